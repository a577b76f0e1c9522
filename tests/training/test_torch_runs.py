"""Whole runs on simulators in torch: what is chosen, said, saved and resumed."""

from types import SimpleNamespace

import pytest
import torch

import groupwise as gw
from groupwise.collectors.resident import WORTH_STEPS
from groupwise.collectors.torch_groups import TorchGroupCollector
from groupwise.collectors.torch_vector import TorchVectorCollector
from groupwise.config.env import EnvCfg
from groupwise.config.run import RunCfg
from groupwise.engines.base import Engine
from groupwise.report.folder import RunFolder
from groupwise.training.build import build_parts
from groupwise.training.callbacks import SaveCheckpoints
from groupwise.training.parts import Given, build_callbacks, build_trainer

STAYS = "rollouts and updates stay on the device; stay_on_device='never' switches that off"
STEPS = {"group_key": "group_step", "returns": "return_to_go", "scale": "batch_std"}
BRANCH = gw.GRPOCfg(group_size=4, num_steps=16, num_epochs=2, credit=STEPS, collection={"partial_groups": "truncate"})
PPO = gw.PPOCfg(num_steps=16, num_epochs=2, minibatch_size=64)
ALGORITHMS = {"ppo": PPO, "grpo": BRANCH}


def parts_of(algorithm, env=gw.TorchCartPole, **fields):
    cfg = RunCfg(algorithm=algorithm, env=EnvCfg(id="<given in Python>", num_envs=8), **fields)
    return build_parts(cfg, Given(env=env), Engine())


@pytest.mark.parametrize(
    ("algorithm", "collector", "stays", "says"),
    [
        (PPO, TorchVectorCollector, True, STAYS),
        (BRANCH, TorchGroupCollector, True, STAYS),
        (
            BRANCH.model_copy(update={"collection": gw.GRPOCfg().collection}),
            gw.GroupCollector,
            False,
            "rollouts and updates wait for the device, since collection.partial_groups is not 'truncate'",
        ),
        (
            PPO.model_copy(update={"objective": gw.ObjectiveCfg(ratio="sequence")}),
            TorchVectorCollector,
            False,
            "updates wait for the device, since the objective keeps episodes whole in a minibatch",
        ),
    ],
)
def test_the_fastest_way_that_the_settings_allow_is_taken_and_told(algorithm, collector, stays, says):
    parts = parts_of(algorithm)
    assert type(parts.collector) is collector
    assert (parts.algorithm.resident is not None) == stays
    assert parts.buffer.resident == isinstance(parts.collector, TorchVectorCollector | TorchGroupCollector)
    assert says in parts.notes()
    parts.collector.collect(16, parts.buffer.start_rollout())


def test_what_stays_on_the_device_can_be_switched_off():
    """Then PPO is what its parts are anywhere: the same parameters as without any of it, bit for bit."""
    parts = parts_of(PPO, stay_on_device="never", total_steps=8 * 16 * 3)
    assert type(parts.collector) is gw.VectorCollector
    assert "rollouts and updates are those of any environment, since stay_on_device='never'" in parts.notes()
    build_trainer(parts, [], Engine()).train()

    env = gw.TorchCartPole(8)
    reference = build_parts(parts.cfg, Given(env=gw.TorchCartPole), Engine()).algorithm.policy
    algorithm = gw.PPO(PPO, reference, seed=parts.algorithm.seed)
    buffer = gw.RolloutBuffer(8, 16, obs_spec=env.obs_spec, action_spec=reference.action_spec, value=True)
    collector = gw.VectorCollector(env, reference, seed=parts.cfg.seed)
    for _ in range(3):
        buffer.add(collector.collect(16, buffer.start_rollout()))
        algorithm.update(buffer.get())
    for one, other in zip(reference.parameters(), parts.algorithm.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def test_groups_that_are_cut_are_not_recorded_where_that_is_switched_off():
    parts = parts_of(BRANCH, stay_on_device="never")
    assert type(parts.collector) is TorchGroupCollector
    assert parts.algorithm.resident is None
    said = "updates are those of any environment, and nothing is recorded, since stay_on_device='never'"
    assert said in parts.notes()
    parts.collector.collect(16, parts.buffer.start_rollout())
    with pytest.raises(
        gw.ConfigError, match=r"stay_on_device='never'; fix: stay_on_device='auto', or compile_rollouts"
    ):
        parts_of(BRANCH, stay_on_device="never", compile_rollouts="always")


def test_other_environments_are_trained_on_as_before():
    parts = build_parts(RunCfg(algorithm=PPO, env=EnvCfg(num_envs=2)), Given(), Engine())
    assert type(parts.collector) is gw.VectorCollector
    assert parts.algorithm.resident is None
    assert not any("device" in note for note in parts.notes())
    parts.close()


@pytest.mark.parametrize(
    ("algorithm", "env", "says"),
    [
        (
            BRANCH,
            None,
            r"without greedy attempts, and CartPole-v1 is none; fix: env\.vectorization='torch', or collection",
        ),
        (
            BRANCH.model_copy(update={"credit": gw.CreditCfg(baseline="greedy", scale="none")}),
            gw.TorchCartPole,
            "and credit.baseline is 'greedy'",
        ),
    ],
)
def test_branch_needs_a_simulator_in_torch(algorithm, env, says):
    cfg = RunCfg(algorithm=algorithm, env=EnvCfg(id="<given in Python>" if env else "CartPole-v1", num_envs=8))
    with pytest.raises(gw.ConfigError, match=says):
        build_parts(cfg, Given(env=env), Engine())


def written(run):
    return [{k: v for k, v in entry.items() if not k.startswith("time/")} for entry in run.metrics()]


COMPILED = "acting and stepping will be compiled together; compile_rollouts='never' switches that off"
FINISH = BRANCH.model_copy(update={"collection": gw.GRPOCfg().collection})


@pytest.mark.parametrize("algorithm", [PPO, BRANCH])
@pytest.mark.parametrize(
    ("compile", "row_steps", "compiled"),
    [
        ("auto", WORTH_STEPS - 1, False),
        ("auto", WORTH_STEPS, True),
        ("never", 10 * WORTH_STEPS, False),
        ("always", 1, True),
    ],
)
def test_rollouts_are_compiled_where_that_is_worth_it(algorithm, compile, row_steps, compiled):
    cfg = RunCfg(
        algorithm=algorithm,
        env=EnvCfg(id="<given in Python>", num_envs=8),
        compile_rollouts=compile,
        total_steps=8 * row_steps,
    )
    parts = build_parts(cfg, Given(env=gw.TorchCartPole), Engine())
    assert parts.collector.compiles == compiled
    assert (COMPILED in parts.notes()) == compiled


@pytest.mark.parametrize(
    ("algorithm", "env", "policy", "says"),
    [
        (
            PPO,
            "CartPole-v1",
            {},
            r"CartPole-v1 is no simulator in torch; fix: env\.vectorization='torch', or compile_rollouts='auto'",
        ),
        (
            FINISH,
            gw.TorchCartPole,
            {},
            "is not 'truncate'; fix: collection.partial_groups='truncate', or compile_rollouts",
        ),
        (
            FINISH,
            "CartPole-v1",
            {},
            r"CartPole-v1 is no simulator in torch; fix: env\.vectorization='torch', or compile_rollouts='auto'",
        ),
        (PPO, gw.TorchCartPole, {"mlp_kernel": "torch"}, "the policy is not known to act as a function"),
    ],
)
def test_compiling_what_cannot_be_is_refused(algorithm, env, policy, says):
    with pytest.raises(gw.ConfigError, match=says):
        gw.train(env, algorithm, num_envs=8, total_steps=8, policy=policy, compile_rollouts="always")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_task_by_its_id_is_trained_on_as_its_class_and_resumed_by_itself(name, tmp_path):
    shared = {"total_steps": 500, "policy": gw.PolicyCfg(normalize_obs=False, normalize_reward=False)}
    by_class = gw.train(gw.TorchCartPole, ALGORITHMS[name], num_envs=8, run_dir=tmp_path / "class", **shared)
    in_torch = gw.EnvCfg(id="CartPole-v1", num_envs=8, vectorization="torch")
    by_id = gw.train(RunCfg(algorithm=ALGORITHMS[name], env=in_torch, run_dir=tmp_path / "id", **shared))
    for key, one in by_class.policy.state_dict().items():
        assert torch.equal(one, by_id.policy.state_dict()[key]), key
    assert gw.resume(by_id.path, total_steps=900).summary["env_steps"] >= 900
    longer = gw.resume(by_class.path, env=gw.TorchCartPole, total_steps=900).policy.state_dict()
    resumed = gw.resume(by_id.path).policy.state_dict()
    assert all(torch.equal(one, resumed[key]) for key, one in longer.items())
    assert gw.evaluate(by_id.path, 3).episodes == 3


@pytest.mark.parametrize("how", ["as it stands", "compiled"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_resumed_run_equals_an_uninterrupted_one(name, how, tmp_path):
    class Stop(gw.Callback):
        def on_checkpoint(self, trainer, path):
            trainer.interrupt()

    settings = {"num_envs": 8, "total_steps": 900, "checkpoint_interval": 256, "logging": {"progress": "none"}}
    settings["compile_rollouts"] = "always" if how == "compiled" else "never"
    whole = gw.train(gw.TorchCartPole, ALGORITHMS[name], run_dir=tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        gw.train(gw.TorchCartPole, ALGORITHMS[name], run_dir=tmp_path / "part", callbacks=[Stop()], **settings)
    resumed = gw.resume(tmp_path / "part", env=gw.TorchCartPole)
    for (key, one), other in zip(whole.policy.state_dict().items(), resumed.policy.state_dict().values(), strict=True):
        assert torch.equal(one, other), key
    assert written(resumed)[-1] == written(whole)[-1]
    entry = written(whole)[-1]
    assert entry["env_steps"] == sum(e["rollout/env_steps"] for e in written(whole))
    assert {"rollout/episodes", "rollout/idle_fraction", "train/learning_rate", "train/optimizer_steps"} <= set(entry)


def test_numbers_that_are_not_finite_end_the_run(tmp_path):
    class Failing(gw.TorchCartPole):
        def transition(self, state, action, random):
            after, reward, terminated = super().transition(state, action, random)
            return after, reward / 0 * 0, terminated

    with pytest.raises(gw.DataError, match="reward of environment 0 at step 0 of the rollout is not finite"):
        gw.train(lambda num_envs: Failing(num_envs), PPO, num_envs=4, total_steps=100, run_dir=tmp_path / "run")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("ranks", "total_steps", "interval"), [(1, 100_000, 20_000), (2, 100_000, 40_000), (2, 10**6, 10**5)]
)
def test_checkpoints_that_cut_episodes_are_five_of_the_longest_apart(algorithm, ranks, total_steps, interval, tmp_path):
    """Of 500 steps, in 8 environments on each rank."""
    parts = parts_of(ALGORITHMS[algorithm], total_steps=total_steps)
    parts.algorithm.engine = SimpleNamespace(world_size=ranks)
    (saves,) = build_callbacks(parts, RunFolder(tmp_path), [], None, rank=1)
    assert isinstance(saves, SaveCheckpoints)
    assert saves.every.interval == interval


def test_groups_that_are_finished_lose_nothing_at_a_checkpoint(tmp_path):
    finish = BRANCH.model_copy(update={"collection": gw.GRPOCfg().collection})
    parts = parts_of(finish, total_steps=1_000)
    (saves,) = build_callbacks(parts, RunFolder(tmp_path), [], None, rank=1)
    assert saves.every.interval == 100
