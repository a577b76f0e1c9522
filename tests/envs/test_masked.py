import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

import groupwise as gw
from groupwise.check import check_env
from groupwise.config.run import EnvCfg
from groupwise.data.spaces import has_mask
from groupwise.envs.make import make_env
from groupwise.errors import EnvError


class Cards(gymnasium.Env):
    """A hand of 5 cards, numbered from 3; each may be played once. A card brings its share of the hand. Ends when 4 are played."""

    observation_space = Box(0, 1, (5,), np.float32)
    action_space = Discrete(5, start=3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.hand = np.ones(5, np.int8)
        self.worth = self.np_random.permutation(5) / 4
        return self.look(), {"action_mask": self.mask()}

    def step(self, action):
        card = int(action) - 3
        if not self.mask()[card]:
            raise ValueError(f"card {card} is not in {self.mask()}")
        reward = self.worth[card] * self.hand.sum()
        self.hand[card] = 0
        over = bool(self.hand.sum() == 1)
        return self.look(), float(reward), over, False, {"action_mask": 0 * self.hand if over else self.mask()}

    def look(self):
        return (self.worth * self.hand).astype(np.float32)

    def mask(self):
        return self.hand.copy()


class CardsInDict(Cards):
    """The mask is an entry of the observation, also of the last one, where nothing is allowed any more."""

    observation_space = Dict({"hand": Cards.observation_space, "action_mask": MultiBinary(5)})

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {}

    def step(self, action):
        return *super().step(action)[:4], {}

    def look(self):
        over = self.hand.sum() == 1
        return {"hand": super().look(), "action_mask": 0 * self.hand if over else self.hand.copy()}


class TwoHands(Cards):
    """Two choices of 3 and 2 options. The mask is a tuple, as ``MultiDiscrete.sample`` takes it."""

    observation_space = Box(0, 1, (2,), np.float32)
    action_space = MultiDiscrete([3, 2], start=[1, 0])

    def reset(self, *, seed=None, options=None):
        gymnasium.Env.reset(self, seed=seed)
        self.count = 0
        return self.draw(), {"action_mask": self.mask()}

    def step(self, action):
        first, second = int(action[0]) - 1, int(action[1])
        if first == self.banned or second != self.only:
            raise ValueError(f"{action} against banned {self.banned} and only {self.only}")
        self.count += 1
        return self.draw(), float(first), self.count == 4, False, {"action_mask": self.mask()}

    def draw(self):
        self.banned, self.only = int(self.np_random.integers(3)), int(self.np_random.integers(2))
        return np.array([self.banned / 2, self.only], np.float32)

    def mask(self):
        return (np.arange(3) != self.banned).astype(np.int8), (np.arange(2) == self.only).astype(np.int8)


ENVS = {"info": (Cards, True), "observation": (CardsInDict, False), "two choices": (TwoHands, True)}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for env, _ in ENVS.values():
        gymnasium.register(f"{env.__name__}-v0", entry_point=env, max_episode_steps=4)
    yield
    for env, _ in ENVS.values():
        del gymnasium.registry[f"{env.__name__}-v0"]


@pytest.mark.parametrize("grouped", [False, True])
def test_masks_of_info_become_an_entry(grouped):
    env = make_env(EnvCfg(id="Cards-v0", num_envs=2, action_masks=True), grouped=grouped, verify=False)
    obs = env.reset(seed=0)
    assert set(obs.keys()) == {"obs", "action_mask"}
    assert obs["action_mask"].tolist() == [[1] * 5] * 2
    step = env.step(torch.tensor([3, 5]))
    assert step.obs["action_mask"].tolist() == [[0, 1, 1, 1, 1], [1, 1, 0, 1, 1]]


@pytest.mark.parametrize("grouped", [False, True])
def test_chosen_keys_do_not_leave_the_mask_out(grouped):
    env = make_env(EnvCfg(num_envs=1, obs_keys=("hand",)), env=CardsInDict, grouped=grouped, verify=False)
    assert set(env.reset(seed=0).keys()) == {"hand", "action_mask"}
    assert has_mask(env.observation_space, env.action_space)


def test_chosen_keys_do_not_leave_the_mask_of_info_out():
    cfg = EnvCfg(num_envs=1, obs_keys=("hand",), action_masks=True)

    class Both(CardsInDict):
        def reset(self, *, seed=None, options=None):
            return Cards.reset(self, seed=seed)

    assert set(make_env(cfg, env=Both).reset(seed=0).keys()) == {"hand", "action_mask"}


def test_random_actions_are_numbers_where_masks_hold_too():
    class Table(Cards):
        def step(self, action):
            return super().step({card: card for card in range(3, 8)}[action])

    cfg = EnvCfg(num_envs=2, action_masks=True, num_random_noops=3)
    for seed in range(4):
        make_env(cfg, env=Table).reset(seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        ("info", gw.PPOCfg(num_steps=16)),
        ("observation", gw.GRPOCfg(group_size=2, num_steps=16)),
        ("two choices", gw.PPOCfg(num_steps=16)),
    ],
)
def test_runs_never_take_a_forbidden_action(kind, algorithm, tmp_path):
    """The environments raise an error at one: in the check of the start, in training, evaluation and prediction."""
    made, from_info = ENVS[kind]
    env = {"action_masks": from_info, "num_random_noops": 2}
    cfg = EnvCfg(id=f"{made.__name__}-v0", num_envs=4, **env)
    run = gw.train(
        cfg, algorithm, run_dir=tmp_path / "run", total_steps=128, evaluation={"episodes": 4, "interval": 64}
    )
    assert run.summary["return_mean"] >= 0
    assert gw.evaluate(tmp_path / "run", 4, deterministic=False).episodes == 4


@pytest.mark.parametrize("policy", ["actor_critic", "recurrent"])
def test_the_ratio_of_the_first_minibatch_is_one_and_policies_with_memory_obey_too(policy, tmp_path):
    run = gw.train(
        EnvCfg(id="Cards-v0", num_envs=4, action_masks=True),
        gw.GRPOCfg(group_size=2, num_steps=16, num_epochs=1, kl_coef=0.1),
        policy=policy,
        run_dir=tmp_path / "run",
        total_steps=64,
        evaluation={"episodes": 2},
    )
    (first, *_) = run.metrics()
    assert first["train/approx_kl"] == pytest.approx(0, abs=1e-7)
    assert first["train/clip_fraction"] == 0
    assert 0 < first["train/entropy"] < np.log(5)


def test_the_check_takes_allowed_actions():
    report = check_env(EnvCfg(id="Cards-v0", action_masks=True))
    assert report.training.value is not None, report


class Stuck(Cards):
    def mask(self):
        return 0 * self.hand


class Forgetful(Cards):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"other": 1}


class Short(Cards):
    def mask(self):
        return np.ones(3, np.int8)


class Arm(Cards):
    action_space = Box(-1, 1, (2,), np.float32)


class StuckInDict(CardsInDict):
    def look(self):
        return super().look() | {"action_mask": 0 * self.hand}


class LongInDict(CardsInDict):
    def look(self):
        return super().look() | {"action_mask": np.ones(10, np.int8)}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Stuck, "allows no action"),
        (Forgetful, r"info\['action_mask'\]"),
        (Short, "has 3 numbers, expected 5"),
        (Arm, "env.action_masks"),
        (StuckInDict, "allows no action"),
        (LongInDict, "action_mask of .* has 10 numbers, expected 5, one for each option"),
    ],
)
def test_masks_that_cannot_be_used_are_named(env, message):
    with pytest.raises(EnvError, match=message):
        make_env(EnvCfg(num_envs=1, action_masks=not issubclass(env, CardsInDict)), env=env).reset(seed=0)
