"""Numbers of info that become metrics: those of each episode's last step."""

from functools import partial

import gymnasium
import numpy as np
import pytest
from plain_envs import Plain
from scripted_envs import FakePolicy

import groupwise as gw
from groupwise.collectors.vector import Episode, VectorCollector


class Counts(Plain):
    """Episodes of 3 to 5 steps. The info counts them in its own ways."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.length = int(self.np_random.integers(3, 6))
        return obs, info

    def step(self, action):
        *outcome, _ = super().step(action)
        count = self.steps
        return *outcome, {"count": count, "half": np.float32(count / 2), "one": np.array([True]), "name": "counts"}


class Hears(gw.Callback):
    """Keeps the episodes of all iterations."""

    def __init__(self):
        self.episodes = []

    def on_iteration_end(self, trainer, rollout, metrics):
        self.episodes += trainer.collector.finished
        self.recent = list(trainer.collector.recent_episodes())


@pytest.fixture
def counting():
    gymnasium.register("Counts-v0", Counts)
    yield
    del gymnasium.registry["Counts-v0"]


def train(tmp_path, algorithm="ppo", log_info=("count", "half", "one"), callbacks=(), **env):
    algorithm = {"name": algorithm, "num_steps": 16} | ({"group_size": 2} if algorithm == "grpo" else {})
    env = gw.EnvCfg(id="Counts-v0", num_envs=2, max_episode_steps=10, log_info=log_info, **env)
    settings = {"evaluation": {"episodes": 2}, "logging": {"progress": "none"}}
    return gw.train(env, algorithm, total_steps=64, run_dir=tmp_path / "run", callbacks=callbacks, **settings)


@pytest.mark.filterwarnings("ignore::groupwise.errors.GroupStartWarning")
@pytest.mark.parametrize(("algorithm", "vectorization"), [("ppo", "sync"), ("grpo", "async")])
def test_metrics_are_means_of_last_values_and_callbacks_get_those_of_each_episode(
    counting, tmp_path, algorithm, vectorization
):
    hears = Hears()
    run = train(tmp_path, algorithm, callbacks=[hears], vectorization=vectorization)
    assert len(hears.episodes) > 5
    for episode in hears.episodes:
        assert episode.info == {"count": episode.length, "half": episode.length / 2, "one": 1.0}
    last = run.metrics()[-1]
    assert last["rollout/info/count"] == pytest.approx(np.mean([episode.length for episode in hears.recent]))
    assert last["rollout/info/half"] == pytest.approx(last["rollout/info/count"] / 2)
    assert last["rollout/info/one"] == 1.0


def test_a_resumed_run_goes_on_with_the_episodes_of_before(counting, tmp_path):
    run = train(tmp_path)
    again = gw.resume(run.path, 96)
    assert 3 <= again.metrics()[-1]["rollout/info/count"] <= 5


def test_episodes_that_the_horizon_cuts_have_none(counting, tmp_path):
    hears, collection = Hears(), {"horizon": 4}
    env = gw.EnvCfg(id="Counts-v0", num_envs=4, max_episode_steps=10, log_info=("count",))
    algorithm = {"name": "grpo", "num_steps": 16, "group_size": 2, "collection": collection}
    settings = {"evaluation": {"episodes": 2}, "logging": {"progress": "none"}, "callbacks": [hears]}
    gw.train(env, algorithm, total_steps=64, run_dir=tmp_path / "run", **settings)
    assert {episode.info is None for episode in hears.episodes} == {True, False}
    for episode in hears.episodes:
        assert (episode.info is None) == (episode.length == 4 and not episode.terminated)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("cuont",), r"env\.log_info has no entry 'cuont' at the end of an episode; did you mean 'count'"),
        (("name",), r"env\.log_info: info\['name'\] is 'counts', expected a number; fix: leave it out"),
    ],
)
def test_an_entry_that_is_missing_or_no_number_is_named(counting, tmp_path, keys, message):
    with pytest.raises(gw.errors.EnvError, match=message):
        train(tmp_path, log_info=keys)


def test_episodes_without_numbers_are_left_out_of_the_mean():
    env = gw.make_env(gw.EnvCfg(num_envs=2), env=partial(gymnasium.make, "CartPole-v1"))
    collector = VectorCollector(env, FakePolicy())
    collector.recent.extend(Episode(0.0, 1, True, info=info) for info in ({"x": 1.0}, None, {"x": 4.0}))
    assert collector.metrics()["rollout/info/x"] == 2.5
    env.close()
