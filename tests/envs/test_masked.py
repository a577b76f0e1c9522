import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from masked_envs import Cards, CardsInDict, TwoHands

import groupwise as gw
from groupwise.check import check_env
from groupwise.config.run import EnvCfg
from groupwise.envs.make import make_env
from groupwise.errors import EnvError

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


def test_chosen_keys_do_not_leave_the_mask_of_info_out():
    cfg = EnvCfg(num_envs=1, obs_keys=("hand",), action_masks=True)

    class Both(CardsInDict):
        def reset(self, *, seed=None, options=None):
            return Cards.reset(self, seed=seed)

    assert set(make_env(cfg, env=Both).reset(seed=0).keys()) == {"hand", "action_mask"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENVS)
@pytest.mark.parametrize("algorithm", [gw.PPOCfg(num_steps=16), gw.GRPOCfg(group_size=2, num_steps=16)])
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


def test_rows_in_other_processes_have_masks(tmp_path):
    cfg = EnvCfg(id="Cards-v0", num_envs=2, action_masks=True, vectorization="async")
    env = make_env(cfg, grouped=True)
    assert set(env.reset(seed=0).keys()) == {"obs", "action_mask"}
    env.close()


def test_the_check_takes_allowed_actions():
    report = check_env(EnvCfg(id="Cards-v0", action_masks=True))
    assert report.training.value is not None, report
    assert report.start_modes["seed"].value


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


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Stuck, "allows no action"),
        (Forgetful, r"info\['action_mask'\]"),
        (Short, "has 3 numbers, expected 5"),
        (Arm, "env.action_masks"),
        (StuckInDict, "allows no action"),
    ],
)
def test_masks_that_cannot_be_used_are_named(env, message):
    with pytest.raises(EnvError, match=message):
        make_env(EnvCfg(num_envs=1, action_masks=env is not StuckInDict), env=env).reset(seed=0)


@pytest.mark.parametrize("grouped", [False, True])
def test_masks_that_nobody_asked_for_are_mentioned(grouped):
    def notes(env, **settings):
        cfg = EnvCfg(num_envs=1, max_episode_steps=4, **settings)
        return make_env(cfg, env=env, grouped=grouped, verify=False).notes

    hint = (
        "Action masks: info['action_mask'] is not used; env.action_masks=True has the policy take only allowed actions."
    )
    assert notes(Cards) == (hint,)
    assert notes(CardsInDict) == ("Action masks: from the observation's 'action_mask'.",)
    assert notes(Cards, action_masks=True) == ()
    assert notes(CardsInDict, obs_keys=("hand",)) == ()
    assert notes(lambda: gymnasium.make("Acrobot-v1")) == ()
