"""Runs of recurrent policies: trained, evaluated, filmed, exported, refused."""

import gymnasium
import memory_envs  # noqa: F401  registers Recall-v0
import numpy as np
import pytest
from safetensors.torch import load_file

import groupwise as gw
from groupwise.cli import main
from groupwise.errors import ConfigError, DataError
from groupwise.policies.export import export
from groupwise.seeding import derive_seed
from groupwise.training.evaluation import evaluate_policy

SMALL = {"name": "recurrent", "hidden_size": 8, "hidden_sizes": (8,)}


def train(algorithm, path, **settings):
    settings = {"num_envs": 4, "total_steps": 256, "evaluation": {"episodes": 4}, "policy": SMALL} | settings
    return gw.train("Recall-v0", {"name": algorithm, "num_steps": 32}, run_dir=path, seed=1, **settings)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train("ppo", tmp_path_factory.mktemp("run") / "r")


@pytest.mark.parametrize(
    ("policy", "vectorization"),
    [
        (SMALL | {"cell": "gru", "trunk": "shared", "normalize_obs": True, "normalize_reward": True}, "sync"),
        pytest.param(gw.config.RecurrentCfg(hidden_size=4), "async", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_trains(algorithm, policy, vectorization, tmp_path):
    env = gw.EnvCfg(id="Recall-v0", num_envs=4, vectorization=vectorization)
    run = gw.train(env, algorithm, policy=policy, run_dir=tmp_path / "r", total_steps=300, evaluation={"episodes": 4})
    assert run.policy.state_size > 0
    assert all(np.isfinite(value) for entry in run.metrics() for value in entry.values())


@pytest.mark.parametrize("deterministic", [True, False])
def test_evaluation_does_not_depend_on_the_number_of_environments(run, deterministic):
    envs = [gw.make_env(gw.EnvCfg(id="Recall-v0", num_envs=n), grouped=True) for n in (9, 4, 12)]
    results = [evaluate_policy(run.policy, env, episodes=9, seed=2, deterministic=deterministic) for env in envs]
    assert results[0] == results[1] == results[2]


def test_evaluation_plays_as_predict_does(run):
    """A user's loop with the state of Stable-Baselines3's signature."""
    env, returns = gymnasium.make("Recall-v0"), []
    for episode in range(6):
        obs, _ = env.reset(seed=derive_seed(3, "eval", episode))
        state, over, total = None, False, 0.0
        while not over:
            action, state = run.policy.predict(obs, state=state)
            obs, reward, terminated, truncated, _ = env.step(action)
            over, total = terminated or truncated, total + float(reward)
        returns.append(total)
    found = evaluate_policy(run.policy, gw.make_env(gw.EnvCfg(id="Recall-v0"), grouped=True), episodes=6, seed=3)
    assert list(found.returns) == returns


def test_a_run_is_evaluated_and_exported_from_its_folder(run, tmp_path, capsys):
    assert main(["eval", str(run.path), "--episodes", "5", "--plugin", "memory_envs"]) in (None, 0)
    assert "return_mean" in capsys.readouterr().out
    loaded = gw.Run.load(run.path)
    assert gw.evaluate(loaded, 5).returns == gw.evaluate(run, 5).returns
    export(run.policy, tmp_path / "p.safetensors", to="safetensors")
    assert "encoder.layer.weight_hh_l0" in load_file(tmp_path / "p.safetensors")
    with pytest.raises(ConfigError, match=r"RecurrentActorCritic has a memory.*fix: safetensors"):
        export(run.policy, tmp_path / "p.onnx", to="onnx")


def test_a_critic_is_added_to_the_actor_of_another_run(tmp_path):
    first = train("grpo", tmp_path / "grpo")
    second = train("ppo", tmp_path / "ppo", policy={"init_from": first.path})
    assert second.cfg.policy.name == "recurrent"
    assert second.policy.state_size == 2 * first.policy.state_size


def test_observations_alone_are_refused(run):
    with pytest.raises(DataError, match=r"an observation and its state.*fix: policy.player\(\)"):
        run.policy.act(run.policy.zero_state(2)[:, :2])


def test_cloning_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"bc clones steps.*has a memory; fix: policy='actor_critic'"):
        gw.train("CartPole-v1", {"name": "bc", "data": tmp_path}, policy="recurrent", run_dir=tmp_path / "r")


@pytest.mark.learn
@pytest.mark.parametrize("seed", [11, 12, 13])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("cell", ["lstm", "gru", None])
def test_memory_solves_what_a_feed_forward_policy_cannot(cell, algorithm, seed, tmp_path):
    memory = {"name": "recurrent", "cell": cell, "hidden_size": 32} if cell else {}
    run = gw.train(
        "Recall-v0",
        {"name": algorithm, "num_steps": 64, "learning_rate": 0.002, "num_epochs": 4, "minibatch_size": 256},
        policy={**memory, "hidden_sizes": (32,)},
        num_envs=16,
        total_steps=25_000,
        seed=seed,
        run_dir=tmp_path / "r",
        evaluation={"episodes": 200},
    )
    success = run.summary["success_rate"]
    assert success > 0.95 if cell else success < 0.65
