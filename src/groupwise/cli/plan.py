"""``groupwise plan``: what a run on texts needs of GPUs that are not here."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from groupwise.cli.parser import Parser, count
from groupwise.config.run import TextRunCfg
from groupwise.errors import ConfigError, UnknownNameError
from groupwise.system import show

HELP = """Estimate the memory of each GPU of a run on texts. Nothing is trained, and no weights are loaded. Exit code 1: it
does not fit.

Examples:
  groupwise plan text.json --gpus 8 --gpu h100
  groupwise plan text.json --gpus 8 --gpu h100 --engine fsdp --model.precision bfloat16
  groupwise plan text.json --gpu l40s --model.lora.r 16 --json

Options, then those of train:
  --gpus 1                     processes, each with a GPU of its own; servers have further ones
  --gpu h100                   or a100, h200, b200, l40s, rtx4090
  --prompt-tokens 256          tokens of a prompt (default: task.max_prompt_tokens)
  --json                       print everything as JSON, in bytes
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


def run(parser: Parser, argv: Sequence[str]) -> int:
    """Print the plan of the run in ``argv``; returns the exit code."""
    parser.add_argument("--gpus", type=count, default=1)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--prompt-tokens", type=count)
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

    from groupwise.planning import GPUS, plan_run

    if options.gpu not in GPUS:
        raise UnknownNameError("GPU", options.gpu, GPUS)
    prompt = options.prompt_tokens or cfg.task.max_prompt_tokens or 256
    plan = plan_run(cfg, options.gpus, GPUS[options.gpu], prompt)
    if options.json:
        print(json.dumps(_report(plan)))
    else:
        assumed = "" if options.prompt_tokens or cfg.task.max_prompt_tokens else " (assumed; --prompt-tokens)"
        gpu = f"{options.gpus} x {options.gpu} ({plan.gpu / 1e9:g} GB)"
        show(*_head(plan, gpu, assumed), "", *_memory(plan), "", *_notes(plan))
    return int(not plan.fits)


def _report(plan: Any) -> dict[str, Any]:
    """All numbers, ready for JSON."""
    from groupwise.planning import fixes

    memory = {name: getattr(plan, name) for name in ("kept", "passing", "host", "peak", "room")}
    tokens = {name: getattr(plan, name) for name in ("prompt", "completion", "row")}
    found = {"fits": plan.fits, "gpus": plan.ranks, "parameters": plan.parameters, "memory_bytes": memory}
    found |= {"completions": plan.rows, "tokens": tokens, "server_rows": plan.server_rows}
    return found | {"fixes": {} if plan.fits else fixes(plan)}


def _head(plan: Any, gpu: str, assumed: str) -> Iterator[str]:
    whole, trained = plan.parameters["all"], plan.parameters["trained"]
    share = "all trained" if trained == whole else f"{short(trained)} trained"
    engine = f", engine {plan.cfg.engine}" if plan.ranks > 1 else ""
    yield f"{plan.sizes.name}, {short(whole)} parameters, {share}, in {plan.cfg.model.precision}"
    yield f"{gpu}{engine}"
    yield f"A step: {plan.ranks * plan.rows:,} completions of at most {plan.completion:,} tokens"
    yield f"Prompts of {plan.prompt:,} tokens{assumed}"


def _memory(plan: Any) -> Iterator[str]:
    words = {"part": "", "whole": ""}
    if plan.ranks > 1 and plan.cfg.engine == "fsdp":
        words = {"part": f", 1/{plan.ranks}", "whole": ", whole, to generate"}
    yield f"{'Memory of each GPU':<{_LABEL}}{'GB':>8}"
    yield from (_row(_KEPT[name].format(**words), size / 1e9) for name, size in plan.kept.items())
    for phase, needed in plan.passing.items():
        yield f"  only in {phase}"
        for name, size in needed.items():
            yield _row(f"  {name}", size / 1e9)
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    yield _row(f"peak, in {plan.fullest}", plan.peak / 1e9, f"of {plan.room / 1e9:.1f} usable: {verdict}")
    if plan.host:
        yield f"\n{'Memory of the host, for each GPU':<{_LABEL}}{'GB':>8}"
        yield from (_row(_KEPT[name].format(**words), size / 1e9) for name, size in plan.host.items())


def _notes(plan: Any) -> Iterator[str]:
    from groupwise.planning import fixes

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
        for options, peak in found.items():
            yield _row(options, peak / 1e9, "GB at the peak")
    yield "An estimate: docs/planning.md"


def _row(label: str, number: float, remark: str = "") -> str:
    return f"  {label:<{_LABEL - 2}}{number:>8.1f}  {remark}".rstrip()


def short(number: int) -> str:
    """A number of parameters, such as 8.03 B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:  # which rounds up to the unit
            return f"{number / size:.3g} {unit}"
    return str(number)
