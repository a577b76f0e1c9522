"""Golden numbers of the credit of papers and libraries, by their presets."""

import pytest
import torch
from credit_rollouts import TWO, assert_advantages, credit, per_episode, preset, rollout
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import DataError

TURNS = {"name": "group_step", "singleton": "trajectory"}


# returns to go 3 2 2 | 1 1: mean 1.8, unbiased deviation .83666
WHITE = [[1.434274, 0.239046, 0.239046], [-0.956183, -0.956183]]


@pytest.mark.parametrize("groups", [(0, 0), (0, 1), (1, 0)])
def test_reinforce_plus_plus_compares_the_batch_whatever_the_groups(groups):
    episodes = [(group, *rest) for group, (_, *rest) in zip(groups, TWO, strict=True)]
    assert_advantages(rollout(episodes), WHITE, name="reinforce_plus_plus")


def test_reinforce_plus_plus_baseline():
    # outcomes 3 and 1 less 2: 1 1 1 -1 -1, mean .2, squares 3 * .64 + 2 * 1.44 = 4.8, deviation sqrt(4.8 / 4)
    expected = [[0.730297] * 3, [-1.095445] * 2]
    assert_advantages(rollout(TWO), expected, name="reinforce_plus_plus_baseline")
    # eps adds to that deviation: .8 and -1.2 over 2.095445
    assert_advantages(rollout(TWO), [[0.381780] * 3, [-0.572671] * 2], name="reinforce_plus_plus_baseline", eps=1.0)
    # a group that teaches nothing changes nothing, and gets nothing
    more = rollout([*TWO, (1, [1.0], "terminated"), (1, [1.0], "terminated")])
    assert_advantages(more, [*expected, [0.0], [0.0]], name="reinforce_plus_plus_baseline")
    # verl counts its two zeros: mean 1 / 7, squares 204 / 42, deviation sqrt(204 / 42 / 6) = .899735
    verl = [[0.952661] * 3, [-1.270215] * 2, [-0.158777], [-0.158777]]
    assert_advantages(more, verl, name="reinforce_plus_plus_baseline", normalize="batch")


def test_opo_weighs_by_length():
    # (3 * 3 + 2 * 1) / 5 = 2.2
    assert_advantages(rollout(TWO), [[0.8] * 3, [-1.2] * 2], name="opo")


def test_remax_compares_with_the_greedy_episode():
    episodes = [*TWO, (0, [1.0, 1.0], "greedy"), (1, [7.0], "terminated"), (1, [4.0], "greedy")]
    batch = rollout(episodes)
    # 3 and 1 against 2; a member alone has the greedy episode for company; the latter is not trained on
    assert_advantages(batch, [[1.0] * 3, [-1.0] * 2, [0.0, 0.0], [3.0], [0.0]], name="remax")
    # a group that lost it has nothing to be compared with
    assert_advantages(rollout(episodes[:-1]), [[1.0] * 3, [-1.0] * 2, [0.0, 0.0], [0.0]], name="remax")
    # two greedy episodes of one group, of 2 and 5: against their mean
    assert_advantages(
        rollout([*TWO, (0, [2.0], "greedy"), (0, [5.0], "greedy")]),
        [[-0.5] * 3, [-2.5] * 2, [0.0], [0.0]],
        name="remax",
    )
    # members' scores 3, 1, 7: deviation sqrt(28 / 3)
    assert_advantages(
        batch, [[0.327327] * 3, [-0.327327] * 2, [0.0] * 2, [0.981981], [0.0]], name="remax", scale="batch_std", eps=0
    )
    with pytest.raises(DataError, match="no 'greedy'; fix"):
        credit(rollout(TWO), **preset("remax"))


PARTS = [[[1.0, 0.0]], [[0.0, 0.0]], [[0.0, 3.0]]]


def test_gdpo_counts_each_episode_once():
    episodes = [(0, [0.0] * 3), (0, [0.0]), (1, [0.0] * 2), (1, [0.0])]
    episodes = [(*episode, "terminated") for episode in episodes] + [(1, [0.0], "unscorable")]
    parts = [[[0.0, 0.0]] * 2 + [[1.0, 0.0]], [[0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]], [[0.0, 0.0]], [[0.0, 0.0]]]
    batch = rollout(episodes, reward_parts=parts)
    weighted = {"reward": {"name": "parts", "weights": (1.0, 0.5)}, "eps": 0.0}
    # +-0.707107 and +-0.353553: squares .5 + .5 + .125 + .125, over 3, deviation .645497
    expected = [[1.095445] * 3, [-1.095445], [0.547723] * 2, [-0.547723], [0.0]]
    assert_advantages(batch, expected, name="gdpo", **weighted)


def test_gdpo_normalises_each_part():
    batch = rollout([(0, [1.0], "terminated"), (0, [0.0], "terminated"), (0, [3.0], "terminated")], reward_parts=PARTS)
    # one of three in each part: 1.154701 for it, -.577350 for the others; their sum has deviation 1 already
    assert_advantages(batch, [[0.577350], [-1.154701], [0.577350]], name="gdpo", eps=0)
    assert_advantages(batch, [[0.577350], [-1.154701], [0.577350]], name="gdpo", eps=0.0, normalize="none")
    weighted = {"reward": {"name": "parts", "weights": (1.0, 0.0)}, "normalize": "none", "eps": 0.0}
    assert_advantages(batch, [[1.154701], [-0.577350], [-0.577350]], name="gdpo", **weighted)
    both = {"reward": {"name": "parts", "weights": (1.0, 0.5)}, "normalize": "none", "eps": 0.0}
    assert_advantages(batch, [[0.866026], [-0.866026], [0.0]], name="gdpo", **both)
    with pytest.raises(DataError, match="weights: 3 for 2 parts"):
        credit(batch, **preset("gdpo", reward={"name": "parts", "weights": (1.0, 1.0, 1.0)}))
    with pytest.raises(DataError, match=r"no 'reward_parts'; fix: .*credit\.reward\.names"):
        credit(rollout(TWO), **preset("gdpo"))


OBS = [[[7.0], [8.0], [9.0]], [[8.0], [5.0]]]


@pytest.mark.parametrize("obs", [OBS, [[[-0.0], [-0.0]][:1] * 3, [[0.0], [1.0]]]])
@pytest.mark.parametrize("per_row", [1, 2])
def test_gigpo(obs, per_row):
    batch = rollout(TWO, per_row=per_row, obs=obs)
    if obs is not OBS:
        # all of the first episode and the start of the second: returns to go 1.5 1 2 | .5, mean 1.25
        assert_discounted(batch, [[1.25, 0.75, 1.75], [-1.75, -1.0]], "gigpo_no_std")
        return
    # episodes +-1; t1 of the first met the start of the second: discounted 1 and .5, mean .75
    assert_discounted(batch, [[1.0, 1.25, 1.0], [-1.25, -1.0]], "gigpo_no_std")
    assert_discounted(batch, [[1.0, 1.5, 1.0], [-1.5, -1.0]], "gigpo_no_std", baseline={"name": "gigpo", "weight": 2.0})
    # over their deviations: 1 / 1.414214 and .25 / .353553, both .707107
    one = 0.707107
    assert_discounted(batch, [[one, 2 * one, one], [-2 * one, -one]], "gigpo", eps=0.0)


def assert_discounted(batch, expected, name, **changes):
    got = per_episode(credit(batch, gamma=0.5, **preset(name, **changes)), batch)
    for have, want in zip(got, expected, strict=True):
        torch.testing.assert_close(have, want, atol=2e-6, rtol=0)


def in_turns(episodes, lengths=lambda episode, turn: 1):
    """A rollout of (group, [(state, reward), ...]): turns of as many tokens, with a token that the environment wrote after each."""
    rewards, turns, states = [], [], []
    for number, (_, played) in enumerate(episodes):
        count = [lengths(number, turn) for turn in range(len(played))]
        rewards.append([x for n, (_, r) in zip(count, played, strict=True) for x in [*[0.0] * (n - 1), r, 0.0]])
        turns.append([x for turn, n in enumerate(count) for x in [*[turn] * n, -1]])
        states.append([x for n, (state, _) in zip(count, played, strict=True) for x in [*[state] * n, -1]])
    ends = [(group, r, "terminated") for (group, _), r in zip(episodes, rewards, strict=True)]
    batch = rollout(ends, turn_id=turns, anchor=states)
    batch["turn_id"].masked_fill_(~batch["valid"], -1)
    batch["loss_mask"] &= batch["turn_id"] >= 0
    return batch


def of_turns(advantage, batch):
    """Each episode's advantages by turn; those of a turn's tokens must be the same, and those of others' 0."""
    assert not advantage[batch["turn_id"] < 0].any()
    found = []
    for row, turns in zip(advantage, batch["turn_id"], strict=True):
        found.append([])
        for turn in range(int(turns.max()) + 1):
            [value] = set(row[turns == turn].tolist())
            found[-1].append(value)
    return found


def test_gigpo_compares_turns_in_the_same_state():
    """States 0, 1, 2; three episodes of a group earn 0 0 4, 0 4 and 3 by turns, and are in 0 1 1, 0 1 and 0."""
    three = [(0, [(0, 0.0), (1, 0.0), (1, 4.0)]), (0, [(0, 0.0), (1, 4.0)]), (0, [(0, 3.0)])]
    others = [(1, [(0, 7.0), (1, 2.0)]), (1, [(2, 9.0)])]  # of another group: alone in each state, and 9 each
    batch = in_turns([*three, *others], lambda episode, turn: 1 + (episode + 2 * turn) % 3)
    # returns to go by a discount of a half: 1 2 4 | 2 4 | 3; in 0: 1 2 3, mean 2; in 1: 2 4 4, mean 10/3
    state = [[-1.0, -4 / 3, 2 / 3], [0.0, 2 / 3], [1.0], [0.0, 0.0], [0.0]]
    # episodes 4 4 3, mean 11/3
    episode = [1 / 3, 1 / 3, -2 / 3, 0.0, 0.0]
    for weight in (1.0, 2.0):
        expected = [[e + weight * s for s in turns] for e, turns in zip(episode, state, strict=True)]
        found = credit(batch, gamma=0.5, **preset("gigpo_no_std", baseline={"name": "gigpo", "weight": weight}))
        for have, want in zip(of_turns(found, batch), expected, strict=True):
            assert have == pytest.approx(want, abs=2e-6)
    # over their deviations: of episodes root 1/3, in 0 1, in 1 root 4/3
    root = 3**0.5
    scaled = [[1 / root - 1, 1 / root - 2 / root, 2 / root], [1 / root, 2 / root], [1 - 2 / root], [0.0] * 2, [0.0]]
    found = credit(batch, gamma=0.5, **preset("gigpo", eps=0.0))
    for have, want in zip(of_turns(found, batch), scaled, strict=True):
        assert have == pytest.approx(want, abs=2e-6)
    # turns of one step are the steps of a control task
    single = in_turns(three)
    steps = rollout(
        [(0, [r for _, r in played], "terminated") for _, played in three], obs=[[[s] for s, _ in p] for _, p in three]
    )
    want = per_episode(credit(steps, gamma=0.5, **preset("gigpo")), steps)
    for have, one in zip(of_turns(credit(single, gamma=0.5, **preset("gigpo")), single), want, strict=True):
        assert have == pytest.approx(one, abs=1e-6)


def test_what_could_not_be_scored_is_in_no_state():
    batch = in_turns([(0, [(0, 1.0)]), (0, [(0, 3.0)]), (0, [(0, 50.0)])])
    batch["loss_mask"][2] = False
    assert of_turns(credit(batch, **preset("gigpo_no_std")), batch) == [[-2.0], [2.0], [0.0]]  # -1 and 1, twice


PLAYED = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-3, 3).map(float), st.integers(1, 4)), min_size=1, max_size=3
)


@given(
    st.lists(st.tuples(st.integers(0, 1), PLAYED), min_size=2, max_size=6), st.sampled_from(["gigpo", "gigpo_no_std"])
)
def test_the_credit_of_a_turn_does_not_depend_on_how_many_tokens_turns_have(episodes, name):
    turns = [(group, [turn[:2] for turn in played]) for group, played in episodes]
    long = in_turns(turns, lambda episode, turn: episodes[episode][1][turn][2])
    short = in_turns(turns)
    for choices in ({}, {"returns": "turn_to_go", "group_key": "group_step"}):
        have, want = (of_turns(credit(b, gamma=0.5, **preset(name, **choices)), b) for b in (long, short))
        for one, other in zip(have, want, strict=True):
            assert one == pytest.approx(other, abs=1e-5)


def test_parts_have_anchors_of_their_own():
    # both parts are the whole reward, with weights 2 and .5: 2.5 times the episode's +-1 and twice the anchors' +-.25
    parts = [[[r, r] for r in rewards] for _, rewards, _ in TWO]
    batch = rollout(TWO, obs=OBS, reward_parts=parts)
    changes = {"baseline": {"name": "gigpo", "weight": 2.0}, "reward": {"name": "parts", "weights": (2.0, 0.5)}}
    assert_discounted(batch, [[2.5, 3.75, 2.5], [-3.75, -2.5]], "gigpo_no_std", **changes)


def test_turns_are_compared_once_each():
    # turn 0: 1 + 0 against 0 + 1 against 4 in one step: mean 2, however many steps; turn 1: 2 against 1; turn 2: alone
    episodes = [(0, [1.0, 0.0, 2.0, 5.0], "terminated"), (0, [0.0, 1.0, 1.0], "terminated"), (0, [4.0], "terminated")]
    turns = [[0, 0, 1, 2], [0, 0, 1], [0]]
    batch = rollout(episodes, turn_id=turns)
    # the lone turn takes its episode's: 8, 2, 4, mean 14 / 3
    assert_advantages(batch, [[-1.0, -1.0, 0.5, 3.333333], [-1.0, -1.0, -0.5], [2.0]], name="agilerl_turn")
    zero = [[-1.0, -1.0, 0.5, 0.0], [-1.0, -1.0, -0.5], [2.0]]
    assert_advantages(batch, zero, name="agilerl_turn", group_key="group_step")
    # deviations: -1 -1 2, squares 6 over 2; .5 and .5 over 1
    root = 3**0.5
    scaled = [[-1 / root, -1 / root, 0.707107, 0.0], [-1 / root, -1 / root, -0.707107], [2 / root]]
    assert_advantages(batch, scaled, name="agilerl_turn", group_key="group_step", scale="std")
    # absorbed: 2, 1 and a 0 in turn 1; 5 and two 0 in turn 2
    absorbed = [[-1.0, -1.0, 1.0, 3.333333], [-1.0, -1.0, 0.0], [2.0]]
    assert_advantages(batch, absorbed, name="agilerl_turn", group_key=TURNS | {"finished_members": "zero"})
    # the trajectory's, from the first turn that somebody missed
    whole = [[-1.0, -1.0, 3.333333, 3.333333], [-1.0, -1.0, -2.666667], [2.0]]
    assert_advantages(batch, whole, name="agilerl_turn", group_key=TURNS | {"finished_members": "trajectory"})


def test_later_turns_count_in_turns_to_go_before_members_are_compared():
    # turns earn 1 2 5 | 1 1 | 4; to go by a discount of a half 3.25 4.5 5 | 1.5 1 | 4
    episodes = [(0, [1.0, 0.0, 2.0, 5.0], "terminated"), (0, [0.0, 1.0, 1.0], "terminated"), (0, [4.0], "terminated")]
    batch = rollout(episodes, turn_id=[[0, 0, 1, 2], [0, 0, 1], [0]])
    choices = {"returns": "turn_to_go", "group_key": "group_step"}
    # turn 0: mean 35 / 12; turn 1: mean 2.75; turn 2: alone
    expected = [[1 / 3, 1 / 3, 1.75, 0.0], [-17 / 12, -17 / 12, -1.75], [13 / 12]]
    assert_discounted(batch, expected, "agilerl_turn", **choices)
    # 8 7 5 | 2 1 | 4 without a discount: means 14 / 3 and 4
    whole = [[10 / 3, 10 / 3, 3.0, 0.0], [-8 / 3, -8 / 3, -3.0], [-2 / 3]]
    assert_advantages(batch, whole, name="agilerl_turn", **choices)
    own = credit(batch, **preset("agilerl_turn", group_key="group_step"))
    assert torch.equal(credit(batch, gamma=0.0, **preset("agilerl_turn", **choices)), own)
    # what all earn in the end changes no comparison, where single turns would compare a bonus with none
    last = batch["terminated"] | batch["truncated"]
    batch["reward"] = batch["reward"] + last
    assert_advantages(batch, whole, name="agilerl_turn", **choices)
    assert not torch.equal(credit(batch, **preset("agilerl_turn", group_key="group_step")), own)


def test_each_step_is_a_turn_where_there_are_none():
    # t0: 1 against 0; t1: 0 against 1; t2 alone: 3 - 2
    assert_advantages(rollout(TWO), [[0.5, -0.5, 1.0], [-0.5, 0.5]], name="agilerl_turn")


def test_a_turns_first_steps_need_not_count():
    # a tool's output opens the first turn: its place is taken by the next step, and its reward is not the policy's
    batch = rollout(TWO, turn_id=[[0, 0, 0], [0, 0]])
    batch["loss_mask"][0, 0] = False
    # 0 + 2 against 0 + 1
    assert_advantages(batch, [[0.0, 0.5, 0.5], [-0.5, -0.5]], name="agilerl_turn")
