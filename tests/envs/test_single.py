import os

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import OrderEnforcing, TimeLimit
from noisy_envs import Calm

from groupwise.config.run import EnvCfg
from groupwise.envs import make as single
from groupwise.envs.make import make_env
from groupwise.errors import EnvError, GroupStartError


class StartsByProcess(Calm):
    def draw_start(self):
        return super().draw_start() + os.getpid()


class PaysByProcess(Calm):
    def pay(self):
        return float(os.getpid())


def make(env, vectorization, **settings):
    cfg = EnvCfg(id="<given in Python>", num_envs=2, max_episode_steps=9, vectorization=vectorization, **settings)
    return make_env(cfg, grouped=True, env=env)


@pytest.fixture
def two_cpus(monkeypatch):
    monkeypatch.setattr(single, "num_cpus", lambda: 2)


@pytest.mark.usefixtures("two_cpus")
@pytest.mark.parametrize(
    ("env", "where"),
    [(StartsByProcess, "at the start, in 'obs' of row 1"), (PaysByProcess, "at step 1 .*, in 'reward' of row 1")],
)
def test_rows_of_workers_are_tried_where_they_live(env, where):
    make(env, "sync").close()
    with pytest.raises(GroupStartError, match=f"members of {env.__name__} .*across processes: .*{where}.*fix"):
        make(env, "async")


@pytest.mark.usefixtures("two_cpus")
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_starts_that_are_not_shared_follow_from_the_seed_of_the_noise(vectorization):
    env = make(Calm, vectorization, start_mode="none")
    every, start = np.ones(2, np.bool_), np.full(2, 7)
    obs = env.start(every, start, np.array([1, 2]))
    assert (env.start_mode, env.start_report.start_mode) == ("none", "none")
    assert obs[0] != obs[1]
    assert torch.equal(env.start(every, start + 1, np.array([1, 2])), obs)
    env.close()


@pytest.mark.parametrize(
    ("env", "limit"),
    [
        (Calm, None),
        (lambda: TimeLimit(Calm(), 20), 20),
        (lambda: OrderEnforcing(TimeLimit(OrderEnforcing(Calm()), 20)), 20),
        (lambda: TimeLimit(gymnasium.make("CartPole-v1"), 20), 20),
        (lambda: gymnasium.make("CartPole-v1"), 500),
    ],
)
@pytest.mark.parametrize("grouped", [True, False])
def test_the_step_limit_of_a_callable_is_read_off_its_wrappers(env, limit, grouped):
    cfg = EnvCfg(id="<given in Python>", num_envs=1)
    made = make_env(cfg, grouped=grouped, env=env, verify=False)
    assert made.max_episode_steps == limit
    made.close()


@pytest.mark.parametrize("mode", ["auto", "snapshot", "seed"])
def test_a_setting_that_does_not_fit_is_not_blamed_on_the_shared_start(mode):
    cfg = EnvCfg(num_envs=2, max_episode_steps=3, log_info=("speed",), start_mode=mode)
    with pytest.raises(EnvError, match=r"^env.log_info has no entry 'speed'") as caught:
        make_env(cfg, env=Calm, grouped=True)
    assert caught.value.__notes__ == ["in row 0 of Calm"]
