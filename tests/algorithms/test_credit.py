"""Credit rules on rollouts small enough to work out by hand; golden numbers of the presets."""

import json
from importlib.resources import files

import pytest
import torch
from tensordict import TensorDict

from groupwise.algorithms.anchors import anchors
from groupwise.algorithms.configs import CreditCfg
from groupwise.algorithms.credit import CREDIT_RULES, CreditInput, advantages, next_score_average, register_credit
from groupwise.errors import ConfigError, DataError, UnknownNameError
from groupwise.functional.reduce import local

PRESETS = json.loads(files("groupwise").joinpath("presets/objectives.json").read_text())


def rollout(episodes, *, steps=None, per_row=1, **more):
    """Transitions [N, T]; each episode is (group, rewards, end), its end terminated, truncated, unscorable or greedy.

    ``more`` are further keys: for each episode what each of its steps has there.
    """
    rows = [list(range(i, min(i + per_row, len(episodes)))) for i in range(0, len(episodes), per_row)]
    steps = steps or max(sum(len(episodes[i][1]) for i in row) for row in rows)
    shape = (len(rows), steps)
    off = {name: torch.zeros(shape, dtype=torch.bool) for name in ("terminated", "truncated", "valid", "loss_mask")}
    ids = {name: torch.full(shape, -1) for name in ("group_id", "episode_id")}
    batch = off | ids | {"reward": torch.zeros(shape), "step": torch.zeros(shape, dtype=torch.int64)}
    batch |= {name: zeros_like_steps(values, shape) for name, values in more.items()}
    if any(end == "greedy" for _, _, end in episodes):
        batch["greedy"] = torch.zeros(shape, dtype=torch.bool)
    for n, row in enumerate(rows):
        t = 0
        for episode_id in row:
            group, rewards, end = episodes[episode_id]
            span = slice(t, t + len(rewards))
            batch["reward"][n, span] = torch.tensor(rewards)
            batch["valid"][n, span] = True
            batch["loss_mask"][n, span] = end not in ("unscorable", "greedy")
            batch["group_id"][n, span] = group
            batch["episode_id"][n, span] = episode_id
            batch["step"][n, span] = torch.arange(len(rewards))
            batch["truncated" if end == "truncated" else "terminated"][n, span.stop - 1] = True
            if end == "greedy":
                batch["greedy"][n, span] = True
            for name, values in more.items():
                batch[name][n, span] = torch.tensor(values[episode_id])
            t = span.stop
    return TensorDict(batch, batch_size=list(shape))


def zeros_like_steps(values, shape):
    one = torch.tensor(values[0][0])
    return torch.zeros((*shape, *one.shape), dtype=one.dtype)


def credit(batch, gamma=1.0, average=None, all_sum=local, **choices):
    return advantages(
        CreditInput(
            batch=batch,
            reward=batch["reward"],
            cfg=CreditCfg(**choices),
            gamma=gamma,
            num_groups=int(batch["group_id"].max()) + 1,
            num_episodes=int(batch["episode_id"].max()) + 1,
            all_sum=all_sum,
            average=average,
            choice_variance=batch.get("variance", None),
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


def test_an_absorbed_sibling_is_company():
    # returns to go 4 3 and 5: t0 mean 4.5; t1: 3 beside 0, not the trajectory's -.5
    batch = rollout([(0, [1.0, 3.0], "terminated"), (0, [5.0], "terminated")])
    choices = STEP | {"early_finisher": "absorb", "lone_member": "trajectory"}
    assert per_episode(credit(batch, **choices), batch) == [[-0.5, 1.5], [0.5]]


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


# ------------------------------------------------------------------------------ papers and libraries, by their presets


def expect(batch, expected, *, name, average=None, **changes):
    got = per_episode(credit(batch, average=average, **preset(name, **changes)), batch)
    for have, want in zip(got, expected, strict=True):
        torch.testing.assert_close(have, want, atol=2e-6, rtol=0)


GOLDEN = [(0, [r], "terminated") for r in [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]]
# returns to go 3 2 2 | 1 1: mean 1.8, unbiased deviation .83666
WHITE = [[1.434274, 0.239046, 0.239046], [-0.956183, -0.956183]]


@pytest.mark.parametrize("name", ["max_rl", "gpg"])
def test_scaled_outcomes_on_the_golden_group(name):
    expect(rollout(GOLDEN), [[3.0], [-1.0], [-1.0], [3.0], *[[-1.0]] * 4], name=name)


def test_pass_at_k():
    expect(rollout(GOLDEN), [[0.0]] * 8, name="grpo_passk")  # two are best
    # 3 beside 1: 2 over the deviation 1.414214 + 1e-6
    expect(rollout(TWO), [[1.414213] * 3, [0.0, 0.0]], name="grpo_passk")


@pytest.mark.parametrize("groups", [(0, 0), (0, 1), (1, 0)])
def test_reinforce_plus_plus_compares_the_batch_whatever_the_groups(groups):
    episodes = [(group, *rest) for group, (_, *rest) in zip(groups, TWO, strict=True)]
    expect(rollout(episodes), WHITE, name="reinforce_plus_plus")


def test_reinforce_plus_plus_baseline():
    # outcomes 3 and 1 less 2: 1 1 1 -1 -1, mean .2, squares 3 * .64 + 2 * 1.44 = 4.8, deviation sqrt(4.8 / 4)
    expected = [[0.730297] * 3, [-1.095445] * 2]
    expect(rollout(TWO), expected, name="reinforce_plus_plus_baseline")
    # eps adds to that deviation: .8 and -1.2 over 2.095445
    expect(rollout(TWO), [[0.381780] * 3, [-0.572671] * 2], name="reinforce_plus_plus_baseline", eps=1.0)
    # a group that teaches nothing changes nothing, and gets nothing
    more = rollout([*TWO, (1, [1.0], "terminated"), (1, [1.0], "terminated")])
    expect(more, [*expected, [0.0], [0.0]], name="reinforce_plus_plus_baseline")
    # verl counts its two zeros: mean 1 / 7, squares 204 / 42, deviation sqrt(204 / 42 / 6) = .899735
    verl = [[0.952661] * 3, [-1.270215] * 2, [-0.158777], [-0.158777]]
    expect(more, verl, name="reinforce_plus_plus_baseline", normalize="batch")


def test_outcomes_without_a_baseline_are_whitened_over_the_batch():
    # 3 3 3 1 1: mean 2.2, deviation sqrt(1.2)
    raw = {"baseline": "none", "scale": "none", "normalize": "batch"}
    expect(rollout(TWO), [[0.730297] * 3, [-1.095445] * 2], name="grpo", eps=0.0, **raw)


def test_one_step_that_differs_makes_a_group_informative():
    # only the best learns: 2 and 0, mean 1, deviation sqrt(2)
    batch = rollout([(0, [3.0], "terminated"), (0, [1.0], "terminated")])
    one = 0.707107
    expect(batch, [[one], [-one]], name="grpo_passk", scale="none", normalize="informative", eps=0.0)


def test_opo_weighs_by_length():
    # (3 * 3 + 2 * 1) / 5 = 2.2
    expect(rollout(TWO), [[0.8] * 3, [-1.2] * 2], name="opo")


def test_remax_compares_with_the_greedy_attempt():
    episodes = [*TWO, (0, [1.0, 1.0], "greedy"), (1, [7.0], "terminated"), (1, [4.0], "greedy")]
    batch = rollout(episodes)
    # 3 and 1 against 2; a member alone has the greedy attempt for company; the latter is not trained on
    expect(batch, [[1.0] * 3, [-1.0] * 2, [0.0, 0.0], [3.0], [0.0]], name="remax")
    # a group that lost it has nothing to be compared with
    expect(rollout(episodes[:-1]), [[1.0] * 3, [-1.0] * 2, [0.0, 0.0], [0.0]], name="remax")
    # two greedy attempts of one group, of 2 and 5: against their mean
    expect(
        rollout([*TWO, (0, [2.0], "greedy"), (0, [5.0], "greedy")]),
        [[-0.5] * 3, [-2.5] * 2, [0.0], [0.0]],
        name="remax",
    )
    # members' scores 3, 1, 7: deviation sqrt(28 / 3)
    expect(
        batch, [[0.327327] * 3, [-0.327327] * 2, [0.0] * 2, [0.981981], [0.0]], name="remax", scale="batch_std", eps=0
    )
    with pytest.raises(DataError, match="no 'greedy'; mend"):
        credit(rollout(TWO), **preset("remax"))


def test_rae_compares_with_the_past():
    expect(rollout(TWO), [[1.0] * 3, [-1.0] * 2], name="rae")  # no past yet: the mean of what there is, 2
    expect(rollout(TWO), [[2.5] * 3, [0.5] * 2], name="rae", average=torch.tensor(0.5))
    lone = rollout([(0, [3.0], "terminated"), (1, [1.0], "unscorable")])
    expect(lone, [[2.5], [0.0]], name="rae", average=torch.tensor(0.5))


@pytest.mark.parametrize("decay", [0.5, 0.9])
def test_the_average_takes_in_scorable_attempts(decay):
    batch = rollout([*TWO, (0, [9.0], "unscorable")])
    given = CreditInput(batch, batch["reward"], CreditCfg(baseline="ema", scale="none", ema_decay=decay), 1.0, 1, 3)
    assert next_score_average(given) == 2.0
    # two attempts of mean 2
    after = next_score_average(given._replace(average=torch.tensor(6.0)))
    torch.testing.assert_close(after, torch.tensor(2 + 4 * decay**2))


PARTS = [[[1.0, 0.0]], [[0.0, 0.0]], [[0.0, 3.0]]]


def test_gdpo_normalises_each_part():
    batch = rollout([(0, [1.0], "terminated"), (0, [0.0], "terminated"), (0, [3.0], "terminated")], reward_parts=PARTS)
    # one of three in each part: 1.154701 for it, -.577350 for the others; their sum has deviation 1 already
    expect(batch, [[0.577350], [-1.154701], [0.577350]], name="gdpo", eps=0)
    expect(batch, [[0.577350], [-1.154701], [0.577350]], name="gdpo", eps=0.0, normalize="none")
    weighted = {"part_weights": (1.0, 0.0), "normalize": "none", "eps": 0.0}
    expect(batch, [[1.154701], [-0.577350], [-0.577350]], name="gdpo", **weighted)
    both = {"part_weights": (1.0, 0.5), "normalize": "none", "eps": 0.0}
    expect(batch, [[0.866026], [-0.866026], [0.0]], name="gdpo", **both)
    with pytest.raises(DataError, match="3 weights for 2 parts"):
        credit(batch, **preset("gdpo", part_weights=(1.0, 1.0, 1.0)))
    with pytest.raises(DataError, match=r"no 'reward_parts'; mend: .*env\.reward_parts"):
        credit(rollout(TWO), **preset("gdpo"))


CHANCE = [[0.5, 0.5, 1.0], [1.5, 0.5]]


@pytest.mark.parametrize("per_row", [1, 2])
def test_optimal_token_baseline(per_row):
    # weights .5 1 2 | 1.5 2; t0: (3 * .5 + 1 * 1.5) / 2 = 1.5; t1: (2 * 1 + 1 * 2) / 3 = 4/3; t2: nobody else
    expected = [[1.5, 0.666667, 0.0], [-0.5, -0.333333]]
    expect(rollout(TWO, per_row=per_row, variance=CHANCE), expected, name="optimal_token_baseline")
    # where everything was certain, the mean
    certain = rollout(TWO, variance=[[0.0] * 3, [0.0] * 2])
    expect(certain, [[1.0, 0.5, 0.0], [-1.0, -0.5]], name="optimal_token_baseline")
    # the longest takes its episode's advantage, 3 - 2, at t2
    fallback = [[1.5, 0.666667, 1.0], [-0.5, -0.333333]]
    batch = rollout(TWO, variance=CHANCE)
    expect(batch, fallback, name="optimal_token_baseline", lone_member="trajectory")
    with pytest.raises(DataError, match="choice_variance"):
        credit(rollout(TWO), **preset("optimal_token_baseline"))


def test_chance_of_steps_that_do_not_count_is_not_seen():
    batch = rollout(TWO, variance=CHANCE)
    batch["loss_mask"][0, 0] = False
    # t0: one member left; t1: weights .5 and 2: (2 * .5 + 1 * 2) / 2.5 = 1.2
    expect(batch, [[0.0, 0.8, 0.0], [0.0, -0.2]], name="optimal_token_baseline")


OBS = [[[7.0], [8.0], [9.0]], [[8.0], [5.0]]]


@pytest.mark.parametrize("obs", [OBS, [[[-0.0], [-0.0]][:1] * 3, [[0.0], [1.0]]]])
@pytest.mark.parametrize("per_row", [1, 2])
def test_gigpo(obs, per_row):
    batch = rollout(TWO, per_row=per_row, obs=obs)
    if obs is not OBS:
        # all of the first attempt and the start of the second: returns to go 1.5 1 2 | .5, mean 1.25
        expect_discounted(batch, [[1.25, 0.75, 1.75], [-1.75, -1.0]], "gigpo_no_std")
        return
    # episodes +-1; t1 of the first met the start of the second: discounted 1 and .5, mean .75
    expect_discounted(batch, [[1.0, 1.25, 1.0], [-1.25, -1.0]], "gigpo_no_std")
    expect_discounted(batch, [[1.0, 1.5, 1.0], [-1.5, -1.0]], "gigpo_no_std", anchor_weight=2.0)
    # over their deviations: 1 / 1.414214 and .25 / .353553, both .707107
    one = 0.707107
    expect_discounted(batch, [[one, 2 * one, one], [-2 * one, -one]], "gigpo", eps=0.0)
    # leave one out: 3 - 1, and 1 - .5
    expect_discounted(batch, [[2.0, 2.5, 2.0], [-2.5, -2.0]], "gigpo_no_std", baseline="leave_one_out")


def expect_discounted(batch, expected, name, **changes):
    got = per_episode(credit(batch, gamma=0.5, **preset(name, **changes)), batch)
    for have, want in zip(got, expected, strict=True):
        torch.testing.assert_close(have, want, atol=2e-6, rtol=0)


def test_parts_have_anchors_of_their_own():
    # both parts are the whole reward, with weights 2 and .5: 2.5 times the episode's +-1 and twice the anchors' +-.25
    parts = [[[r, r] for r in rewards] for _, rewards, _ in TWO]
    batch = rollout(TWO, obs=OBS, reward_parts=parts)
    changes = {"anchor_weight": 2.0, "reward": "parts", "part_weights": (2.0, 0.5)}
    expect_discounted(batch, [[2.5, 3.75, 2.5], [-3.75, -2.5]], "gigpo_no_std", **changes)


def test_anchors_are_of_one_group_and_of_members_only():
    group_id = torch.tensor([[0, 0, 1, 1], [0, 0, 1, -1]])
    obs = torch.tensor([[1, 2, 1, 2], [2, 2, 1, 1]])[..., None]
    member = torch.ones(2, 4).bool()
    member[1, 1], member[1, 3] = False, False
    ids, number = anchors(obs, group_id, member)
    assert number == 4
    assert ids.tolist() == [[0, 1, 2, 3], [1, -1, 2, -1]]
    nested = TensorDict({"b": obs, "a": {"image": torch.zeros(2, 4, 3, 3)}}, batch_size=[2, 4])
    assert torch.equal(anchors(nested, group_id, member)[0], ids)
    nested["a", "image"][1, 0, 2, 2] = 1.0
    assert anchors(nested, group_id, member)[0].tolist() == [[0, 1, 2, 3], [4, -1, 2, -1]]
    assert anchors(torch.tensor([[1e-9, 2e-9, 1e-9]]), torch.zeros(1, 3).long(), torch.ones(1, 3).bool())[1] == 2
    nobody, number = anchors(nested, group_id, member & False)
    assert (number, nobody.tolist()) == (0, [[-1] * 4] * 2)


def test_turns_are_compared_once_each():
    # turn 0: 1 + 0 against 0 + 1 against 4 in one step: mean 2, however many steps; turn 1: 2 against 1; turn 2: alone
    episodes = [(0, [1.0, 0.0, 2.0, 5.0], "terminated"), (0, [0.0, 1.0, 1.0], "terminated"), (0, [4.0], "terminated")]
    turns = [[0, 0, 1, 2], [0, 0, 1], [0]]
    batch = rollout(episodes, turn_id=turns)
    # the lone turn takes its episode's: 8, 2, 4, mean 14 / 3
    expect(batch, [[-1.0, -1.0, 0.5, 3.333333], [-1.0, -1.0, -0.5], [2.0]], name="agilerl_turn")
    zero = [[-1.0, -1.0, 0.5, 0.0], [-1.0, -1.0, -0.5], [2.0]]
    expect(batch, zero, name="agilerl_turn", lone_member="zero")
    # deviations: -1 -1 2, squares 6 over 2; .5 and .5 over 1
    root = 3**0.5
    scaled = [[-1 / root, -1 / root, 0.707107, 0.0], [-1 / root, -1 / root, -0.707107], [2 / root]]
    expect(batch, scaled, name="agilerl_turn", lone_member="zero", scale="std")
    # absorbed: 2, 1 and a 0 in turn 1; 5 and two 0 in turn 2
    absorbed = [[-1.0, -1.0, 1.0, 3.333333], [-1.0, -1.0, 0.0], [2.0]]
    expect(batch, absorbed, name="agilerl_turn", early_finisher="absorb")
    # the trajectory's, from the first turn that somebody missed
    whole = [[-1.0, -1.0, 3.333333, 3.333333], [-1.0, -1.0, -2.666667], [2.0]]
    expect(batch, whole, name="agilerl_turn", early_finisher="trajectory")


def test_each_step_is_a_turn_where_there_are_none():
    # t0: 1 against 0; t1: 0 against 1; t2 alone: 3 - 2
    expect(rollout(TWO), [[0.5, -0.5, 1.0], [-0.5, 0.5]], name="agilerl_turn")


def test_a_turns_first_steps_need_not_count():
    # a tool's output opens the first turn: its place is taken by the next step, and its reward is not the policy's
    batch = rollout(TWO, turn_id=[[0, 0, 0], [0, 0]])
    batch["loss_mask"][0, 0] = False
    # 0 + 2 against 0 + 1
    expect(batch, [[0.0, 0.5, 0.5], [-0.5, -0.5]], name="agilerl_turn")


def test_kl_shaping_is_grpos_credit_without_a_reference():
    expect(rollout(TWO), [[0.707057] * 3, [-0.707057] * 2], name="kl_shaping")


# --------------------------------------------------------------------------------------------------- every preset

# one preset for each credit: many differ in their objective only
RULES = sorted({str(p["credit"]): name for name, p in PRESETS.items()}.values())
OF_THE_BATCH = ["gdpo", "gpg", "rae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


def every_key(episodes, **kw):
    """A rollout with all that any rule asks for; the same for an episode wherever it stands."""
    lengths = [len(rewards) for _, rewards, _ in episodes]
    return rollout(
        episodes,
        reward_parts=[[[r, -float(t)] for t, r in enumerate(rewards)] for _, rewards, _ in episodes],
        variance=[[0.1 + 0.2 * t for t in range(n)] for n in lengths],
        obs=[[[float(t // 2)] for t in range(n)] for n in lengths],
        turn_id=[[t // 2 for t in range(n)] for n in lengths],
        **kw,
    )


def random_episodes(seed, groups=3):
    torch.manual_seed(seed)
    lengths = torch.randint(1, 6, (groups, 5)).tolist()
    ends = ["terminated", "truncated", "terminated", "unscorable", "greedy"]
    return [(g, torch.rand(n).tolist(), end) for g in range(groups) for n, end in zip(lengths[g], ends, strict=True)]


@pytest.mark.parametrize("name", RULES)
def test_a_member_alone_never_gets_its_score(name):
    batch = every_key([(0, [5.0], "terminated"), (0, [2.0], "greedy"), (0, [3.0], "unscorable")])
    compared = 3.0 if name == "remax" else 0.0  # with the greedy attempt
    assert per_episode(credit(batch, **preset(name)), batch) == [[compared], [0.0], [0.0]]


@pytest.mark.parametrize("name", RULES)
def test_equal_attempts_get_exactly_zero(name):
    batch = every_key(
        [(0, [0.3], "terminated"), (0, [0.3], "terminated"), (0, [0.3], "greedy"), (0, [0.3], "terminated")]
    )
    assert not credit(batch, **preset(name)).any()


@pytest.mark.parametrize("name", RULES)
def test_the_order_of_rows_and_members_and_padding_mean_nothing(name):
    episodes = random_episodes(1)
    batch = every_key(episodes, steps=6)
    out = credit(batch, **preset(name))
    assert out.any()
    order = torch.randperm(15)
    torch.testing.assert_close(credit(batch[order], **preset(name)), out[order], atol=1e-5, rtol=1e-4)
    wide = every_key(episodes, steps=17, per_row=3)
    wide = per_episode(credit(wide, **preset(name)), wide)
    for have, want in zip(wide, per_episode(out, batch), strict=True):
        torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(set(RULES) - set(OF_THE_BATCH)))
def test_groups_do_not_see_each_other(name):
    episodes = random_episodes(2)
    out = credit(every_key(episodes, steps=6), **preset(name))
    for g in range(3):
        own = every_key([(0, rewards, end) for group, rewards, end in episodes if group == g], steps=6)
        torch.testing.assert_close(out[5 * g : 5 * g + 5], credit(own, **preset(name)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "choices",
    [
        *(preset(name) for name in OF_THE_BATCH),
        *(preset(name, scale="batch_std") for name in ("grpo", "gigpo", "remax", "rae", "embodichain", "agilerl_turn")),
    ],
    ids=str,
)
def test_two_ranks_are_one_batch(choices, two_ranks):
    episodes = random_episodes(3, groups=4)
    whole = credit(every_key(episodes, steps=6), **choices)
    ranks = []
    for half in (0, 1):
        own = [(g - 2 * half, rewards, end) for g, rewards, end in episodes if g // 2 == half]
        ranks.append((every_key(own, steps=6),))

    def on_rank(batch, all_sum):
        return credit(batch, all_sum=all_sum, **choices)

    torch.testing.assert_close(two_ranks(on_rank, *ranks), whole[:10], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(two_ranks(on_rank, *reversed(ranks)), whole[10:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(set(RULES) - {"max_rl", "gpg"}))
def test_a_bonus_that_all_attempts_get_changes_nothing(name):
    episodes = random_episodes(4)
    batch = every_key(episodes, steps=6)
    out = credit(batch, **preset(name))
    last = batch["terminated"] | batch["truncated"]
    batch["reward"] = batch["reward"] + last
    batch["reward_parts"] = batch["reward_parts"] + last[..., None]
    # a bonus at the end is the same for all in outcomes and returns to go, but not for single steps
    unlike = preset(name)["returns"] in ("process", "turn")
    assert torch.allclose(credit(batch, **preset(name)), out, atol=1e-4, rtol=1e-3) != unlike


@pytest.mark.parametrize("normalize", ["batch", "informative"])
def test_normalised_advantages_have_mean_0_and_deviation_1(normalize):
    batch = every_key([*random_episodes(5), (3, [2.0] * 4, "terminated"), (3, [8.0], "terminated")])
    out = credit(batch, scale="none", normalize=normalize)
    counted = out[batch["loss_mask"]] if normalize == "batch" else out[batch["loss_mask"] & (batch["group_id"] < 3)]
    torch.testing.assert_close(counted.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(counted.std(), torch.tensor(1.0), atol=1e-3, rtol=0)
    assert out[batch["group_id"] == 3].any() == (normalize == "batch")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"returns": "turn"}, "got group_key='group', mend: group_key='group_step'"),
        ({"group_key": "group_step", "returns": "process"}, "got returns='process', mend: returns='return_to_go'"),
        ({"part_weights": (1.0,)}, "got reward='total', mend: reward='parts'"),
        ({"kl_placement": "reward", "reward": "parts"}, "got reward='parts', mend: kl_placement='loss'"),
        ({"baseline": "greedy", "returns": "process"}, "baseline='greedy' .* got returns='process', mend"),
        ({"baseline": "length_weighted", "returns": "return_to_go"}, "got returns='return_to_go', mend"),
        ({"baseline": "second_best", "returns": "return_to_go"}, "got returns='return_to_go', mend"),
        ({"baseline": "ema", "returns": "return_to_go"}, "got returns='return_to_go', mend"),
        ({"baseline": "ema", "scale": "std"}, "scale='std' .*baseline='ema' .*mend: scale='none' or 'batch_std'"),
        ({"baseline": "greedy", "scale": "mean"}, "scale='mean' .*baseline='greedy'"),
        ({"baseline": "greedy", "scale": "population_std"}, "scale='population_std' .*baseline='greedy'"),
        ({"baseline": "ema", "scale": "none", "reward": "parts"}, "got reward='parts', mend: reward='total'"),
        ({"baseline": "optimal_token"}, "got group_key='group', returns='outcome', early_finisher='mask'"),
        (
            {"baseline": "optimal_token", **STEP, "early_finisher": "absorb"},
            "early_finisher='absorb', mend: 'group_step', 'return_to_go', 'mask'",
        ),
        ({"baseline": "none", "scale": "none"}, "normalize='none', mend: 'group', 'none', 'batch'"),
        ({"baseline": "none", "scale": "none", "normalize": "informative"}, "normalize='informative', mend"),
        ({"baseline": "none", "normalize": "batch"}, "scale='std'"),
        ({"baseline": "none", "normalize": "batch", **STEP}, "group_key='group_step'"),
    ],
)
def test_compositions_that_make_no_sense_are_refused(choices, message):
    with pytest.raises(ValueError, match=message):
        CreditCfg(**choices)
