"""The example of an own policy: it is cloned and trained, and its scores are those of the steps that it drew."""

import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from forked import run_script
from scripts import ROOT, load

SCRIPT = ROOT / "examples" / "flow_policy.py"
OBS = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTIONS = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))


@pytest.fixture
def policy(registry):
    example = load(SCRIPT)
    torch.manual_seed(0)
    return example.FlowPolicy(OBS, ACTIONS, example.FlowCfg(hidden_size=16), actor_only=True)


def scores(folder, *words):
    """Returns of the clone and after GRPO."""
    out = run_script(SCRIPT, *words, "--run-dir", folder / "run", folder=folder)
    return map(int, re.search(r"^clone: (-\d+), after GRPO: (-\d+)$", out, re.MULTILINE).groups())


@pytest.mark.slow
def test_it_is_cloned_and_trained(tmp_path):
    assert all(score < 0 for score in scores(tmp_path, "--total-steps", "1000"))


@pytest.mark.learn
def test_grpo_learns_what_the_clone_lacks(tmp_path):
    clone, after = scores(tmp_path)
    assert clone < -600  # a policy at random has about -1,200
    assert after > -300


def test_the_stochastic_step_by_hand(policy):
    # h = 1/4, a = 1/2. At t = 1/2: sigma^2 = 1/4, mean = 1 - (2 + 1/4 (1 + 1/2 * 2)) / 4, std = 1/2 * 1/2.
    # At t = 1, where 1 - t counts as h: sigma^2 = 1, mean = 1 - (2 + 1/2 * 1) / 4, std = 1/2
    mean, std = policy.transition(torch.ones(2, 2), torch.full((2, 2), 2.0), torch.tensor([[0.5], [1.0]]))
    torch.testing.assert_close(mean, torch.full((2, 2), 0.375))
    torch.testing.assert_close(std, torch.tensor([[0.25], [0.5]]))


def test_decisions_and_their_scores_agree(policy):
    obs = torch.randn(64, 3)
    action = policy.act(obs, generator=torch.Generator().manual_seed(0))
    before, after, _, time = policy.parts(action.action)
    assert sorted(time.unique().tolist()) == [0.25, 0.5, 0.75, 1.0]
    found = policy.evaluate({"obs": obs, "action": action.action})
    torch.testing.assert_close(found.log_prob, action.log_prob)
    mean, std = policy.transition(before, policy.flow(obs, before, time), time)
    gaussian = torch.distributions.Normal(mean, std.expand_as(mean))
    torch.testing.assert_close(found.log_prob, gaussian.log_prob(after).sum(1))
    torch.testing.assert_close(found.entropy, gaussian.entropy().sum(1))


def test_deterministic_actions_follow_the_flow_from_zero(policy):
    obs, x = torch.randn(5, 3), torch.zeros(5, 2)
    for step in range(4):
        x = x - policy.flow(obs, x, torch.full((5, 1), 1 - step / 4)).detach() / 4
    found = policy.act(obs, deterministic=True).action
    torch.testing.assert_close(policy.parts(found)[2], x)
    np.testing.assert_allclose(policy.predict(obs.numpy()), policy.env_action(found).numpy(), atol=1e-6)
    assert all(ACTIONS.contains(row) for row in policy.predict(obs.numpy()))


def test_cloning_minimises_the_error_of_the_velocity(policy):
    obs, wanted = torch.randn(6, 3), torch.rand(6, 2) * torch.tensor([4.0, 1.0]) - torch.tensor([2.0, 0.0])
    own = policy.own_action(wanted)
    torch.testing.assert_close(policy.env_action(own), wanted)
    label = policy.label(own, 0.1, torch.Generator().manual_seed(1))
    noise, _, actions, time = policy.parts(label)
    assert len(time.unique()) == 6
    torch.testing.assert_close(policy.env_action(label), wanted)
    velocity = policy.flow(obs, time * noise + (1 - time) * actions, time)
    loss = -policy.imitate({"obs": obs, "action": label}).log_prob
    torch.testing.assert_close(loss, ((velocity - (noise - actions)) ** 2).mean(1))
