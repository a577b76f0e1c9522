"""The memory of recurrent policies in rollouts."""

import pytest
import torch
from recurrent_policies import Steady, averaging, buffer_of, group_rollouts, small, vector_env, vector_rollouts

from groupwise.collectors.groups import GroupCollector
from groupwise.collectors.torch import TorchGroupCollector, TorchVectorCollector
from groupwise.collectors.vector import VectorCollector
from groupwise.config.algorithm import CollectionCfg
from groupwise.data.rollout import transition_view
from groupwise.envs.torch_env import TorchCartPole
from groupwise.errors import EnvError
from groupwise.policies.recurrent import RecurrentActorCritic

MODES = ["same_step", "next_step", "disabled"]


@pytest.mark.parametrize("autoreset", MODES)
def test_states_begin_at_0_and_go_on_across_rollouts(autoreset):
    """V after k + 1 observations of 0.8 is 0.8 * (1 - 0.5^(k+1)): 0.4, 0.6, 0.7, ...; at a truncation, too."""
    steps = set()
    for rollout in vector_rollouts(averaging(), autoreset, count=4, rows=2, steps=7, kind=Steady):
        batch = transition_view(rollout)
        live, step = batch["valid"], batch["step"]
        value = 0.8 * (1 - 0.5 ** (step + 1.0))
        torch.testing.assert_close(batch["value"][live], value[live])
        torch.testing.assert_close(batch["state"][..., 0][live], (2 * (value - 0.4))[live])
        after = (0.8 * (1 - 0.5 ** (step + 2.0))).masked_fill(batch["terminated"], 0.0)
        torch.testing.assert_close(batch["next_value"][live], after[live])
        steps |= {(int(step[0, 0]), bool(batch["truncated"][0].any()))}
    assert len(steps) > 2, "rollouts begin at different steps of an episode"


@pytest.mark.parametrize("setting", [{"cell": "lstm"}, {"cell": "gru", "trunk": "shared"}])
@pytest.mark.parametrize("autoreset", MODES)
def test_the_ratio_is_one(autoreset, setting):
    policy = small(**setting)
    for rollout in vector_rollouts(policy, autoreset):
        same_scores(policy, rollout)


@pytest.mark.parametrize(
    "cfg", [{}, {"greedy_members": 1, "rows": 3}, {"rows": 5}, {"horizon": 4}, {"noise": "shared"}]
)
def test_each_member_begins_with_its_own_state(cfg):
    policy = small(actor_only=True)
    for rollout in group_rollouts(policy, **cfg):
        begins = rollout["valid"] & (rollout["step"] == 0)
        assert not rollout["state"][begins].any()
        assert rollout["state"][rollout["valid"] & ~begins].all()
        same_scores(policy, rollout)


def same_scores(policy, rollout):
    batch = {**transition_view(rollout)}
    found, counts = policy.evaluate(batch), batch["loss_mask"]
    assert counts.sum() > 20
    torch.testing.assert_close(found.log_prob[counts], batch["sample_log_prob"][counts], atol=1e-6, rtol=1e-6)
    if found.value is not None:
        torch.testing.assert_close(found.value[counts], batch["value"][counts], atol=1e-6, rtol=1e-6)


def test_collectors_of_torch_environments_refuse():
    env = TorchCartPole(4, max_episode_steps=20)
    policy = RecurrentActorCritic(env.observation_space, env.action_space)
    with pytest.raises(EnvError, match=r"recurrent .* TorchCartPole.*fix: VectorCollector"):
        TorchVectorCollector(env, policy)
    with pytest.raises(EnvError, match=r"fix: VectorCollector .*'complete'"):
        TorchGroupCollector(env, policy, group_size=2, collection=CollectionCfg(partial_groups="truncate"))
    assert GroupCollector(env, policy, group_size=2)
    assert VectorCollector(env, policy)


def test_running_episodes_go_on_with_their_states():
    """A collector that continues from a saved state writes the same rollout."""
    policy = small()
    env, again = (vector_env(Steady, 3, "next_step") for _ in range(2))
    first, second = VectorCollector(env, policy, seed=0), VectorCollector(again, policy, seed=0)
    first.collect(4, buffer_of(env, policy, 4).start_rollout())
    state = first.state_dict()
    assert "running" in state
    second.iteration = first.iteration
    second.load_state_dict(state)
    for _ in range(2):
        one, other = (c.collect(4, buffer_of(env, policy, 4).start_rollout()) for c in (first, second))
        assert (one == other).all()
    assert one["state"].any()
