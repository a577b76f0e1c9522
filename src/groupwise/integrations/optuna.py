"""Optuna over runs: it proposes settings, and prunes by the evaluations of training. Needs the extra ``optuna``."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.config.evolution import Choices, EvolutionCfg, RangeCfg
from groupwise.errors import ConfigError, DivergedError, require_extra
from groupwise.evolution.search import setting_at
from groupwise.integrations.base import Base
from groupwise.run import train_from_config
from groupwise.training.base import Callback
from groupwise.training.evaluation import EvaluationResult
from groupwise.training.trainer import Trainer

require_extra("optuna", "optuna")

from optuna import Study, Trial
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import TrialState


def optimize(
    study: Study,
    env: Any = "CartPole-v1",
    algorithm: Any = None,
    *,
    search: Mapping[str, Any],
    trials: int,
    run_dir: Path | str,
    **fields: Any,
) -> None:
    """Train a run for each trial of ``study``, which maximises the last evaluation. A run that diverges fails.

    Args:
        env, algorithm, fields: as of ``gw.train``.
        search: bounds or values of settings, by path, as of ``gw.evolve``. Network sizes may be searched, too.
        trials: runs to train.
        run_dir: their folder; a run is ``trial-<number>`` in it.

    Raises:
        ConfigError: a setting is unknown or impossible, or the study does not maximise.
        RunFolderError: the folder of a run is taken.
    """
    if study.directions != [StudyDirection.MAXIMIZE]:
        raise ConfigError(
            "the study minimises, and scores are better when higher; fix: create_study(direction='maximize')"
        )
    base = Base(env, algorithm, fields)
    spaces = EvolutionCfg(search=search).search  # type: ignore[arg-type]
    distributions = {path: _distribution(space, setting_at(base.cfg, path)) for path, space in spaces.items()}
    for _ in range(trials):
        trial = study.ask(distributions)
        scores = _Report(trial, base.metric)
        try:
            cfg = base.with_settings(trial.params, run_dir=str(Path(run_dir, f"trial-{trial.number}")))
            run = train_from_config(cfg, base.given(), [scores])
        except DivergedError:
            study.tell(trial, state=TrialState.FAIL)
            continue
        except BaseException:
            study.tell(trial, state=TrialState.FAIL)
            raise
        pruned = run.summary["stopped"] == _PRUNED
        study.tell(trial, None if pruned else scores.last, TrialState.PRUNED if pruned else None)


_PRUNED = "pruned"


class _Report(Callback):
    """Reports each evaluation, and stops a run that the study prunes."""

    def __init__(self, trial: Trial, metric: Any) -> None:
        self.trial = trial
        self.metric = metric
        self.last = math.nan

    def on_evaluation_end(self, trainer: Trainer, evaluation: EvaluationResult) -> None:
        self.last = evaluation.score(self.metric)
        self.trial.report(self.last, trainer.env_steps)
        if not trainer.is_done() and self.trial.should_prune():
            trainer.stop(_PRUNED)


def _distribution(space: RangeCfg | Choices, now: Any) -> BaseDistribution:
    """Of a setting whose value is ``now``."""
    if not isinstance(space, RangeCfg):
        return CategoricalDistribution(space)
    if isinstance(now, int):
        return IntDistribution(round(space.min), round(space.max), log=space.log)
    return FloatDistribution(space.min, space.max, log=space.log)
