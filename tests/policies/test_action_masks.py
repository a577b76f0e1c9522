import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from groupwise.config.policy import PolicyCfg
from groupwise.data.spaces import allowed_action, allowed_logits
from groupwise.errors import ConfigError, DataError
from groupwise.policies.actor_critic import ActorCritic
from groupwise.policies.heads import make_head

SEEN = Box(-1, 1, (3,), np.float32)
ACTIONS = {"discrete": Discrete(4, start=2), "multi_discrete": MultiDiscrete([[3, 2]], start=[[0, 5]])}
SIZE = {"discrete": 4, "multi_discrete": 5}


def policy(kind, **settings):
    torch.manual_seed(0)
    space = Dict({"seen": SEEN, "action_mask": MultiBinary(SIZE[kind])})
    made = ActorCritic(space, ACTIONS[kind], PolicyCfg(**settings))
    torch.nn.init.normal_(made.actor.head.weight)
    return made


def observations(kind, masks, seed=0):
    mask = torch.tensor(masks, dtype=torch.int8)
    seen = torch.rand(len(masks), 3, generator=torch.Generator().manual_seed(seed))
    return TensorDict({"seen": seen, "action_mask": mask}, [len(masks)])


def random_masks(kind, count, seed=0):
    """Each choice has one option or more."""
    sizes = [4] if kind == "discrete" else [3, 2]
    draws = np.random.default_rng(seed)
    parts = []
    for size in sizes:
        part = draws.integers(0, 2, (count, size))
        part[np.arange(count), draws.integers(0, size, count)] = 1
        parts.append(part)
    return np.concatenate(parts, axis=1)


def is_allowed(kind, action, masks):
    if kind == "discrete":
        return bool(masks[np.arange(len(masks)), action].all())
    flat = action.reshape(len(masks), 2)
    rows = np.arange(len(masks))
    return bool(masks[rows, flat[:, 0]].all() and masks[rows, 3 + flat[:, 1]].all())


def test_numbers_worked_out_by_hand():
    """Two of four options are left, with logits 1 and 3: their probabilities are those of a coin with logit 2."""
    head = make_head(Discrete(4), PolicyCfg())
    params = allowed_logits(torch.tensor([[1.0, 9.0, 3.0, 9.0]]), torch.tensor([[1, 0, 1, 0]]))
    low, high = 1 / (1 + math.exp(2)), 1 / (1 + math.exp(-2))
    torch.testing.assert_close(head.log_prob(params, torch.tensor([0])), torch.tensor([math.log(low)]))
    torch.testing.assert_close(head.log_prob(params, torch.tensor([2])), torch.tensor([math.log(high)]))
    entropy = -low * math.log(low) - high * math.log(high)
    torch.testing.assert_close(head.entropy(params), torch.tensor([entropy]))
    other = allowed_logits(torch.tensor([[0.0, -5.0, 0.0, 5.0]]), torch.tensor([[1, 0, 1, 0]]))
    torch.testing.assert_close(head.kl(params, other), torch.tensor([math.log(2) - entropy]))
    assert head.mode(params).tolist() == [2]


def test_entropy_of_choices_counts_allowed_options_only():
    """log 2 for the first choice, nothing for the second."""
    head = make_head(MultiDiscrete([3, 2]), PolicyCfg())
    params = allowed_logits(torch.zeros(1, 5), torch.tensor([[1, 0, 1, 0, 1]]))
    torch.testing.assert_close(head.entropy(params), torch.tensor([math.log(2)]))


@pytest.mark.parametrize("kind", ACTIONS)
@given(seed=st.integers(0, 1000))
def test_no_action_is_forbidden_and_scores_are_those_of_sampling(kind, seed):
    made, masks = policy(kind), random_masks(kind, 32, seed)
    obs = observations(kind, masks, seed)
    for deterministic in (False, True):
        acted = made.act(obs, deterministic, torch.Generator().manual_seed(seed))
        assert is_allowed(kind, acted.action.numpy(), masks)
        scores = made.evaluate({"obs": obs, "action": acted.action})
        torch.testing.assert_close((scores.log_prob - acted.log_prob).exp(), torch.ones(32), rtol=0, atol=1e-6)
        assert (scores.log_prob <= 1e-6).all()
    probabilities = torch.stack([is_forbidden_probability(made, kind, scores.dist, masks)])
    assert probabilities.max() == 0


def is_forbidden_probability(made, kind, dist, masks):
    sizes = [4] if kind == "discrete" else [3, 2]
    parts = torch.cat([part.softmax(-1) for part in torch.split(dist, sizes, dim=-1)], dim=-1)
    return parts[torch.from_numpy(masks) == 0].sum()


@pytest.mark.parametrize("kind", ACTIONS)
def test_gradients_are_finite_and_zero_where_forbidden(kind):
    made, masks = policy(kind), random_masks(kind, 16)
    masks[:, 0], masks[:, 1] = 0, 1  # the first option never
    obs = observations(kind, masks)
    scores = made.evaluate({"obs": obs, "action": made.act(obs).action})
    (
        scores.log_prob.sum() + scores.entropy.sum() + made.kl(scores.dist, scores.dist.detach().roll(1, 0)).sum()
    ).backward()
    gradient = made.actor.head.weight.grad
    assert gradient.isfinite().all()
    assert (gradient[0] == 0).all()
    assert (gradient[1:] != 0).any()


@pytest.mark.parametrize("kind", ACTIONS)
def test_the_mask_is_no_feature(kind):
    made = policy(kind, normalize_obs=True)
    assert (made.encoder.num_features, made.critic(torch.zeros(1, 3)).shape) == (3, (1, 1))
    masks = random_masks(kind, 8)
    opened = np.ones_like(masks)
    assert torch.equal(made.value(observations(kind, masks)), made.value(observations(kind, opened)))


def test_everything_allowed_is_as_without_a_mask():
    made, seen = policy("discrete"), torch.rand(8, 3)
    torch.manual_seed(0)
    plain = ActorCritic(SEEN, ACTIONS["discrete"], PolicyCfg())
    plain.load_state_dict(made.state_dict())
    obs = TensorDict({"seen": seen, "action_mask": torch.ones(8, 4, dtype=torch.int8)}, [8])
    ours, theirs = (p.act(o, generator=torch.Generator().manual_seed(1)) for p, o in ((made, obs), (plain, seen)))
    assert torch.equal(ours.action, theirs.action)
    assert torch.equal(ours.log_prob, theirs.log_prob)


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_predict_takes_allowed_actions_in_the_environments_numbers(kind, deterministic):
    made, masks = policy(kind), random_masks(kind, 64)
    seen = np.random.default_rng(0).uniform(-1, 1, (64, 3)).astype(np.float32)
    found = made.predict({"seen": seen, "action_mask": masks}, deterministic)
    assert is_allowed(kind, found - np.asarray(ACTIONS[kind].start), masks)
    one = made.predict({"seen": seen[0], "action_mask": masks[0].astype(bool)}, deterministic)
    assert ACTIONS[kind].contains(one)


def test_a_mask_that_allows_nothing_is_an_error_that_shows_it():
    seen = np.zeros(3, np.float32)
    with pytest.raises(
        DataError, match=r"action_mask of obs allows no action: \[0, 0, 0, 0\]; fix: at least one option"
    ):
        policy("discrete").predict({"seen": seen, "action_mask": [0, 0, 0, 0]})
    with pytest.raises(DataError, match=r"allows no action: \[1, 1, 1, 0, 0\]"):
        policy("multi_discrete").predict({"seen": seen, "action_mask": [1, 1, 1, 0, 0]})
    with pytest.raises(DataError, match="no entry 'action_mask'"):
        policy("discrete").predict({"seen": seen})


def test_after_the_end_of_an_episode_nothing_need_be_allowed():
    """Rows that have ended show their last observation; nothing becomes of what the policy does there."""
    made = policy("multi_discrete")
    obs = observations("multi_discrete", np.zeros((64, 5), int))
    acted = made.act(obs)
    assert acted.log_prob.isfinite().all()
    assert (acted.action.reshape(-1, 2) < torch.tensor([3, 2])).all()


def test_a_mask_of_another_size_is_refused():
    space = Dict({"seen": SEEN, "action_mask": MultiBinary(3)})
    with pytest.raises(ConfigError, match=r"'action_mask' has shape \[3\], and the actions have 4 options"):
        ActorCritic(space, ACTIONS["discrete"])


def test_with_other_actions_the_entry_is_a_feature_like_any():
    space = Dict({"seen": SEEN, "action_mask": MultiBinary(3)})
    assert ActorCritic(space, Box(-1, 1, (2,), np.float32)).encoder.num_features == 6


def test_the_actors_keys_do_not_name_the_mask():
    space = Dict({"seen": SEEN, "more": SEEN, "action_mask": MultiBinary(4)})
    made = ActorCritic(space, ACTIONS["discrete"], PolicyCfg(actor_keys=("seen",)))
    assert (made.encoder.num_features, made.critic_encoder.num_features) == (3, 6)
    obs = {"seen": np.zeros(3, np.float32), "action_mask": [0, 0, 1, 0]}
    assert made.predict(obs) == made.without_critic().predict(obs) == 4


@given(seed=st.integers(0, 1000))
def test_allowed_actions_take_the_place_of_others(seed):
    for kind, space in ACTIONS.items():
        masks = random_masks(kind, 16, seed)
        space.seed(seed)
        random = torch.from_numpy(np.stack([np.asarray(space.sample()) for _ in range(16)]))
        found = allowed_action(random, observations(kind, masks), space).numpy()
        assert is_allowed(kind, found - np.asarray(space.start), masks)
        opened = observations(kind, np.ones_like(masks))
        assert torch.equal(allowed_action(random, opened, space), random)


def test_without_a_mask_actions_stay():
    action = torch.tensor([2, 3])
    assert allowed_action(action, torch.zeros(2, 3), Discrete(4)) is action
