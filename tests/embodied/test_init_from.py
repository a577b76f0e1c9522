"""Runs that start from the weights of another: what is taken, what starts fresh, and what is refused."""

import json
import re
from pathlib import Path

import gymnasium
import pytest
import torch

import groupwise as gw
from groupwise import cli
from groupwise.config import load_config, resolve
from groupwise.engines import Engine
from groupwise.errors import CheckpointError, ConfigError, RunFolderError
from groupwise.run import build
from groupwise.training.build import UserObjects
from groupwise.training.checkpoint import Identity, _other_spaces, load_checkpoint

QUIET = {"logging": {"progress": "none"}, "evaluation": {"episodes": 2}}
GRPO = {"name": "grpo", "num_steps": 16, "group_size": 4}


def trained(algorithm, out: Path, **policy) -> Path:
    policy = {"hidden_sizes": [8], "normalize_obs": True} | policy
    return gw.train("CartPole-v1", algorithm, policy=policy, total_steps=512, run_dir=out, **QUIET).path


@pytest.fixture(scope="module")
def grpo_run(tmp_path_factory) -> Path:
    return trained(gw.GRPOCfg(num_steps=32), tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="module")
def ppo_run(tmp_path_factory) -> Path:
    return trained(gw.PPOCfg(num_steps=32), tmp_path_factory.mktemp("ppo"), normalize_reward=True)


def weights(folder: Path, checkpoint="latest") -> dict[str, torch.Tensor]:
    return load_checkpoint(folder / "checkpoints" / checkpoint).policy


def built(algorithm, source, policy=None, **fields):
    """The parts of a run on CartPole that starts from ``source``."""
    policy = {"init_from": str(source), **(policy or {})}
    parts = build(
        resolve("CartPole-v1", algorithm, policy=policy, env={"num_envs": 4}, **fields), UserObjects(), Engine()
    )
    parts.close()
    return parts


def same(own: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], names) -> bool:
    return all(torch.equal(own[name], theirs[name]) for name in names)


def test_all_weights_and_statistics_are_taken_from_a_run_or_a_checkpoint(grpo_run):
    parts = built({**GRPO, "kl_coef": 0.1}, grpo_run)
    own, theirs = parts.policy.state_dict(), weights(grpo_run)
    assert own.keys() == theirs.keys()
    assert same(own, theirs, own)
    assert parts.notes()[0] == f"Weights: {len(own)} tensors from {grpo_run / 'checkpoints/latest'}."
    assert same(parts.algorithm.reference.state_dict(), theirs, theirs), "the reference is the first policy"
    parts = built(GRPO, grpo_run / "checkpoints" / "best")
    assert same(parts.policy.state_dict(), weights(grpo_run, "best"), own)
    assert parts.cfg.policy.hidden_sizes == (8,), "the run's settings, also then"


def test_a_critic_starts_fresh_and_is_named(grpo_run):
    parts = built("ppo", grpo_run)
    own, theirs = parts.policy.state_dict(), weights(grpo_run)
    assert same(own, theirs, theirs)
    assert {name.partition(".")[0] for name in own.keys() - theirs.keys()} == {"critic", "reward_normalizer"}
    assert "critic, reward_normalizer starts fresh" in parts.notes()[0]


def test_a_critic_that_is_not_needed_is_named(ppo_run):
    parts = built(GRPO, ppo_run)
    own = parts.policy.state_dict()
    assert same(own, weights(ppo_run), own)
    assert "its critic, reward_normalizer is not used" in parts.notes()[0]


def test_settings_of_the_policy_follow_the_run_and_yours_come_first(grpo_run, ppo_run):
    cfg = built(GRPO, grpo_run).cfg.policy
    assert (cfg.hidden_sizes, cfg.normalize_obs) == ((8,), True)
    assert not built(GRPO, ppo_run).cfg.policy.normalize_reward, (
        "that of the rewards is of the algorithm, not of the weights"
    )
    cfg = resolve("CartPole-v1", policy={"init_from": str(grpo_run), "normalize_reward": True, "activation": "tanh"})
    assert cfg.policy.normalize_reward


OTHER = [
    ({"activation": "tanh"}, {"activation": "relu"}, "activation"),
    ({"squash_output": False}, {"squash_output": True}, "squash_output"),
    ({"actor_keys": ["a", "b"]}, {"actor_keys": ("b", "c")}, "actor_keys"),
    ({"lora": {"r": 8, "alpha": 16.0}}, {"name": "vla", "lora": {"alpha": 8}}, r"lora\.alpha"),
]


@pytest.mark.parametrize(("trained_with", "given", "named"), OTHER)
def test_settings_with_which_weights_that_fit_are_another_policy_are_refused(trained_with, given, named, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"policy": trained_with}))
    with pytest.raises(ConfigError, match=rf"^policy\.{named} = .* trained with .* another policy; fix: leave it out$"):
        resolve("Pendulum-v1", policy={"init_from": tmp_path, **given})


def test_the_order_of_entries_makes_no_other_policy(tmp_path):
    (tmp_path / "config.json").write_text('{"policy": {"actor_keys": ["a", "b"]}}')
    cfg = resolve("Pendulum-v1", policy={"init_from": tmp_path, "actor_keys": ("b", "a")})
    assert cfg.policy.actor_keys == ("b", "a")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hidden_sizes": [9]}, r"'actor\.head\.weight' has shape \(2, 8\), but the policy needs \(2, 9\)"),
        ({"normalize_obs": False}, r"'obs_normalizer\.statistics.*but the policy needs None"),
        ({"hidden_sizes": [8, 8]}, r"'actor\.hidden.* has shape None"),
    ],
)
def test_other_networks_are_refused_by_name(grpo_run, settings, named):
    with pytest.raises(CheckpointError, match=named):
        built(GRPO, grpo_run, settings)


def test_another_environment_is_refused_with_both_spaces(grpo_run):
    there, here = (re.escape(str(gymnasium.make(name).observation_space)) for name in ("CartPole-v1", "Acrobot-v1"))
    cfg = resolve("Acrobot-v1", GRPO, policy={"init_from": str(grpo_run)}, env={"num_envs": 4})
    with pytest.raises(
        CheckpointError, match=f"observation_space {there} there, {here} here; action_space .*action_chunk"
    ):
        build(cfg, UserObjects(), Engine())


def test_spaces_of_a_stranger_send_nothing_to_the_terminal():
    saved, own = Identity("a", "Box\x1b[2J", "x" * 300 + "1"), Identity("a", "Box(1)", "x" * 300 + "2")
    said = _other_spaces(saved, own)
    assert "observation_space Box\\x1b[2J there, Box(1) here" in said
    assert f"action_space ... {'x' * 60}1 there, ... {'x' * 60}2 here" in said


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match=r"no run folder '.*nothing'"):
        built(GRPO, tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*checkpoints/best"):
        built(GRPO, tmp_path / "checkpoints" / "best")


def test_statistics_that_came_with_the_weights_stay(grpo_run, tmp_path):
    settings = {"policy": {"init_from": grpo_run}, "total_steps": 256, "run_dir": tmp_path / "x", **QUIET}
    run = gw.train("CartPole-v1", gw.GRPOCfg(num_steps=16), **settings)
    own, theirs = run.policy.state_dict(), weights(grpo_run)
    kept = [name for name in own if name.startswith("obs_normalizer")]
    assert kept
    assert same(own, theirs, kept)
    assert not torch.equal(own["actor.head.weight"], theirs["actor.head.weight"])


@pytest.mark.slow
def test_a_run_is_resumed_and_evaluated_without_its_source(tmp_path):
    algorithm = gw.GRPOCfg(num_steps=16, kl_coef=0.1, schedule="none")
    common = {"policy": {"normalize_obs": True}, "num_envs": 4, **QUIET}
    source = gw.train("CartPole-v1", algorithm, total_steps=64, run_dir=tmp_path / "source", **common).path
    fields = QUIET | {"policy": {"init_from": source}, "num_envs": 4, "evaluation": {"interval": 10_000, "episodes": 2}}
    whole = gw.train("CartPole-v1", algorithm, total_steps=512, run_dir=tmp_path / "whole", **fields)
    gw.train("CartPole-v1", algorithm, total_steps=200, run_dir=tmp_path / "parts", **fields)
    source.rename(tmp_path / "moved")
    resumed = gw.resume(tmp_path / "parts", 512)
    assert resumed.cfg.policy.init_from == source
    own, other = whole.policy.state_dict(), resumed.policy.state_dict()
    assert same(own, other, own)
    assert gw.evaluate(tmp_path / "parts", 3).episodes == 3


def test_the_command_line_and_files_have_it(grpo_run, tmp_path, capsys):
    words = ["--policy.init-from", str(grpo_run), "--total-steps", "64", "--algorithm.num-steps", "16"]
    assert cli.main(["train", "CartPole-v1", *words, "--run-dir", str(tmp_path / "x")]) == 0
    assert f"tensors from {grpo_run / 'checkpoints/latest'}." in capsys.readouterr().err.replace("\n", "")
    assert json.loads((tmp_path / "x/config.json").read_text())["policy"]["init_from"] == str(grpo_run)
    file = tmp_path / "my_run.json"
    file.write_text(json.dumps({"env": {"id": "CartPole-v1"}, "policy": {"init_from": str(grpo_run)}}))
    assert load_config(file).policy.hidden_sizes == (8,)
