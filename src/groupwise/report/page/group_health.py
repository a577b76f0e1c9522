"""What a run's metrics and the groups that it kept say about its health."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from groupwise import plugins
from groupwise.report.folder import RunFolder
from groupwise.report.groups import kept_iterations, read_groups
from groupwise.report.page.health import Finding, examine, percent, sort

WILD = 100.0
"""Observations of this size are too large for a network without a normaliser."""
CLONING = "bc"
"""The algorithm that plays no episodes."""
Columns = Mapping[str, Sequence[Any]]
"""Of a file of kept groups, as ``read_groups`` gives them."""


def diagnose(folder: RunFolder) -> list[Finding]:
    """All findings on a run, those to look at first.

    Raises:
        RunFolderError: a file is damaged.
    """
    paths = list(kept_iterations(folder.groups).values())
    ends = [read_groups(path) for path in dict.fromkeys(paths[:1] + paths[-1:])]
    metrics, config = folder.read_metrics(), folder.read_config()
    if config["algorithm"]["name"] == CLONING:
        metrics = [
            {key: value for key, value in entry.items() if not key.startswith(("rollout/", "time/advantage"))}
            for entry in metrics
        ]
    return sort([*failure(folder), *examine(metrics), *examine_groups(config, ends, metrics[-1:])])


def failure(folder: RunFolder) -> Iterator[Finding]:
    """A run that an error or a kill ended."""
    if folder.is_training:
        return
    summary, known = folder.read_summary(), folder.read_provenance()
    again = plugins.resume_command(folder.path, known["given_in_python"], known["plugins"])
    if summary.get("stopped") == "failed":
        text = f"An error ended it: {summary.get('error', 'its message was not kept')}"
        yield Finding("End of the run", (), "bad", text, f"After its cause is gone: {again}")
    elif not summary:
        text = "It was killed, or its machine stopped: out of memory, or out of time?"
        yield Finding("End of the run", (), "look", text, f"It goes on with: {again}")


def examine_groups(
    config: Mapping[str, Any], files: Sequence[Columns], last: Sequence[Mapping[str, Any]]
) -> list[Finding]:
    """The findings on some files of kept groups, the latest last.

    Args:
        last: the last entry of the metrics, which names the rewards.
    """
    found = []
    if observations := [value for columns in files for value in columns["observation"] if value is not None]:
        normalized = config.get("policy", {}).get("normalize_obs", False)
        found.append(scale(np.array(observations), normalized=normalized))
    if "group_size" in config["algorithm"] and "task" not in config and files and len(files[-1]["group"]):
        found.append(spread(files[-1]))
    rewards = config.get("task", {}).get("rewards", [])
    if len(rewards) > 1 and (parts := [value for columns in files for value in _parts_of_members(columns)]):
        names = [name for entry in last for name in re.findall(r"reward/(\S+)_mean", " ".join(entry))]
        weights = [reward["weight"] for reward in rewards]
        if len(names) != len(weights):  # a reward that gave nothing in the last iteration is not in its metrics
            names = [f"reward {number}" for number, _ in enumerate(weights, 1)]
        found.append(dominance(np.array(parts) * weights, names))
    if values := [ratio for columns in files[-1:] for ratio in columns["ratio"] if ratio is not None]:
        found.append(ratios(values))
    return found


def scale(observations: np.ndarray, *, normalized: bool) -> Finding:
    """Networks learn badly from numbers that are large.

    Args:
        observations: raw, ``[step, width]``.
        normalized: whether the policy normalises them.
    """
    size = np.sqrt(np.square(observations).mean(axis=0))
    largest = int(size.argmax())
    text = f"Number {largest} of an observation is the largest, with a root mean square of {size[largest]:.3g}."
    made = Finding("Scale of observations", (), "good", text)
    indices = bool((observations == observations.round()).all())  # of Discrete spaces: the network gets them one-hot
    if normalized or indices or size[largest] < WILD:
        return made
    return made._replace(verdict="look", advice="Normalise them: policy.normalize_obs.")


def spread(columns: Columns) -> Finding:
    """Returns of a group must differ."""
    rows = groupby(zip(columns["group"], columns["member"], columns["reward"], strict=True), key=lambda row: row[:2])
    returns = [(group, sum(reward for *_, reward in steps)) for (group, _), steps in rows]
    groups = [[value for _, value in members] for _, members in groupby(returns, key=lambda member: member[0])]
    std = float(np.mean([np.std(group) for group in groups]))
    text = f"Standard deviation of returns within a group, of those kept last: {std:.3g}."
    made = Finding("Spread of returns", (), "good", text)
    return made if std > 1e-6 else made._replace(verdict="look", text=f"{text} There is nothing to compare.")


def dominance(parts: np.ndarray, names: Sequence[str]) -> Finding:
    """A reward whose range is small beside that of another hardly changes the advantages.

    Args:
        parts: weighted rewards of the members, ``[member, reward]``.
    """
    spans = np.ptp(parts, axis=0)
    shown = ", ".join(f"{name} {span:.3g}" for name, span in zip(names, spans, strict=True))
    made = Finding("Sizes of rewards", (), "good", f"Ranges of the weighted rewards: {shown}.")
    strongest = names[int(spans.argmax())]
    drowned = [name for name, span in zip(names, spans, strict=True) if 0 < span < 0.05 * spans.max()]
    if not drowned:
        return made
    text = f"{made.text} {strongest} dominates: {' and '.join(drowned)} hardly counts."
    return made._replace(verdict="look", text=text, advice="Other weights in task.rewards, or rewards of one scale.")


def ratios(values: Sequence[float]) -> Finding:
    """How far the update moved the probabilities of single actions, in the groups that were kept last."""
    far = sum(not 0.5 <= value <= 2 for value in values) / len(values)
    middle = sorted(values)[len(values) // 20 : -(len(values) // 20) or None]
    text = f"90 % of the ratios are from {middle[0]:.3f} to {middle[-1]:.3f}; {percent(far, 1)} of them outside of 0.5 to 2."
    made = Finding("Ratios after the update", (), "good", text, values=tuple(values))
    if far <= 0.05:
        return made
    return made._replace(verdict="look", advice="Single actions moved far: lower learning_rate, or fewer num_epochs.")


def _parts_of_members(columns: Columns) -> list[list[float]]:
    """The sum of each reward over a member's steps."""
    steps = zip(columns["group"], columns["member"], columns["reward_parts"], strict=True)
    members = [[parts for *_, parts in steps] for _, steps in groupby(steps, key=lambda step: step[:2])]
    return [np.sum(parts, axis=0).tolist() for parts in members if parts[0] is not None]
