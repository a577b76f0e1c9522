"""Prints how often the second iteration of a training waits for its device: ``ppo``, ``grpo``, or a text update by its ``old_log_prob``."""

import json
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import text_runs
from at_events import on
from emulated import DEVICE, WAITS, EmulatedDevice
from torch_rollouts import SETTINGS

import groupwise as gw
from groupwise.envs.torch_env import TorchCartPole

QUIET = {"logging": {"progress": "none"}, "evaluation": {"interval": 10**9}, "checkpoint_interval": 10**9}
found: dict[str, int] = {}


def clear(trainer, *_):
    WAITS.clear()


def note(trainer, *_):
    found.clear()
    found.update(WAITS)


def train_control(folder, kind):
    """Counts from the end of one iteration to that of the next."""
    end = [on("iteration_end", note), on("iteration_end", clear)]
    policy = {"normalize_obs": True}
    gw.train(
        TorchCartPole,
        SETTINGS[kind],
        num_envs=16,
        total_iterations=3,
        policy=policy,
        run_dir=folder / "run",
        callbacks=end,
        **QUIET,
    )


def train_text(folder, kind):
    """Counts from the end of the rollout to that of the update: one pass, or two."""
    epochs, old = (2, "sampled") if kind == "two epochs" else (1, kind)
    algorithm = gw.GRPOCfg(group_size=4, num_epochs=epochs, minibatch_size=None, objective={"old_log_prob": old})
    callbacks = [on("rollout_end", clear), on("iteration_end", note)]
    model = text_runs.save_model(folder / "model")
    text_runs.train(text_runs.copying(), model, folder / "run", algorithm, callbacks=callbacks, **QUIET)


if __name__ == "__main__":
    places = ("groupwise.training.build", "groupwise.text.build", "groupwise.run")
    with tempfile.TemporaryDirectory() as scratch, EmulatedDevice():
        for place in places:
            patch(f"{place}.pick_device", lambda name: DEVICE).start()
        run = train_control if sys.argv[1] in SETTINGS else train_text
        run(Path(scratch), sys.argv[1])
    print(json.dumps(found))
