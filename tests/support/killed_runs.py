"""Kills training by SIGKILL at its changes of files and at random moments, starts it again, and compares with a whole run.

    python killed_runs.py control|text FOLDER AT_CHANGES AT_MOMENTS [SEED]

prints what was wrong as a JSON list. Needs Linux.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from run_folders import logged, same_weights

import groupwise as gw
from groupwise.report.folder import RunFolder
from groupwise.run import STOP
from groupwise.training import build as env_evaluator
from groupwise.training.checkpoint import saved_counts

INTERVAL = {"control": 128, "text": 40}
COMMON = {"seed": 3, "speed": "off", "logging": {"progress": "none"}}
RENAMES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


def train(kind, path, model):
    """Five iterations; train as long as there are no settings in the folder, then resume."""
    resumed = (path / "config.json").exists()
    if kind == "text":
        from text_runs import copying

        task = copying()
        if resumed:
            gw.resume(path, **{name: value for name, value in task.given.items() if value is not None})
            return
        gw.train(
            task, gw.GRPOCfg(group_size=2), model=str(model), num_prompts=4, sampling={"max_new_tokens": 4}, run_dir=path,
            total_steps=130, checkpoint_interval=INTERVAL[kind], evaluation={"interval": 40}, **COMMON,
        )  # fmt: skip
    elif resumed:
        gw.resume(path)
    else:
        gw.train(
            "CartPole-v1", gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64), num_envs=4, run_dir=path,
            total_steps=320, checkpoint_interval=INTERVAL[kind], evaluation={"interval": 128, "episodes": 1}, **COMMON,
        )  # fmt: skip


class Runs:
    """Runs under ``folder``, each part in a process of its own."""

    def __init__(self, kind, folder):
        self.kind, self.folder, self.log = kind, folder, folder / "log"
        folder.mkdir(parents=True)
        if kind == "text":
            from text_runs import save_model

            save_model(folder / "model")
        env_evaluator.film = lambda *args, **options: None  # half of the time
        self.whole = folder / "whole"
        assert self.start(self.whole) == 0, self.log.read_text()
        begin = time.perf_counter()
        self.start(folder / "timed")
        self.duration = time.perf_counter() - begin
        path, file = folder / "counted", folder / "changes"
        self.start(path, before=lambda: dies_at(10**9, path, os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)))
        self.changes = file.stat().st_size  # of files by one run

    def start(self, path, number=None, seconds=0, before=lambda: None):
        """Train, or go on, until the signal with that number; the status of the process."""
        process = os.fork()
        if process == 0:
            os.dup2(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
            os.dup2(1, 2)
            try:
                before()
                train(self.kind, path, self.folder / "model")
            except KeyboardInterrupt:
                os._exit(130)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", flush=True)
                os._exit(1)
            os._exit(0)
        if number is not None:
            time.sleep(seconds)
            os.kill(process, number)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def killed_at_change(self, number):
        """What is wrong after a kill right before that change of a file, or in the middle of it; empty if nothing."""
        path = self.folder / f"change_{number}"
        if self.start(path, before=lambda: dies_at(number, path)) != -signal.SIGKILL:
            return "it was not killed"
        return self.continued(path)

    def killed_at_moments(self, rng):
        """The same for three kills or signals of one run."""
        path = self.folder / f"moment_{rng.random()}"
        for number in (signal.SIGKILL, rng.choice(STOP), rng.choice(STOP)):
            since = time.monotonic()
            code = self.start(path, number, rng.uniform(0, self.duration))
            if number != signal.SIGKILL and (code not in (0, 130, -number) or time.monotonic() - since > 90):
                return f"signal {number} ended it by {code} after {time.monotonic() - since:.0f} s"
        return self.continued(path)

    def continued(self, path):
        """Let a killed run end, and compare it with the whole one."""
        folder = RunFolder(path)
        rows = folder.read_metrics() if folder.config.exists() else []
        lost = rows[-1]["env_steps"] - saved_counts(folder.latest)["steps"] if rows else 0
        longest = max(row["rollout/env_steps"] for row in rows) if rows else 0
        if lost > INTERVAL[self.kind] + longest:
            return f"{lost} steps are lost"
        if self.start(path) != 0:
            return f"not continued: {self.log.read_text()[-300:]}"
        if logged(path) != logged(self.whole):
            return "other metrics"
        if not same_weights(path, self.whole):
            return "other parameters"
        if left := [str(file) for file in path.rglob(".*.partial")]:
            return f"left behind: {left}"
        shutil.rmtree(path)
        return ""


def dies_at(number, path, count=None):
    """End this process at the change with that number in a folder; a write is half done."""
    done, write = 0, os.write

    def change(half=lambda: None):
        nonlocal done
        done += 1
        if count is not None:
            write(count, b".")
        if done == number:
            half()
            os.kill(os.getpid(), signal.SIGKILL)

    def writes(descriptor, data):
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(path)):
            change(lambda: write(descriptor, data[: len(data) // 2]))
        return write(descriptor, data)

    def hook(event, args):
        if event == "open" and str(args[0]).startswith(str(path)) and args[2] & os.O_CREAT:
            change()
        elif event in RENAMES and (str(args[0]).startswith(str(path)) or args[-1] not in (-1, None)):
            change()  # rmtree names files by their folder's descriptor

    os.write = writes
    sys.addaudithook(hook)


def torture(kind, folder, at_changes, at_moments, seed=0):
    """What was wrong in that many runs."""
    torch.set_num_threads(1)
    runs, rng = Runs(kind, folder), random.Random(seed)
    numbers = sorted(rng.sample(range(1, runs.changes + 1), min(at_changes, runs.changes)))
    found = {f"change {number} of {runs.changes}": runs.killed_at_change(number) for number in numbers}
    found |= {f"moments {number}": runs.killed_at_moments(rng) for number in range(at_moments)}
    return [f"{where}: {what}" for where, what in found.items() if what]


if __name__ == "__main__":
    print(json.dumps(torture(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))))
