"""The presets that name papers and libraries: each trains, and says what its source says."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from groupwise import presets
from groupwise.algorithms.configs import CreditCfg, GRPOCfg, ObjectiveCfg
from groupwise.algorithms.objective_configs import CispoCfg, CorrectionCfg, CovarianceCfg, DppoCfg
from groupwise.config import resolve
from groupwise.engines.base import Engine
from groupwise.training.build import Given, build_parts


def parameters(policy):
    return parameters_to_vector(policy.parameters()).detach().clone()


NEED_MORE = {"remax", "gdpo"}
"""They want what a plain rollout of CartPole does not hold, and say so: deterministic attempts, parts of the reward."""


@pytest.mark.parametrize("name", sorted(presets.objective_presets().keys() - NEED_MORE))
def test_every_preset_trains(name):
    cfg = GRPOCfg(num_steps=12, num_epochs=2, minibatch_size=24, group_size=4, kl_coef=0.01)
    parts = build_parts(resolve("CartPole-v1", cfg, preset=name, env={"num_envs": 4}), Given(), Engine())
    start = parameters(parts.algorithm.policy)
    for _ in range(2):
        parts.buffer.add(parts.collector.collect(12, rollout=parts.buffer.start_rollout()))
        metrics = parts.algorithm.update(parts.buffer.get())
        assert [key for key, value in metrics.items() if not value.isfinite()] == []
    assert parameters(parts.algorithm.policy).isfinite().all()
    # every step of CartPole has the same reward, from which process supervision learns nothing
    assert torch.equal(parameters(parts.algorithm.policy), start) == (name == "sb3_process_deepseek")
    parts.env.close()


@pytest.mark.parametrize("name", ["rloo", "reinforce_plus_plus"])
def test_presets_whose_kl_is_taken_off_the_rewards(name):
    settings = presets.objective_preset(name).settings
    assert (CreditCfg(**settings["credit"]).kl_placement, ObjectiveCfg(**settings["objective"]).kl_estimator) == (
        "reward",
        "k1",
    )


def test_presets_of_one_name_in_several_libraries_are_those_libraries():
    def cispo(name):
        return ObjectiveCfg(**presets.objective_preset(name).settings["objective"]).cispo

    assert cispo("cispo") == CispoCfg(low=None, high=5.0)
    assert cispo("cispo_verl") == CispoCfg(low=0.8, high=1.2)
    assert cispo("cispo_agilerl") == CispoCfg(low=None, high=1.2)
    prime = ObjectiveCfg(**presets.objective_preset("prime_rl").settings["objective"])
    assert prime.dppo == DppoCfg(divergence="tv", low=0.2, high=0.2, max_ratio=None, pull=1e-3)
    kl = ObjectiveCfg(**presets.objective_preset("dppo_kl").settings["objective"])
    assert (kl.dppo.divergence, kl.dppo.low, kl.dppo.high) == ("kl", 0.05, 0.05)
    assert ObjectiveCfg(**presets.objective_preset("trl").settings["objective"]).correction == CorrectionCfg(
        weight="sequence_mask", high=3.0
    )
    assert ObjectiveCfg(**presets.objective_preset("clip_cov").settings["objective"]).covariance == CovarianceCfg(
        fraction=2e-4, low=1.0, high=5.0
    )
