"""Flow policies from demonstrations: the loss of flow matching, held-out scores, and GRPO from the clone."""

import numpy as np
import pytest
import robots
import torch
from robots import Robot, towards_its_side

import groupwise as gw
from groupwise.config import resolve
from groupwise.config.policy import FlowCfg
from groupwise.embodied.chunks import ActionChunk
from groupwise.embodied.demos import record_demos
from groupwise.engines.base import Engine
from groupwise.report.folder import RunFolder
from groupwise.run import build
from groupwise.training.checkpoint import load_checkpoint
from groupwise.training.components import UserObjects

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")
from groupwise.embodied.flow import FlowPolicy

pytestmark = pytest.mark.contrib
robots.register()
C = 3
ENV = ActionChunk(Robot(), C)
POLICY = {"name": "flow", "hidden_size": 32, "num_layers": 1, "patch_size": 8}
ROBOT = gw.EnvCfg(id="Robot-v0", action_chunk=C, num_envs=8)
SETTINGS = {"policy": POLICY, "evaluation": {"episodes": 40}, "logging": {"progress": "none"}, "seed": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return record_demos("Robot-v0", towards_its_side, episodes=20, out=tmp_path_factory.mktemp("demos")).path


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return FlowPolicy(ENV.observation_space, ENV.action_space, FlowCfg(**POLICY), actor_only=True)


def labelled(policy, actions, seed=0):
    return policy.label(policy.own_action(actions), 0.1, torch.Generator().manual_seed(seed))


def test_the_loss_is_that_of_transformers(policy):
    obs, actions = robots.observations(ENV), torch.rand(4, C, 2) * 2 - 1
    own = labelled(policy, actions)
    found = policy.imitate({"obs": obs, "action": own})
    drawn, network, text = policy.unpacked(own), policy.model.network, obs["instruction"].long()
    images = torch.full((4, 8), 256)  # two views of 2 x 2 patches
    wanted = network(
        state=obs["proprio"],
        noise=drawn.before,
        timestep=drawn.time[:, 0],
        actions=actions,
        input_ids=torch.cat([images, text], dim=1),
        attention_mask=torch.cat([torch.ones_like(images), (text != 0).long()], dim=1),
        pixel_values=obs["image"].movedim(-1, 2) / 127.5 - 1,
        pixel_attention_mask=torch.ones(4, 2, dtype=torch.bool),
    ).loss
    torch.testing.assert_close(-found.log_prob.mean(), wanted, atol=1e-5, rtol=1e-5)
    assert found.log_prob.shape == found.entropy.shape == (4,)


def test_the_loss_by_hand(policy):
    """A model that gives velocity 0 has the loss mean (noise - actions)^2."""
    with torch.no_grad():
        policy.model.network.action_out_proj.weight.zero_()
        policy.model.network.action_out_proj.bias.zero_()
    actions = torch.rand(4, C, 2) * 2 - 1
    own = labelled(policy, actions)
    noise = policy.unpacked(own).before
    found = policy.imitate({"obs": robots.observations(ENV), "action": own}).log_prob
    torch.testing.assert_close(found, -(noise - actions).square().mean(dim=(1, 2)))


def test_noise_and_times_are_drawn_anew_and_actions_stay(policy):
    actions = torch.rand(4000, C, 2) * 2 - 1
    drawn = policy.unpacked(labelled(policy, actions))
    torch.testing.assert_close(drawn.actions, actions)
    assert (drawn.before.mean().item(), drawn.before.std().item()) == pytest.approx((0, 1), abs=0.02)
    assert drawn.time.min() >= 0.001
    assert drawn.time.max() <= 1
    assert drawn.time.mean().item() == pytest.approx(0.001 + 0.999 * 1.5 / 2.5, abs=0.02)  # Beta(1.5, 1)
    assert (drawn.time < 0.5).float().mean().item() == pytest.approx(0.5**1.5, abs=0.03)
    again, other = (policy.unpacked(labelled(policy, actions, seed)) for seed in (0, 1))
    assert torch.equal(again.before, drawn.before)
    assert not torch.equal(other.before, drawn.before)
    assert not torch.equal(other.time, drawn.time)


def parts_of(data, **algorithm):
    cfg = resolve("Robot-v0", gw.config.BCCfg(data=data, num_steps=8, **algorithm), env=ROBOT, policy=POLICY)
    parts = build(cfg, UserObjects(), Engine())
    parts.close()
    return parts


def test_micro_batches_never_change_the_update(data):
    found = []
    for size in (None, 5):
        parts = parts_of(data, micro_batch_size=size, num_epochs=2, minibatch_size=32, optimizer={"eps": 1e-3})
        metrics = parts.algorithm.update(parts.collector.collect(8, parts.buffer.start_rollout()))
        found.append((metrics["train/loss"], torch.cat([p.detach().flatten() for p in parts.policy.parameters()])))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)


def test_held_out_scores_are_the_same_each_time(data):
    parts = parts_of(data)
    *_, scores = parts.own_callbacks(RunFolder(data))
    steps = parts.collector.held_out.nonzero()[:, 0]
    first, second = scores.scores(steps), scores.scores(steps)
    assert first == second
    assert first.keys() == {"eval/demo_loss", "eval/demo_error"}


def test_a_clone_resumes_bit_for_bit(data, tmp_path):
    settings = SETTINGS | {"algorithm": gw.config.BCCfg(data=data, num_steps=8), "checkpoint_interval": 1}
    settings |= {"evaluation": {"interval": 128, "episodes": 2}}
    whole = gw.train(ROBOT, total_steps=256, run_dir=tmp_path / "whole", **settings)
    gw.train(ROBOT, total_steps=128, run_dir=tmp_path / "cut", **settings)
    cut = gw.resume(tmp_path / "cut", total_steps=256)
    first, second = (load_checkpoint(run.path / "checkpoints" / "latest") for run in (whole, cut))
    assert all(torch.equal(first.policy[name], second.policy[name]) for name in first.policy)
    assert whole.metrics()[-1]["eval/demo_loss"] == cut.metrics()[-1]["eval/demo_loss"]


def cloned(data, steps, folder):
    algorithm = gw.config.BCCfg(data=data, num_steps=16, minibatch_size=64, learning_rate=1e-3)
    return gw.train(ROBOT, algorithm, total_steps=steps, run_dir=folder, **SETTINGS)


@pytest.mark.learn
def test_cloning_lowers_the_loss_and_solves_the_task(data, tmp_path):
    run = cloned(data, 1_500, tmp_path / "run")
    history = run.metrics()
    first, last = (np.mean([metrics["train/loss"] for metrics in part]) for part in (history[:3], history[-3:]))
    assert last < 0.8 * first
    assert history[-1]["eval/success_rate"] > 0.9
    assert history[-1]["eval/demo_error"] < 0.3
    new = gw.train(ROBOT, "grpo", total_steps=1, run_dir=tmp_path / "new", stop={"time_limit": 1e-3}, **SETTINGS)
    assert gw.evaluate(new, 40).success_rate < 0.5


@pytest.mark.learn
def test_grpo_on_success_improves_a_weak_clone(data, tmp_path):
    weak = cloned(data, 600, tmp_path / "weak")
    algorithm = gw.GRPOCfg(num_steps=16, num_epochs=2, minibatch_size=128, learning_rate=3e-4)
    settings = SETTINGS | {"policy": {"init_from": weak.path}, "preset": "vla", "num_envs": 16}
    run = gw.train(ROBOT, algorithm, total_steps=20_000, run_dir=tmp_path / "run", **settings)
    before, after = (gw.evaluate(r, 100, deterministic=False).success_rate for r in (weak, run))
    assert before < 0.85
    assert after > before + 0.1
