"""Whole runs on arithmetic of ours and on Gymnasium's: the same rollouts, metrics and weights."""

import pytest
import torch

import groupwise as gw
from groupwise.engines.base import Engine
from groupwise.envs.cartpole_physics import CartPolePhysics
from groupwise.training.build import build_parts
from groupwise.training.parts import Given

LEARN = {"num_steps": 40, "num_epochs": 1, "minibatch_size": 128, "learning_rate": 3e-3}


def trained(env, algorithm, iterations=3):
    """Rollouts, metrics and final parameters."""
    torch.manual_seed(0)
    grouped = algorithm == "grpo"
    cfg = gw.GRPOCfg(group_size=3, **LEARN) if grouped else gw.PPOCfg(**LEARN)
    policy = gw.ActorCritic(env.observation_space, env.action_space, actor_only=grouped)
    buffer = gw.RolloutBuffer(
        env.num_envs, cfg.num_steps, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=not grouped
    )
    collector = gw.GroupCollector(env, policy, group_size=3) if grouped else gw.VectorCollector(env, policy)
    seen = []

    class Keep(gw.Callback):
        def on_iteration_end(self, trainer, rollout, metrics):
            seen.append((rollout.clone(), {k: v for k, v in metrics.items() if not k.startswith("time/")}))
            if trainer.iteration == iterations:
                trainer.stop("enough")

    update = gw.GRPO(cfg, policy) if grouped else gw.PPO(cfg, policy)
    gw.Trainer(update, collector, buffer, num_steps=cfg.num_steps, total_steps=10**6, callbacks=[Keep()]).train()
    return seen, [parameter.detach() for parameter in policy.parameters()]


def same(one, other):
    (rollouts, weights), (expected, others) = one, other
    for (rollout, metrics), (reference, numbers) in zip(rollouts, expected, strict=True):
        assert set(rollout.keys()) == set(reference.keys())
        assert all(torch.equal(rollout[key], reference[key]) for key in rollout.keys())  # noqa: SIM118 (no mapping)
        assert metrics == numbers
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


@pytest.mark.parametrize(("algorithm", "rows"), [("ppo", 7), ("grpo", 34)])
def test_cartpole(monkeypatch, algorithm, rows):
    made = []
    for known in (True, False):
        with monkeypatch.context() as patch:
            if not known:
                patch.setattr(CartPolePhysics, "knows", lambda env: False)
            made.append(gw.make_env(gw.EnvCfg(num_envs=rows), grouped=algorithm == "grpo"))
    assert made[0].note is not None
    assert made[1].note is None
    same(*(trained(env, algorithm) for env in made))


def test_acrobot():
    ways = (gw.EnvCfg(id="Acrobot-v1", num_envs=5, vectorization=way) for way in ("auto", "sync"))
    ours, theirs = (gw.make_env(cfg) for cfg in ways)
    assert ours.note is not None
    assert theirs.note is None
    same(trained(ours, "ppo"), trained(theirs, "ppo"))


def test_who_watches_is_told():
    parts = build_parts(gw.RunCfg(), Given(), Engine())
    assert any("CartPole-v1 is stepped by groupwise" in note for note in parts.notes())
