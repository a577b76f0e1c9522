"""Ray Tune over runs, for its own schedulers. Needs the extra ``ray``."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from groupwise.errors import require_extra
from groupwise.integrations.base import Base
from groupwise.run import resume, train_from_config
from groupwise.training.base import Callback
from groupwise.training.checkpoint import saved_counts
from groupwise.training.evaluation import EvaluationResult
from groupwise.training.fork import fork_run
from groupwise.training.trainer import Trainer

require_extra("ray", "ray")

from ray import tune


def trainable(env: Any = "CartPole-v1", algorithm: Any = None, **fields: Any) -> Callable[[dict[str, Any]], None]:
    """A function for ``ray.tune.Tuner``. The configuration of a trial has settings by path, such as ``algorithm.learning_rate``.

    Each evaluation is reported as ``score``, with ``env_steps`` and a checkpoint of the run. A trial that Ray Tune gives the
    checkpoint of another one, as in population-based training, trains on from there with its own settings.

    Args:
        env, algorithm, fields: as of ``gw.train``; ``checkpoint_interval`` is that of the evaluations.
    """
    return partial(_train, Base(env, algorithm, fields))


def _train(base: Base, config: dict[str, Any]) -> None:
    saving = {"checkpoint_interval": base.cfg.evaluation.interval, "keep_checkpoints": 1, "run_dir": None}
    cfg = base.with_settings(config, **saving)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=tune.get_context().get_trial_dir()))  # one for each start
    callbacks = [_Report(base.metric)]
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        train_from_config(cfg.model_copy(update={"run_dir": folder}), base.given(), callbacks)
        return
    with checkpoint.as_directory() as saved:
        fork_run(Path(saved), folder, "latest", lambda _: cfg)
    resume(folder, callbacks=callbacks, **base.given().as_arguments())


class _Report(Callback):
    """Reports each evaluation when the checkpoint of its iteration is written."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        self.scores: dict[int, float] = {}
        """By environment steps; of checkpoints that are not written yet."""

    def on_evaluation_end(self, trainer: Trainer, evaluation: EvaluationResult) -> None:
        self.scores[trainer.env_steps] = evaluation.score(self.metric)

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        steps = int(saved_counts(path)["steps"])  # the trainer may be further
        if steps in self.scores:
            finished = trainer.is_done() and steps == trainer.env_steps  # no other run can begin there
            saved = None if finished else tune.Checkpoint.from_directory(str(path.parents[1]))
            tune.report({"score": self.scores.pop(steps), "env_steps": steps}, checkpoint=saved)
