"""Keeps groups of training, so that people can look at them."""

import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from groupwise.data.rollout import Nested, transition_view
from groupwise.policies.base import Policy
from groupwise.report.groups import MAX_WIDTH, Values, kept_iterations, write_groups
from groupwise.system import files
from groupwise.training.base import Callback
from groupwise.training.saving import SAVE_SECONDS

if TYPE_CHECKING:
    from groupwise.training.trainer import Trainer


Array: TypeAlias = np.ndarray


class KeepGroups(Callback):
    """Writes some groups of the rollout to ``<folder>/<iteration>.parquet``, with each evaluation and at the end.

    Nothing that training depends on changes.

    Args:
        interval: environment steps in between. None: a tenth of the budget.
        num_groups: half of them with the largest spread of returns, a quarter with the smallest, others at random. Of
            algorithms without groups, the episodes of a row are its members.
    """

    def __init__(self, folder: Path, interval: int | None, num_groups: int) -> None:
        self.folder = folder
        self.interval = interval
        self.num_groups = num_groups
        self._buffers: dict[str, Tensor] = {}

    def on_training_start(self, trainer: "Trainer") -> None:
        """Remove what a resumed run writes again."""
        import pyarrow.parquet  # noqa: F401  # takes 0.1 s and memory, better here than in the midst of training

        for iteration, path in kept_iterations(self.folder).items():
            if iteration > trainer.iteration:
                files.remove(path)

    def on_rollout_end(self, trainer: "Trainer", rollout: TensorDict) -> None:
        """Keep the statistics of normalisers, which the update changes in its end."""
        self._buffers = _buffers(trainer.algorithm.policy)

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Write groups when it is time."""
        if trainer.passed(self.interval) or trainer.is_done():
            start = time.perf_counter()
            steps = Steps(transition_view(rollout), self.num_groups, trainer)
            write_groups(self.folder, trainer.iteration, steps.columns(self._buffers))
            metrics[SAVE_SECONDS] = time.perf_counter() - start


class Steps:
    """The steps of some groups of a rollout ``[N, T]``, ordered by group, member and time."""

    def __init__(self, batch: TensorDict, num_groups: int, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.batch = batch
        row, time = _written(batch).nonzero(as_tuple=True)
        episode = batch["episode_id"][row, time].cpu().numpy()
        group = batch["group_id"][row, time].cpu().numpy() if trainer.algorithm.grouped else row.cpu().numpy()
        order = np.lexsort((time.cpu().numpy(), episode, group))
        reward = batch["reward"][row, time].cpu().double().numpy()
        chosen = choose(_spreads(group, episode, reward), num_groups, seed=trainer.iteration)
        order = order[np.isin(group[order], chosen)]
        self.slots = row[order.copy()], time[order.copy()]
        self.group, self.episode = group[order], episode[order]

    def columns(self, buffers: dict[str, Tensor]) -> dict[str, Values]:
        """The columns of ``report.groups``.

        Args:
            buffers: of the policy, as they were during the update.
        """
        batch, algorithm, count = self.batch, self.trainer.algorithm, len(self.group)
        ratio, counts = self._ratio(buffers)
        ends = np.where(self._at("terminated"), "terminated", np.where(self._at("truncated"), "truncated", "running"))
        is_text = "turn_id" in batch.keys()  # noqa: SIM118  iterating goes over rows
        step = self._at("step")
        return {
            "env_steps": np.full(count, self.trainer.env_steps),
            "group": self.group,
            "start": self._starts(),
            "member": _members(self.group, self.episode),
            "step": step - step[_firsts(self.episode)] if is_text else step,  # prompts are left out
            "observation": None if is_text else self._vectors(batch["obs"]),
            "action": self._vectors(batch["action"]),
            "token": self._tokens() if is_text else None,
            "reward": self._at("reward"),
            "reward_parts": self._vectors(batch.get("reward_parts", None)),
            "log_prob": self._pick(algorithm.of_decisions(batch["sample_log_prob"])),
            "ratio": np.where(counts, ratio, np.nan),
            "advantage": None if algorithm.advantage is None else self._pick(algorithm.advantage),
            "loss_mask": counts,
            "greedy": self._pick(batch.get("greedy", torch.zeros_like(batch["valid"]))),
            "end": ends.tolist(),
        }

    def _ratio(self, buffers: dict[str, Tensor]) -> tuple[Array, Array]:
        """The probability ratio of the updated policy to the sampler, and where the loss counts it."""
        algorithm = self.trainer.algorithm
        rows: Tensor = torch.unique(self.slots[0])
        inputs = algorithm.policy_inputs(self.batch[rows])
        now = _buffers(algorithm.policy)
        _restore(algorithm.policy, buffers)
        after = algorithm.score(algorithm.policy, inputs).log_prob
        _restore(algorithm.policy, now)
        ratio = algorithm.of_decisions(after - self.batch["sample_log_prob"][rows]).exp()
        slots = torch.searchsorted(rows, self.slots[0]), self.slots[1]
        mask = inputs["loss_mask"]
        counts = mask.any(dim=-1) if mask.dim() > 2 else mask
        return ratio[slots].cpu().numpy(), counts[slots].cpu().numpy()

    def _starts(self) -> list[str]:
        """What the members of each step's group share."""
        ids = self._at("group_id").tolist()
        starts = {number: self.trainer.collector.group_start(number) for number in set(ids)}
        return [starts[number] for number in ids]

    def _tokens(self) -> list[str]:
        ids = self._at("action").tolist()
        kinds = sorted(set(ids))
        texts = dict(zip(kinds, self.trainer.collector.token_texts(kinds), strict=True))
        return [texts[token] for token in ids]

    def _vectors(self, values: Nested | None) -> Array | None:
        """The numbers of each step ``[step, width]``; None where there are none or too many."""
        if values is None:
            return None
        leaves = [values] if isinstance(values, Tensor) else list(values.values(True, True))
        if sum(leaf[0, 0].numel() for leaf in leaves) > MAX_WIDTH:
            return None
        flat = [leaf[self.slots].float().reshape(len(self.group), -1) for leaf in leaves]
        return torch.cat(flat, dim=1).cpu().numpy()

    def _at(self, key: str) -> Array:
        return self._pick(self.batch[key])

    def _pick(self, values: Tensor) -> Array:
        return values[self.slots].cpu().numpy()


def choose(spread: dict[int, float], count: int, seed: int) -> list[int]:
    """Groups to keep: half of ``count`` have the largest spread, a quarter the smallest, others are random."""
    ranked = sorted(spread, key=lambda group: -spread[group])
    if len(ranked) <= count:
        return ranked
    most, least = count - count // 2, count // 4
    middle = ranked[most : len(ranked) - least]
    picked = Random(seed).sample(middle, count - most - least)
    return ranked[:most] + picked + ranked[len(ranked) - least :]


def _written(batch: TensorDict) -> Tensor:
    """The steps that were taken; of texts, those from the completion's first token on."""
    valid: Tensor = batch["valid"]
    turn = batch.get("turn_id", None)
    return valid if turn is None else valid & ((turn >= 0).cumsum(dim=1) > 0)


def _spreads(group: Array, episode: Array, reward: Array) -> dict[int, float]:
    """Highest less lowest return of each group."""
    ids, index = np.unique(np.stack([group, episode]), axis=1, return_inverse=True)
    returns = np.bincount(index.reshape(-1), weights=reward)
    groups = np.unique(group)
    place = np.searchsorted(groups, ids[0])
    high, low = np.full(len(groups), -np.inf), np.full(len(groups), np.inf)
    np.maximum.at(high, place, returns)
    np.minimum.at(low, place, returns)
    return dict(zip(groups.tolist(), (high - low).tolist(), strict=True))


def _firsts(episode: Array) -> Array:
    """For each step the place of its episode's first one."""
    begins = np.flatnonzero(np.diff(episode, prepend=-1))
    return begins.repeat(np.diff(begins, append=len(episode)))


def _members(group: Array, episode: Array) -> Array:
    """For each step the number of its episode in its group."""
    begins = np.diff(episode, prepend=-1) != 0
    number = begins.cumsum()
    starts = np.diff(group, prepend=-1) != 0
    members: Array = number - np.maximum.accumulate(np.where(starts, number, 0))
    return members


def _buffers(policy: Policy) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in policy.named_buffers()}


def _restore(policy: Policy, buffers: dict[str, Tensor]) -> None:
    for name, buffer in policy.named_buffers():
        buffer.copy_(buffers[name])
