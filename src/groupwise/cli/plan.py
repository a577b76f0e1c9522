"""``groupwise plan``: what a run on texts needs of GPUs that are not here."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from groupwise.cli.parser import Parser, count
from groupwise.config.run import TextRunCfg
from groupwise.errors import ConfigError, UnknownNameError
from groupwise.planning.gpus import GPUS
from groupwise.system.terminal import show

HELP = f"""Estimate the memory of each GPU and the seconds of a step of a run on texts. Nothing is trained, and no weights are
loaded. Exit code 1: it does not fit.

Examples:
  groupwise plan text.json --gpus 8 --gpu h100
  groupwise plan text.json --gpus 8 --gpu h100 --engine fsdp --model.precision bfloat16
  groupwise plan text.json --gpu l40s --model.lora.r 16 --completion-tokens 300 --json

Options, then those of train:
  --gpus 1                     processes, each with a GPU of its own; servers have further ones
  --gpu h100                   or {", ".join(name for name in GPUS if name != "h100")}
  --prompt-tokens 256          tokens of a prompt, in the mean
  --completion-tokens N        tokens of a completion, in the mean (default: the most that it may have)
  --json                       print everything as JSON, in bytes and seconds
  --preset NAME                credit and objective of a paper; see: groupwise list
"""
_LABEL = 46
_KEPT = {
    "policy": "weights{whole}",
    "learner": "weights{part}, to train",
    "gradients": "gradients{part}",
    "optimizer state": "optimizer state{part}",
    "reference": "reference",
}
_SECONDS = {
    "generation": "generation",
    "scoring": "scores before the update",
    "update": "update",
    "publishing": "new weights to where they generate",
}


def run(parser: Parser, argv: Sequence[str]) -> int:
    """Print the plan of the run in ``argv``; returns the exit code."""
    parser.add_argument("--gpus", type=count, default=1)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--prompt-tokens", type=count)
    parser.add_argument("--completion-tokens", type=count)
    parser.add_argument("--json", action="store_true")
    options, rest = parser.parse_known_args(argv)
    if not rest or rest[0] in ("-h", "--help"):
        if not rest:
            raise ConfigError("expected a file of settings first, as in: groupwise plan text.json --gpus 8 --gpu h100")
        print(f"usage: groupwise plan FILE [options]\n\n{HELP}\nAll settings: groupwise plan FILE --help")
        return 0

    from groupwise.cli.options import parse_options

    flags = [flag.removeprefix("--") for flag in parser.flags]
    cfg = parse_options(rest, prog="groupwise plan", description=HELP, flags=(*flags, "preset"))
    if not isinstance(cfg, TextRunCfg):
        raise ConfigError(f"{rest[0]} is a run on an environment; plan is for runs on texts; fix: a file with a task")
    if options.gpu not in GPUS:
        raise UnknownNameError("GPU", options.gpu, GPUS)

    from groupwise.planning.plan import plan_run

    prompt = options.prompt_tokens or cfg.task.max_prompt_tokens or 256
    plan = plan_run(cfg, options.gpus, GPUS[options.gpu], prompt, options.completion_tokens)
    if options.json:
        print(json.dumps(plan.report()))
    else:
        assumed = "" if options.prompt_tokens else " (assumed; --prompt-tokens)"
        show(*_head(plan, assumed), "", *_memory(plan), "", *_seconds(plan), "", *_notes(plan))
    return int(not plan.fits)


def _head(plan: Any, assumed: str) -> Iterator[str]:
    cfg, work = plan.cfg, plan.work
    whole, trained = plan.parameters["all"], plan.parameters["trained"]
    share = "all trained" if trained == whole else f"{short(trained)} trained"
    engine = f", engine {cfg.engine}" if work.ranks > 1 else ""
    gpu = f"{work.ranks} x {plan.gpu.title} ({plan.gpu.memory / 1e9:g} GB)"
    yield f"{plan.sizes.name}, {short(whole)} parameters, {share}, in {cfg.model.precision}"
    yield f"{gpu}{engine}"
    longest = "at most " if work.completion == work.longest else ""
    completions = f"{work.ranks * work.rows:,} completions of {longest}{work.completion:,} tokens"
    yield f"A step: {completions}, {plan.tokens:,} in all"
    yield f"Prompts of {work.prompt:,} tokens{assumed}"


def _memory(plan: Any) -> Iterator[str]:
    memory, ranks = plan.memory, plan.work.ranks
    words = (
        {"part": f", 1/{ranks}", "whole": ", whole, to generate"} if plan.work.sharded else {"part": "", "whole": ""}
    )
    yield f"{'Memory of each GPU':<{_LABEL}}{'GB':>8}"
    yield from (_row(_KEPT[name].format(**words), size / 1e9) for name, size in memory.kept.items())
    for phase, needed in memory.passing.items():
        yield f"  only in {phase}"
        for name, size in needed.items():
            yield _row(f"  {name}", size / 1e9)
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    yield _row(f"peak, in {memory.fullest}", memory.peak / 1e9, f"of {plan.room / 1e9:.1f} usable: {verdict}")
    if memory.host:
        yield f"\n{'Memory of the host, for each GPU':<{_LABEL}}{'GB':>8}"
        yield from (_row(_KEPT[name].format(**words), size / 1e9) for name, size in memory.host.items())


def _seconds(plan: Any) -> Iterator[str]:
    total = plan.step_seconds
    yield f"{'Time of a step':<{_LABEL}}{'s':>8}"
    for name, seconds in plan.seconds.items():
        if seconds >= 0.005 * total:  # less is 0 %
            yield _row(_SECONDS[name], seconds, f"{seconds / total:>4.0%}" if total < float("inf") else "")
    overlap = "step, partly at once" if total < sum(plan.seconds.values()) else "step"
    yield _row(f"{overlap}, without rewards", total, f"{plan.tokens / total:,.0f} tokens/s")


def _notes(plan: Any) -> Iterator[str]:
    from groupwise.planning.plan import fixes

    assumed = plan.assumed
    if plan.cfg.generation.name != "native":
        rows, servers = plan.server_rows, len(plan.cfg.generation.urls)
        room = f"{rows:,} completions at once" if rows else "no room for the model; fix: GPUs with more memory"
        yield f"{servers} server{'s' if servers > 1 else ''}, each on a further GPU of this kind: {room}."
    if not plan.fits:
        found = fixes(plan)
        yield (
            "It does not fit. fix: one of"
            if found
            else "It does not fit. fix: GPUs with more memory, or a smaller model"
        )
        for fix in found:
            yield _row(" ".join(fix.options), fix.peak / 1e9, "GB at the peak")
    yield (
        f"An estimate, from {assumed.mfu:.0%} of the data sheet's FLOP/s and {assumed.bandwidth:.0%} of its bandwidth.\n"
        "Published runs took up to half as long again: docs/planning.md"
    )


def _row(label: str, number: float, remark: str = "") -> str:
    return f"  {label:<{_LABEL - 2}}{number:>8.1f}  {remark}".rstrip()


def short(number: int) -> str:
    """A number of parameters, such as 8.03 B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:  # which rounds up to the unit
            return f"{number / size:.3g} {unit}"
    return str(number)
