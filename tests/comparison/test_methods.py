"""Which runs are of one method, and what methods are called."""

import json
from typing import Any

import pytest

from groupwise import config
from groupwise.comparison.compare import differences, differing, environment_of, labels, method_of


def method(algorithm: Any = "grpo", **fields: Any) -> dict[str, Any]:
    return method_of(json.loads(config.to_json(config.resolve("CartPole-v1", algorithm, **fields))))


@pytest.mark.parametrize(
    ("fields", "is_method"),
    [
        ({"seed": 7}, False),
        ({"logging": {"progress": "none"}}, False),
        ({"evaluation": {"interval": 7, "episodes": 3}}, False),
        ({"total_steps": 7}, False),
        ({"stop": {"time_limit": 1e9}}, False),
        ({"env": {"max_episode_steps": 7}}, False),
        ({"env": {"num_envs": 16}}, True),
        ({"policy": {"hidden_sizes": [8]}}, True),
        ({"checkpoint_interval": 9}, True),
    ],
    ids=str,
)
def test_settings_that_make_the_method(fields, is_method):
    assert (method(**fields) != method()) == is_method


def test_environments_and_tasks():
    one, other = ({"env": {"id": "A-v0", "kwargs": {"g": g}, "max_episode_steps": None, "num_envs": g}} for g in (1, 2))
    assert environment_of(one) == ("A-v0", {"env.id": "A-v0", "env.kwargs.g": 1, "env.max_episode_steps": None})
    assert environment_of(one) != environment_of(other)
    name, settings = environment_of({"task": {"data": "some/sums.jsonl", "rewards": []}, "model": {"path": "m"}})
    assert (name, settings["task.data"]) == ("sums", "some/sums.jsonl")
    tasks = [{"data": "", "env": "guess/Number-v0"}, {"data": "<given in Python>"}, {"data": "reasoning_gym:chain_sum"}]
    assert [environment_of({"task": task})[0] for task in tasks] == ["Number-v0", "text", "chain_sum"]
    assert "model.path" in method_of({"task": {"data": "x"}, "model": {"path": "m"}})


FALLING = {"name": "linear", "start": 0.2, "end": 0.0}
RATES = [{"learning_rate": rate} for rate in (0.12345678, 0.12345679)]
GRID = [{"gamma": gamma, "learning_rate": rate} for gamma in (0.9, 1.0) for rate in (0.1, 0.2)]


@pytest.mark.parametrize(
    ("algorithms", "names"),
    [
        (["grpo", "ppo"], ["grpo", "ppo"]),
        (["ppo"], ["ppo"]),
        ([{"learning_rate": 0.001}, {"learning_rate": 0.0003}, "ppo"], ["grpo learning_rate=0.001", "grpo learning_rate=0.0003", "ppo"]),
        (GRID, [f"grpo learning_rate={rate}, gamma={gamma}" for gamma in ("0.9", "1") for rate in ("0.1", "0.2")]),
        ([{"gamma": one, "learning_rate": one} for one in (0.5, 0.25)], ["grpo learning_rate=0.5", "grpo learning_rate=0.25"]),
        (RATES, ["grpo learning_rate=0.12345678", "grpo learning_rate=0.12345679"]),
        ([{"kl_coef": 0.1}, {"kl_coef": 0.1, "sync_ref_model": {"steps": 5}}], ["grpo sync_ref_model=none", "grpo sync_ref_model=set"]),
        ([{"name": "ppo", "clip_range_vf": one} for one in (None, FALLING)], ["ppo clip_range_vf=none", "ppo clip_range_vf=linear"]),
    ],
    ids=["algorithms", "one", "a setting", "several settings", "one of two is enough", "close numbers", "a group", "a schedule"],
)  # fmt: skip
def test_names_of_methods(algorithms, names):
    assert labels([method(algorithm) for algorithm in algorithms]) == names


def test_settings_that_end_alike_keep_their_full_names():
    one = {"algorithm.name": "x", "a.eps": 1, "b.eps": 1}
    found = [one | {"a.eps": a, "b.eps": b} for a in (1, 2) for b in (1, 2)]
    assert labels(found)[1] == "x a.eps=1, b.eps=2"


def test_settings_that_only_one_algorithm_has_are_no_difference():
    found = differences({"a": method("grpo"), "b": method({"name": "ppo", "max_grad_norm": None})})
    assert found["algorithm.max_grad_norm"] == {"a": 0.5, "b": None}
    assert not {"algorithm.group_size", "algorithm.gae_lambda"} & found.keys()
    assert differences({"a": method(), "b": method()}) == {}
    assert differing([{"a": None, "b": 1}, {"b": 1}]) == ["a"]


def test_a_group_of_settings_that_one_method_lacks_is_a_difference():
    with_group = method({"kl_coef": 0.1, "sync_ref_model": {"steps": 5}})
    found = differences({"a": method({"kl_coef": 0.1}), "b": with_group})
    assert found == {"algorithm.sync_ref_model": {"a": None, "b": "set"}}
