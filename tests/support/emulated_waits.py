"""Prints how often an iteration of ``ppo`` or ``grpo`` waits for its device, or an update of texts by its ``old_log_prob``: a line each."""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

from at_events import on
from emulated import DEVICE, WAITS, EmulatedDevice
from text_updates import rows_of
from tiny_models import tiny_model
from torch_rollouts import SETTINGS

import groupwise as gw
from groupwise.algorithms.grpo import GRPO
from groupwise.config.algorithm import GRPOCfg
from groupwise.envs.torch_env import TorchCartPole
from groupwise.text.collector import text_rollout
from groupwise.text.policy import CausalLM

found: dict[str, int] = {}


def clear(trainer, *_):
    WAITS.clear()


def note(trainer, *_):
    found.clear()
    found.update(WAITS)


def train_control(folder, kind):
    """Counts from the end of one iteration to that of the next."""
    with (
        EmulatedDevice(),
        patch("groupwise.training.build.pick_device", return_value=DEVICE),
        patch("groupwise.run.pick_device", return_value=DEVICE),
    ):
        gw.train(
            partial(TorchCartPole, max_episode_steps=12),
            SETTINGS[kind].model_copy(update={"minibatch_size": 96}),
            num_envs=16,
            total_iterations=3,
            checkpoint_interval=10**9,
            run_dir=folder / "run",
            policy={"normalize_obs": True},
            callbacks=[on("iteration_end", note), on("iteration_end", clear)],
            logging={"progress": "none"},
            evaluation={"interval": 10**9, "episodes": 1},
        )


def update_text(kind):
    """Counts an update of one pass, or of two, by rows that a policy on the CPU wrote."""
    epochs, old = (2, "sampled") if kind == "two epochs" else (1, kind)
    cfg = GRPOCfg(group_size=4, num_epochs=epochs, minibatch_size=None, objective={"old_log_prob": old})
    written = text_rollout(rows_of(CausalLM(tiny_model()), [[5, 6, 7], [9], [10, 11, 12, 13]]))
    with EmulatedDevice():
        algorithm = GRPO(cfg, CausalLM(tiny_model()).to(DEVICE))
        algorithm.update(written)
        WAITS.clear()
        algorithm.update(written)
    found.update(WAITS)


if __name__ == "__main__":
    for kind in sys.argv[1:]:
        found.clear()
        if kind in SETTINGS:
            with tempfile.TemporaryDirectory() as scratch:
                train_control(Path(scratch), kind)
        else:
            update_text(kind)
        print(json.dumps({kind: found}))
