"""Scripts in processes that have imported the library already: forked from one that did, as new interpreters take seconds."""

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import warnings
from multiprocessing import forkserver
from pathlib import Path

import pytest
import quick_imports  # noqa: F401  (first of all)

PRELOADED = [
    "forked",
    "groupwise.run",
    "groupwise.training.build",
    "groupwise.text.build",
    "groupwise.evolution.population",
    "peft",
]
CONTEXT = multiprocessing.get_context("forkserver")


def preload():
    """Start the process that others are forked from, those of the library, too."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # where this file is found
        forkserver.ensure_running()


def without_pictures(patch):
    """Runs end with a curve, a video and frames, which are most of a short one, and which few tests look at."""
    patch.setattr("groupwise.training.build.film", lambda *args, **options: None)
    patch.setattr("groupwise.training.build.film_group", lambda *args: None)
    patch.setattr("groupwise.run.plot_curve", lambda *args: None)


def with_two_episodes(patch):
    """Evaluations of trainings are of two episodes: environments of more of them take most of a short training."""
    from groupwise.training.build import EnvEvaluator

    def evaluator(cfg, *args, **options):
        two = cfg.evaluation.model_copy(update={"episodes": 2})
        return EnvEvaluator(cfg.model_copy(update={"evaluation": two}), *args, **options)

    patch.setattr("groupwise.training.build.EnvEvaluator", evaluator)


class Script:
    """A script that runs: code, or the path of a file.

    Args:
        args: what follows in ``sys.argv``.
        ranks: processes, which find each other as under torchrun.
        pictures: whether runs draw them.
        two_episodes: whether evaluations of trainings are that short.
        lenient: whether it may warn, as with ``-W ignore``.
        python: what it takes for its interpreter, where it starts processes.
    """

    def __init__(
        self,
        script,
        *args,
        folder=None,
        ranks=1,
        pictures=False,
        two_episodes=False,
        lenient=False,
        python=sys.executable,
    ):
        self._folder = tempfile.TemporaryDirectory(prefix="script-")
        self._out = Path(self._folder.name)
        port = _free_port()
        environments = [_rank(rank, ranks, port) if ranks > 1 else {} for rank in range(ranks)]
        argv = ["script", *map(str, args)]
        self.processes = [
            CONTEXT.Process(
                target=_run,
                args=(script, argv, folder, env, self._out / str(rank), pictures, two_episodes, lenient, str(python)),
            )
            for rank, env in enumerate(environments)
        ]
        for process in self.processes:
            process.start()

    def finish(self, seconds=280):
        """What the processes printed; fails where one did not end well."""
        for process in self.processes:
            process.join(seconds)
        codes = [process.exitcode for process in self.processes]
        if any(codes) or None in codes:
            errors = "\n".join(map(self.errors, range(len(codes))))
            self.kill()
            pytest.fail(f"exit codes {codes}\n{errors[-3000:]}")
        printed = "".join((self._out / f"{rank}.out").read_text() for rank in range(len(codes)))
        self._folder.cleanup()
        return printed

    def errors(self, rank):
        return (self._out / f"{rank}.err").read_text()

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def run_script(script, *args, seconds=280, **options):
    """What it printed."""
    return Script(script, *args, **options).finish(seconds)


def _rank(rank, ranks, port):
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in numbers.items()}


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _run(script, argv, folder, env, out, pictures, two_episodes, lenient, python):
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{out}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(env)
    warnings.simplefilter("ignore" if lenient else "error")
    warnings.filterwarnings("default", module="torch.distributed")
    warnings.filterwarnings("default", r"`torch\.jit\.", DeprecationWarning)  # of torch's compiler when it is imported
    if not pictures:
        without_pictures(pytest.MonkeyPatch())
    if two_episodes:
        with_two_episodes(pytest.MonkeyPatch())
    if folder is not None:
        os.chdir(folder)
    sys.argv, sys.executable = argv, python
    if isinstance(script, Path):
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
    else:
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
