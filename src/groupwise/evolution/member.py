"""One round of one member: train to the end of the round, evaluate, write down the result."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from groupwise.config.run import CommonCfg, RunCfg
from groupwise.errors import DivergedError
from groupwise.report.folder import RunFolder
from groupwise.run import Run, evaluate, resume, train_from_config
from groupwise.system import files
from groupwise.training.base import Callback
from groupwise.training.components import UserObjects
from groupwise.training.trainer import PAUSED, Trainer

RESULTS = "evolution.jsonl"
"""In a member's folder: a line for each of its rounds."""
NOISY_SHARE = 0.1
"""Of the weights of a clone."""


@dataclass(frozen=True)
class Round:
    """What a member does in a round."""

    number: int
    folder: Path
    """Of the member's run; it is made if it does not exist."""
    cfg: CommonCfg
    """Settings of a new run."""
    until: int
    """Environment steps at which the round ends."""
    episodes: int
    seed: int
    """Of the evaluation; the same for all members."""
    noise: tuple[float, int] | None = None
    """Of a clone: standard deviation of the noise on its weights, and its seed."""


class AddNoise(Callback):
    """Gaussian noise on a tenth of the weights, once, before a clone trains for the first time.

    Args:
        std: in units of each tensor's standard deviation.

    Source: the parameter mutation of AgileRL, https://github.com/AgileRL/AgileRL.
    """

    def __init__(self, std: float, seed: int) -> None:
        self.std = std
        self.seed = seed
        self._added: int | None = None
        """Seed of the noise in the weights. A clone of a clone begins with that of its parent."""

    @torch.no_grad()
    def on_training_start(self, trainer: Trainer) -> None:
        """Change the weights, unless nothing is trained: such weights would not be saved."""
        if self._added == self.seed or trainer.is_done():
            return
        generator = torch.Generator().manual_seed(self.seed)
        for parameter in trainer.algorithm.policy.parameters():
            if parameter.requires_grad and parameter.numel() > 1:
                noise = torch.randn(parameter.shape, generator=generator) * self.std * float(parameter.std())
                chosen = torch.rand(parameter.shape, generator=generator) < NOISY_SHARE
                parameter.add_((noise * chosen).to(parameter))
        self._added = self.seed

    def state_dict(self) -> dict[str, Any]:
        """Seed of the noise that was added."""
        return {"added": self._added}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self._added = state["added"]


class PauseAt(Callback):
    """Stops training where a round ends."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_training_start(self, trainer: Trainer) -> None:
        """Stop at once, if the round was trained before a kill, or by an iteration of the round before."""
        if trainer.env_steps >= self.steps:
            trainer.stop(PAUSED)

    def on_iteration_end(self, trainer: Trainer, rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Stop where the round ends."""
        self.on_training_start(trainer)


def play(task: Round, given: UserObjects) -> dict[str, Any]:
    """The result of a round: scores with their interval, or how the member diverged. A finished round is read again."""
    for result in read_results(task.folder):
        if result["round"] == task.number:
            return result
    found: dict[str, Any] = {"round": task.number, "status": "ok"}
    try:
        found |= _scores(_trained(task, given), task)
    except DivergedError as error:
        found |= {"status": "diverged", "reason": str(error)}
    files.append(task.folder / RESULTS, f"{json.dumps(found)}\n".encode())
    return found


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The member's finished rounds."""
    path = folder / RESULTS
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _trained(task: Round, given: UserObjects) -> Run:
    callbacks: list[Callback] = []
    if task.until < (task.cfg.total_steps or 0):  # else the budget ends it
        callbacks.append(PauseAt(task.until))
    if task.noise is not None:
        callbacks.append(AddNoise(*task.noise))
    if RunFolder(task.folder).config.exists():
        return resume(task.folder, callbacks=callbacks, **given.as_arguments())
    return train_from_config(task.cfg.model_copy(update={"run_dir": task.folder}), given, callbacks)


def _scores(run: Run, task: Round) -> dict[str, Any]:
    result = evaluate(run, task.episodes, seed=task.seed)
    by_success = isinstance(run.cfg, RunCfg) and run.cfg.evaluation.metric == "success_rate"
    mean = result.success_rate if by_success else result.return_mean
    if mean is None or not math.isfinite(mean):
        raise DivergedError.because(f"the score of an evaluation is {mean}")
    ci95 = result.success_ci95 if by_success else result.ci95
    return {"env_steps": run.summary["env_steps"], "mean": mean, "ci95": ci95 and list(ci95)}
