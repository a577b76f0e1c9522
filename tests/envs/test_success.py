"""The success flag from every kind of environment: of the step at which an episode ends, and of no other."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from success_envs import TorchTouch, Touch, TouchEither

from groupwise.config.run import EnvCfg
from groupwise.envs.base import outcomes_of_rows, success_of_row, task_of_row
from groupwise.envs.gymnasium import GymnasiumVectorEnv
from groupwise.envs.make import make_env
from groupwise.errors import EnvError

STEPS = ([1, 0, 1], [1, 1, 0], [0, 1, 1])
"""Actions of three rows at each of three steps; in the end rows 1 and 2 touch the goal."""


def played(env, steps=STEPS):
    """The flags of each step."""
    flags = []
    for actions in steps:
        success = env.step(torch.tensor(actions)).info.get("success")
        flags.append(None if success is None else success.tolist())
    env.close()
    return flags


def started(make, workers=0):
    vectorization = "async" if workers else "sync"
    env = make_env(EnvCfg(vectorization=vectorization), grouped=True, num_envs=3, env=make, verify=False)
    env.reset(seed=0)
    return env


def test_a_flag_is_a_truth_value_or_a_number():
    for flag in (True, np.bool_(True), 1.0, np.array(1.0)):
        assert success_of_row({"success": flag}) is True
    for flag in (False, np.float32(0), 0.3, np.nan):
        assert success_of_row({"success": flag}) is False
    for flag in ("yes", {"near": True}, np.array([True, False]), None):
        assert success_of_row({"success": flag}) is None
    assert success_of_row({"success": False, "is_success": True}) is True
    assert success_of_row({"success": True, "is_success": "near"}) is True
    assert success_of_row({"reward": 1.0}) is None


def test_rows_without_the_flag_count_as_failed_beside_those_with_it():
    info = {"success": np.array([1.0, 1.0, 0.0]), "_success": np.array([True, False, True])}
    assert outcomes_of_rows(info, 3)["success"].tolist() == [True, False, False]
    assert outcomes_of_rows({"success": np.array([True, False])}, 2)["success"].tolist() == [True, False]
    assert outcomes_of_rows({"success": np.array([True, None], dtype=object)}, 2)["success"].tolist() == [True, False]
    for progress in (np.array([1.0, 0.3, np.nan]), np.array([True, "no", None], dtype=object)):
        assert outcomes_of_rows({"success": progress}, 3)["success"].tolist() == [True, False, False]
    assert outcomes_of_rows({"success": np.array(["no", "yes"])}, 2)["success"].tolist() == [False, False]
    assert outcomes_of_rows({"success": "yes", "time": np.zeros(3)}, 3) == {}


def test_rows_without_a_name_have_an_empty_one():
    assert [task_of_row({"task": task}) for task in ("push", 3, ["push"])] == ["push", "", ""]
    tasks = np.array(["push", None, 3], dtype=object)
    info = {"success": np.array([True, False, False]), "task": tasks}
    assert outcomes_of_rows(info, 3)["task"].tolist() == ["push", "", ""]
    assert "task" not in outcomes_of_rows(info | {"task": tasks[:2]}, 3)
    assert outcomes_of_rows({"task": tasks}, 3) == {}
    last = {"success": np.array([True, True]), "task": np.array(["reach", "push"], dtype=object)}
    assert outcomes_of_rows({"task": tasks[:2], "final_info": last}, 2)["task"].tolist() == ["reach", "push"]


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_name_their_task_at_the_end_alone(workers):
    env = started(TouchEither, workers)
    obs = env.start(np.ones(3, dtype=np.bool_), np.arange(3), np.arange(3))
    shown = [TouchEither.names[int(index)] for index in obs[:, 1]]
    assert set(shown) == {"left", "right"}
    tasks = [env.step(torch.tensor(actions)).info.get("task") for actions in STEPS]
    env.close()
    assert tasks[:2] == [None, None]
    assert tasks[2].tolist() == shown


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("key", "kind"), [("is_success", bool), ("success", float), ("success", np.bool_), (None, bool)]
)
def test_rows_tell_at_the_end_alone_if_at_all(workers, key, kind):
    expected = None if key is None else [False, True, True]
    assert played(started(partial(Touch, key, kind=kind, sealed=True), workers)) == [None, None, expected]


def test_only_rows_that_end_have_a_flag():
    class AsLongAsItsSeed(Touch):
        def reset(self, *, seed=None, options=None):
            self.length = seed
            return super().reset(seed=seed)

    env, lengths = started(AsLongAsItsSeed), np.array([2, 3, 2])
    env.start(np.ones(3, dtype=np.bool_), lengths, lengths)
    assert played(env, [[1, 1, 1]] * 3) == [None, [True, False, True], [False, True, False]]


@pytest.mark.parametrize("vectorizer", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("mode", ["DISABLED", "NEXT_STEP", "SAME_STEP"])
@pytest.mark.parametrize("key", ["is_success", "success", None])
def test_vectors_tell_in_every_autoreset_mode(vectorizer, mode, key):
    env = vectorizer([partial(Touch, key)] * 3, autoreset_mode=AutoresetMode[mode])
    env = GymnasiumVectorEnv(env, env_id="Touch", max_episode_steps=3)
    env.reset(seed=0)
    assert played(env)[2] == (None if key is None else [False, True, True])


@pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(3, 1, dtype=torch.bool)])
def test_success_in_torch_is_one_truth_value_a_row_after_the_transition(wrong):
    env = TorchTouch(3)
    env.reset(seed=0)
    assert played(env)[2] == [False, True, True]

    class Wrong(TorchTouch):
        def success(self, state):
            return wrong

    env = Wrong(3)
    env.reset(seed=0)
    with pytest.raises(EnvError, match=r"success of TorchTouch returned .* expected \[3\] of torch.bool; fix"):
        env.step(torch.zeros(3))
