"""``GRPO`` through Stable-Baselines3: what an update is made of, and that it is the library's own."""

import numpy as np
import pytest
import torch
from sb3_corridor import Corridor, corridor, parameters
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import configure_logger
from tensordict import TensorDict

import groupwise as gw
from groupwise.config.load import objective_presets
from groupwise.contrib.sb3 import GRPO, GroupBuffer, Tick


class AtRolloutStart(BaseCallback):
    """What a function finds at the start of each rollout."""

    def __init__(self, look) -> None:
        super().__init__()
        self.look, self.seen = look, []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self.seen.append(self.look())


def test_an_update_takes_the_learning_rate_of_its_rollouts_start():
    model = corridor(learning_rate=lambda left: 1e-3 * left)
    started, rates, train = AtRolloutStart(lambda: model.num_timesteps), [], model.train
    model.train = lambda: rates.append(train() or model.policy.optimizer.param_groups[0]["lr"])
    model.learn(200, started)
    assert len(started.seen) > 3
    assert rates == pytest.approx([1e-3 * (1 - steps / 200) for steps in started.seen])
    assert (rates[0], model.num_timesteps > 200) == (1e-3, True)  # the last rollout goes beyond the end


def test_a_training_of_one_rollout_learns_at_the_default_rate():
    model = corridor()
    before = parameters(model)
    model.learn(32)
    assert model.num_timesteps == 32
    assert model.policy.optimizer.param_groups[0]["lr"] == 1e-3
    assert np.abs(parameters(model) - before).max() > 1e-4


def test_an_update_takes_the_attributes_that_the_model_has_then():
    """As SB3's algorithms do, for which callbacks anneal them."""
    model = corridor(n_epochs=2, clip_range=lambda left: 0.1 + 0.1 * left)
    model.learn(32)
    updates, iteration, moments = model._n_updates, model.core.iteration, len(model.policy.optimizer.state)
    settings = {"n_epochs": 1, "batch_size": 10_000, "ent_coef": 0.5, "gamma": 0.9, "target_kl": 9.0, "clip_range": 0.2}
    vars(model).update(settings)
    model.learn(32, reset_num_timesteps=False)
    cfg = model.core.cfg
    assert (cfg.num_epochs, cfg.minibatch_size, cfg.ent_coef, cfg.gamma, cfg.target_kl) == (1, 10_000, 0.5, 0.9, 9.0)
    assert cfg.objective.trust_region.parameters() == {"clip_low": 0.2, "clip_high": 0.2}
    assert model._n_updates == updates + 1
    assert (model.core.iteration, len(model.policy.optimizer.state)) == (iteration + 1, moments)
    core = model.core
    model.learn(32, reset_num_timesteps=False)
    assert model.core is core, "made again only where something changed"
    model.n_epochs = 0
    with pytest.raises(gw.errors.ConfigError, match="n_epochs = 0"):
        model.learn(32, reset_num_timesteps=False)


def test_target_kl_ends_the_update():
    free, bounded = (corridor(n_epochs=40, learning_rate=0.05, target_kl=kl).learn(40) for kl in (None, 1e-3))
    assert 0 < bounded._n_updates < free._n_updates


def test_the_reference_is_renewed_in_its_interval():
    model = corridor(kl_coef=0.1, kl_ref_iterations=2)
    first = model.reference_policy.parameters_to_vector()

    def look():
        reference = model.reference_policy.parameters_to_vector()
        return model.core.iteration, (reference == parameters(model)).all(), (reference == first).all()

    starts = AtRolloutStart(look)
    model.learn(300, starts)
    seen = starts.seen
    assert {(updates % 2 == 0) for updates, _, _ in seen} == {True, False}
    assert all(same == (updates % 2 == 0) for updates, same, _ in seen)
    frozen = corridor(kl_coef=0.1).learn(100)
    np.testing.assert_array_equal(frozen.reference_policy.parameters_to_vector(), first)
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
    assert (model.core.cfg.credit, model.core.cfg.objective) == (gw.CreditCfg(**settings["credit"]), objective)
    assert model.core.cfg.kl_estimator == ("k3" if divides else settings.get("kl_estimator", "k3"))


def test_settings_of_credit_and_objective():
    cfg = gw.ObjectiveCfg(aggregation={"name": "constant", "max_length": 6})
    corridor(credit="dr_grpo", objective=cfg).learn(40)
    plain = corridor(credit={"scale": "none"}, objective={"trust_region": {"clip_low": 0.1}}).core.cfg
    assert (plain.credit.scale, plain.objective.trust_region.clip_low) == ("none", 0.1)
    with pytest.raises(gw.errors.ConfigError, match=r"max_length, which is None; fix"):
        corridor(objective="dr_grpo")


PAIRS = ("grpo grpo", "rloo rloo", "embodichain embodichain", "sb3_process sb3_outcome", "sb3_process_deepseek grpo")


@pytest.mark.parametrize(("credit", "objective"), [*map(str.split, PAIRS)], ids=PAIRS)
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

    names = ("gamma", "kl_coef", "ent_coef", "group_size", "credit", "objective", "kl_estimator")
    shared = {name: getattr(model.core.cfg, name) for name in names}
    cfg = gw.GRPOCfg(learning_rate=0.01, num_epochs=3, minibatch_size=100, **shared)
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
    def slots(values):
        return torch.cat([torch.as_tensor(values), torch.zeros_like(torch.as_tensor(values[:, :1]))], dim=1)

    step, row = torch.arange(4).expand(4, 4), torch.arange(4)[:, None].expand(4, 4)
    length = torch.tensor(LENGTHS)[:, None]
    valid, never = step < length, torch.zeros(4, 4, dtype=torch.bool)
    columns = {
        "obs": slots(obs),
        "action": slots(action),
        "reward": slots(reward) * valid,
        "sample_log_prob": slots(old),
    }
    columns |= {"terminated": step == length - 1, "truncated": never, "valid": valid, "loss_mask": valid}
    columns |= {"group_id": torch.where(valid, row // 2, -1), "episode_id": torch.where(valid, row, -1)}
    return TensorDict(columns | {"step": torch.where(valid, step, 0)}, batch_size=[4, 4])
