"""Whole runs on simulators in torch: what is chosen, said, saved and resumed."""

import pytest
from at_events import on
from run_folders import logged, same_weights

import groupwise as gw
from groupwise.collectors.torch import TorchGroupCollector, TorchVectorCollector
from groupwise.config.run import EnvCfg, RunCfg
from groupwise.engines import Engine
from groupwise.envs.torch_env import TorchCartPole
from groupwise.training.build import UserObjects, build_components

STEPS = {"group_key": "group_step", "returns": "return_to_go", "scale": "batch_std"}
BRANCH = gw.GRPOCfg(group_size=4, num_steps=16, num_epochs=2, credit=STEPS, collection={"partial_groups": "truncate"})
PPO = gw.PPOCfg(num_steps=16, num_epochs=2, minibatch_size=64)
ALGORITHMS = {"ppo": PPO, "grpo": BRANCH}
QUICK = {"logging": {"progress": "none"}, "evaluation": {"interval": 9999, "episodes": 2}}


COMPLETE = BRANCH.model_copy(update={"collection": gw.GRPOCfg().collection})
GREEDY = BRANCH.model_copy(update={"credit": gw.CreditCfg(baseline="greedy", scale="none")})


def parts_of(algorithm, env=TorchCartPole):
    cfg = RunCfg(algorithm=algorithm, env=EnvCfg(id="<given in Python>" if env else "CartPole-v1", num_envs=8))
    return build_components(cfg, UserObjects(env=env), Engine())


@pytest.mark.parametrize(
    ("algorithm", "env", "collector"),
    [
        (PPO, TorchCartPole, TorchVectorCollector),
        (BRANCH, TorchCartPole, TorchGroupCollector),
        (COMPLETE, TorchCartPole, gw.GroupCollector),
        (PPO, None, gw.VectorCollector),
    ],
)
def test_torch_environments_have_collectors_of_their_own(algorithm, env, collector):
    parts = parts_of(algorithm, env)
    assert type(parts.collector) is collector
    parts.collector.collect(16, parts.buffer.start_rollout())


@pytest.mark.parametrize(
    ("algorithm", "env", "message"),
    [
        (BRANCH, None, "an environment in torch, got CartPole-v1; fix: "),
        (GREEDY, TorchCartPole, "credit.baseline='greedy' needs whole groups"),
    ],
)
def test_branch_needs_a_simulator_in_torch(algorithm, env, message):
    with pytest.raises((gw.errors.ConfigError, gw.errors.EnvError), match=message):
        parts_of(algorithm, env)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_task_by_its_id_is_trained_on_as_its_class_and_resumed_by_itself(name, tmp_path):
    shared = QUICK | {"total_steps": 500, "policy": gw.PolicyCfg(normalize_obs=False, normalize_reward=False)}
    by_class = gw.train(TorchCartPole, ALGORITHMS[name], num_envs=8, run_dir=tmp_path / "class", **shared)
    in_torch = gw.EnvCfg(id="CartPole-v1", num_envs=8, vectorization="torch")
    by_id = gw.train(RunCfg(algorithm=ALGORITHMS[name], env=in_torch, run_dir=tmp_path / "id", **shared))
    assert same_weights(by_class, by_id)
    assert gw.resume(by_id.path, total_steps=900).summary["env_steps"] >= 900
    assert gw.evaluate(by_id.path, 3).episodes == 3


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_resumed_run_equals_an_uninterrupted_one(name, tmp_path):
    stop = on("checkpoint", lambda trainer, path: trainer.interrupt())
    settings = {"num_envs": 8, "total_steps": 900, "checkpoint_interval": 256, **QUICK}
    whole = gw.train(TorchCartPole, ALGORITHMS[name], run_dir=tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        gw.train(TorchCartPole, ALGORITHMS[name], run_dir=tmp_path / "part", callbacks=[stop], **settings)
    resumed = gw.resume(tmp_path / "part", env=TorchCartPole)
    assert same_weights(whole, resumed)
    assert logged(resumed)[-1] == logged(whole)[-1]
    entry = logged(whole)[-1]
    assert entry["env_steps"] == sum(e["rollout/env_steps"] for e in logged(whole))
    assert {"rollout/episodes", "rollout/idle_fraction", "train/learning_rate", "train/optimizer_steps"} <= set(entry)


def test_numbers_that_are_not_finite_end_the_run(tmp_path):
    class Failing(TorchCartPole):
        def transition(self, state, action, random):
            after, reward, terminated = super().transition(state, action, random)
            return after, reward / 0 * 0, terminated

    with pytest.raises(gw.errors.DataError, match="reward of environment 0 at step 0 of the rollout is not finite"):
        gw.train(lambda num_envs: Failing(num_envs), PPO, num_envs=4, total_steps=100, run_dir=tmp_path / "run")
