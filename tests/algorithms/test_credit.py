"""Credit rules on rollouts small enough to work out by hand; golden numbers of the presets."""

import json
from importlib.resources import files

import pytest
import torch
from tensordict import TensorDict

from groupwise.algorithms.configs import CreditCfg
from groupwise.algorithms.credit import CREDIT_RULES, CreditInput, advantages, register_credit
from groupwise.errors import ConfigError, UnknownNameError

PRESETS = json.loads(files("groupwise").joinpath("presets/objectives.json").read_text())


def rollout(episodes, *, steps=None, per_row=1):
    """Transitions [N, T]; each episode is (group, rewards, end) with end "terminated", "truncated" or "unscorable"."""
    rows = [episodes[i : i + per_row] for i in range(0, len(episodes), per_row)]
    steps = steps or max(sum(len(rewards) for _, rewards, _ in row) for row in rows)
    shape = (len(rows), steps)
    batch = {
        "reward": torch.zeros(shape),
        "terminated": torch.zeros(shape, dtype=torch.bool),
        "truncated": torch.zeros(shape, dtype=torch.bool),
        "valid": torch.zeros(shape, dtype=torch.bool),
        "loss_mask": torch.zeros(shape, dtype=torch.bool),
        "group_id": torch.full(shape, -1),
        "episode_id": torch.full(shape, -1),
        "step": torch.zeros(shape, dtype=torch.int64),
    }
    episode_id = 0
    for n, row in enumerate(rows):
        t = 0
        for group, rewards, end in row:
            span = slice(t, t + len(rewards))
            batch["reward"][n, span] = torch.tensor(rewards)
            batch["valid"][n, span] = True
            batch["loss_mask"][n, span] = end != "unscorable"
            batch["group_id"][n, span] = group
            batch["episode_id"][n, span] = episode_id
            batch["step"][n, span] = torch.arange(len(rewards))
            batch["truncated" if end == "truncated" else "terminated"][n, span.stop - 1] = True
            episode_id, t = episode_id + 1, span.stop
    return TensorDict(batch, batch_size=list(shape))


def credit(batch, gamma=1.0, **choices):
    return advantages(
        CreditInput(
            batch=batch,
            reward=batch["reward"],
            cfg=CreditCfg(**choices),
            gamma=gamma,
            num_groups=int(batch["group_id"].max()) + 1,
            num_episodes=int(batch["episode_id"].max()) + 1,
        )
    )


def preset(name, **changes):
    return PRESETS[name]["credit"] | changes


def per_episode(out, batch):
    """Each episode's advantages as a list, in order of their ids."""
    ids = batch["episode_id"]
    return [out[ids == i].tolist() for i in range(int(ids.max()) + 1)]


def test_outcome_presets_on_the_golden_group():
    # rewards [1,0,0,1,0,0,0,0]: mean .25, unbiased deviation .46291005, population .43301270
    batch = rollout([(0, [r], "terminated") for r in [1.0, 0, 0, 1, 0, 0, 0, 0]])
    for choices, one, zero in [
        (preset("grpo"), 1.619835, -0.539945),
        (preset("grpo", scale="population_std", eps=1e-8), 1.732051, -0.577350),
        (preset("dr_grpo"), 0.75, -0.25),
        (preset("rloo"), 0.857143, -0.285714),
    ]:
        out = credit(batch, **choices)
        torch.testing.assert_close(out[0, 0], torch.tensor(one), atol=2e-6, rtol=0)
        torch.testing.assert_close(out[1, 0], torch.tensor(zero), atol=2e-6, rtol=0)


TWO = [(0, [1.0, 0.0, 2.0], "terminated"), (0, [0.0, 1.0], "terminated")]


@pytest.mark.parametrize("per_row", [1, 2])
@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        (preset("sb3_process_deepseek", eps=0.0), [[0.717137, 0.478091, 1.434274], [-0.717137, 0.239046]]),
        (preset("sb3_process_deepseek", scale="none"), [[0.6, 0.4, 1.2], [-0.6, 0.2]]),
        (preset("sb3_process", scale="none"), [[1.2, 0.2, 0.2], [-0.8, -0.8]]),
        (preset("sb3_process", eps=0.0), [[1.434274, 0.239046, 0.239046], [-0.956183, -0.956183]]),
        # returns to go [3,2,2] and [1,1]: one above, one below at t0 and t1; nobody left to compare with at t2
        (preset("embodichain"), [[1.0, 1.0, 0.0], [-1.0, -1.0]]),
        # means 2 and 1.5 at t0 and t1
        (preset("sb3_timestep", scale="none"), [[1.0, 0.5, 0.0], [-1.0, -0.5]]),
        # episode sums 3 and 1, mean 2
        (preset("sb3_outcome", scale="none"), [[1.0, 1.0, 1.0], [-1.0, -1.0]]),
    ],
)
def test_two_trajectories(choices, expected, per_row):
    batch = rollout(TWO, per_row=per_row)
    for got, want in zip(per_episode(credit(batch, **choices), batch), expected, strict=True):
        torch.testing.assert_close(got, want, atol=2e-6, rtol=0)


STEP = {"group_key": "group_step", "returns": "return_to_go", "scale": "none"}


@pytest.mark.parametrize(
    ("end", "choices", "expected"),
    [
        # lengths 2 and 1, reward 1: returns to go [2,1] and [1]; t0: mean 1.5
        # absorbed: the terminated sibling counts with 0 at t1, mean .5
        ("terminated", {"early_finisher": "absorb"}, [[0.5, 0.5], [-0.5]]),
        # truncated siblings are absent, not worth 0: nothing to compare with at t1
        ("truncated", {"early_finisher": "absorb"}, [[0.5, 0.0], [-0.5]]),
        ("terminated", {"early_finisher": "mask"}, [[0.5, 0.0], [-0.5]]),
        # trajectory advantage: outcomes 2 and 1, mean 1.5
        ("terminated", {"early_finisher": "mask", "lone_member": "trajectory"}, [[0.5, 0.5], [-0.5]]),
        ("terminated", {"early_finisher": "trajectory"}, [[0.5, 0.5], [-0.5]]),
        # leave one out doubles the distance of two
        ("terminated", {"early_finisher": "absorb", "baseline": "leave_one_out"}, [[1.0, 1.0], [-1.0]]),
    ],
)
def test_members_that_ended_early(end, choices, expected):
    batch = rollout([(0, [1.0, 1.0], "terminated"), (0, [1.0], end)])
    assert per_episode(credit(batch, **STEP, **choices), batch) == expected


def test_trajectory_rule_starts_where_the_first_sibling_ends():
    # lengths 3, 2, 1: returns to go [3,2,1], [2,1], [1]
    # t0 all three: mean 2; t1 one is gone: trajectory advantages 3-2 and 2-2; t2 likewise
    batch = rollout([(0, [1.0] * n, "terminated") for n in (3, 2, 1)])
    out = per_episode(credit(batch, **STEP, early_finisher="trajectory"), batch)
    assert out == [[1.0, 1.0, 1.0], [0.0, 0.0], [-1.0]]
    # the lone rule still compares the two that are left at t1: [2, 1], mean 1.5
    out = per_episode(credit(batch, **STEP, lone_member="trajectory"), batch)
    assert out == [[1.0, 0.5, 1.0], [0.0, -0.5], [-1.0]]


def test_trajectory_fallback_discounts_like_the_steps_it_stands_in_for():
    # gamma .5: discounted outcomes 1 + .5 = 1.5 and 1, mean 1.25
    batch = rollout([(0, [1.0, 1.0], "terminated"), (0, [1.0], "terminated")])
    out = per_episode(credit(batch, gamma=0.5, **STEP, lone_member="trajectory"), batch)
    assert out == [[0.25, 0.25], [-0.25]]


def test_a_lone_survivor_has_no_signal_under_mask_and_some_under_absorb():
    batch = rollout([(0, [1.0] * n, "terminated") for n in (10, 10, 10, 50)])
    masked = per_episode(credit(batch, **STEP, early_finisher="mask"), batch)[3]
    absorbed = per_episode(credit(batch, **STEP, early_finisher="absorb"), batch)[3]
    assert masked[10:] == [0.0] * 40
    assert min(absorbed) > 0


def test_a_perfect_group_has_a_time_index_bias_only_when_steps_are_pooled():
    batch = rollout([(0, [1.0] * 500, "truncated")] * 4)
    pooled = credit(batch, returns="return_to_go", scale="none")
    torch.testing.assert_close(pooled[:, 0], torch.full((4,), 249.5))
    torch.testing.assert_close(pooled[:, -1], torch.full((4,), -249.5))
    for scale in ("none", "std", "population_std", "batch_std"):
        assert credit(batch, **STEP | {"scale": scale}, eps=1e-8).abs().max() == 0


def test_constant_step_rewards_say_nothing_to_process_supervision():
    batch = rollout([(0, [1.0] * n, "terminated") for n in (3, 7)])
    assert credit(batch, **preset("sb3_process_deepseek")).abs().max() == 0


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_group_of_one_has_nothing_to_be_compared_with(name):
    batch = rollout([(0, [5.0], "terminated")])
    assert credit(batch, **PRESETS[name]["credit"]).abs().max() == 0


@pytest.mark.parametrize(
    "choices",
    [preset("grpo"), preset("rloo"), preset("sb3_process"), preset("embodichain"), STEP | {"early_finisher": "absorb"}],
)
def test_an_unscorable_member_is_no_member(choices):
    siblings = [(0, [1.0, 2.0], "terminated"), (0, [0.0, 1.0], "terminated")]
    alone = rollout(siblings)
    joined = rollout([*siblings, (0, [0.0, 0.0], "unscorable")])
    out = credit(joined, **choices)
    torch.testing.assert_close(out[:2], credit(alone, **choices))
    assert out[2].abs().max() == 0


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_groups_do_not_see_each_other_and_row_order_does_not_matter(name):
    choices = PRESETS[name]["credit"]
    torch.manual_seed(0)
    episodes = [(g, torch.randn(int(n)).tolist(), "terminated") for g in range(3) for n in torch.randint(1, 6, (4,))]
    together = rollout(episodes, steps=6)
    out = credit(together, **choices)
    order = torch.randperm(12)
    torch.testing.assert_close(credit(together[order], **choices), out[order], atol=1e-5, rtol=1e-4)
    for g in range(3):
        own = rollout([(0, rewards, end) for group, rewards, end in episodes if group == g], steps=6)
        torch.testing.assert_close(out[4 * g : 4 * g + 4], credit(own, **choices), atol=1e-5, rtol=1e-4)


def test_a_rule_of_the_users_own():
    @register_credit("first_reward")
    def first_reward(given: CreditInput):
        return given.reward[:, :1].expand_as(given.reward)

    try:
        batch = rollout(TWO)
        assert per_episode(credit(batch, rule="first_reward"), batch) == [[1.0, 1.0, 1.0], [0.0, 0.0]]
        with pytest.raises(ConfigError, match="registered already"):
            register_credit("first_reward")(first_reward)
        with pytest.raises(UnknownNameError, match="did you mean 'first_reward'"):
            credit(batch, rule="first_rewards")
    finally:
        del CREDIT_RULES["first_reward"]


def test_impossible_composition_is_refused():
    with pytest.raises(ValueError, match="returns='return_to_go'"):
        CreditCfg(group_key="group_step", returns="outcome")


def test_steps_beyond_the_rollouts_own_number_never_meet_another_group():
    batch = rollout([(0, [1.0, 2.0], "terminated"), (1, [7.0, 7.0], "terminated")])
    batch["step"] = torch.tensor([[2, 3], [0, 1]])
    assert credit(batch, group_key="group_step", returns="return_to_go", scale="none").tolist() == [[0.0, 0.0]] * 2
