"""The presets that name papers and libraries: each trains, and says what its source says."""

from typing import Literal

import gymnasium
import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector

from groupwise.algorithms.grpo import GRPO
from groupwise.algorithms.losses import cispo, clip_cov, dppo, mis
from groupwise.config import load as presets
from groupwise.config import resolve
from groupwise.config.algorithm import CreditCfg, GRPOCfg, ObjectiveCfg, register_algorithm
from groupwise.config.base import GIVEN
from groupwise.engines import Engine
from groupwise.errors import DataError
from groupwise.training.build import UserObjects, build_components


def parameters(policy):
    return parameters_to_vector(policy.parameters()).detach().clone()


class Paid(gymnasium.Env):
    """Three steps; the reward has two parts: what the action earns, and what chance takes."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.start = 0, self.np_random.uniform(-1, 1)
        return self.look(), {}

    def look(self):
        return np.array([self.start, self.steps / 3], np.float32)

    def step(self, action):
        self.steps += 1
        parts = {"earned": float(action), "lost": -10 * self.np_random.uniform()}
        return self.look(), sum(parts.values()), self.steps == 3, False, parts


@pytest.mark.parametrize("name", sorted(presets.objective_presets().keys() - {"gdpo", "agilerl_turn_ratio"}))
def test_every_preset_trains(name):
    start, end = trained(resolve("CartPole-v1", SMALL, preset=name, env={"num_envs": 4}), UserObjects())
    # every step of CartPole has the same reward, from which process supervision learns nothing
    assert torch.equal(end, start) == (name == "sb3_process_deepseek")


def test_gdpo_trains_on_the_parts_of_a_reward():
    env, credit = (
        {"num_envs": 4, "max_episode_steps": 3},
        CreditCfg(reward={"name": "parts", "names": ["earned", "lost"]}),
    )
    algorithm = SMALL.model_copy(update={"credit": credit})
    start, end = trained(resolve(GIVEN, algorithm, preset="gdpo", env=env), UserObjects(env=Paid))
    assert not torch.equal(end, start)


class TurnsCfg(GRPOCfg):
    """Of an algorithm that knows the turns."""

    name: Literal["turns"] = "turns"


def test_a_ratio_of_turns_trains_on_turns_and_says_what_it_needs(registry):
    register_algorithm(TurnsCfg)(GRPO)
    settings = TurnsCfg(**SMALL.model_dump(exclude_unset=True, exclude={"name"}))
    parts = build_components(
        resolve("CartPole-v1", settings, preset="agilerl_turn_ratio", env={"num_envs": 4}), UserObjects(), Engine()
    )
    parts.buffer.add(parts.collector.collect(12, rollout=parts.buffer.start_rollout()))
    rollout = parts.buffer.get()
    with pytest.raises(DataError, match=r"needs turn_id.*fix: ratio='token'"):
        parts.algorithm.update(rollout)
    rollout["turn_id"] = rollout["step"] // 3
    start = parameters(parts.algorithm.policy)
    parts.algorithm.update(rollout)
    assert not torch.equal(parameters(parts.algorithm.policy), start)
    parts.env.close()


SMALL = GRPOCfg(num_steps=12, num_epochs=2, minibatch_size=24, group_size=4, kl_coef=0.01)


def trained(cfg, given):
    """The policy's parameters before and after two iterations, in which every metric is finite."""
    parts = build_components(cfg, given, Engine())
    start = parameters(parts.algorithm.policy)
    for _ in range(2):
        parts.buffer.add(parts.collector.collect(12, rollout=parts.buffer.start_rollout()))
        metrics = parts.algorithm.update(parts.buffer.get())
        assert [key for key, value in metrics.items() if not value.isfinite()] == []
    parts.env.close()
    end = parameters(parts.algorithm.policy)
    assert end.isfinite().all()
    return start, end


@pytest.mark.parametrize("name", ["rloo", "reinforce_plus_plus"])
def test_presets_whose_kl_is_taken_off_the_rewards(name):
    settings = presets.objective_preset(name).settings
    assert (CreditCfg(**settings["credit"]).kl_placement, settings["kl_estimator"]) == ("reward", "k1")


@pytest.mark.parametrize(
    "choice",
    [
        {"objective": {"ratio": "turn"}},
        {"objective": {"aggregation": "seq_mean_token_sum_norm"}},
        {"kl_estimator": "k2"},
        {"kl_estimator": "k3+"},
        {"kl_estimator": "abs"},
    ],
)
def test_choices_that_libraries_have_are_in_a_preset(choice):
    ((name, value),) = choice.items()
    found = [preset.settings.get(name, {}) for preset in presets.objective_presets().values()]
    assert value in found if isinstance(value, str) else any(value.items() <= settings.items() for settings in found)


def test_every_sampler_correction_is_in_a_preset():
    objectives = [ObjectiveCfg(**preset.settings["objective"]) for preset in presets.objective_presets().values()]
    found = {
        (
            objective.importance_sampling_correction.name,
            getattr(objective.importance_sampling_correction, "level", None),
        )
        for objective in objectives
    }
    assert found == {
        ("none", None),
        ("off_policy_mask", None),
        *((name, level) for name in ("tis", "mis") for level in ("token", "sequence")),
    }


def test_icepop_says_whose_numbers_it_has():
    assert "AgileRL" in presets.objective_preset("icepop").note


def test_presets_of_one_name_in_several_libraries_are_those_libraries():
    def objective(name):
        return ObjectiveCfg(**presets.objective_preset(name).settings["objective"])

    def region(name):
        return objective(name).trust_region

    assert region("cispo") == cispo.Settings(low=None, high=5.0)
    assert region("cispo_verl") == cispo.Settings(low=0.8, high=1.2)
    assert region("cispo_agilerl") == cispo.Settings(low=None, high=1.2)
    assert region("prime_rl") == dppo.Settings(divergence="tv", low=0.2, high=0.2, max_ratio=None, pull=1e-3)
    assert (region("dppo_kl").divergence, region("dppo_kl").low, region("dppo_kl").high) == ("kl", 0.05, 0.05)
    assert objective("trl").importance_sampling_correction == mis.Settings(level="sequence", high=3.0)
    assert region("clip_cov") == clip_cov.Settings(fraction=2e-4, low=1.0, high=5.0)
