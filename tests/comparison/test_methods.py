"""Which runs are of one method, and what methods are called."""

import json
from typing import Any

import pytest

from groupwise import config
from groupwise.comparison.compare import differences, differing, environment_of, labels, method_of


def method(algorithm: Any = "grpo", **fields: Any) -> dict[str, Any]:
    return method_of(json.loads(config.to_json(config.resolve("CartPole-v1", algorithm, **fields))))


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 7},
        {"run_dir": "elsewhere"},
        {"logging": {"progress": "none"}},
        {"evaluation": {"interval": 7, "episodes": 3}},
        {"total_steps": 7},
        {"stop": {"time_limit": 1e9}},
        {"env": {"max_episode_steps": 7}},
    ],
    ids=str,
)
def test_what_is_not_of_the_method(fields):
    assert method(**fields) == method()


@pytest.mark.parametrize(
    "fields",
    [{"device": "cuda"}, {"env": {"num_envs": 16}}, {"policy": {"hidden_sizes": [8]}}, {"checkpoint_interval": 9}],
    ids=str,
)
def test_what_is_of_the_method(fields):
    assert method(**fields) != method()


def test_environment_is_its_id_arguments_and_step_limit():
    one, other = ({"env": {"id": "A-v0", "kwargs": {"g": g}, "max_episode_steps": None, "num_envs": g}} for g in (1, 2))
    assert environment_of(one) == ("A-v0", {"env.id": "A-v0", "env.kwargs.g": 1, "env.max_episode_steps": None})
    assert environment_of(one) != environment_of(other)


def test_environment_of_texts_is_their_task():
    name, settings = environment_of({"task": {"data": "some/sums.jsonl", "rewards": []}, "model": {"path": "m"}})
    assert (name, settings["task.data"]) == ("sums.jsonl", "some/sums.jsonl")
    assert "model.path" in method_of({"task": {"data": "x"}, "model": {"path": "m"}})


# --- names ---


def test_algorithms_name_themselves():
    assert labels([method("grpo"), method("ppo")]) == ["grpo", "ppo"]
    assert labels([method("ppo")]) == ["ppo"]


def test_one_setting_names_what_differs():
    found = [method({"learning_rate": rate}) for rate in (0.001, 0.0003)]
    assert labels([*found, method("ppo")]) == ["grpo learning_rate=0.001", "grpo learning_rate=0.0003", "ppo"]


def test_few_settings_name_what_differs_in_several():
    grid = [method({"gamma": gamma, "learning_rate": rate}) for gamma in (0.9, 1.0) for rate in (0.1, 0.2)]
    assert labels(grid) == [
        "grpo learning_rate=0.1, gamma=0.9",
        "grpo learning_rate=0.2, gamma=0.9",
        "grpo learning_rate=0.1, gamma=1",
        "grpo learning_rate=0.2, gamma=1",
    ]
    both = [method({"gamma": value, "learning_rate": value}) for value in (0.5, 0.25)]
    assert labels(both) == ["grpo learning_rate=0.5", "grpo learning_rate=0.25"]  # one of the two is enough


def test_settings_that_differ_little_have_names_that_do():
    assert labels([method({"learning_rate": rate}) for rate in (0.12345678, 0.12345679)]) == [
        "grpo learning_rate=0.12345678",
        "grpo learning_rate=0.12345679",
    ]


def test_settings_that_end_alike_keep_their_full_names():
    one = {"algorithm.name": "x", "a.eps": 1, "b.eps": 1}
    found = [one | {"a.eps": a, "b.eps": b} for a in (1, 2) for b in (1, 2)]
    assert labels(found)[1] == "x a.eps=1, b.eps=2"


# --- differences ---


def test_settings_that_only_one_algorithm_has_are_no_difference():
    found = differences({"a": method("grpo"), "b": method({"name": "ppo", "max_grad_norm": None})})
    assert found["algorithm.max_grad_norm"] == {"a": 0.5, "b": None}
    assert "algorithm.group_size" not in found
    assert "algorithm.gae_lambda" not in found
    assert differences({"a": method(), "b": method()}) == {}


def test_differing_counts_a_missing_setting():
    assert differing([{"a": None, "b": 1}, {"b": 1}]) == ["a"]
    assert differing([{"a": 1}, {"a": 1}]) == []
