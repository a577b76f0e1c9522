"""Credit rules on rollouts small enough to work out by hand."""

import pytest
import torch
from credit_rollouts import STEP, TWO, by_step, credit, per_episode, preset, rollout, same_rewards_in_other_order

from groupwise.algorithms.advantages import BASELINES, CREDIT_RULES, CreditInput, Scores, register_credit
from groupwise.config.algorithm import CreditCfg, GRPOCfg
from groupwise.errors import ConfigError, DataError


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


@pytest.mark.parametrize(
    ("end", "rules", "expected"),
    [
        # lengths 2 and 1, reward 1: returns to go [2,1] and [1]; t0: mean 1.5
        # absorbed: the terminated member counts with 0 at t1, mean .5
        ("terminated", {"finished_members": "zero"}, [[0.5, 0.5], [-0.5]]),
        # truncated members are absent, not worth 0: nothing to compare with at t1
        ("truncated", {"finished_members": "zero"}, [[0.5, 0.0], [-0.5]]),
        ("terminated", {"finished_members": "mask"}, [[0.5, 0.0], [-0.5]]),
        # trajectory advantage: outcomes 2 and 1, mean 1.5
        ("terminated", {"finished_members": "mask", "singleton": "trajectory"}, [[0.5, 0.5], [-0.5]]),
        ("terminated", {"finished_members": "trajectory"}, [[0.5, 0.5], [-0.5]]),
    ],
)
def test_members_that_ended_early(end, rules, expected):
    batch = rollout([(0, [1.0, 1.0], "terminated"), (0, [1.0], end)])
    assert per_episode(credit(batch, **by_step(**rules)), batch) == expected
    # leave one out doubles the distance of two
    if rules == {"finished_members": "zero"} and end == "terminated":
        leave_one_out = credit(batch, **by_step(**rules), baseline="leave_one_out")
        assert per_episode(leave_one_out, batch) == [[1.0, 1.0], [-1.0]]


@pytest.mark.parametrize(
    "choices",
    [{}, {"baseline": "leave_one_out"}, {"scale": "batch_std"}, {"group_key": "group_step", "returns": "turn"}],
    ids=str,
)
def test_the_order_of_equal_rewards_gives_no_credit(choices):
    rewards = same_rewards_in_other_order()
    batch = rollout([(0, row.tolist(), "terminated") for row in rewards], turn_id=torch.zeros(4, 200).long().tolist())
    assert not credit(batch, eps=1e-6, **choices).any()


def test_the_order_of_equal_rewards_gives_no_credit_from_the_first_step_on():
    torch.manual_seed(0)
    for _ in range(10):
        rewards = torch.rand(50)
        batch = rollout([(0, rewards[torch.randperm(50)].tolist(), "terminated") for _ in range(4)])
        out = credit(batch, **preset("embodichain"))
        assert not out[:, 0].any()
        assert out.any()


def test_the_share_of_scores_that_are_not_0_is_never_0():
    batch = rollout([(0, [0.0], "terminated"), (0, [0.0], "terminated"), (0, [4.0], "greedy")])
    out = credit(batch, baseline="greedy", scale="nonzero_share")
    # all scores are 0, which counts as one of two that is not: -4 / (1 / 2)
    assert per_episode(out, batch) == [[-8.0], [-8.0], [0.0]]


def above(score, baseline, member, **choices):
    compared = CreditInput(rollout(TWO), score, CreditCfg(**choices), 1.0, 1, 2)
    return Scores(compared, score, torch.zeros(len(score), dtype=torch.long), 1, member).above(baseline)


def test_scores_above_a_baseline_from_elsewhere_by_hand():
    # scores 4, 1, 1 of members: mean 2, squares 4 + 1 + 1, deviation sqrt(3); 2 of 3 ... all three are not 0
    score, member = torch.tensor([4.0, 1.0, 1.0, torch.nan]), torch.tensor([True, True, True, False])
    baseline = torch.tensor([1.0, 1.0, 3.0, 3.0])
    assert above(score, baseline, member, scale="none").tolist() == [3.0, 0.0, -2.0, 0.0]
    out = above(score, baseline, member, scale="batch_std", eps=0.0)
    torch.testing.assert_close(out, torch.tensor([3.0, 0.0, -2.0, 0.0]) / 3**0.5)
    with pytest.raises(ConfigError, match=r"takes no credit\.scale='std'; fix: none, "):
        above(score, baseline, member, scale="std")
    score = torch.tensor([4.0, 0.0, 0.0, 5.0])
    out = above(score, torch.tensor(1.0), member, scale="nonzero_share")
    torch.testing.assert_close(out, torch.tensor([9.0, -3.0, -3.0, 0.0]))
    out = above(score, torch.tensor(1.0), member, scale="batch_std")
    torch.testing.assert_close(out, torch.tensor([3.0, -1.0, -1.0, 0.0]) / (16 / 3) ** 0.5, rtol=1e-4, atol=0)
    assert out[0] < 3 / (16 / 3) ** 0.5  # eps is 1e-4 unless told


@pytest.mark.parametrize("choices", [{}, {"scale": "batch_std"}, {"scale": "none", "normalize": "batch"}], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e19, 1e30])
def test_rewards_may_be_huge(size, choices):
    batch = rollout([(0, [r * size], "terminated") for r in (1.0, 2.0, 3.0)])  # deviation 1
    out = torch.cat([*map(torch.tensor, per_episode(credit(batch, **choices, eps=0.0), batch))])
    torch.testing.assert_close(out, torch.tensor([-1.0, 0.0, 1.0]), atol=1e-5, rtol=0)


def test_returns_that_overflow_are_no_equal_ones():
    batch = rollout([(0, [3e38, 3e38], "terminated"), (0, [3e38, 2e38], "terminated")])
    assert credit(batch).isnan().all()


def test_an_absorbed_member_is_company():
    # returns to go 4 3 and 5: t0 mean 4.5; t1: 3 beside 0, not the trajectory's -.5
    batch = rollout([(0, [1.0, 3.0], "terminated"), (0, [5.0], "terminated")])
    choices = by_step(finished_members="zero", singleton="trajectory")
    assert per_episode(credit(batch, **choices), batch) == [[-0.5, 1.5], [0.5]]


def test_trajectory_rule_starts_where_the_first_member_ends():
    # lengths 3, 2, 1: returns to go [3,2,1], [2,1], [1]
    # t0 all three: mean 2; t1 one is gone: trajectory advantages 3-2 and 2-2; t2 likewise
    batch = rollout([(0, [1.0] * n, "terminated") for n in (3, 2, 1)])
    out = per_episode(credit(batch, **by_step(finished_members="trajectory")), batch)
    assert out == [[1.0, 1.0, 1.0], [0.0, 0.0], [-1.0]]
    # the lone rule still compares the two that are left at t1: [2, 1], mean 1.5
    out = per_episode(credit(batch, **by_step(singleton="trajectory")), batch)
    assert out == [[1.0, 0.5, 1.0], [0.0, -0.5], [-1.0]]


def test_trajectory_fallback_discounts_like_the_steps_it_stands_in_for():
    # gamma .5: discounted outcomes 1 + .5 = 1.5 and 1, mean 1.25
    batch = rollout([(0, [1.0, 1.0], "terminated"), (0, [1.0], "terminated")])
    out = per_episode(credit(batch, gamma=0.5, **by_step(singleton="trajectory")), batch)
    assert out == [[0.25, 0.25], [-0.25]]


def test_a_lone_survivor_has_no_signal_under_mask_and_some_under_absorb():
    batch = rollout([(0, [1.0] * n, "terminated") for n in (10, 10, 10, 50)])
    masked = per_episode(credit(batch, **by_step(finished_members="mask")), batch)[3]
    absorbed = per_episode(credit(batch, **by_step(finished_members="zero")), batch)[3]
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


@pytest.mark.parametrize(
    "choices",
    [preset("grpo"), preset("rloo"), preset("sb3_process"), preset("embodichain"), by_step(finished_members="zero")],
)
def test_an_unscorable_member_is_no_member(choices):
    members = [(0, [1.0, 2.0], "terminated"), (0, [0.0, 1.0], "terminated")]
    alone = rollout(members)
    joined = rollout([*members, (0, [0.0, 0.0], "unscorable")])
    out = credit(joined, **choices)
    torch.testing.assert_close(out[:2], credit(alone, **choices))
    assert out[2].abs().max() == 0


@pytest.mark.parametrize("end", ["unscorable", "greedy"])
def test_a_member_that_does_not_count_is_not_absorbed_either(end):
    # returns to go 3 2 and 1 0, means 2 and 1; a third that ended after one step would be a 0 at the second
    batch = rollout([(0, [1.0, 2.0], "terminated"), (0, [1.0, 0.0], "terminated"), (0, [9.0], end)])
    out = per_episode(credit(batch, **by_step(finished_members="zero")), batch)
    assert out == [[1.0, 1.0], [-1.0, -1.0], [0.0]]


def test_a_rule_of_the_users_own():
    @register_credit("first_reward")
    def first_reward(given: CreditInput):
        return given.reward[:, :1].expand_as(given.reward)

    try:
        batch = rollout(TWO)
        assert per_episode(credit(batch, rule="first_reward"), batch) == [[1.0, 1.0, 1.0], [0.0, 0.0]]
        with pytest.raises(ConfigError, match="registered already"):
            register_credit("first_reward")(first_reward)
    finally:
        del CREDIT_RULES["first_reward"]


@pytest.mark.parametrize(
    ("returned", "what"), [(torch.zeros(2), r"shape \[2\]"), (torch.zeros(2, 1), r"shape \[2, 1\]"), (None, "NoneType")]
)
def test_a_rule_that_returns_no_advantages_is_named(returned, what, monkeypatch):
    monkeypatch.setitem(CREDIT_RULES, "mine", lambda given: returned)
    message = rf"credit rule 'mine' returned .*{what}.*, expected a tensor of shape \[2, 3\]; fix: .*gather_segments"
    with pytest.raises(DataError, match=message):
        credit(rollout(TWO), rule="mine")


@pytest.mark.parametrize("returns", ["outcome", "return_to_go"])
@pytest.mark.parametrize(("returned", "what"), [(torch.zeros(1), r"shape \[1\]"), (None, "NoneType")])
def test_a_baseline_of_another_shape_is_named_and_never_broadcast(returned, what, returns, monkeypatch):
    monkeypatch.setitem(BASELINES, "mean", lambda scores: returned)
    message = rf"baseline 'mean' returned .*{what}.*, expected a tensor of shape .*; fix: an advantage for each"
    with pytest.raises(DataError, match=message):
        credit(rollout(TWO), returns=returns)


@pytest.mark.parametrize(("returned", "what"), [(torch.zeros(2, 1), r"shape \[2, 1\]"), (0.0, "float")])
def test_a_baseline_of_whole_rollouts_is_checked_too(returned, what, monkeypatch):
    monkeypatch.setitem(BASELINES, "gigpo", lambda given, **settings: returned)
    message = rf"baseline 'gigpo' returned .*{what}.*, expected a tensor of shape \[2, 3\]; fix: an advantage for each"
    with pytest.raises(DataError, match=message):
        credit(rollout(TWO), baseline="gigpo", returns="return_to_go", group_key="group_step", scale="none")


def test_steps_beyond_the_rollouts_own_number_never_meet_another_group():
    batch = rollout([(0, [1.0, 2.0], "terminated"), (1, [7.0, 7.0], "terminated")])
    batch["step"] = torch.tensor([[2, 3], [0, 1]])
    assert credit(batch, group_key="group_step", returns="return_to_go", scale="none").tolist() == [[0.0, 0.0]] * 2


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"group_key": "group_step"}, "excludes returns='outcome'; fix: returns='return_to_go'"),
        ({"returns": "turn"}, "compares the same turns; fix: group_key='group_step'"),
        ({"group_key": "group_step", "returns": "process"}, "excludes returns='process'; fix: returns='return_to_go'"),
        ({"reward": {"weights": (1.0,)}}, "reward: unknown key 'weights'"),
        ({"kl_placement": "reward", "reward": "parts"}, "got reward='parts', fix: kl_placement='loss'"),
        ({"baseline": "greedy", "returns": "process"}, "baseline='greedy' .* got returns='process', .*fix"),
        ({"baseline": "length_weighted", "returns": "return_to_go"}, "got returns='return_to_go', fix"),
        (
            {"baseline": "greedy", "scale": "std"},
            "baseline='greedy' needs scale='none' or .*; got scale='std', fix: scale='none'",
        ),
        (
            {"baseline": "knn", "group_key": "group_step", "returns": "return_to_go"},
            "needs group_key='group', scale='none'; got group_key='group_step', scale='std', "
            "fix: group_key='group', scale='none', or baseline='mean'",
        ),
        ({"baseline": "greedy", "scale": "mean"}, "baseline='greedy' needs .*; got scale='mean'"),
        ({"baseline": "greedy", "scale": "population_std"}, "baseline='greedy' needs .*; got scale='population_std'"),
        ({"group_key": {"singleton": "zero"}}, "group_key: unknown key 'singleton'"),
        ({"baseline": "none", "scale": "none"}, "normalize='none', fix: normalize='batch'"),
        ({"baseline": "none", "scale": "none", "normalize": "informative"}, "normalize='informative', fix"),
        ({"normalize": "episodes", "returns": "process"}, "one advantage for each episode; got returns='process'.*fix"),
        ({"normalize": "episodes", "baseline": "gigpo"}, "got returns='outcome', baseline='gigpo', fix: "),
        ({"baseline": "none", "normalize": "batch"}, "scale='std'"),
        ({"baseline": "none", "normalize": "batch", **STEP}, "group_key='group_step'"),
    ],
)
def test_compositions_that_make_no_sense_are_refused(choices, message):
    with pytest.raises(ValueError, match=message):
        CreditCfg(**choices)


@pytest.mark.parametrize(
    "choices",
    [{}, {"returns": "process"}, {"baseline": "length_weighted"}, STEP, {"baseline": "gigpo", "scale": "none"}],
    ids=str,
)
def test_gamma_is_said_to_have_an_effect_where_it_has_one(choices):
    batch = rollout(TWO, obs=[[[7.0], [8.0], [9.0]], [[8.0], [5.0]]])
    same = torch.equal(credit(batch, gamma=0.5, **choices), credit(batch, gamma=1.0, **choices))
    assert CreditCfg(**choices).discounts is not same


@pytest.mark.parametrize(
    "choices",
    [
        STEP | {"scale": "none"},
        {"returns": "process", "scale": "none"},
        {"group_key": "group_step", "returns": "turn", "scale": "none"},
        {"scale": "none", "baseline": "gigpo"},
    ],
)
def test_credit_by_time_tells_members_of_equal_whole_return_apart(choices):
    """Why groups of equal whole return that are left out are not always groups that teach nothing."""
    rewards = [(0, [1.0, 0.0, 0.0], "terminated"), (0, [0.0, 0.0, 1.0], "terminated")]
    batch = rollout(rewards, obs=[[[7.0], [8.0], [9.0]]] * 2)
    assert credit(batch, **choices).abs().max() > 0.1
    GRPOCfg(credit=choices, collection={"dynamic_sampling": 0})  # the user may
    assert not credit(batch, scale="none").any()
