"""The command line: parses, calls ``groupwise.run``, prints.

Only the commands that train or play import torch, and only once their arguments are known to be right.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from groupwise import plugins
from groupwise.cli.parser import Parser
from groupwise.errors import ConfigError, GroupwiseError, UnknownNameError

USAGE = """usage: groupwise COMMAND ...

Reinforcement learning with GRPO and PPO: compares episodes that begin in the same state.

  train ENV|FILE     train on a Gymnasium environment, or as a JSON file says (texts, too)
  eval RUN           play episodes with a trained policy, or score completions of held-out prompts
  sample RUN PROMPT  write completions with a trained language model
  resume RUN         go on with a run, bit for bit
  compare RUNS ...   methods by their runs: mean of seeds with intervals, curves, who is better
  config ENV|FILE    print the full settings as JSON; --schema: their JSON Schema
  check-env ENV      what an environment offers to training: shared starts, noise, speed
  list               presets, algorithms, choices of credit and objective

With every command:
  --help             more about it
  --plugin FILE.py   import a file of yours first: it may register algorithms, credit rules, environments;
                     or a module by its name, as ale_py, which registers Atari
  --debug            show the traceback of an error
  --version

Start with:
  groupwise train CartPole-v1
"""

TRAIN_HELP = """Train a policy on a Gymnasium environment, or as a JSON file says.

  groupwise train CartPole-v1
  groupwise train CartPole-v1 --algorithm ppo --seed 3
  groupwise train CartPole-v1 --preset dr_grpo --seeds 0-9
  groupwise train my_run.json --algorithm.learning-rate 3e-4

Options, with the defaults of this environment:
  --algorithm NAME                    grpo, ppo, or one that a plugin registers (grpo)
  --preset NAME                       credit and objective of a paper; see: groupwise list
  --seeds 0-9                         or 0,3,5: a run per seed, in parallel
  --plugin FILE.py                    import a file of yours first
"""

CONFIG_HELP = """Print the full settings of a run as JSON: a file that train takes.

  groupwise config CartPole-v1 --algorithm ppo > my_run.json
  groupwise config my_run.json --algorithm.gamma 0.98
  groupwise config --schema                        JSON Schema, for your editor

Options, as of train:
  --algorithm NAME                    grpo, ppo, or one that a plugin registers (grpo)
  --preset NAME                       credit and objective of a paper; see: groupwise list
"""


EVAL_HELP = """Play episodes with the policy of a run; print the mean return and its 95 % interval on one line.
Of a language model: complete the prompts that were held out; mean reward, and the share that k completions solve.

Examples:
  groupwise eval runs/<run>
  groupwise eval runs/<run> --episodes 1000 --sampled
  groupwise eval runs/<run> --checkpoint best --video
  groupwise eval runs/<run> --json | jq .return_mean
  groupwise eval runs/<text run> --completions-per-prompt 8
"""

SAMPLE_HELP = """Write completions of a prompt with the language model of a run.

Examples:
  groupwise sample runs/<run> "What is 12 + 7?"
  groupwise sample runs/<run> "What is 12 + 7?" --count 4 --checkpoint best
"""

RESUME_HELP = """Go on with a run from its last checkpoint, as if it had never stopped.

Examples:
  groupwise resume runs/<run>
  groupwise resume runs/<run> --total-steps 200000
"""

CHECK_HELP = """Try out for some seconds what an environment offers to training: how members of a group can share a start and
what that costs, what is random, which spaces are supported, how fast it steps. Exit code 1: GRPO cannot train on it.

Examples:
  groupwise check-env Ant-v5
  groupwise check-env Ant-v5 --env.kwargs '{"healthy_reward": 0.5}' --json
  groupwise check-env Mine-v0 --plugin my_env.py

  groupwise check-env ALE/Pong-v5 --plugin ale_py --env.num-random-noops 30

Besides --json it takes the settings of the environment that count here:
"""

CHECK_SETTINGS = ("kwargs", "max_episode_steps", "vectorization", "start_mode", "num_random_noops", "reward_parts")
"""Of ``EnvCfg``, what makes a difference to the trials."""

LIST_HELP = "Print algorithms, presets, and the choices of credit and objective with their sources."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    0 done; 1 a seed failed, or ``check-env`` found nothing that trains; 2 a mistake of the user's; 130 interrupted.
    """
    shared = Parser(prog="groupwise", add_help=False)
    shared.add_argument("--plugin", type=Path, action="append", default=[])
    shared.add_argument("--debug", action="store_true")
    debug = "--debug" in (sys.argv if argv is None else argv)
    try:
        options, rest = shared.parse_known_args(argv)
        plugins.load(options.plugin)
        return _dispatch(rest, options.plugin)
    except GroupwiseError as error:
        if debug:
            raise
        print("\n".join([f"groupwise: error: {error}", *vars(error).get("__notes__", [])]), file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(f"groupwise: {str(error) or 'interrupted'}", file=sys.stderr)  # the API says how to go on
        return 130
    except BrokenPipeError:  # whoever read the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as stop:  # argparse leaves this way after --help
        return stop.code if isinstance(stop.code, int) else 0


def _dispatch(argv: Sequence[str], plugins: list[Path]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] == "--version":
        from importlib.metadata import version

        print(f"groupwise {version('groupwise')}")
        return 0
    commands: dict[str, Callable[[Sequence[str], list[Path]], int]] = {
        "train": _train,
        "eval": _eval,
        "sample": _sample,
        "resume": _resume,
        "compare": _compare,
        "config": _config,
        "check-env": _check_env,
        "list": _list,
    }
    if argv[0] not in commands:
        raise UnknownNameError("command", argv[0], commands)
    return commands[argv[0]](argv[1:], plugins)


def _train(argv: Sequence[str], plugins: list[Path]) -> int:
    parser = Parser(prog="groupwise train", add_help=False)
    parser.add_argument("--seeds")
    options, rest = parser.parse_known_args(argv)

    from groupwise.cli.seeds import parse_seeds, train_seeds

    seeds = parse_seeds(options.seeds) if options.seeds is not None else []
    cfg = _parse_config(rest, "groupwise train", TRAIN_HELP)
    if seeds:
        return train_seeds(cfg, seeds, plugins)

    from groupwise.run import train_from_config

    _print_run(train_from_config(cfg))
    return 0


def _config(argv: Sequence[str], plugins: list[Path]) -> int:
    from groupwise.config import json_schema, to_json

    if "--schema" in argv:
        print(json.dumps(json_schema(), indent=2))
    else:
        print(to_json(_parse_config(argv, "groupwise config", CONFIG_HELP)))
    return 0


def _check_env(argv: Sequence[str], plugins: list[Path]) -> int:
    prog = "groupwise check-env"
    target, *options = _with_target([word for word in argv if word != "--json"], prog)
    if any(option.startswith(("--algorithm", "--preset")) for option in options):
        raise ConfigError(
            f"{prog} takes no algorithm and no preset: it tries out what GRPO needs, while PPO needs only "
            f"that observation and action are supported, which it tells, too; fix: {prog} {target}"
        )

    from groupwise.cli.options import parse_env_options

    env = parse_env_options(target, CHECK_SETTINGS, options, prog=prog, description=CHECK_HELP)

    from groupwise.check import check_env

    report = check_env(env)
    print(json.dumps(report.to_dict()) if "--json" in argv else report)
    return int(report.training.value is None)


def _with_target(argv: Sequence[str], prog: str) -> Sequence[str]:
    """``argv`` if a target comes first; help without one is about CartPole."""
    if argv and not argv[0].startswith("-"):
        return argv
    if {"-h", "--help", "--help-all"}.isdisjoint(argv):
        raise ConfigError(f"expected an environment id or a JSON file first, as in: {prog} CartPole-v1")
    return ["CartPole-v1", *argv]


def _parse_config(argv: Sequence[str], prog: str, description: str) -> Any:
    """The ``RunCfg`` of ``TARGET [--algorithm NAME] [--preset NAME] [--any.field VALUE ...]``."""
    argv = _with_target(argv, prog)
    parser = Parser(prog=prog, add_help=False)
    parser.add_argument("--algorithm", "--algorithm.name")
    parser.add_argument("--preset")
    chosen, options = parser.parse_known_args(argv[1:])

    from groupwise.cli.options import parse_options

    return parse_options(argv[0], chosen.algorithm, chosen.preset, options, prog=prog, description=description)


def _eval(argv: Sequence[str], plugins: list[Path]) -> int:
    parser = Parser(prog="groupwise eval", description=EVAL_HELP)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--episodes", type=int, help="how many (default: 100); or prompts (default: all)")
    parser.add_argument(
        "--completions-per-prompt", type=int, default=1, help="completions of each prompt, sampled if several"
    )
    parser.add_argument("--sampled", action="store_true", help="sample actions instead of taking the most likely ones")
    parser.add_argument("--seed", type=int, help="of the episodes (default: one that training never used)")
    parser.add_argument("--video", action="store_true", help="also record an episode, where the environment renders")
    _add_checkpoint(parser)
    parser.add_argument("--json", action="store_true", help="print everything as JSON, each return too")
    options = parser.parse_args(argv)
    for name in ("episodes", "completions_per_prompt"):
        if (number := vars(options)[name]) is not None and number < 1:
            raise ConfigError(f"--{name} {number}: expected at least 1")

    from groupwise.report.folder import RunFolder
    from groupwise.run import evaluate

    found = evaluate(
        options.run,
        options.episodes,
        completions_per_prompt=options.completions_per_prompt,
        deterministic=False if options.sampled else None,
        seed=options.seed,
        video=options.video,
        checkpoint=options.checkpoint,
    )
    video = {"video": str(RunFolder(options.run).video)} if options.video else {}
    if options.json:
        print(json.dumps(found.report() | video))
        return 0
    print(found.line())
    if found.episodes == 1:
        print("one episode gives no interval; fix: --episodes 2 or more", file=sys.stderr)
    if video:
        print(f"video: {video['video']}")
    return 0


def _sample(argv: Sequence[str], plugins: list[Path]) -> int:
    parser = Parser(prog="groupwise sample", description=SAMPLE_HELP)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("prompt", help="what to complete")
    parser.add_argument("--count", type=int, default=1, help="how many completions (default: 1)")
    parser.add_argument("--deterministic", action="store_true", help="take the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default: 0)")
    _add_checkpoint(parser)
    options = parser.parse_args(argv)
    if options.count < 1:
        raise ConfigError(f"--count {options.count}: expected at least 1")

    from groupwise.run import sample

    texts = sample(
        options.run,
        options.prompt,
        options.count,
        deterministic=options.deterministic,
        seed=options.seed,
        checkpoint=options.checkpoint,
    )
    print(f"\n{'-' * 20}\n".join(texts))
    return 0


def _compare(argv: Sequence[str], plugins: list[Path]) -> int:
    from groupwise.cli import compare

    compare.run(Parser(prog="groupwise compare", description=compare.HELP), argv)
    return 0


def _add_checkpoint(parser: Parser) -> None:
    parser.add_argument(
        "--checkpoint", choices=("latest", "best"), default="latest", help="whose policy (default: latest)"
    )


def _resume(argv: Sequence[str], plugins: list[Path]) -> int:
    from groupwise.cli.options import whole_number

    parser = Parser(prog="groupwise resume", description=RESUME_HELP)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument(
        "--total-steps", type=whole_number, help="train until then (default: what the run was started with)"
    )
    options = parser.parse_args(argv)

    from groupwise.run import resume

    _print_run(resume(options.run, options.total_steps))
    return 0


def _print_run(run: Any) -> None:
    """What a run reached, in a sentence or two, and what to do next."""
    found = run.summary
    reached = [f"Done in {found['seconds']:.1f} s"]
    if (score := found.get("return_mean")) is not None:
        kind = "greedy return" if run.cfg.evaluation.deterministic else "return"
        interval = "95 % interval {:.4g} to {:.4g}".format(*found["ci95"]) if found.get("ci95") else "no interval"
        reached.append(f": {kind} {score:.1f} ({found['episodes']} episodes, {interval})")
        reached.append(f". Best {found['best_return_mean']:.1f} at step {found['best_env_steps']:,}")
    print("".join(reached) + ".")
    if found["stopped"] != "total_steps":
        print(f"Stopped at step {found['env_steps']:,}: {found['stopped']}.")
    print(f"Next:  groupwise eval {run.path}{plugins.options(plugins.loaded())}")


def _list(argv: Sequence[str], plugins: list[Path]) -> int:
    parser = Parser(prog="groupwise list", description=LIST_HELP)
    parser.add_argument("text", nargs="?", default="", help="show only entries that contain this, such as dapo or kl")

    from groupwise.cli import listing

    listing.show(parser.parse_args(argv).text)
    return 0
