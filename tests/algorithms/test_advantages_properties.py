"""What holds for the credit of every preset, on random rollouts."""

import pytest
import torch
from credit_rollouts import credit, per_episode, preset, rollout
from two_ranks import in_two_threads
from variants import SETTINGS

RULES = sorted({str(p["credit"]): name for name, p in SETTINGS.items()}.values())
NEAR = {"knn"}
"""Of equally near states the first ones count, and many are equal here; any group's are near; cut returns go on."""
FITTED = {"lstd"}
"""Values come from the episodes of all groups; a bonus at the end is part of the value of all states before."""
OF_THE_BATCH = ["gdpo", "gpg", "lite_ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


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
    compared = 3.0 if name == "remax" else 0.0  # with the greedy episode
    assert per_episode(credit(batch, **preset(name)), batch) == [[compared], [0.0], [0.0]]


@pytest.mark.parametrize("name", RULES)
def test_equal_episodes_get_exactly_zero(name):
    batch = every_key(
        [(0, [0.3], "terminated"), (0, [0.3], "terminated"), (0, [0.3], "greedy"), (0, [0.3], "terminated")]
    )
    assert not credit(batch, **preset(name)).any()


@pytest.mark.parametrize("name", sorted(set(RULES) - NEAR))
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


@pytest.mark.parametrize("name", sorted(set(RULES) - set(OF_THE_BATCH) - NEAR - FITTED))
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
        *(preset(name, scale="batch_std") for name in ("grpo", "gigpo", "remax", "embodichain", "agilerl_turn")),
        preset("agilerl_turn", returns="turn_to_go"),
    ],
    ids=str,
)
def test_two_ranks_are_one_batch(choices):
    episodes = random_episodes(3, groups=4)
    whole = credit(every_key(episodes, steps=6), **choices)
    halves = [[(g - 2 * half, *rest) for g, *rest in episodes if g // 2 == half] for half in (0, 1)]
    parts = in_two_threads(lambda e: credit(every_key(halves[e.rank], steps=6), engine=e, **choices))
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(set(RULES) - {"max_rl", "gpg"} - NEAR - FITTED))
def test_a_bonus_that_all_episodes_get_changes_nothing(name):
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
