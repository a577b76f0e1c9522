"""The groups of a run, as the page's explorer reads them: a few numbers for each step, in JSON."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from markupsafe import Markup

from groupwise.report.groups import kept_iterations, read_groups

MAX_BYTES = 1_200_000
"""JSON of all groups together."""
MAX_CELLS = 240
"""Cells of a member; in longer episodes a cell is several steps."""
MAX_NUMBERS = 64
"""Of an observation or action; longer ones, such as pictures, are not shown."""
_WORD = re.compile(r"\s*\S+|\s+$")
Number: TypeAlias = float | int | None
_Step = dict[str, Any]


def load_groups(folder: Path) -> list[dict[str, Any]]:
    """The groups that fit, by iteration and then by spread of returns; those of the last and the first iteration go first.

    Raises:
        RunFolderError: a file is damaged.
    """
    waiting = [_ranked(read_groups(path)) for path in kept_iterations(folder).values()]
    waiting = waiting[-1:] + waiting[:-1]
    chosen: list[dict[str, Any]] = []
    size = 0
    while any(waiting):
        for groups in waiting:
            if groups:
                group = groups.pop(0)
                size += len(to_json(group))
                if size > MAX_BYTES and chosen:
                    return _sorted(chosen)
                chosen.append(group)
    return _sorted(chosen)


def to_json(data: object) -> Markup:
    """JSON that can stand in a script element: it has no ``<``."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704  without < nothing ends the element


def _sorted(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(groups, key=lambda group: (-group["iteration"], -group["spread"], group["group"]))


def _ranked(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The groups of a file, the largest spread first."""
    steps = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    groups = [_group(list(members)) for _, members in groupby(steps, key=lambda step: step["group"])]
    return sorted(groups, key=lambda group: -group["spread"])


def _group(steps: list[_Step]) -> dict[str, Any]:
    episodes = [list(steps) for _, steps in groupby(steps, key=lambda step: step["member"])]
    is_text = steps[0]["token"] is not None
    # a token is a cell
    stride = 1 if is_text else -(-max(map(len, episodes)) // MAX_CELLS)
    members = [_member(episode, stride) for episode in episodes]
    returns = [sum(step["reward"] for step in episode) for episode in episodes]
    known = {key: steps[0][key] for key in ("iteration", "env_steps", "group", "start")}
    spread = _number(max(returns) - min(returns))
    group = known | {"spread": spread, "stride": stride, "text": is_text, "members": members}
    return group | {"diff": extremes(members)} if is_text and spread else group


def extremes(members: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return and words of the best and the worst completion; each stretch with whether the other lacks it at its place."""
    ranked = sorted(members, key=lambda member: -member["return"])
    ends = ranked[:1] + ranked[1:][-1:]
    best, worst = (_WORD.findall("".join(member["token"])) for member in (ranked[0], ranked[-1]))
    match = SequenceMatcher(None, [word.strip() for word in best], [word.strip() for word in worst])
    spans = [
        (("".join(best[i:j]), how != "equal"), ("".join(worst[k:m]), how != "equal"))
        for how, i, j, k, m in match.get_opcodes()
    ]
    return [
        {"return": end["return"], "words": [pair[side] for pair in spans if pair[side][0]]}
        for side, end in enumerate(ends)
    ]


def _member(steps: list[_Step], stride: int) -> dict[str, Any]:
    cells = [steps[first : first + stride] for first in range(0, len(steps), stride)]
    rewards = [sum(step["reward"] for step in cell) for cell in cells]
    member = {
        "return": _number(sum(rewards), digits=6),
        "end": steps[-1]["end"],
        "length": len(steps),
        "first": steps[0]["step"],
        "greedy": steps[0]["greedy"],
        "reward": _short(map(_number, rewards)),
        "mask": _short(int(any(step["loss_mask"] for step in cell)) for cell in cells),
    }
    for key in ("advantage", "ratio", "log_prob"):
        member[key] = _short(_mean([step[key] for step in cell]) for cell in cells)
    if steps[0]["token"] is not None:
        return member | {"token": [step["token"] for step in steps]}
    if steps[0]["action"] is not None and len(steps[0]["action"]) <= MAX_NUMBERS:
        member["action"] = [list(map(_number, cell[0]["action"])) for cell in cells]
    if steps[0]["observation"] is not None and len(steps[0]["observation"]) <= MAX_NUMBERS:
        member["observation"] = [list(map(_number, cell[0]["observation"])) for cell in cells]
    return member


def _mean(values: Sequence[Number]) -> Number:
    known = [value for value in values if value is not None]
    return _number(sum(known) / len(known)) if known else None


def _short(values: Iterator[Any] | Sequence[Any]) -> list[Any]:
    """A list; of one element if all are the same."""
    found = list(values)
    return found[:1] if len(set(found)) == 1 else found


def _number(value: float | int, digits: int = 4) -> Number:
    """Rounded; None for what is not finite."""
    shown = float(f"{value:.{digits}g}")
    if not math.isfinite(shown):
        return None
    return int(shown) if shown == int(shown) else shown
