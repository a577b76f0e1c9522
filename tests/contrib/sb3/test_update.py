"""``GRPO`` through Stable-Baselines3: what an update is made of, and that it is the library's own."""

import numpy as np
import pytest
import torch
from sb3_corridor import Corridor, corridor, parameters
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import configure_logger

import groupwise as gw
from groupwise.config.load import objective_presets
from groupwise.contrib.sb3 import GRPO


def test_an_update_takes_the_learning_rate_of_its_rollouts_start():
    model = corridor(learning_rate=lambda left: 1e-3 * left)
    started, rates, train = [], [], model.train

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            started.append(model.num_timesteps)

    def spy():
        train()
        rates.append(model.policy.optimizer.param_groups[0]["lr"])

    model.train = spy
    model.learn(200, Look())
    assert len(started) > 3
    assert rates == pytest.approx([1e-3 * (1 - steps / 200) for steps in started])
    assert (rates[0], model.num_timesteps > 200) == (1e-3, True)  # the last rollout goes beyond the end


def test_a_training_of_one_rollout_learns_at_the_default_rate():
    model = corridor()
    before = parameters(model)
    model.learn(32)
    assert model.num_timesteps == 32
    assert model.policy.optimizer.param_groups[0]["lr"] == 1e-3
    assert np.abs(parameters(model) - before).max() > 1e-4


def test_target_kl_ends_the_update():
    free, bounded = (corridor(n_epochs=40, learning_rate=0.05, target_kl=kl).learn(40) for kl in (None, 1e-3))
    assert 0 < bounded._n_updates < free._n_updates


def test_the_reference_is_renewed_in_its_interval():
    model = corridor(kl_coef=0.1, kl_ref_iterations=2)
    first = model.reference_policy.parameters_to_vector()
    seen = []

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            reference = model.reference_policy.parameters_to_vector()
            seen.append((model.core.iteration, (reference == parameters(model)).all(), (reference == first).all()))

    model.learn(300, Look())
    assert {(updates % 2 == 0) for updates, _, _ in seen} == {True, False}
    assert all(same == (updates % 2 == 0) for updates, same, _ in seen)
    frozen = corridor(kl_coef=0.1).learn(100)
    np.testing.assert_array_equal(frozen.reference_policy.parameters_to_vector(), first)


def test_without_kl_there_is_no_reference():
    with pytest.raises(gw.errors.ConfigError, match="kl_coef is 0"):
        corridor().reference_policy  # noqa: B018


REFUSED = {"gdpo", "remax", "agilerl_turn_ratio"}
"""They read what no rollout here holds."""


@pytest.mark.parametrize("preset", sorted(objective_presets().keys() - REFUSED))
def test_presets_by_name(preset):
    settings = objective_presets()[preset].settings
    objective = gw.ObjectiveCfg(**settings["objective"])
    divides = objective.aggregation.name in ("constant", "seq_mean_token_sum_norm")
    if divides:
        aggregation = objective.aggregation.model_copy(update={"max_length": 6})
        objective = objective.model_copy(update={"aggregation": aggregation})
    model = corridor(credit=preset, objective=objective if divides else preset)
    assert (model.credit, model.objective) == (gw.CreditCfg(**settings["credit"]), objective)


def test_a_constant_divisor_is_given_in_the_objective():
    cfg = gw.ObjectiveCfg(aggregation={"name": "constant", "max_length": 6})
    corridor(credit="dr_grpo", objective=cfg).learn(40)
    with pytest.raises(gw.errors.ConfigError, match=r"max_length, which is None; fix"):
        corridor(objective="dr_grpo")


def test_credit_and_objective_may_be_plain_settings():
    model = corridor(credit={"scale": "none"}, objective={"trust_region": {"clip_low": 0.1}})
    assert model.credit == gw.CreditCfg(scale="none")
    assert model.objective == gw.ObjectiveCfg(trust_region={"clip_low": 0.1})
    model.learn(32)


@pytest.mark.parametrize("credit", ["grpo", "rloo", "embodichain", "sb3_process", "sb3_process_deepseek"])
@pytest.mark.parametrize("objective", ["grpo", "rloo", "embodichain", "sb3_outcome"])
def test_one_update_equals_that_of_the_library(credit, objective):
    """Two groups of two episodes of three and two steps, once through SB3, once as a padded rollout."""
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(4, 3, 2)).astype(np.float32)
    action, reward = rng.integers(0, 2, (4, 3)), rng.normal(size=(4, 3)).astype(np.float32)
    old = (np.log(0.5) + rng.normal(size=(4, 3)) * 0.2).astype(np.float32)
    settings = {"batch_size": 100, "n_epochs": 3, "gamma": 0.9, "kl_coef": 0.1, "ent_coef": 0.01, "group_size": 2}
    env = make_vec_env(Corridor, n_envs=2)
    model = corridor(env=env, credit=credit, objective=objective, learning_rate=0.01, **settings)
    through_sb3(model, obs, action, reward, old)

    cfg = gw.GRPOCfg(
        learning_rate=0.01,
        num_epochs=3,
        minibatch_size=100,
        gamma=0.9,
        kl_coef=0.1,
        ent_coef=0.01,
        group_size=2,
        credit=model.credit,
        objective=model.objective,
        kl_estimator=model.kl_estimator,
    )
    fresh = corridor(env=env, credit=credit, objective=objective)
    policy = gw.ActorCritic(
        Corridor().observation_space, Corridor().action_space, gw.PolicyCfg(hidden_sizes=(8,)), actor_only=True
    )
    with torch.no_grad():
        for target, source in zip(policy.parameters(), fresh.policy.parameters(), strict=True):
            target.copy_(source)
    before = parameters(fresh)
    gw.GRPO(cfg, policy).update(padded(obs, action, reward, old))
    expected = torch.nn.utils.parameters_to_vector(policy.parameters()).detach().numpy()
    assert np.abs(expected - before).max() > 5e-3
    np.testing.assert_allclose(parameters(model), expected, atol=2e-6)


LENGTHS = (3, 2, 3, 2)


def through_sb3(model: GRPO, obs, action, reward, old) -> None:
    """Episodes 0, 2 in environment 0 and 1, 3 in environment 1, one after another."""
    from groupwise.contrib.sb3 import GroupBuffer, Tick

    model.set_logger(configure_logger())
    model.rollout_buffer = GroupBuffer(2, 2, seed=0, first_group=0, starts="shared")
    model.rollout_buffer.begin()
    when = {0: [(0, 0), (0, 1), (0, 2), (3, 0), (3, 1)], 1: [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]}
    for time in range(5):
        at = tuple(np.array([when[env][time] for env in range(2)]).T)
        last = at[1] == np.array(LENGTHS)[at[0]] - 1
        model.rollout_buffer.record(Tick(obs[at], action[at], old[at], reward[at], last, np.zeros(2, np.bool_)))
    model.train()


def padded(obs, action, reward, old):
    from tensordict import TensorDict

    def slots(values):
        return torch.cat([torch.as_tensor(values), torch.zeros_like(torch.as_tensor(values[:, :1]))], dim=1)

    step = torch.arange(4).expand(4, 4)
    length = torch.tensor(LENGTHS)[:, None]
    valid = step < length
    row = torch.arange(4)[:, None].expand(4, 4)
    return TensorDict(
        {
            "obs": slots(obs),
            "action": slots(action),
            "reward": slots(reward) * valid,
            "sample_log_prob": slots(old),
            "terminated": step == length - 1,
            "truncated": torch.zeros(4, 4, dtype=torch.bool),
            "valid": valid,
            "loss_mask": valid,
            "group_id": torch.where(valid, row // 2, -1),
            "episode_id": torch.where(valid, row, -1),
            "step": torch.where(valid, step, 0),
        },
        batch_size=[4, 4],
    )
