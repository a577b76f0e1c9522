"""Rollouts small enough to work credit out by hand."""

import torch
from tensordict import TensorDict
from variants import SETTINGS

from groupwise.algorithms.advantages import CreditInput, advantages
from groupwise.config.algorithm import CreditCfg
from groupwise.engines import Engine


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


def credit(batch, gamma=1.0, engine=None, memory=None, **choices):
    return advantages(
        CreditInput(
            batch=batch.set("action", torch.zeros_like(batch["step"])),
            reward=batch["reward"],
            cfg=CreditCfg(**choices),
            gamma=gamma,
            num_groups=int(batch["group_id"].max()) + 1,
            num_episodes=int(batch["episode_id"].max()) + 1,
            engine=engine or Engine(),
            memory=memory,
            states=batch.get("obs", None),
        )
    )


def preset(name, **changes):
    return SETTINGS[name]["credit"] | changes


def per_episode(out, batch):
    """Each episode's advantages as a list, in order of their ids."""
    ids = batch["episode_id"]
    return [out[ids == i].tolist() for i in range(int(ids.max()) + 1)]


def same_rewards_in_other_order(members=4, steps=200):
    """Rewards of members that earn the same, 1.7 a step and five times something else, at other steps each."""
    torch.manual_seed(0)
    reward = torch.full((members, steps), 1.7)
    for row in reward:
        row[torch.randperm(steps)[:5]] += torch.tensor([1.0, 0.7, 0.3, 2.0, 5.5])
    one_by_one = torch.zeros(members).index_add(0, torch.arange(members).repeat(steps), reward.T.flatten())
    assert len(one_by_one.unique()) > 1  # sums in float32 differ
    return reward


TWO = [(0, [1.0, 0.0, 2.0], "terminated"), (0, [0.0, 1.0], "terminated")]


STEP = {"group_key": "group_step", "returns": "return_to_go", "scale": "none"}


def by_step(**rules):
    """``STEP`` with rules for members that ended early."""
    return STEP | {"group_key": {"name": "group_step", **rules}}


def assert_advantages(batch, expected, *, name, **changes):
    got = per_episode(credit(batch, **preset(name, **changes)), batch)
    for have, want in zip(got, expected, strict=True):
        torch.testing.assert_close(have, want, atol=2e-6, rtol=0)
