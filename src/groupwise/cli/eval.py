"""Commands for a trained policy: ``eval``, ``play``, ``sample``, ``export`` and ``compare``."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from groupwise import plugins
from groupwise.cli.options import Parser, count, parse_json, parse_options
from groupwise.config.load import read_file
from groupwise.config.run import EvaluationMetric
from groupwise.errors import ConfigError
from groupwise.system import printable, show

FILES = {"onnx": "policy.onnx", "safetensors": "policy.safetensors", "transformers": "transformers"}
"""Formats of ``export``, and where in the run folder they go by default."""
CHECKPOINTS = ("latest", "best")


def eval_command(parser: Parser, argv: Sequence[str]) -> None:
    """Evaluate the policy of a run; print the mean return and its 95 % interval on one line.
    A language model completes the held-out prompts: mean reward and pass@k.

    Examples:
      groupwise eval runs/<run>
      groupwise eval runs/<run> --episodes 1000 --sampled
      groupwise eval runs/<run> --checkpoint best --video
      groupwise eval runs/<run> --json | jq .return_mean
      groupwise eval runs/<text run> --completions-per-prompt 8
    """
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--episodes", type=count, help="episodes (default: 100) or prompts (default: all)")
    parser.add_argument("--completions-per-prompt", type=count, default=1, help="sampled if more than 1 (default: 1)")
    sampled = "sample actions (default: take the most likely one)"
    parser.add_argument("--sampled", dest="deterministic", action="store_const", const=False, help=sampled)
    parser.add_argument("--seed", type=int, help="of the episodes (default: not used in training)")
    parser.add_argument("--video", action="store_true", help="also record an episode")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="latest", help="whose policy (default: latest)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, with each return")
    options = vars(parser.read(argv))

    from groupwise.report.folder import RunFolder

    as_json, run = options.pop("json"), options.pop("run")
    folder = RunFolder(run)

    from groupwise.run import evaluate

    found = evaluate(run, options.pop("episodes"), **options)
    report, video = found.report(), str(folder.shown / folder.video.name)
    if as_json:
        print(json.dumps(report | ({"video": video} if options["video"] else {})))
        return
    show(found.line())
    tasks = report.get("success_by_task", {})
    width = max(map(len, tasks), default=0)
    for task, scores in tasks.items():
        low, high = (100 * end for end in scores["success_ci95"])
        rate = f"success {100 * scores['success_rate']:3.0f} % (95 % interval {low:.0f} to {high:.0f})"
        show(f"{task:<{width}}  {rate} of {scores['episodes']} episodes")
    if options["video"]:
        show(f"video: {video}")


def play_command(parser: Parser, argv: Sequence[str]) -> None:
    """Show episodes of the policy of a run in a window. Without a display they become a video in the run folder:
    play.mp4, or play.gif if ffmpeg is not installed.

    Examples:
      groupwise play runs/<run>
      groupwise play runs/<run> --checkpoint best --sampled --episodes 10
      groupwise play runs/<run> --output play.mp4
    """
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--episodes", type=count, default=3, help="(default: 3)")
    sampled = "sample actions (default: take the most likely one)"
    parser.add_argument("--sampled", dest="deterministic", action="store_false", help=sampled)
    parser.add_argument("--seed", type=int, help="of the episodes (default: that of eval)")
    parser.add_argument("--output", type=Path, metavar="PATH", help="write a video: .mp4 (needs ffmpeg), .gif or .webp")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="latest", help="whose policy (default: latest)")
    options = vars(parser.read(argv))

    from groupwise.run import play
    from groupwise.training.evaluation import shown

    found, video = play(options.pop("run"), **options)
    returns = ", ".join(f"{one:.6g}" for one in found.returns)  # an interval of so few reaches beyond possible returns
    line = found.line().replace(f"ci95={shown(found.ci95)}", f"returns=[{returns}]", 1)
    show(line, *([] if video is None else [f"video: {video}"]))


def sample_command(parser: Parser, argv: Sequence[str]) -> None:
    """Complete prompts with the language model of a run. With a text environment: play episodes, show turns, answers,
    rewards and the end.

    Examples:
      groupwise sample runs/<run> "What is 12 + 7?"
      groupwise sample runs/<run> "What is 12 + 7?" "What is 3 + 4?" --count 4 --checkpoint best
      groupwise sample runs/<run> --messages '[{"role": "user", "content": "What is 12 + 7?"}]'
      groupwise sample runs/<run on guess/Number-v0> --count 4 --plugin my_game.py
      groupwise sample guess/Number-v0 --model my_model --task.max-turns 3 --plugin my_game.py
    """
    parser.add_argument("--count", type=count, default=1, help="completions of each prompt, or episodes (default: 1)")
    parser.add_argument("--deterministic", action="store_true", help="take the most likely token each time")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default: 0)")
    if argv and plugins.is_text_env(argv[0]):  # a model that no run has trained
        own, rest = parser.parse_known_args(argv)
        options = vars(own) | {"run": parse_options(rest, parser)}
    else:
        parser.add_argument("run", type=Path, help="folder of the run")
        parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts; none with a text environment")
        parser.add_argument("--messages", action="store_true", help="prompts are lists of messages, in JSON")
        parser.add_argument(
            "--checkpoint", choices=CHECKPOINTS, default="latest", help="whose weights (default: latest)"
        )
        options = vars(parser.read(argv))

    from groupwise.run import sample

    run, prompts = options.pop("run"), options.pop("prompts", [])
    if options.pop("messages", False):
        prompts = [parse_json("--messages", word) for word in prompts]
        if not all(isinstance(messages, list) for messages in prompts):
            fix = """'[{"role": "user", "content": "..."}]'"""
            raise ConfigError(f"--messages: expected lists of messages in JSON; fix: {fix}")
    texts = sample(run, prompts or None, options.pop("count"), **options)
    show(f"\n{'=' * 20}\n".join(f"\n{'-' * 20}\n".join(one) if isinstance(one, list) else str(one) for one in texts))


def export_command(parser: Parser, argv: Sequence[str]) -> None:
    """Write a trained policy for other programs.

    Formats:
      groupwise export runs/<run> --to onnx             a policy of an environment, from observation to action
      groupwise export runs/<run> --to safetensors      its weights
      groupwise export runs/<run> --to transformers     a language model, or its PEFT adapter
    """
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--to", choices=FILES, required=True)
    parser.add_argument("--out", type=Path, metavar="PATH", help="new file or folder (default: in the run's folder)")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="latest", help="whose policy (default: latest)")
    options = parser.read(argv)

    from groupwise.policies.export import export
    from groupwise.run import Run

    out = options.out or options.run / FILES[options.to]
    target = out.absolute()  # an environment may change the working folder
    export(Run.load(options.run, checkpoint=options.checkpoint).policy, target, options.to)
    show(f"written: {out}")


def compare_command(parser: Parser, argv: Sequence[str]) -> None:
    """Compare methods by their runs. Runs that differ only in their seed are one method. One table per environment.
    Scores are interquartile means (IQM) over runs with 95 % bootstrap intervals.

    Examples:
      groupwise compare runs/grpo_seeds runs/ppo_seeds             folders of train --seeds
      groupwise compare runs/*                                     or single runs
      groupwise compare new=runs/a old=runs/b                      methods with your names
      groupwise compare runs/* --out comparison                    comparison.json and a page, comparison.html
      groupwise compare runs/* --json | jq '.environments[].methods[].iqm'
    """
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUNS", help="folder of a run, or one that holds several")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write comparison.json and comparison.html there")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, curves too")
    finished = "leave out unfinished and damaged runs, and say so"
    parser.add_argument("--finished-only", action="store_true", help=finished)
    scores = 'scores that count as 0 and 1, as {"CartPole-v1": [20, 500]}: compares over all environments, too'
    parser.add_argument("--reference", type=Path, metavar="FILE.json", help=scores)
    metrics = get_args(EvaluationMetric)
    parser.add_argument("--metric", choices=metrics, default="return", help="the score (default: return)")
    options = parser.read(argv)
    reference = None
    if options.reference is not None:
        try:
            found = read_file(options.reference)
            reference = {name: (float(low), float(high)) for name, (low, high) in found.items()}
        except (ValueError, TypeError) as error:
            expected = 'expected a file with JSON like {"CartPole-v1": [20, 500]}, the scores that count as 0 and 1'
            raise ConfigError(f"{options.reference}: {expected}; {error}") from error
    named: dict[str | None, list[Path]] = {}
    for name, path in map(parse_word, options.runs):
        named.setdefault(name, []).append(path)

    from groupwise.comparison.compare import compare
    from groupwise.comparison.results import tables

    comparison = compare(named, reference=reference, metric=options.metric, finished_only=options.finished_only)
    if options.out is not None:
        comparison.save(options.out)
    if options.json:
        show(json.dumps(comparison.report(), allow_nan=False))
        return
    for table in tables(comparison):
        rows = [[*map(printable, row)] for row in (table.heads, *table.rows)]
        show(f"\n{table.title}" if table.title else "")
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            show("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for note in comparison.notes:
        show(f"note: {note}")
    if options.out is not None:
        show(f"written: {options.out / 'comparison.json'}, {options.out / 'comparison.html'}")


def parse_word(word: str) -> tuple[str | None, Path]:
    """Name (or None) and path of ``PATH`` or ``NAME=PATH``."""
    name, equals, path = word.partition("=")
    if not equals or "/" in name or Path(word).exists():  # a pattern may have "=" in it
        return None, Path(word)
    if not name or not path:
        raise ConfigError(f"{word!r}: expected a folder of runs, or NAME=FOLDER")
    return name, Path(path)
