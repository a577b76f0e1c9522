"""The command line: finds the function of a command, and explains errors. Commands that need torch import it."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from groupwise import plugins
from groupwise.cli.options import HelpShownError, Parser
from groupwise.config.base import OTHER_NAMES, meant
from groupwise.errors import GroupwiseError, UnknownNameError
from groupwise.system import prepare, show

USAGE = """usage: groupwise COMMAND ...

Reinforcement learning with GRPO and PPO.

  train ENV|FILE     train on a Gymnasium environment, or with the settings of a file
  evolve ENV|FILE    train a population whose settings change while it trains
  eval RUN           evaluate a trained policy in episodes or on held-out prompts
  play RUN           show a trained policy in a window, or as a video
  sample RUN PROMPT  complete prompts with a trained language model, or play episodes
  resume RUN         continue a run
  serve MODEL        start a vLLM server that generates for training
  plan FILE          say how much GPU memory a run on texts needs
  export RUN         write a policy as ONNX or safetensors, a language model for transformers
  report RUN         write a page about a run: did it learn, its health, its groups
  view [FOLDER]      follow runs in the browser while they train
  doctor [RUN]       say what is wrong with a run, or with the installation
  compare RUNS ...   compare methods over seeds: means, intervals, curves
  config ENV|FILE    print all settings as JSON; --schema: their JSON Schema
  check-env ENV      check what an environment supports: shared starts, spaces
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

COMMANDS = {
    "train": "train", "evolve": "train", "resume": "train",
    "eval": "eval", "play": "eval", "sample": "eval", "export": "eval", "compare": "eval",
    "report": "report", "view": "report", "doctor": "report",
    "config": "other", "check-env": "other", "plan": "other", "demos": "other", "serve": "other", "list": "other",
}  # fmt: skip
"""Modules of the commands. The docstring of a command's function is its help."""
WITH_SETTINGS = ("train", "config", "check-env")
"""Commands whose help has the settings of an environment."""


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
        if not rest or rest[0] in ("-h", "--help"):
            print(USAGE, end="")
            return 0 if rest else 2
        name, *words = rest
        if name == "--version":
            print(f"groupwise {version('groupwise')}")
            return 0
        if name not in COMMANDS:
            hint = meant([OTHER_NAMES[name]]) if OTHER_NAMES.get(name) in COMMANDS else None
            raise UnknownNameError("command", name, [*COMMANDS, "--help", "--version"], hint=hint)
        module = importlib.import_module(f"groupwise.cli.{COMMANDS[name]}")
        command, helps = getattr(module, f"{name.replace('-', '_')}_command"), name not in WITH_SETTINGS
        parser = Parser(prog=f"groupwise {name}", description=inspect.getdoc(command), add_help=helps)
        return int(command(parser, words) or 0)
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
    except HelpShownError:
        return 0
    except SystemExit as stop:  # an environment, a reward or a plugin ended the process: an error, whatever the code
        *_, (frame, line) = traceback.walk_tb(stop.__traceback__)
        where = f"sys.exit in {frame.f_code.co_filename}, line {line}"
        text = stop.code if isinstance(stop.code, str) else f"the program was ended with code {stop.code}"
        show(f"groupwise: error: {text} ({where})", *vars(stop).get("__notes__", []), to="stderr")
        return stop.code if isinstance(stop.code, int) and stop.code else 2
