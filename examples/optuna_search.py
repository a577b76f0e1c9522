"""Optuna proposes settings, and prunes runs by their evaluations. It needs the extra ``optuna``.

The study is kept in the run folder: the same command again adds trials to it, also after a kill.

python examples/optuna_search.py
"""

import argparse
from pathlib import Path

import optuna

import groupwise as gw


class Report(gw.Callback):
    """Reports each evaluation to the trial, and stops a run that the study prunes."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_evaluation_end(self, trainer, evaluation):
        self.trial.report(evaluation.return_mean, trainer.env_steps)
        if not trainer.is_done() and self.trial.should_prune():
            trainer.stop("pruned")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=50_000, help="of each run")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--run-dir", type=Path, default="runs/optuna")
    args = parser.parse_args()

    def train(trial: optuna.Trial) -> float:
        rate = trial.suggest_float("learning_rate", 1e-5, 1e-1, log=True)
        ppo = {"name": "ppo", "learning_rate": rate, "num_epochs": trial.suggest_int("num_epochs", 1, 10)}
        options = {"total_steps": args.total_steps, "evaluation": {"interval": args.total_steps // 10}}
        run = gw.train(
            "CartPole-v1", ppo, run_dir=args.run_dir / f"trial-{trial.number}", callbacks=[Report(trial)], **options
        )
        if run.summary["stopped"] == "pruned":
            raise optuna.TrialPruned
        return run.summary["return_mean"]

    args.run_dir.mkdir(parents=True, exist_ok=True)
    kept = {"storage": f"sqlite:///{args.run_dir}/study.db", "study_name": "ppo", "load_if_exists": True}
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
    study = optuna.create_study(direction="maximize", pruner=pruner, **kept)
    study.optimize(train, n_trials=args.trials, catch=gw.errors.DivergedError)
    print(
        f"trial {study.best_trial.number} of {len(study.trials)} is the best, {study.best_value:.1f}: {study.best_params}"
    )


if __name__ == "__main__":
    main()
