"""Health of a run: a table of rules on its metrics, and a few on the groups that it kept. Each gives a verdict and advice."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np

from groupwise import plugins
from groupwise.report.folder import RunFolder, evaluations_of, interval_of, kept_iterations, read_groups

Verdict = Literal["good", "look", "bad"]
WORDS: dict[Verdict, str] = {"good": "good", "look": "look", "bad": "trouble"}  # as people read them
RETURN, SCORE, KL, STEPS = "rollout/return_mean", "eval/return_mean", "train/approx_kl", "train/optimizer_steps"
FAR = 0.2  # nats of an update that ruins a policy
WILD = 100.0  # size of observations that is too large for a network without a normaliser
CLONING = "bc"  # plays no episodes


class Finding(NamedTuple):
    """One row of the page's table."""

    title: str
    keys: tuple[str, ...]
    """Metrics to draw."""
    verdict: Verdict
    text: str
    advice: str = ""
    """Steps to take; empty where all is well."""


class Goal(NamedTuple):
    """The end of a task, as far as it is known."""

    threshold: float | None = None
    """``reward_threshold`` of its Gymnasium spec."""
    limit: int | None = None
    """Decisions of an episode, as ``eval/length_mean`` counts them."""
    steps: int | None = None
    """Environment steps until all rows have ended an episode, at the latest."""
    samples: bool = False
    """Whether evaluations sample actions, as training does."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Goal":
        """The goal of a run with these settings. Gymnasium is only asked for what it knows: an id may name a stranger's module."""
        import gymnasium

        env = config.get("env", {})
        spec = gymnasium.registry.get(str(env.get("id")))
        samples = config.get("evaluation", {}).get("deterministic") is False
        if spec is None:
            return cls(None, *_decisions(env.get("max_episode_steps"), env), samples)
        limit = env.get("max_episode_steps") or spec.max_episode_steps
        is_registered = limit == spec.max_episode_steps and not env.get("kwargs")  # otherwise it is another task
        return cls(spec.reward_threshold if is_registered else None, *_decisions(limit, env), samples)

    def reached(self, metrics: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
        """Whether the last evaluation solves the task, and the rule that says so; without a rule, the text is empty."""
        returns = [entry[key] for key in (RETURN, SCORE) for entry in metrics if key in entry]
        last: Mapping[str, Any] = (evaluations_of(metrics) or [{}])[-1]
        interval = interval_of(last) if last else None
        if interval is None:
            return False, ""
        if self.threshold is not None:
            least = f"{self.threshold:g} (reward_threshold in Gymnasium)"
            return interval[0] >= self.threshold, f"The task is solved when the whole interval is at least {least}."
        for key, words in (("eval/success_rate", "episodes succeed"), ("eval/pass_at_1", "completions are right")):
            if key in last:
                return last[key] == 1, f"{100 * last[key]:.4g} % of the evaluated {words}."
        top, margin = max(returns), 1e-6 * abs(last[SCORE])
        is_perfect = last["eval/return_std"] <= margin and last[SCORE] >= top - margin and min(returns) < top - margin
        if is_perfect and last[SCORE] > 0 and last.get("eval/length_mean", -1) == self.limit:
            return True, f"Every episode ran to its limit of {self.limit:,} steps, with the highest return of the run."
        return False, ""


def _decisions(limit: object, env: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Most decisions of an episode of ``limit`` environment steps, and the steps of one episode in every row."""
    each = [
        env.get("num_action_steps") or env.get("action_chunk", 1),
        env.get("action_repeat", 1),
        env.get("num_envs", 1),
    ]
    if not isinstance(limit, int) or not all(isinstance(number, int) and number > 0 for number in each):
        return None, None
    *chunk, rows = map(int, each)
    return -(-limit // math.prod(chunk)), limit * rows


UNKNOWN = Goal()


def is_below(evaluation: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the 95 % interval of an evaluation ends below where that of the other one begins."""
    low, high = interval_of(evaluation), interval_of(other)
    return low is not None and high is not None and low[1] < high[0]


class Series:
    """A metric; "early" and "late" are means of the first and the last fifth. All are NaN if it was never logged."""

    def __init__(self, steps: list[int], values: list[float]) -> None:
        known, fifth = values or [math.nan], max(1, len(values) // 5)
        self.steps, self.values = steps, values
        self.first, self.last, self.min, self.max = known[0], known[-1], min(known), max(known)
        self.early, self.late, self.sum = fmean(known[:fifth]), fmean(known[-fifth:]), sum(values)


class Metrics:
    """The entries of ``metrics.jsonl``.

    An update without an optimiser step has no KL and no entropy: it logs zeros, which are left out.
    """

    def __init__(self, entries: Sequence[Mapping[str, Any]], goal: Goal = UNKNOWN) -> None:
        self.evaluations = [entry for entry in entries if SCORE in entry]
        self.interval = (interval_of(self.evaluations[-1]) if self.evaluations else None) or (math.nan, math.nan)
        """95 % interval of the last evaluation."""
        self.cut = float(self.evaluations[-1].get("eval/cut_episodes", 0)) if self.evaluations else 0.0
        """Episodes that the last evaluation cut."""
        self.samples = goal.samples
        """Whether evaluations sample actions, as training does."""
        self.solved = goal.reached(entries)[0]
        """Whether the last evaluation solves the task."""
        self.entries = [
            {k: v for k, v in entry.items() if entry.get(STEPS) != 0 or k[:6] != "train/" or k == "train/grad_norm"}
            for entry in entries
        ]
        self.is_short = goal.steps is not None and self["env_steps"].max <= goal.steps
        """Whether training may have ended before the first episodes did."""
        returns = self[RETURN]
        self.span = returns.max - returns.min
        """Difference between the highest and the lowest return of training."""
        gain = returns.late - returns.early
        self.improved = gain > 0 and gain >= 0.5 * (returns.max - returns.early)
        """Whether the return of training rose, and kept at least half of its gain."""
        self.on_top = self.improved and returns.late >= returns.max - 0.1 * self.span
        """Whether the return rose, and ended at its highest."""
        succeeds = self["rollout/success_rate"].late == 1
        self.is_constant = len(returns.values) >= 3 and self.span <= 1e-6 * abs(returns.max) and not succeeds
        """Whether the return is always the same, in a task that does not always succeed."""
        self.kl = max(self[KL].early, self[KL].late)
        """KL of an update; a policy that moved too far at first may be unable to move later."""

    def __contains__(self, key: str) -> bool:
        return any(key in entry for entry in self.entries)

    def __getitem__(self, key: str) -> Series:
        known = [entry for entry in self.entries if key in entry]
        return Series([entry.get("env_steps", 0) for entry in known], [float(entry[key]) for entry in known])

    @property
    def shares(self) -> str:
        """Parts of the time of training, such as ``collect 75 %``."""
        parts = ("collect", "advantage", "update", "evaluate", "save")
        spent = {part: self[f"time/{part}_seconds"].sum for part in parts}
        spent["update"] -= spent["advantage"]
        total = max(sum(spent.values()), 1e-9)
        return ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in spent.items() if seconds)


Condition = Callable[[Metrics, Series], bool]
"""Test of all metrics, and of the first one that the rule needs."""


class Rule(NamedTuple):
    """A row of the table. It is silent unless the run logged all metrics that it needs."""

    title: str
    needs: tuple[str, ...]
    text: str
    """Format of all metrics ``m`` and the first one that is needed, ``v``."""
    sick: tuple[tuple[Condition, str], ...] = ()
    """Conditions with advice; the first one that holds counts."""
    bad: Condition | bool = False
    """Whether that is trouble, not only something to look at."""
    excuses: tuple[tuple[Condition, str], ...] = ()
    """Conditions under which nothing is wrong, with the sentence to print."""
    draws: int = 1
    """How many of the metrics that it needs are drawn: the first ones."""

    def find(self, m: Metrics) -> Finding:
        """The verdict on a run."""
        v, keys = m[self.needs[0]], self.needs[: self.draws]
        text = re.sub(r"(?<=\d)%", " %", self.text.format(m=m, v=v))
        advice = next((advice for holds, advice in self.sick if holds(m, v)), "")
        for holds, words in self.excuses if advice else ():
            if holds(m, v):
                return Finding(self.title, keys, "good", f"{text} {words}".rstrip())
        is_bad = self.bad if isinstance(self.bad, bool) else self.bad(m, v)
        return Finding(self.title, keys, ("bad" if is_bad else "look") if advice else "good", text, advice)


def _decided(m: Metrics, v: Series) -> bool:
    return v.first > 0 and v.late < max(0.05 * v.first, 0.01)


def _undecided(m: Metrics, v: Series) -> bool:
    """Whether the policy acts as at first, and the greedy one does better by more than training ever gained, if it rose."""
    hides_skill = m.interval[0] - m[RETURN].late > m.span
    return len(m.entries) >= 10 and v.late > 0.99 * v.first > 0 and (not m.on_top or hides_skill)


def _got_worse(m: Metrics, v: Series) -> bool:
    """Whether the last evaluation is below the best one, as the intervals of both say, in a run that learned."""
    best, seen = max(m.evaluations, key=lambda entry: float(entry[SCORE])), v.values + m[RETURN].values
    fell = is_below(m.evaluations[-1], best) and v.max - v.last > 0.3 * (max(seen) - min(seen))
    return fell and any(m["train/grad_norm"].values or [1])


def _falls_short(m: Metrics, v: Series) -> bool:
    """Whether the interval of the last evaluation ends far below the return of training."""
    return v.late - m.interval[1] > 0.3 * m.span > 0


SOLVED: tuple[Condition, str] = (lambda m, v: m.solved, "The task is solved.")


# fmt: off
RULES = (  # causes go before their consequences
    Rule("Return", (RETURN,), "Between {v.min:.4g} and {v.max:.4g} in training.", bad=True, sick=(
        (lambda m, v: m.is_constant, "It never changes. If a goal was never reached, reward progress towards it, or start nearer "
         "to it. If the return cannot be higher, the task is solved. Else the reward does not depend on the policy."),
    ), excuses=(SOLVED,)),
    Rule("Ends of episodes", ("rollout/episodes",), "{v.sum:,.0f} episodes ended in training.", bad=lambda m, v: v.sum == 0, sick=(
        (lambda m, v: v.sum == 0 or m.cut > m["eval/episodes"].last / 2,
         "Episodes do not end, or evaluations cut them: set env.max_episode_steps, or end episodes in step()."),
    ), excuses=((lambda m, v: m.is_short and m.cut == 0, "Training was shorter than a full episode in each environment."),)),
    Rule("KL of an update", (KL, STEPS), "It moves the policy by {m.kl:.2g} nats.", bad=lambda m, v: m.kl > FAR, sick=(
        (lambda m, v: m.kl > 0.05, "Lower learning_rate, fewer num_epochs, or target_kl such as 0.02."),
        (lambda m, v: m.kl < 1e-5, "The policy hardly moves: a higher learning_rate."),
    ), excuses=((lambda m, v: m[STEPS].late <= 1, "With one optimiser step in each update it is 0 by definition."),)),
    Rule("Groups without signal", ("rollout/zero_variance_groups",),
         "Members of {v.late:.0%} of the groups did equally well.", bad=lambda m, v: v.late > 0.9 and not m.improved, sick=(
        (lambda m, v: m.is_constant, "This follows from: Return."),
        (lambda m, v: m.kl > FAR, "This follows from: KL of an update."),
        (lambda m, v: any(0.1 <= m[key].late <= 0.9 for key in ("rollout/success_rate", "rollout/pass_at_1")),
         "Some attempts succeed, so groups may be too small for these starts: a larger group_size."),
        (lambda m, v: m.improved, "The return rose. If the task is not solved: harder starts, or a larger group_size."),
        (lambda m, v: True, "A denser reward, a larger group_size, easier or harder starts; collection.dynamic_sampling."),
    ), excuses=(SOLVED, (lambda m, v: v.late <= 0.5, ""), (lambda m, v: m.on_top, "The task may be solved: the return rose."))),
    Rule("Spread of rewards", ("rollout/reward_std",), "Standard deviation within a group: {v.late:.3g}.", bad=True, sick=(
        (lambda m, v: v.late <= 1e-6, "Nothing to compare: another reward, or a higher sampling.temperature."),
    ), excuses=(SOLVED,)),
    Rule("Clipped steps", ("train/clip_fraction_low", "train/clip_fraction_high", "train/clip_fraction"),
         "{v.late:.1%} below the clip range, {m[train/clip_fraction_high].late:.1%} above it.", draws=2, sick=(
        (lambda m, v: m["train/clip_fraction"].late > 0.4, "Lower learning_rate, or fewer num_epochs."),
    )),
    Rule("Entropy", ("train/entropy",), "From {v.first:.3g} at first to {v.late:.3g} nats per step.", bad=_decided, sick=(
        (_decided, "It decided too early: lower learning_rate, or ent_coef such as 0.01."),
        (_undecided, "The policy acts as randomly as at first. A lower ent_coef; where it is 0, a higher learning_rate."),
    ), excuses=(SOLVED, (lambda m, v: _decided(m, v) and m.improved, "The policy has decided, and the return rose."),)),
    Rule("Gradient norm", ("train/grad_norm",), "{v.late:.3g} before clipping.", bad=True, sick=(
        (lambda m, v: "train/skipped_steps" in m, "Numbers were not finite: lower learning_rate, or look at the rewards."),
        (lambda m, v: v.values.count(0) > len(v.values) / 2, "Most updates change nothing: see the groups without signal."),
    ), excuses=((lambda m, v: m.solved and "train/skipped_steps" not in m, "The task is solved."),)),
    Rule("Critic", ("train/explained_variance",), "The critic explains {v.late:.0%} of the variance of the returns.", sick=(
        (lambda m, v: v.late < 0.3 and m.kl > FAR, "This follows from: KL of an update."),
        (lambda m, v: v.late < 0.3, "It helps little: policy.normalize_obs, policy.normalize_reward, a higher learning_rate."),
    ), excuses=(SOLVED, (lambda m, v: m.improved, ""))),
    Rule("Sampler against trainer", ("rollout/sampler_kl",), "KL {v.late:.2g} nats per step.", bad=lambda m, v: v.late > 0.1, sick=(
        (lambda m, v: v.late > 0.01,
         "Another precision, or objective.importance_sampling_correction; in control, a policy's act and evaluate."),
    )),
    Rule("Length", ("rollout/length_mean",), "From {v.early:.4g} to {v.late:.4g} on average.", sick=(
        (lambda m, v: not 0.5 < v.late / v.early < 2, "The return does not rise with it: look at short and long episodes."),
    ), excuses=((lambda m, v: m.improved, ""),)),
    Rule("Cut completions", ("completions/clipped_ratio", "rollout/ended_by_eos", "rollout/ended_by_stop"),
         "{v.late:.0%} end at the limit, {m[rollout/ended_by_eos].late:.0%} with the end token, "
         "{m[rollout/ended_by_stop].late:.0%} with a stop string.", bad=lambda m, v: v.late > 0.5, sick=(
        (lambda m, v: v.late > 0.1, "A larger sampling.max_new_tokens, or overlong_buffer."),
    )),
    Rule("Success", ("rollout/success_rate",), "{v.late:.0%} of the episodes of training.", bad=True, sick=(
        (lambda m, v: v.late <= 0, "No episode succeeds: easier starts, a denser reward, or demonstrations."),
    )),
    Rule("Evaluation against training", (RETURN, SCORE),
         "Sampled in training {v.late:.4g}, last evaluation {m[eval/return_mean].last:.4g}.", draws=2, sick=(
        (lambda m, v: m.samples and _falls_short(m, v), "Starts of evaluations may differ from those of training: train on more starts, or more data."),
        (_falls_short, "The policy may need random actions: evaluation.deterministic=false."),
    )),
    Rule("Last against best", (SCORE, "eval/return_std", "eval/episodes"), "Last {v.last:.4g}, best {v.max:.4g}.", sick=(
        (_got_worse, "The policy got worse; the best one is in checkpoints/best. A lower learning_rate, or target_kl."),
    )),
    Rule("Speed", ("time/steps_per_second", "time/collect_seconds", "time/update_seconds"),
         "{v.late:,.0f} steps per second at the end. Of the time: {m.shares}."),
)
# fmt: on


def examine(
    entries: Sequence[Mapping[str, Any]], others: Sequence[Finding] = (), goal: Goal = UNKNOWN
) -> list[Finding]:
    """Other findings, and those of all rules whose metrics the run logged, the worst first."""
    m = Metrics(entries, goal)
    found = [*others, *(rule.find(m) for rule in RULES if all(key in m for key in rule.needs))]
    return sorted(found, key=lambda finding: ("bad", "look", "good").index(finding.verdict))


def diagnose(folder: RunFolder) -> list[Finding]:
    """All findings on a run, the worst first; a ``RunFolderError`` if a file is damaged."""
    paths = list(kept_iterations(folder.groups).values())
    ends = [read_groups(path) for path in dict.fromkeys(paths[:1] + paths[-1:])]
    metrics, config, summary = folder.read_scored(), folder.read_config(), folder.read_summary()
    others = examine_groups(config, ends, metrics[-1:])
    known = folder.read_provenance()
    again, end = plugins.resume_command(folder.shown, known["given_in_python"], known["plugins"]), "End of the run"
    has_failed, room = summary.get("stopped") == "failed", "Make room on the disk, or give rights to write"
    if has_failed and not folder.is_training:
        text = f"An error ended it: {summary.get('error', 'its message was not kept')}"
        others.append(Finding(end, (), "bad", text, f"After its cause is gone: {again}"))
    elif not summary and not folder.is_training and not folder.is_agent:
        text = "It was killed, or its machine stopped: out of memory, or out of time?"
        others.append(Finding(end, (), "look", text, f"To continue it: {again}"))
    if (steps := summary.get("unsaved_env_steps")) and not has_failed:  # an update that fails is not saved
        text = f"The last {steps:,} {'tokens' if 'task' in config else 'steps'} are not saved."
        others.append(Finding("Checkpoint", (), "bad", text, f"{room}, then: {again}"))
    if iterations := summary.get("unlogged_iterations"):
        text = f"The metrics of {iterations:,} iterations are not saved."
        others.append(Finding("Metrics", (), "bad", text, f"{room}."))
    if config["algorithm"]["name"] == CLONING:
        own = ("rollout/", "time/advantage")
        metrics = [{key: value for key, value in entry.items() if not key.startswith(own)} for entry in metrics]
    return examine(metrics, others, Goal.from_config(config))


def examine_groups(
    config: Mapping[str, Any], files: Sequence[Mapping[str, Sequence[Any]]], last: Sequence[Mapping[str, Any]]
) -> list[Finding]:
    """The findings on kept groups.

    Args:
        files: columns as ``read_groups`` gives them.
        last: the last entry of the metrics, which names the rewards.
    """
    found: list[Finding] = []

    def add(title: str, text: str, is_sick: bool, advice: str) -> None:
        found.append(Finding(title, (), "look" if is_sick else "good", text, advice if is_sick else ""))

    if known := [value for columns in files for value in columns["observation"] if value is not None]:
        observations = np.array(known)
        size = np.sqrt(np.square(observations).mean(axis=0))
        largest = int(size.argmax())
        text = f"Number {largest} of an observation is the largest, with a root mean square of {size[largest]:.3g}."
        indices = bool((observations == observations.round()).all())  # the network gets them one-hot
        is_raw = not config.get("policy", {}).get("normalize_obs", False) and not indices
        add("Scale of observations", text, is_raw and size[largest] >= WILD, "Normalise them: policy.normalize_obs.")
    weights = [reward["weight"] for reward in config.get("task", {}).get("rewards", [])]
    totals: list[list[float]] = []  # of each member
    for columns in files if "task" in config else ():
        steps = zip(columns["group"], columns["member"], columns["reward_parts"], strict=True)
        for _, some in groupby(steps, key=lambda step: step[:2]):
            parts = [part for *_, part in some]
            totals += [np.sum(parts, axis=0).tolist()] if parts[0] is not None else []
    if totals:  # of two or more rewards; that of a text environment is the first
        own = ["environment"] if len(totals[0]) == len(weights) + 1 else []
        weights = [1.0] * len(own) + weights
        names = [name for entry in last for name in re.findall(r"reward/(\S+)_mean", " ".join(entry))]
        if len(names) != len(weights):  # a reward that gave nothing in the last iteration is not in its metrics
            names = own + [f"reward {number}" for number in range(1, len(weights) - len(own) + 1)]
        rewards = np.array(totals) * weights
        spans = dict(zip(names, np.ptp(rewards, axis=0).tolist(), strict=True))
        widest = max(spans, key=lambda name: spans[name])
        drowned = " and ".join(name for name, span in spans.items() if 0 < span < 0.05 * spans[widest])
        text = f"Ranges of the weighted rewards: {', '.join(f'{name} {span:.3g}' for name, span in spans.items())}."
        advice = f"{widest} dominates, {drowned} hardly counts: other weights in task.rewards, or rewards of one scale."
        add("Sizes of rewards", text, bool(drowned), advice)
    return found
