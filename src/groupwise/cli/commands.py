"""The command line: parses, calls ``groupwise.run``, prints.

Only the commands that train or play import torch, and only once their arguments are known to be right.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from groupwise import plugins
from groupwise.cli.parser import Parser, count
from groupwise.config.budget import BUDGETS
from groupwise.errors import ConfigError, GroupwiseError, UnknownNameError
from groupwise.system.terminal import prepare, show, show_errors_only, show_everything

USAGE = """usage: groupwise COMMAND ...

Reinforcement learning with GRPO and PPO.

  train ENV|FILE     train on a Gymnasium environment, or with the settings of a file
  evolve ENV|FILE    train a population whose settings change while it trains
  eval RUN           evaluate a trained policy in episodes or on held-out prompts
  sample RUN PROMPT  complete prompts with a trained language model
  resume RUN         continue a run
  serve MODEL        start a vLLM server that generates for training
  plan FILE          say what a run on texts needs of GPUs: memory, seconds of a step
  export RUN         write a policy as ONNX or safetensors, a language model for transformers
  report RUN         write a page about a run: did it learn, its health, its groups
  view [FOLDER]      follow runs in the browser while they train
  doctor [RUN]       say what is wrong with a run, or with the installation
  compare RUNS ...   compare methods over seeds: means, intervals, curves
  config ENV|FILE    print all settings as JSON; --schema: their JSON Schema
  convert LIB FILE   print the settings of another library (embodichain) as settings of groupwise
  check-env ENV      check what an environment supports: shared starts, spaces, speed
  demos ENV          record episodes of a scripted expert, which --algorithm bc clones
  list               algorithms, presets, choices of credit and objective

With every command:
  --help             help
  --plugin FILE.py   import your file first, which may register algorithms, credit rules or environments;
                     or the name of an installed module
  --debug            show the traceback of an error
  --version

Start with:
  groupwise train CartPole-v1
"""

TRAIN_HELP = """Train a policy on a Gymnasium environment, or with the settings of a JSON or YAML file.

  groupwise train CartPole-v1
  groupwise train CartPole-v1 --algorithm ppo --seed 3
  groupwise train CartPole-v1 --preset dr_grpo --seeds 0-9
  groupwise train my_run.json --algorithm.learning-rate 3e-4
  groupwise train --config my_run.yaml

Options, with the defaults of this environment:
  --seeds 0-9                         or 0,3,5: one run per seed, in parallel
  --plugin FILE.py                    import your file first
  --preset NAME                       credit and objective of a paper; see: groupwise list
  -q, --quiet                         print errors and the result only
  -v, --verbose                       print every iteration, and what the library logs
  --profile [3]                       record that many iterations with torch.profiler, into profile/ of the run folder
"""

CONFIG_HELP = """Print all settings of a run as JSON, which train takes as a file.

  groupwise config CartPole-v1 --algorithm ppo > my_run.json
  groupwise config my_run.json --algorithm.gamma 0.98
  groupwise config --schema                        JSON Schema, for your editor

Options, as those of train:
  --preset NAME                       credit and objective of a paper; see: groupwise list
"""

EVAL_HELP = """Evaluate the policy of a run; print the mean return and its 95 % interval on one line.
A language model completes the held-out prompts: mean reward and pass@k.

Examples:
  groupwise eval runs/<run>
  groupwise eval runs/<run> --episodes 1000 --sampled
  groupwise eval runs/<run> --checkpoint best --video
  groupwise eval runs/<run> --json | jq .return_mean
  groupwise eval runs/<text run> --completions-per-prompt 8
"""

SAMPLE_HELP = """Complete prompts with the language model of a run.

Examples:
  groupwise sample runs/<run> "What is 12 + 7?"
  groupwise sample runs/<run> "What is 12 + 7?" "What is 3 + 4?" --count 4 --checkpoint best
  groupwise sample runs/<run> --messages '[{"role": "user", "content": "What is 12 + 7?"}]'
"""

CHECK_HELP = """Check what an environment supports: shared starts of groups and their cost, randomness, spaces, speed.
Exit code 1: GRPO cannot train on it.

Examples:
  groupwise check-env Ant-v5
  groupwise check-env Ant-v5 --env.kwargs '{"healthy_reward": 0.5}' --json
  groupwise check-env Mine-v0 --plugin my_env.py
  groupwise check-env ALE/Pong-v5 --env.num-random-noops 30

Options: --json, and settings of the environment:
"""

DEMOS_HELP = """Record successful episodes of a scripted expert, for --algorithm bc. Layout: LeRobot's dataset format.

Examples:
  groupwise demos FetchPush-v4
  groupwise demos FetchPush-v4 --episodes 20 --noise 0.2 --out demos/push
  groupwise train FetchPush-v4 --algorithm bc --algorithm.data demos/push

Options:
  --episodes 50       how many to keep
  --out FOLDER        new or empty (default: demos/<environment>)
  --noise 0.1         standard deviation of noise on the executed actions, as a share of half their range; the
                      stored actions are without it
  --seed 0            of starts and noise
  --keep-failures     keep episodes without success, too

Settings of the environment:
"""

LIST_HELP = "Print algorithms, presets, and the choices of credit and objective with their sources."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    0: done; 1: the end of a run was not saved, a seed failed, ``check-env`` found that GRPO cannot train, ``plan`` that
    a run does not fit, or ``doctor`` trouble; 2: an error; 130: interrupted.
    """
    shared = Parser(prog="groupwise", add_help=False)
    shared.add_argument("--plugin", type=Path, action="append", default=[])
    shared.add_argument("--debug", action="store_true")
    debug = "--debug" in (sys.argv if argv is None else argv)
    prepare()
    try:
        options, rest = shared.parse_known_args(argv)
        plugins.load(options.plugin)
        return _dispatch(rest)
    except KeyboardInterrupt as error:
        show(f"groupwise: {str(error) or 'interrupted'}", to="stderr")
        return 130
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (GroupwiseError, OSError) as error:
        if debug:
            raise
        hint = " (--debug shows where)" if isinstance(error, OSError) else ""
        show(f"groupwise: error: {error}{hint}", *vars(error).get("__notes__", []), to="stderr")
        return 2
    except SystemExit as stop:  # argparse exits after --help
        return stop.code if isinstance(stop.code, int) else 0


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] == "--version":
        from importlib.metadata import version

        print(f"groupwise {version('groupwise')}")
        return 0
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "train": _train,
        "evolve": partial(_run_module, "evolve", add_help=False),
        "plan": partial(_run_module, "plan", add_help=False),
        "eval": _eval,
        "sample": _sample,
        "resume": _resume,
        "config": _config,
        "check-env": _check_env,
        "demos": _demos,
        "list": _list,
    }
    modules = ("serve", "export", "report", "view", "doctor", "compare", "convert")
    commands |= {name: partial(_run_module, name) for name in modules}
    if argv[0] not in commands:
        raise UnknownNameError("command", argv[0], [*commands, "--help", "--version"])
    return commands[argv[0]](argv[1:])


def _train(argv: Sequence[str]) -> int:
    parser = Parser(prog="groupwise train", add_help=False)
    parser.add_argument("--seeds")
    parser.add_argument("--profile", type=count, nargs="?", const=3)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("-q", "--quiet", dest="progress", action="store_const", const="none")
    output.add_argument("-v", "--verbose", dest="progress", action="store_const", const="iterations")
    options, rest = parser.parse_known_args(argv)

    from groupwise.cli.options import parse_options

    flags = ("seeds", "profile", "preset", "quiet", "verbose")
    cfg = parse_options(rest, prog="groupwise train", description=TRAIN_HELP, flags=flags)
    if options.progress is not None:
        show_errors_only() if options.progress == "none" else show_everything()
        cfg = cfg.model_copy(update={"logging": cfg.logging.model_copy(update={"progress": options.progress})})
    if options.seeds is not None:
        if options.profile is not None:
            raise ConfigError("--profile is of a single run, got --seeds too; fix: one of them")
        from groupwise.cli.seeds import parse_seeds, train_seeds

        return train_seeds(cfg, parse_seeds(options.seeds))

    from groupwise.run import train_from_config

    quiet = options.progress == "none"
    if options.profile is None:
        return _print_run(train_from_config(cfg), quiet)

    from groupwise.training.profiler import Profiler

    return _print_run(train_from_config(cfg, callbacks=[Profiler(options.profile)]), quiet)


def _config(argv: Sequence[str]) -> int:
    from groupwise.cli.options import parse_options
    from groupwise.config import json_schema, to_json

    if "--schema" in argv:
        print(json.dumps(json_schema(), indent=2))
    else:
        flags = ("schema", "preset")
        print(to_json(parse_options(argv, prog="groupwise config", description=CONFIG_HELP, flags=flags)))
    return 0


def _check_env(argv: Sequence[str]) -> int:
    from groupwise.config.env import EnvCfg

    words = [word for word in argv if word != "--json"]
    settings = [f"env.{name}" for name in EnvCfg.model_fields if name not in ("id", "num_envs")]
    env = _read_env(words, prog="groupwise check-env", description=CHECK_HELP, only=settings, flags=("json",))

    from groupwise.check import check_env

    report = check_env(env)
    show(json.dumps(report.to_dict()) if "--json" in argv else report)
    return int(report.training.value is None)


def _read_env(words: Sequence[str], **command: Any) -> Any:
    """The ``EnvCfg`` that the words describe."""
    from groupwise.cli.options import parse_options
    from groupwise.config.run import RunCfg

    cfg = parse_options(words, **command)
    if not isinstance(cfg, RunCfg):
        raise ConfigError(f"{words[0]} is a text task without an environment; fix: an environment's id or file")
    return cfg.env


def _demos(argv: Sequence[str]) -> int:
    parser = Parser(prog="groupwise demos", add_help=False)
    parser.add_argument("--episodes", type=count, default=50)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-failures", action="store_true")
    options, rest = parser.parse_known_args(argv)

    only, flags = ("env.kwargs", "env.max_episode_steps"), [flag.removeprefix("--") for flag in parser.flags]
    env = _read_env(rest, prog="groupwise demos", description=DEMOS_HELP, only=only, flags=flags)

    from groupwise.embodied.demos import record_demos

    found = record_demos(env, **vars(options))
    show(f"Recorded {found.episodes} episodes ({found.steps:,} steps) of {found.attempts} attempts in {found.path}.")
    again = plugins.command("train", rest[0], "--algorithm", "bc", "--algorithm.data", found.path)
    show(f"Next:  {again}")
    return 0


def _eval(argv: Sequence[str]) -> int:
    parser = Parser(prog="groupwise eval", description=EVAL_HELP)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--episodes", type=count, help="episodes (default: 100) or prompts (default: all)")
    parser.add_argument("--completions-per-prompt", type=count, default=1, help="sampled if more than 1 (default: 1)")
    sampled = "sample actions (default: take the most likely one)"
    parser.add_argument("--sampled", dest="deterministic", action="store_const", const=False, help=sampled)
    parser.add_argument("--seed", type=int, help="of the episodes (default: not used in training)")
    parser.add_argument("--video", action="store_true", help="also record an episode")
    parser.add_choice("--checkpoint", ("latest", "best"), default="latest", help="whose policy (default: latest)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, with each return")
    options = vars(parser.read(argv))
    as_json = options.pop("json")

    from groupwise.report.folder import RunFolder
    from groupwise.run import evaluate

    run = options.pop("run")
    found = evaluate(run, options.pop("episodes"), **options)
    video = {"video": str(RunFolder(run).video)} if options["video"] else {}
    if as_json:
        print(json.dumps(found.report() | video))
        return 0
    show(found.line())
    _print_tasks(found.report().get("success_by_task", {}))
    if found.episodes == 1:
        print("one episode gives no interval; fix: --episodes 2 or more", file=sys.stderr)
    if video:
        show(f"video: {video['video']}")
    return 0


def _print_tasks(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the success of each task, where there are several."""
    width = max(map(len, found), default=0)
    for task, scores in found.items():
        low, high = (100 * end for end in scores["success_ci95"])
        rate = f"success {100 * scores['success_rate']:3.0f} % (95 % interval {low:.0f} to {high:.0f})"
        show(f"{task:<{width}}  {rate} of {scores['episodes']} episodes")


def _sample(argv: Sequence[str]) -> int:
    parser = Parser(prog="groupwise sample", description=SAMPLE_HELP)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="what to complete")
    parser.add_argument("--messages", action="store_true", help="prompts are lists of messages, in JSON")
    parser.add_argument("--count", type=count, default=1, help="completions of each prompt (default: 1)")
    parser.add_argument("--deterministic", action="store_true", help="take the most likely token each time")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default: 0)")
    parser.add_choice("--checkpoint", ("latest", "best"), default="latest", help="whose policy (default: latest)")
    options = vars(parser.read(argv))

    from groupwise.run import sample

    prompts, as_messages = options.pop("prompts"), options.pop("messages")
    read = list(map(_messages, prompts)) if as_messages else prompts
    texts = sample(options.pop("run"), read, options.pop("count"), **options)
    show(f"\n{'=' * 20}\n".join(f"\n{'-' * 20}\n".join(of_prompt) for of_prompt in texts))
    return 0


def _messages(word: str) -> Any:
    try:
        messages = json.loads(word)
    except ValueError:
        messages = None
    if isinstance(messages, list):
        return messages
    fix = """'[{"role": "user", "content": "..."}]'"""
    raise ConfigError(f"--messages: {word!r:.80} is no list of messages in JSON; fix: {fix}")


def _run_module(name: str, argv: Sequence[str], **options: Any) -> int:
    """Run a command that has a module of its name; returns the exit code."""
    module = importlib.import_module(f"groupwise.cli.{name}")
    return int(module.run(Parser(prog=f"groupwise {name}", description=module.HELP, **options), argv) or 0)


def _resume(argv: Sequence[str]) -> int:
    from groupwise.cli import evolve, resume

    if argv and (Path(argv[0]) / "population.json").is_file():
        return evolve.resume(Parser(prog="groupwise resume", description=resume.HELP), argv)
    return _print_run(resume.run(Parser(prog="groupwise resume", description=resume.HELP), argv))


def _print_run(run: Any, quiet: bool = False) -> int:
    """Print the result of a run and the next command; returns the exit code.

    Args:
        quiet: name the run folder in place of commands.
    """
    found = run.summary
    if "seconds" not in found:  # of several processes, the first one reports
        return 0
    reached = ""
    if (score := found.get("return_mean")) is not None:
        kind = "greedy return" if run.cfg.evaluation.deterministic else "return"
        interval = "95 % interval {:.4g} to {:.4g}".format(*found["ci95"]) if found.get("ci95") else "no interval"
        cut = f", {count} cut at the step limit" if (count := found.get("cut_episodes")) else ""
        reached = f": {kind} {score:.1f} ({found['episodes']} episodes{cut}, {interval})"
        best = f"{found['best_return_mean']:.1f}"
        if (rate := found.get("success_rate")) is not None:
            low, high = (100 * end for end in found["success_ci95"])
            reached += f", success {100 * rate:.0f} % (95 % interval {low:.0f} to {high:.0f})"
            best += f", success {100 * found['best_success_rate']:.0f} %,"
        reached += f". Best {best} at step {found['best_env_steps']:,}"
    where = f" Run folder: {run.path}" if quiet else ""
    show(f"Done in {found['seconds']:.1f} s{reached}.{where}")
    if found["stopped"] not in BUDGETS:
        show(f"Stopped at step {found['env_steps']:,}: {found['stopped']}.")
    if 0 < found.get("updates_without_gradient", 0) == found["iterations"]:
        show("Nothing was learned: the gradient of every update was 0 (docs/troubleshooting.md).")
    steps, iterations = found.get("unsaved_env_steps"), found.get("unlogged_iterations")
    if steps or iterations:
        what = f"the last {steps:,} steps" if steps else f"metrics of {iterations:,} iterations"
        again = f", then {plugins.command('resume', run.path)}" if steps else ""
        show(f"NOT SAVED: {what}; fix: make room{again}", to="stderr")
        return 1
    if not quiet:
        show(f"Look:  {plugins.command('report', run.path)}", f"Next:  {plugins.command('eval', run.path)}")
    return 0


def _list(argv: Sequence[str]) -> int:
    parser = Parser(prog="groupwise list", description=LIST_HELP)
    parser.add_argument("text", nargs="?", default="", help="show only entries with this text, such as dapo or kl")

    from groupwise.cli import listing

    listing.show(parser.read(argv).text)
    return 0
