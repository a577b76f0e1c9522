import logging
import os
import signal
import threading
import time

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from groupwise.envs.rows import RowCfg, RowsGroupEnv
from groupwise.errors import EnvError


class Noisy(gymnasium.Env):
    """A random start and random steps, all from ``np_random``; ends after 5 steps. Tells how its reward is made up."""

    observation_space = spaces.Dict({"at": spaces.Box(-np.inf, np.inf, (1,), np.float64), "left": spaces.Discrete(6)})
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self):
        self.steps_taken = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.state = 0, self.np_random.normal()
        return self.obs(), {}

    def step(self, action):
        self.steps_taken += 1
        self.count += 1
        self.state += self.np_random.normal() + float(action[0])
        parts = {"bonus": 1.0, "cost": -float(action[0])}
        return self.obs(), sum(parts.values()), False, self.count >= 5, parts

    def obs(self):
        return {"at": np.array([self.state]), "left": 5 - self.count}


class Fragile(Noisy):
    """Breaks when it is told to."""

    def step(self, action):
        if action[0] > 0.75:
            raise RuntimeError("the wheel came off")
        return super().step(action)


def make(env=Noisy, num_envs=3, workers=0, mode="seed", **settings):
    cfg = RowCfg(env, "Noisy", Noisy.observation_space, Noisy.action_space, 5, mode, **settings)
    return RowsGroupEnv(cfg, num_envs, num_workers=workers)


def seeds(*numbers):
    return np.array(numbers, np.int64)


def mask(*flags):
    return np.array(flags, np.bool_)


def go(*actions):
    return torch.tensor(actions)[:, None]


ALL = mask(1, 1, 1)
STILL = go(0.0, 0.0, 0.0)


def started(*args, **settings):
    env = make(*args, **settings)
    env.start(ALL, seeds(1, 2, 3), seeds(1, 2, 3))
    return env


def test_a_start_is_the_plain_seeded_reset_in_the_rollouts_types():
    env = make()
    largest = 2**31 - 1
    obs = env.start(ALL, seeds(0, 5, largest), seeds(largest, 0, 1))
    expected = [Noisy().reset(seed=seed)[0]["at"] for seed in (0, 5, largest)]
    assert obs["at"].tolist() == np.array(expected, np.float32).tolist()
    assert (obs["at"].dtype, obs["left"].dtype, obs["left"].tolist()) == (torch.float32, torch.int64, [5, 5, 5])


def test_a_missing_part_is_named_with_those_there_are():
    env = started(reward_parts=("bonus", "speed"))
    with pytest.raises(EnvError, match=r"Noisy has no reward part 'speed': .*\['bonus', 'cost'\]; fix"):
        env.step(STILL)


def test_an_error_is_passed_on_with_its_row():
    env = started(Fragile)
    with pytest.raises(RuntimeError, match="the wheel came off") as caught:
        env.step(go(0.0, 1.0, 0.0))
    assert caught.value.__notes__ == ["in row 1 of Noisy"]


def test_a_failed_row_is_reported_replaced_and_paused(caplog):
    env = started(Fragile, on_error="report")
    assert env.step(STILL).failed is None
    shown = env.step(STILL).obs["at"].clone()
    with caplog.at_level(logging.ERROR):
        step = env.step(go(0.0, 1.0, 0.0))
        assert step.failed.tolist() == [False, True, False]
        assert step.reward.tolist() == [1.0, 0.0, 1.0]
        assert torch.equal(step.obs["at"][1], shown[1])
        failed = step.failed
        assert env.step(go(0.0, 1.0, 0.0)).failed is None  # paused
        assert failed.tolist() == [False, True, False]
        env.start(mask(0, 1, 0), seeds(5, 5, 5), seeds(5, 5, 5))
        assert env.step(go(0.0, 0.5, 0.0)).reward.tolist() == [1.0, 0.5, 1.0]
        env.step(go(0.0, 1.0, 0.0))
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2
    assert all(m.startswith("row 1 of Noisy failed, and was replaced: RuntimeError('the wheel") for m in messages)
    assert [bool(record.exc_info) for record in caplog.records] == [True, False]


# --- rows in worker processes --------------------------------------------------------------------


def story(env):
    """Everything that an environment says while rows are reset, end, are paused and started."""
    outputs = [env.reset(seed=4).clone(), env.reset(mask=mask(0, 1, 1)).clone(), env.reset().clone()]
    outputs.append(env.start(ALL, seeds(1, 1, 3), seeds(1, 2, 3)).clone())
    for number in range(8):
        step = env.step(go(0.25, -0.25, 0.125 * number))
        outputs += [step.obs.clone(), step.reward.clone(), step.truncated.clone(), step.info["reward_parts"].clone()]
        if number == 3:
            outputs.append(env.start(mask(0, 1, 1), seeds(0, 9, 9), seeds(0, 5, 6)).clone())
        if number == 5:
            env.pause(mask(0, 1, 0))
    outputs.append(env.start(mask(1, 0, 0), seeds(7, 0, 0), seeds(8, 0, 0)).clone())
    return [*outputs, env.step(STILL).obs.clone()]


@pytest.fixture(scope="module")
def workers():
    env = make(workers=2, mode="seed", reward_parts=("bonus", "cost"))
    yield env
    env.close()


def test_workers_say_what_one_process_says(workers):
    local = make(mode="seed", reward_parts=("bonus", "cost"))
    for ours, theirs in zip(story(local), story(workers), strict=True):
        assert (ours == theirs).all()


def test_an_error_in_a_worker_comes_back():
    env = started(Fragile, workers=3)
    with pytest.raises(EnvError, match=r"(?s)Noisy failed in groupwise rows 1-1.*Traceback.*the wheel came off.*row 1"):
        env.step(go(0.0, 1.0, 0.0))
    assert env.step(STILL).reward.tolist() == [1.0, 1.0, 1.0]
    env.close()
    with pytest.raises(EnvError, match=r"worker processes of Noisy have ended; fix"):
        env.step(STILL)


class Sleeps(Noisy):
    def step(self, action):
        time.sleep(60)


def test_an_interrupt_waits_for_no_hung_process_and_leaves_no_answer_behind_for_the_next_step():
    env = started(Sleeps, workers=2)
    ctrl_c = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    start = time.perf_counter()
    ctrl_c.start()
    with pytest.raises(KeyboardInterrupt):
        env.step(STILL)
    assert time.perf_counter() - start < 4.0
    with pytest.raises(EnvError, match=r"worker processes of Noisy have ended; fix"):
        env.step(STILL)


def test_what_cannot_be_sent_to_a_process_or_made_there_is_refused():
    generator = (number for number in range(3))
    with pytest.raises(EnvError, match=r"what makes Noisy cannot be sent to another process: .*fix: .*'sync'"):
        make(lambda: (generator, Noisy())[1], workers=1)

    def fails():
        raise OSError("no such robot")

    with pytest.raises(EnvError, match=r"(?s)Noisy failed in groupwise rows 0-2.*no such robot"):
        make(fails, workers=1)


@pytest.mark.parametrize("workers", [0, 3])
def test_parts_of_rows_that_take_no_step_are_0_as_their_rewards(workers):
    env = started(Fragile, workers=workers, reward_parts=("bonus", "cost"), on_error="report")
    assert env.step(go(0.5, 0.5, 0.5)).info["reward_parts"].tolist() == [[1.0, -0.5]] * 3
    env.pause(mask(1, 0, 0))
    step = env.step(go(0.25, 1.0, 0.25))
    assert step.failed.tolist() == [False, True, False]
    assert step.info["reward_parts"].tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, -0.25]]
    env.close()


def test_rows_in_any_order_reach_their_workers(workers):
    local = make(mode="seed", reward_parts=("bonus", "cost"))
    for env in (local, workers):
        env.start(mask(0, 0, 1), seeds(0, 0, 3), seeds(0, 0, 3))
        env.start(mask(1, 1, 0), seeds(1, 2, 0), seeds(1, 2, 0))
    assert (local.step(STILL).obs == workers.step(STILL).obs).all()
