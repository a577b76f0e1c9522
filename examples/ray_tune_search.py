"""Ray Tune trains runs in parallel, and stops the worse ones early. It needs the extra ``ray``.

python examples/ray_tune_search.py
"""

import argparse
from pathlib import Path

from ray import tune

import groupwise as gw


class Report(gw.Callback):
    """Reports each evaluation, after which Ray Tune may end the trial."""

    def on_evaluation_end(self, trainer, evaluation):
        tune.report({"score": evaluation.return_mean, "env_steps": trainer.env_steps})


def train(config: dict[str, float]) -> None:
    options = {"total_steps": config["total_steps"], "evaluation": {"interval": config["total_steps"] // 10}}
    ppo = {"name": "ppo", "learning_rate": config["learning_rate"]}
    gw.train("CartPole-v1", ppo, run_dir=f"{tune.get_context().get_trial_dir()}/run", callbacks=[Report()], **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=50_000, help="of each run")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--run-dir", type=Path, default="runs/ray_tune")
    args = parser.parse_args()

    # a trial that the scheduler ends loses the iteration it is in, so runs end by themselves, before ``max_t``
    grace_period = args.total_steps // 5
    asha = tune.schedulers.ASHAScheduler(time_attr="env_steps", max_t=10**12, grace_period=grace_period)
    results = tune.Tuner(
        train,
        param_space={"learning_rate": tune.loguniform(1e-5, 1e-1), "total_steps": args.total_steps},
        tune_config=tune.TuneConfig(metric="score", mode="max", num_samples=args.trials, scheduler=asha),
        run_config=tune.RunConfig(storage_path=str(args.run_dir.absolute().parent), name=args.run_dir.name),
    ).fit()
    best = results.get_best_result()
    print(f"the best of {len(results)} trials reached {best.metrics['score']:.1f}: {Path(best.path) / 'run'}")


if __name__ == "__main__":
    main()
