"""What the metrics of a run say about its health: a verdict in words, and what to do."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np

from groupwise import plugins
from groupwise.report.folder import RunFolder, half_width_95, kept_iterations, read_groups

Verdict = Literal["good", "look", "bad"]
WORDS: dict[Verdict, str] = {"good": "good", "look": "look", "bad": "trouble"}
"""Verdicts as people read them."""


RETURN = "rollout/return_mean"
FAR = 0.2
"""Nats of an update that ruins a policy."""


class Finding(NamedTuple):
    """One row of the table."""

    title: str
    keys: tuple[str, ...]
    """Metrics to draw."""
    verdict: Verdict
    text: str
    advice: str = ""
    """What to do; empty where all is well."""
    values: Sequence[float] = ()
    """Ratios to draw in place of metrics."""


def percent(share: float, digits: int = 0) -> str:
    """Such as 12 %."""
    return f"{100 * share:.{digits}f} %"


class Metrics:
    """The entries of ``metrics.jsonl``; "late" is the mean of the last fifth of a metric's values, "early" of the first.

    An update without an optimiser step has no KL and no entropy: it logs zeros, which are left out.
    """

    def __init__(self, entries: Sequence[Mapping[str, Any]]) -> None:
        self.entries = [_with_known(entry) for entry in entries]

    def __contains__(self, key: str) -> bool:
        return any(key in entry for entry in self.entries)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Environment steps and values."""
        found = [(entry.get("env_steps", 0), float(entry[key])) for entry in self.entries if key in entry]
        return [step for step, _ in found], [value for _, value in found]

    def late(self, key: str) -> float:
        """At the end."""
        values = self.series(key)[1]
        return fmean(values[-max(1, len(values) // 5) :])

    def early(self, key: str) -> float:
        """At the beginning."""
        values = self.series(key)[1]
        return fmean(values[: max(1, len(values) // 5)])

    @property
    def improved(self) -> bool:
        """Whether the return of training rose, and kept at least half of what it had gained."""
        if RETURN not in self:
            return False
        early, late = self.early(RETURN), self.late(RETURN)
        return late > early and late - early >= 0.5 * (max(self.series(RETURN)[1]) - early)

    @property
    def on_top(self) -> bool:
        """Whether the return of training rose, and ended as high as it ever was."""
        if not self.improved:
            return False
        values = self.series(RETURN)[1]
        return self.late(RETURN) >= max(values) - 0.1 * (max(values) - min(values))


def _with_known(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    if entry.get("train/optimizer_steps") != 0:
        return entry
    return {key: value for key, value in entry.items() if not key.startswith("train/") or key == "train/grad_norm"}


def _moves_too_far(metrics: Metrics) -> bool:
    key = "train/approx_kl"
    return key in metrics and max(metrics.early(key), metrics.late(key)) > FAR


def _is_constant(metrics: Metrics) -> bool:
    return RETURN in metrics and constant(metrics).verdict != "good"


_CAUSES: dict[str, Callable[[Metrics], bool]] = {"Return": _is_constant, "KL of an update": _moves_too_far}
"""Findings that leave groups without signal."""


def signal(metrics: Metrics) -> Finding:
    """Groups whose members all did equally well teach nothing."""
    share = metrics.late("rollout/zero_variance_groups")
    text = f"{percent(share)} of the groups have members that all did equally well. They teach nothing."
    made = Finding("Groups without signal", ("rollout/zero_variance_groups",), "good", text)
    if share <= 0.5:
        return made
    if metrics.on_top:
        return made._replace(text=f"{text} The return rose to its highest, so the task may be solved.")
    made = made._replace(verdict="bad" if share > 0.9 and not metrics.improved else "look")
    if cause := next((title for title, is_cause in _CAUSES.items() if is_cause(metrics)), None):
        return made._replace(advice=f"This follows from: {cause}.")
    rates = [metrics.late(key) for key in ("rollout/success_rate", "rollout/pass_at_1") if key in metrics]
    if rates and 0.1 <= rates[0] <= 0.9:
        text = f"{text} But {percent(rates[0])} of all attempts succeed."
        return made._replace(text=text, advice="Groups may be too small for these starts: a larger group_size.")
    if metrics.improved:
        solved = "The return rose, so the task may be solved. If it is not: harder starts, or a larger group_size."
        return made._replace(advice=solved)
    advice = "A denser reward, a larger group_size, easier or harder starts; collection.dynamic_sampling."
    return made._replace(advice=advice)


def constant(metrics: Metrics) -> Finding:
    """A return that is the same in every episode teaches nothing."""
    values = metrics.series(RETURN)[1]
    made = Finding("Return", (RETURN,), "good", f"Between {min(values):.4g} and {max(values):.4g} in training.")
    succeeds = "rollout/success_rate" in metrics and metrics.late("rollout/success_rate") == 1
    if len(values) < 3 or max(values) - min(values) > 1e-6 * abs(max(values)) or succeeds:
        return made
    text = "No episode earned a reward." if values[-1] == 0 else f"It was {values[-1]:.4g} in all of training."
    advice = (
        "If a goal was never reached, reward progress towards it, or start nearer to it. If the return cannot be higher, "
        "the task is solved. Else the reward does not depend on the policy."
    )
    return made._replace(verdict="bad", text=text, advice=advice)


def endings(metrics: Metrics) -> Finding:
    """Episodes must end for their returns to be known."""
    ended = sum(metrics.series("rollout/episodes")[1])
    made = Finding("Ends of episodes", ("rollout/episodes",), "good", f"{ended:,.0f} episodes ended in training.")
    if ended == 0:
        text = f"No episode ended in {metrics.entries[-1].get('env_steps', 0):,} steps."
        return made._replace(verdict="bad", text=text, advice="Set env.max_episode_steps, or end episodes in step().")
    cut, played = (metrics.series(f"eval/{name}")[1] for name in ("cut_episodes", "episodes"))
    if not cut or cut[-1] <= played[-1] / 2:
        return made
    text = f"{cut[-1]:.0f} of the last evaluation's {played[-1]:.0f} episodes did not end, and were cut."
    return made._replace(verdict="look", text=text, advice="Set env.max_episode_steps, or end episodes in step().")


def spread(metrics: Metrics) -> Finding:
    """Rewards in a group must differ."""
    std = metrics.late("rollout/reward_std")
    made = Finding(
        "Spread of rewards", ("rollout/reward_std",), "good", f"Standard deviation within a group: {std:.3g}."
    )
    if std > 1e-6:
        return made
    return made._replace(verdict="bad", advice="Nothing to compare: another reward, or a higher sampling.temperature.")


def distance(metrics: Metrics) -> Finding:
    """How far an update moves the policy."""
    # a policy that moved too far at first may be unable to move later
    kl = max(metrics.early("train/approx_kl"), metrics.late("train/approx_kl"))
    steps = metrics.late("train/optimizer_steps")
    made = Finding("KL of an update", ("train/approx_kl",), "good", f"The policy moves by {kl:.2g} nats in an update.")
    if steps <= 1:
        return made._replace(text="One optimiser step in each update: the KL is 0 by definition.")
    if kl > 0.05:
        advice = "Lower learning_rate, fewer num_epochs, or target_kl such as 0.02."
        return made._replace(verdict="bad" if kl > FAR else "look", advice=advice)
    if kl < 1e-5:
        return made._replace(verdict="look", advice="The policy hardly moves: a higher learning_rate.")
    return made


def clipping(metrics: Metrics) -> Finding:
    """Steps outside the clip range."""
    share, low, high = (metrics.late(f"train/clip_fraction{side}") for side in ("", "_low", "_high"))
    keys = ("train/clip_fraction_low", "train/clip_fraction_high")
    made = Finding(
        "Clipped steps", keys, "good", f"{percent(low, 1)} below the clip range, {percent(high, 1)} above it."
    )
    if share > 0.4:
        return made._replace(verdict="look", advice="Lower learning_rate, or fewer num_epochs.")
    return made


def entropy(metrics: Metrics) -> Finding:
    """A policy that no longer tries anything, or never decides."""
    early, late = metrics.series("train/entropy")[1][0], metrics.late("train/entropy")
    made = Finding("Entropy", ("train/entropy",), "good", f"From {early:.3g} at first to {late:.3g} nats per step.")
    if early > 0 and late < max(0.05 * early, 0.01):
        if metrics.improved:
            return made._replace(text=f"{made.text} The policy has decided, and the return rose.")
        advice = "It decided too early: lower learning_rate, ent_coef such as 0.01, or adaptive_entropy."
        return made._replace(verdict="bad", advice=advice)
    if len(metrics.entries) >= 10 and late > 0.99 * early > 0 and (not metrics.on_top or _hides_skill(metrics)):
        text = f"{made.text} The policy acts as randomly as at first."
        return made._replace(
            verdict="look", text=text, advice="A lower ent_coef; where it is 0, a higher learning_rate."
        )
    return made


def _hides_skill(metrics: Metrics) -> bool:
    """Whether the greedy policy does better than training by more than training ever gained."""
    greedy, values = metrics.series("eval/return_mean")[1], metrics.series(RETURN)[1]
    return bool(greedy) and greedy[-1] - metrics.late(RETURN) > max(values) - min(values)


def gradient(metrics: Metrics) -> Finding:
    """Updates that change nothing, or too much."""
    norms = metrics.series("train/grad_norm")[1]
    zero = sum(norm == 0 for norm in norms)
    made = Finding(
        "Gradient norm", ("train/grad_norm",), "good", f"{metrics.late('train/grad_norm'):.3g} before clipping."
    )
    if "train/skipped_steps" in metrics:
        advice = "Numbers were not finite: lower learning_rate, or look at the rewards."
        return made._replace(verdict="bad", advice=advice)
    if zero > len(norms) / 2:
        text = f"It is 0 in {zero} of {len(norms)} iterations: they change nothing."
        return made._replace(verdict="bad", text=text, advice="See the groups without signal; or learning is over.")
    return made


def critic(metrics: Metrics) -> Finding:
    """What the critic predicts of the returns."""
    explained = metrics.late("train/explained_variance")
    text = f"The critic explains {percent(explained)} of the variance of the returns."
    made = Finding("Critic", ("train/explained_variance",), "good", text)
    if explained >= 0.3 or metrics.improved:
        return made
    advice = "It helps little: policy.normalize_obs, policy.normalize_reward, a higher learning_rate or num_epochs."
    if _moves_too_far(metrics):
        advice = "This follows from: KL of an update."
    return made._replace(verdict="look", advice=advice)


def sampler(metrics: Metrics) -> Finding:
    """Sampler and trainer must give an action the same probability."""
    kl = metrics.late("rollout/sampler_kl")
    made = Finding("Sampler against trainer", ("rollout/sampler_kl",), "good", f"KL {kl:.2g} nats per step.")
    if kl <= 0.01:
        return made
    advice = "Another precision, or objective.importance_sampling_correction; in control, a policy's act and evaluate."
    return made._replace(verdict="bad" if kl > 0.1 else "look", advice=advice)


def lengths(metrics: Metrics) -> Finding:
    """Lengths of episodes or completions, and how these end."""
    early, late = metrics.early("rollout/length_mean"), metrics.late("rollout/length_mean")
    text = f"From {early:.4g} to {late:.4g} on average."
    made = Finding("Length of episodes", ("rollout/length_mean",), "good", text)
    if not metrics.improved and not 0.5 < late / early < 2:
        drifts = "The return does not rise with it: see in the groups what short and long episodes earn."
        made = made._replace(verdict="look", advice=drifts)
    if "completions/clipped_ratio" not in metrics:
        return made
    cut = metrics.late("completions/clipped_ratio")
    ended = ", ".join(
        f"{percent(metrics.late(f'rollout/ended_by_{how}'))} with {words}"
        for how, words in (("eos", "the end token"), ("stop", "a stop string"))
    )
    made = made._replace(title="Length of completions", text=f"{text} {ended}, {percent(cut)} cut at the limit.")
    if cut <= 0.1:
        return made
    advice = f"{made.advice} A larger sampling.max_new_tokens, or overlong_buffer.".strip()
    return made._replace(verdict="bad" if cut > 0.5 else "look", advice=advice)


def success(metrics: Metrics) -> Finding:
    """Episodes that did the task."""
    rate = metrics.late("rollout/success_rate")
    made = Finding("Success", ("rollout/success_rate",), "good", f"{percent(rate)} of the episodes of training.")
    if rate > 0:
        return made
    return made._replace(
        verdict="bad", advice="No episode succeeds: easier starts, a denser reward, or demonstrations."
    )


def generalisation(metrics: Metrics) -> Finding:
    """The evaluation should not be far below training."""
    training, greedy = metrics.late(RETURN), metrics.series("eval/return_mean")[1][-1]
    values = metrics.series(RETURN)[1]
    text = f"Sampled in training {training:.4g}, last evaluation {greedy:.4g}."
    made = Finding("Evaluation against training", (RETURN, "eval/return_mean"), "good", text)
    if training - greedy <= 0.3 * (max(values) - min(values)):
        return made
    return made._replace(verdict="look", advice="The policy may need its randomness: evaluation.deterministic=false.")


def best(metrics: Metrics) -> Finding:
    """The last evaluation should be near the best one."""
    values = metrics.series("eval/return_mean")[1]
    seen = values + metrics.series(RETURN)[1]
    noise, episodes = (metrics.series(f"eval/{name}")[1][-1] for name in ("return_std", "episodes"))
    made = Finding(
        "Last against best", ("eval/return_mean",), "good", f"Last {values[-1]:.4g}, best {max(values):.4g}."
    )
    lost = max(values) - values[-1]
    half = half_width_95(noise, int(episodes))
    never_learned = not any(metrics.series("train/grad_norm")[1] or [1])
    if lost <= 0.3 * (max(seen) - min(seen)) or not lost > half or never_learned:
        return made
    limit = ", or target_kl such as 0.02" if "train/approx_kl" in metrics else ""
    advice = f"The policy got worse; the best one is in checkpoints/best. A lower learning_rate{limit}."
    return made._replace(verdict="look", advice=advice)


def speed(metrics: Metrics) -> Finding:
    """Where the time went."""
    words = {
        "collect": "collection",
        "advantage": "advantages",
        "update": "updates",
        "evaluate": "evaluations",
        "save": "saving",
    }
    spent = {words[part]: sum(metrics.series(f"time/{part}_seconds")[1]) for part in words}
    spent["updates"] -= spent["advantages"]
    total = max(sum(spent.values()), 1e-9)
    shares = ", ".join(f"{percent(seconds / total)} in {words}" for words, seconds in spent.items() if seconds)
    text = f"{metrics.late('time/steps_per_second'):,.0f} steps per second at the end. Of the time, {shares}."
    return Finding("Speed", ("time/steps_per_second",), "good", text)


RULES: tuple[tuple[Callable[[Metrics], Finding], tuple[str, ...]], ...] = (
    (constant, (RETURN,)),
    (endings, ("rollout/episodes",)),
    (distance, ("train/approx_kl", "train/optimizer_steps")),
    (signal, ("rollout/zero_variance_groups",)),
    (spread, ("rollout/reward_std",)),
    (clipping, ("train/clip_fraction", "train/clip_fraction_low", "train/clip_fraction_high")),
    (entropy, ("train/entropy",)),
    (gradient, ("train/grad_norm",)),
    (critic, ("train/explained_variance",)),
    (sampler, ("rollout/sampler_kl",)),
    (lengths, ("rollout/length_mean",)),
    (success, ("rollout/success_rate",)),
    (generalisation, (RETURN, "eval/return_mean")),
    (best, ("eval/return_mean", "eval/return_std", "eval/episodes")),
    (speed, ("time/collect_seconds", "time/update_seconds", "time/steps_per_second")),
)
"""Each rule with the metrics that it needs; causes go before what follows from them."""


def examine(entries: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """The findings of all rules whose metrics the run logged, those to look at first."""
    metrics = Metrics(entries)
    return sort([rule(metrics) for rule, needed in RULES if all(key in metrics for key in needed)])


def sort(found: Sequence[Finding]) -> list[Finding]:
    """Those to look at first."""
    return sorted(found, key=lambda finding: ("bad", "look", "good").index(finding.verdict))


# What a run's metrics and the groups that it kept say about its health.

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
        found.append(group_spread(files[-1]))
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


def group_spread(columns: Columns) -> Finding:
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
