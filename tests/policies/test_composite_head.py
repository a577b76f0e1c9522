import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from hypothesis import given
from hypothesis import strategies as st

import groupwise as gw
from groupwise.config.policy import PolicyCfg
from groupwise.data.spaces import flat_action, nested_action
from groupwise.errors import UnsupportedSpaceError
from groupwise.policies.actor_critic import ActorCritic
from groupwise.policies.heads import make_head

SEEN = Box(-1, 1, (3,), np.float32)
SPACE = Dict(
    {
        "move": Tuple([Discrete(3, start=4), Box(-2, 1, (2,), np.float64)]),
        "switches": MultiBinary(2),
        "tools": MultiDiscrete([[2, 3]], start=[[0, 7]]),
        "turn": Box(-1, 1, (1,), np.float32),
    }
)
CFG = PolicyCfg(log_std_init=-0.5)

LEAVES = st.one_of(
    st.builds(Discrete, st.integers(1, 5), start=st.integers(-(2**40), 2**40)),
    st.builds(
        lambda sizes: MultiDiscrete(sizes, start=[3] * len(sizes)), st.lists(st.integers(1, 4), min_size=1, max_size=3)
    ),
    st.builds(MultiBinary, st.integers(1, 3)),
    st.builds(
        lambda shape, dtype: Box(-3, 2, shape, dtype),
        st.sampled_from([(), (2,), (2, 1)]),
        st.sampled_from([np.float32, np.float64]),
    ),
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(Dict),
        st.lists(inner, min_size=1, max_size=3).map(Tuple),
    ),
    max_leaves=5,
).filter(lambda space: isinstance(space, Dict | Tuple))


def same(space, left, right):
    if isinstance(space, Dict):
        return left.keys() == right.keys() and all(same(space[key], left[key], right[key]) for key in left)
    if isinstance(space, Tuple):
        return len(left) == len(right) and all(map(same, space, left, right))
    return np.array_equal(left, right)


@given(space=NESTED, seed=st.integers(0, 99))
def test_actions_of_any_nested_space_are_taken_apart_as_they_were_joined(space, seed):
    space.seed(seed)
    sample = space.sample()
    found = nested_action(space, flat_action(space, sample))
    assert space.contains(found)
    assert same(space, found, sample)


@given(space=NESTED, seed=st.integers(0, 99))
def test_own_actions_of_any_nested_space_come_back(space, seed):
    head, generator = make_head(space, CFG), torch.Generator().manual_seed(seed)
    params = torch.randn(4, head.num_params, generator=generator)
    action = head.sample(params, generator)
    sent = head.env_action(action)
    assert (action.shape, action.dtype) == ((4, *head.action_spec.shape), head.action_spec.dtype)
    assert all(space.contains(nested_action(space, row)) for row in sent.numpy())
    assert torch.equal(head.env_action(head.own_action(sent)), sent)  # bounds clip once


def test_scores_are_sums_over_parts_worked_out_by_hand():
    """A fair choice of 4, and a Gaussian with standard deviation 1/2 at its mean and at one deviation from it."""
    head = make_head(Dict({"a": Discrete(4), "b": Box(-9, 9, (2,), np.float32)}), CFG)
    params = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0, 2.0, math.log(0.5), math.log(0.5)]])
    action = torch.tensor([[3.0, 1.0, 2.5]])
    log_prob = -math.log(4) + 2 * (-math.log(0.5) - 0.5 * math.log(2 * math.pi)) - 0.5
    torch.testing.assert_close(head.log_prob(params, action), torch.tensor([log_prob]))
    entropy = math.log(4) + 2 * (math.log(0.5) + 0.5 + 0.5 * math.log(2 * math.pi))
    torch.testing.assert_close(head.entropy(params), torch.tensor([entropy]))
    assert head.mode(params).tolist() == [[0.0, 1.0, 2.0]]
    moved = params.clone()
    moved[0, 4] = 1.5  # by one standard deviation: KL 1/2
    torch.testing.assert_close(head.kl(moved, params), torch.tensor([0.5]))


def test_a_space_of_one_part_is_as_that_part():
    for leaf in (Discrete(3, start=2), Box(-1, 1, (2,), np.float32), MultiBinary(3)):
        one, alone = make_head(Dict({"x": leaf}), CFG), make_head(leaf, CFG)
        params = torch.randn(5, alone.num_params)
        left, right = (head.sample(params, torch.Generator().manual_seed(0)) for head in (one, alone))
        assert torch.equal(left, right.reshape(5, -1).float())
        torch.testing.assert_close(one.log_prob(params, left), alone.log_prob(params, right))


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
def test_ratios_are_one(batch):
    torch.manual_seed(0)
    made = ActorCritic(SEEN, SPACE, CFG)
    assert made.log_std.shape == (3,)
    obs = torch.randn(math.prod(batch), 3)
    acted = made.act(obs)
    shaped = {"obs": obs.reshape(*batch, 3), "action": acted.action.reshape(*batch, -1)}
    torch.testing.assert_close(made.evaluate(shaped).log_prob.flatten(), acted.log_prob)


def test_predict_gives_actions_of_the_space():
    made = ActorCritic(SEEN, SPACE, CFG)
    for deterministic in (False, True):
        assert SPACE.contains(made.predict(np.zeros(3, np.float32), deterministic))
    batch = made.predict(np.zeros((5, 3), np.float32))
    assert batch["tools"].shape == (5, 1, 2)
    assert batch["move"][0].tolist() == [made.predict(np.zeros(3, np.float32))["move"][0]] * 5


def test_parts_without_a_head_are_named():
    with pytest.raises(UnsupportedSpaceError, match=r"action space Box\(0, 5, \(1,\), int64\) is not supported"):
        make_head(Dict({"a": Discrete(2), "b": Box(0, 5, (1,), np.int64)}), CFG)


class Workbench(gymnasium.Env):
    """Refuses actions outside its space; a reward for one option of each part. Observations are a Tuple."""

    observation_space = Tuple([Discrete(3), SEEN])
    action_space = SPACE

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.look(), {}

    def step(self, action):
        if not SPACE.contains(action):
            raise ValueError(f"not in the space: {action}")
        self.count += 1
        reward = float(action["move"][0] == 5) + float(action["switches"][0]) + float(action["tools"][0, 1] == 9)
        return self.look(), reward - abs(float(action["turn"][0]) - 0.5), self.count == 5, False, {}

    def look(self):
        return (self.count % 3, self.np_random.uniform(-1, 1, 3).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "algorithm"),
    [("recurrent", gw.PPOCfg(num_steps=16)), ("actor_critic", gw.GRPOCfg(group_size=2, num_steps=16))],
)
def test_runs_on_dict_actions_and_tuple_observations(policy, algorithm, tmp_path):
    run = gw.train(
        Workbench,
        algorithm,
        policy=policy,
        run_dir=tmp_path / "run",
        num_envs=4,
        max_episode_steps=5,
        total_steps=128,
        evaluation={"episodes": 2, "interval": 64},
    )
    assert run.metrics()[0]["train/approx_kl"] < 0.1
    again = gw.Run.load(tmp_path / "run", env=Workbench)
    obs = Workbench().reset(seed=1)[0]
    action = run.policy.player().predict(obs)
    assert SPACE.contains(action)
    assert same(SPACE, again.policy.player().predict(obs), action)


@pytest.mark.learn
def test_every_part_is_learned(tmp_path):
    run = gw.train(
        Workbench,
        gw.PPOCfg(num_steps=64, minibatch_size=128, learning_rate=3e-3),
        run_dir=tmp_path / "run",
        num_envs=8,
        max_episode_steps=5,
        total_steps=20_000,
    )
    assert run.summary["return_mean"] > 13  # of 15
