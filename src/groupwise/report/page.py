"""Writes a run folder as one HTML file, which needs no network and, except for the explorer, no scripts."""

import json
import math
import shlex
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from importlib.resources import files as resources
from itertools import groupby
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from markupsafe import Markup
from pydantic import BaseModel, ValidationError

from groupwise import plugins
from groupwise import system as files
from groupwise.config import resolve, resolve_text
from groupwise.config.base import flat
from groupwise.config.run import BUDGETS
from groupwise.errors import ConfigError
from groupwise.report.curve import curve_svg, small
from groupwise.report.folder import (
    RunFolder,
    explained,
    interval_of,
    kept_iterations,
    read_frames,
    read_groups,
    scores_of,
)
from groupwise.report.health import CLONING, UNKNOWN, WORDS, Goal, Metrics, diagnose, is_below

if TYPE_CHECKING:
    from jinja2 import Environment


# Groups of a run for the page's explorer: a few numbers for each step, in JSON

MAX_BYTES = 1_200_000
"""JSON of all groups together."""
MAX_CELLS = 240
"""Cells of a member; in longer episodes a cell is several steps."""
MAX_TEXT = 4_000
"""Characters of a message; longer ones are cut in the middle."""
Number: TypeAlias = float | int | None


def load_groups(folder: Path) -> list[dict[str, Any]]:
    """The groups that fit, by spread of returns. The first one goes first, then those of the last and the first iteration."""
    waiting = []
    for path in kept_iterations(folder).values():
        columns = read_groups(path)
        steps = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        groups = [_group(list(members)) for _, members in groupby(steps, key=lambda step: step["group"])]
        waiting.append(sorted(groups, key=_by_spread))
    if not any(waiting):
        return []
    waiting = waiting[-1:] + waiting[:-1]
    widest = min((groups for groups in waiting if groups), key=lambda groups: _by_spread(groups[0]))
    chosen = [widest.pop(0)]
    size = len(to_json(chosen))
    while any(waiting) and size <= MAX_BYTES:
        for groups in waiting:
            if groups and size <= MAX_BYTES:
                size += len(to_json(groups[0]))
                if size <= MAX_BYTES:
                    chosen.append(groups.pop(0))
    return sorted(chosen, key=_by_spread)


def _by_spread(group: Mapping[str, Any]) -> tuple[float, int, int]:
    """Sorts groups: the largest spread first, and of equal ones the latest."""
    return -(group["spread"] or 0), -group["iteration"], group["group"]


def to_json(data: object) -> Markup:
    """JSON that can stand in a script element: it has no ``<``."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704  without < nothing ends the element


def _group(steps: list[dict[str, Any]]) -> dict[str, Any]:
    episodes = [list(steps) for _, steps in groupby(steps, key=lambda step: step["member"])]
    is_text = steps[0]["token"] is not None
    # a token is a cell
    stride = 1 if is_text else -(-max(map(len, episodes)) // MAX_CELLS)
    talks = is_text and any(step["stop_reason"] or step["turn"] > 0 for step in steps)
    members = [_speaker(episode, steps[0]["start"]) if talks else _member(episode, stride) for episode in episodes]
    returns = [sum(step["reward"] for step in episode) for episode in episodes]
    known = {key: steps[0][key] for key in ("iteration", "env_steps", "group", "start")}
    spread = _number(max(returns) - min(returns))
    apart = talks and _mark_apart(members, has_parts=steps[0]["reward_parts"] is not None)
    shown = {"spread": spread, "stride": stride, "text": is_text, "talks": talks, "apart": apart, "members": members}
    return known | shown


def _member(steps: list[dict[str, Any]], stride: int) -> dict[str, Any]:
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
    known = [key for key in ("action", "observation") if steps[0][key] is not None]
    return member | {key: [list(map(_number, cell[0][key])) for cell in cells] for key in known}


class _Message(BaseModel, strict=True):
    """A message of a conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] = []

    @property
    def text(self) -> str:
        """The content, cut in the middle if it is long."""
        text = self.content if isinstance(self.content, str) else json.dumps(self.content) if self.content else ""
        left_out = f"\n[... {len(text) - MAX_TEXT:,} characters ...]\n"
        return text if len(text) <= MAX_TEXT else text[: MAX_TEXT // 2] + left_out + text[-MAX_TEXT // 2 :]


def _speaker(steps: list[dict[str, Any]], start: str) -> dict[str, Any]:
    """A member that had several turns, or an environment: its tokens by turn, and what answered each."""
    written = [step for step in steps if step["turn"] >= 0]
    calls, answers = list[list[str]](), list[list[dict[str, str]]]()
    for message in map(_Message.model_validate, files.parse_json(steps[0]["messages"].encode())):
        if message.role == "assistant":
            calls.append([json.dumps(call.get("function", call), ensure_ascii=False) for call in message.tool_calls])
            answers.append([])
        else:
            answers[-1].append({"role": message.name or message.role, "text": message.text})
    turns, first = list[dict[str, Any]](), 0
    for own, (_, some) in enumerate(groupby(written, key=lambda step: step["turn"])):
        tokens = list(some)
        of_turn = {"calls": calls[own], "answers": answers[own], "from": first, "to": first + len(tokens)}
        numbers = _mean([step["advantage"] for step in tokens]), _number(sum(step["reward"] for step in tokens))
        turns.append(of_turn | dict(zip(("advantage", "reward"), numbers, strict=True)))
        first += len(tokens)
    about = {"at": [step["step"] for step in written], "won": steps[0]["success"], "turns": turns}
    about |= {"end": steps[0]["stop_reason"] or steps[-1]["end"]}
    return _member(written, 1) | about | {"start": "" if steps[0]["start"] == start else steps[0]["start"]}


def _mark_apart(members: Sequence[dict[str, Any]], has_parts: bool) -> bool:
    """Mark turns that were answered differently, though the members wrote the same so far; whether there are any.

    Args:
        has_parts: the reward of a last turn is also one of reward functions, which is no answer.
    """
    found: dict[Any, list[tuple[dict[str, Any], Any]]] = {}
    for member in members:
        for turn in member["turns"]:
            turn["apart"] = False
            if not turn["answers"]:  # it was cut, or took too long
                continue
            reward = None if has_parts and turn is member["turns"][-1] else turn["reward"]
            wrote = (member["start"], *member["token"][: turn["to"]])
            found.setdefault(wrote, []).append((turn, (turn["answers"], reward)))
    for alike in found.values():
        for turn, answer in alike:
            turn["apart"] = any(other != answer for _, other in alike)
    return any(turn["apart"] for alike in found.values() for turn, _ in alike)


def _mean(values: Sequence[Number]) -> Number:
    known = [value for value in values if value is not None]
    return _number(sum(known) / len(known)) if known else None


def _short(values: Iterator[Any] | Sequence[Any]) -> list[Any]:
    """Values as a list, with one element if all are the same."""
    found = list(values)
    return found[:1] if len(set(found)) == 1 else found


def _number(value: float | int, digits: int = 4) -> Number:
    """Rounds a number; None if it is not finite."""
    shown = float(f"{value:.{digits}g}")
    if not math.isfinite(shown):
        return None
    return int(shown) if shown == int(shown) else shown


MAX_VIDEO = 900_000
"""Bytes of a video that the page holds; of a larger one it gives the path."""
STATIC_GROUPS = 3
"""Groups that are tables, for readers without scripts."""


class Live(NamedTuple):
    """Addresses and script of a page that follows its run."""

    home: str
    """Address of all runs."""
    version: str
    """ETag of what is shown."""
    script: str
    """Asks for later versions."""
    run: str = ""
    """Name of the run in the list."""


class Answer(NamedTuple):
    """Whether the run learned."""

    word: str
    text: str


_OTHERS = "so all members of a group can be above 0, or below."
_COMPARED = {
    "knn": f"A step is compared with the returns from the nearest states of other episodes (credit.baseline=knn), {_OTHERS}",
    "lstd": f"A step is compared with the value of its state by least squares (credit.baseline=lstd), {_OTHERS}",
}
"""Explanations of what advantages are relative to, where it is not the group."""


def _compared(credit: object) -> str:
    match credit:
        case {"rule": "composed", "baseline": {"name": str(name)}}:
            return _COMPARED.get(name, "")
    return ""


def write_page(run: Path, out: Path | None = None) -> Path:
    """Write the page of the run in a folder, also of one that failed or still trains; returns its path.

    Args:
        out: None: ``report.html`` in the folder.

    Raises:
        ConfigError: ``out`` is a link, a folder or a device.
        RunFolderError: it is no run folder, or is damaged.
    """
    if out is not None and (out.is_symlink() or (out.exists() and not out.is_file())):  # such as /dev/stdout
        raise ConfigError(f"{str(out)!r} is no file that may be replaced; fix: a new name, such as page.html")
    with explained(run):
        folder = RunFolder.open(run)
        data = render(folder).encode(errors="backslashreplace")
    out = out or folder.report
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write(out, data)
    return out


def render(folder: RunFolder, live: Live | None = None) -> str:
    """The page; with ``live`` it follows the run."""
    config, provenance, summary = folder.read_config(), folder.read_provenance(), folder.read_summary()
    metrics, groups = folder.read_metrics(), load_groups(folder.groups)
    unit, score, _ = words_of(config)
    given, others = settings_of(config)
    has_video = folder.video.is_file() and folder.video.stat().st_size <= MAX_VIDEO
    frames, shown = read_frames(folder.frames), {(group["iteration"], group["group"]) for group in groups}
    return (
        templates(__package__)
        .get_template("page.html")
        .render(
            style=style(),
            script=resources(__package__).joinpath("page.js").read_text(encoding="utf-8"),
            live=live,
            subject=subject(config, summary),
            algorithm=config["algorithm"]["name"],
            seed=config["seed"],
            name=folder.path.resolve().name,
            ending=" ".join([_ending(folder, metrics, unit), *_origins(provenance, unit)]),
            answer=answer_of(folder),
            curve=curve_svg(metrics, "", unit, score) if metrics else "",
            video=b64encode(files.read(folder.video, MAX_VIDEO)).decode() if has_video else "",
            completions=_completions(groups),
            health=_health(metrics, folder),
            groups=groups,
            grouped="group_size" in config["algorithm"],
            compared=_compared(config["algorithm"].get("credit")),
            static=groups[:STATIC_GROUPS],
            data=to_json(groups),
            frames=frames.model_dump() if frames and shown.intersection([(frames.iteration, frames.group)]) else None,
            num_iterations=len({group["iteration"] for group in groups}),
            cloning=config["algorithm"]["name"] == CLONING,
            keeps_groups=config.get("evaluation", {}).get("num_logged_groups", 0) > 0,
            given=given,
            others=others,
            versions=_without_none(provenance.get("versions") or {}),
            facts=_facts(provenance, summary),
            commands=_commands(folder, provenance),
            score=score,
            unit=unit,
        )
    )


def templates(package: str) -> "Environment":
    """The templates of a package."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    env = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters["number"] = _shown
    return env


def style() -> str:
    """The style sheet."""
    return resources(__package__).joinpath("page.css").read_text(encoding="utf-8")


def words_of(config: Mapping[str, Any]) -> tuple[str, str, str]:
    """Names of a run's steps, scores and evaluated items."""
    if "task" in config:
        return "tokens", "reward", "prompts"
    return "demonstrated steps" if config["algorithm"]["name"] == CLONING else "environment steps", "return", "episodes"


def answer_of(folder: RunFolder) -> Answer:
    """Whether the run in a folder learned."""
    config = folder.read_config()
    _, score, sample = words_of(config)
    return answer(folder.read_scored(), score, sample, Goal.from_config(config))


def answer(metrics: Sequence[Mapping[str, Any]], score: str, sample: str, goal: Goal = UNKNOWN) -> Answer:
    """Whether the run learned: the last evaluation against the first one, and against the first iteration of training.

    An evaluation is better or worse than another one where their 95 % intervals do not overlap.
    """
    scores = [entry["rollout/return_mean"] for entry in metrics if "rollout/return_mean" in entry]
    evaluations = [entry for entry in metrics if "eval/return_mean" in entry]
    if not evaluations:
        if not scores:
            return Answer("Unknown", "No iteration was logged.")
        change = f"from {_shown(scores[0])} to {_shown(scores[-1])}"
        return Answer("Unknown", f"The {score} of training went {change}, and nothing was evaluated.")
    first, last = evaluations[0], evaluations[-1]
    before, after = first["eval/return_mean"], last["eval/return_mean"]
    at_first, at_last = interval_of(first), interval_of(last)
    if at_first is None or at_last is None:
        one = f", of one of the {sample}" if last.get("eval/episodes") == 1 else ""
        change = f"from {_shown(before)} to {_shown(after)}{one}"
        return Answer("Unknown", f"The evaluated {score} went {change}, without an interval.")
    interval = f"95 % interval {_shown(at_last[0])} to {_shown(at_last[1])}"
    end = f"{_shown(after)} ({interval}, {last['eval/episodes']:.0f} {sample})"
    untrained, (solved, rule) = scores[0] if scores else -inf, goal.reached(metrics)
    best = max(evaluations, key=lambda entry: float(entry["eval/return_mean"]))
    top = best["eval/return_mean"]
    if solved:
        start, where = (untrained, "in the first iteration") if scores else (before, "at first")
        return Answer("Solved", f"The {score} was {_shown(start)} {where} and is {end}. {rule}")
    if is_below(first, best) and is_below(last, best) and after - before < 0.5 * (top - before):
        peak = f"rose from {_shown(before)} to {_shown(top)} at step {best['env_steps']:,}"
        return Answer("No longer", f"The evaluated {score} {peak}, then fell to {end}.")
    if is_below(last, first):
        at = f"{_shown(before)} (95 % interval {_shown(at_first[0])} to {_shown(at_first[1])})"
        return Answer("No", f"The evaluated {score} fell from {at} to {end}.")
    yes = Answer("Yes, but not solved" if rule else "Yes", f" {rule}".rstrip())
    if is_below(first, last):
        rose = f"The evaluated {score} rose from {_shown(before)} to {end}"
        if after > untrained:
            return yes._replace(text=f"{rose}.{yes.text}")
        return Answer("No", f"{rose}, which is no more than the {_shown(untrained)} of the first iteration.")
    if scores[-1:] > [untrained] and at_last[0] > untrained:
        early = f"from {_shown(untrained)} in the first iteration, most of it before the first evaluation"
        return yes._replace(text=f"The {score} rose {early}; at the end it is {end}.{yes.text}")
    change = "no change" if at_first == at_last else "no more than noise"
    return Answer("Not visibly", f"The evaluated {score} was {_shown(before)} first and {end} last: {change}.")


def subject(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Name of the task."""
    return str(summary.get("task") or ("text" if "task" in config else config.get("env", {}).get("id", "?")))


def _ending(folder: RunFolder, metrics: list[dict[str, Any]], unit: str) -> str:
    """How far the run came, and why it ended."""
    reached = scores_of(metrics)
    done = f"{reached['env_steps']:,} {unit} in {reached['iterations']:,} iterations, {reached['seconds']:,.1f} s of training"
    if folder.is_training:
        return f"Still training: {done} so far. {progress(folder.read_config(), metrics)}".rstrip()
    if folder.is_agent:
        return "Saved by LanguageAgent.save, which keeps no metrics."
    stopped = str(folder.read_summary().get("stopped", ""))
    if not stopped:
        return f"Killed after {done}."
    if stopped == "failed":
        return f"The run failed with an error after {done}."
    return f"Ended by {stopped} after {done}."


def _origins(provenance: Mapping[str, Any], unit: str) -> Iterator[str]:
    """Sentences on the run that it was copied from, and on resumes with other budgets."""
    if provenance["forked_from"]:
        yield "It is a fork of {}, from step {}.".format(*provenance["forked_from"])
    for one in provenance["resumed"]:
        yield f"It was resumed after {one['step']} {unit}{one['cut']} with {one['after']} in place of {one['before']}."


def progress(config: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], *, runs: bool = True) -> str:
    """The share of the budget that is done, and the time that is left if the run goes on as fast: ``40 %, 1:30 left``."""
    last = metrics[-1] if metrics else {}
    shares = [last[metric] / config[name] for name, metric in BUDGETS.items() if config.get(name) and last.get(metric)]
    if not shares:
        return ""
    share, spent = min(shares[0], 1.0), last.get("time/total_seconds", 0.0)
    left = int(min(spent / share - spent, last.get("time/left_seconds", inf)))
    hours, minutes = divmod(left // 60, 60)
    time = f", {hours}:{minutes:02}:{left % 60:02} left" if hours else f", {minutes}:{left % 60:02} left"
    return f"{share:.0%}{time if runs else ''}".replace("%", " %")


def _completions(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The best and the worst completion of some groups of the first and the last iteration of a language model; of episodes also
    the one in the middle.
    """
    if not groups or not groups[0]["text"]:
        return []
    iterations = [group["iteration"] for group in groups]
    found = []
    for iteration in sorted({min(iterations), max(iterations)}):
        some = [group for group in groups if group["iteration"] == iteration]
        some = some[: 1 if some[0]["talks"] else STATIC_GROUPS]
        shown = []
        for group in some:
            ranked = sorted(group["members"], key=lambda member: -member["return"])
            places = (0, len(ranked) // 2, -1) if group["talks"] else (0, -1)
            told = [member["won"] for member in ranked if group["talks"] and member["won"] is not None]
            won = f"{sum(told)} of {len(ranked)} members won" if told else ""
            best = {id(ranked[place]): ranked[place] for place in places}
            shown.append({"start": group["start"], "talks": group["talks"], "won": won, "members": [*best.values()]})
        found.append({"iteration": iteration, "groups": shown})
    return found


def _health(metrics: Sequence[Mapping[str, Any]], folder: RunFolder) -> list[dict[str, Any]]:
    """The findings with their figures."""
    read = Metrics(metrics)
    rows = []
    for finding in diagnose(folder):
        label = f"{finding.title}, all of training"
        picture = small([(read[key].steps, read[key].values) for key in finding.keys], label) if finding.keys else ""
        rows.append(finding._asdict() | {"picture": picture, "word": WORDS[finding.verdict]})
    return rows


def settings_of(config: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """The settings of a run that were set, with their defaults, and all others."""
    name, usual, given, others = config["algorithm"]["name"], dict[str, Any](), {}, {}
    with suppress(ConfigError, KeyError, ValidationError):  # an algorithm of a plugin that is not loaded
        is_text = "task" in config
        adapters = bool(config.get("model", {}).get("lora"))
        cfg = resolve_text(name, adapters=adapters) if is_text else resolve(config["env"]["id"], name)
        usual = flat(cfg.model_dump(mode="json"))
    for key, value in flat(dict(config)).items():
        if key in usual and usual[key] == value:
            others[key] = _setting(value)
        else:
            instead = f" (default {_setting(usual[key])})" if key in usual and key != "env.id" else ""
            given[key] = f"{_setting(value)}{instead}"
    return given, others


def _setting(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _facts(provenance: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, str]:
    """Machine, time and resources of the run."""
    git, machine = provenance.get("git") or {}, provenance.get("machine") or {}
    facts = {
        "started": provenance.get("started"),
        **{name: machine.get(name) for name in ("system", "processor", "cores")},
        "git commit": f"{git['commit']}{' with changes' if git.get('dirty') else ''}" if git.get("commit") else None,
        "peak memory": f"{summary['peak_memory_mib']:,.0f} MiB" if summary.get("peak_memory_mib") else None,
        "plugins": ", ".join(provenance["plugins"]),
    }
    return _without_none(facts)


def _without_none(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in facts.items() if value}


def _commands(folder: RunFolder, provenance: Mapping[str, Any]) -> dict[str, str]:
    """How the run was made, and how to make it again."""
    given, found = provenance["given_in_python"], {"made by": str(provenance.get("command") or "")}
    if given:
        again = f"in Python, where {' and '.join(given)} came from: gw.train(..., seed={folder.read_config()['seed']})"
    else:
        again = f"{plugins.program()} train {shlex.quote(str(folder.config))}{plugins.options(provenance['plugins'])}"
    if not provenance["forked_from"] and not provenance["resumed"]:  # otherwise the sentences on these tell
        found["repeat"] = again
    if folder.read_summary().get("stopped") not in BUDGETS:
        found["continue"] = plugins.resume_command(folder.shown, given, provenance["plugins"])
    return _without_none(found)


def _shown(value: float | int) -> str:
    """Four digits."""
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


# Views of a run in a notebook


class Curve(str):
    """A picture as SVG, which a notebook shows."""

    def _repr_svg_(self) -> str:
        return str(self)


class Frame(str):
    """A page, which a notebook shows in a frame."""

    def __repr__(self) -> str:
        return f"<Frame: {len(self):,} characters>"  # a notebook saves this with the page

    def _repr_html_(self) -> str:
        # without the base, links inside the page would lead to the notebook
        page = self.replace("<head>", '<head>\n<base href="about:srcdoc">', 1)
        style = "width: 100%; height: 45rem; border: 0"
        return f'<iframe srcdoc="{escape(page)}" title="Page of the run" style="{style}"></iframe>'


def plot(folder: RunFolder) -> Curve:
    """The learning curve of a run."""
    with explained(folder.shown):
        config = folder.read_config()
        title = f"{_title(folder)}, seed {config['seed']}"
        return Curve(curve_svg(folder.read_metrics(), title, *words_of(config)[:2]))


def to_html(folder: RunFolder) -> str:
    """A short version of the run's page, in HTML."""
    with explained(folder.shown):
        config, metrics = folder.read_config(), folder.read_metrics()
        unit, score, _ = words_of(config)
        learned = answer_of(folder)
        curve = curve_svg(metrics, "", unit, score) if metrics else ""
        sick = [finding for finding in diagnose(folder) if finding.verdict != "good"]
    row = Markup("<li>{}: <b>{}</b> {} {}</li>")
    rows = Markup().join(row.format(WORDS[f.verdict], f.title, f.text, f.advice) for f in sick)
    parts = Markup("<p><b>{}</b>, seed {}, {}</p><p>Did it learn? <b>{}.</b> {}</p>").format(
        _title(folder), config["seed"], folder.shown, learned.word, learned.text
    )
    return parts + Markup('<div style="max-width: 40rem">{}</div><ul>{}</ul>').format(curve, rows)


def explore(folder: RunFolder) -> Frame:
    """The page of a run, with the explorer of its groups."""
    with explained(folder.shown):
        return Frame(render(folder))


def _title(folder: RunFolder) -> str:
    config = folder.read_config()
    return f"{subject(config, folder.read_summary())}, {config['algorithm']['name']}"
