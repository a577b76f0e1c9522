"""Callbacks of your own.

One logs a statistic of the rollout. The other stops the run at a score, and keeps its count across a resume.

    python examples/callbacks.py
"""

import argparse

import groupwise as gw
from groupwise.data.rollout import transition_view


class CartDistance(gw.Callback):
    """Logs the mean distance of the cart from the middle. Values added to ``metrics`` go to every log."""

    def on_iteration_end(self, trainer, rollout, metrics):
        steps = transition_view(rollout)
        # Other slots hold no step of an episode.
        position = steps["obs"][..., 0][steps["valid"]]
        metrics["rollout/cart_distance"] = position.abs().mean().item()


class StopWhenSolved(gw.Callback):
    """Stops when several evaluations in a row reach the score.

    For a single evaluation, ``stop={"threshold": 475}`` needs no callback.
    """

    def __init__(self, score: float, times: int) -> None:
        self.score = score
        self.times = times
        self.reached = 0

    def on_evaluation_end(self, trainer, evaluation):
        self.reached = self.reached + 1 if evaluation.return_mean >= self.score else 0
        print(f"{trainer.env_steps:,} steps: {evaluation.return_mean:.1f}, {self.reached} of {self.times} in a row")
        if self.reached == self.times:
            trainer.stop(f"solved: {self.score:g} or more, {self.times} times in a row")

    def state_dict(self):  # a resumed run continues from this count
        return {"reached": self.reached}

    def load_state_dict(self, state):
        self.reached = state["reached"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=100_000)
    parser.add_argument("--score", type=float, default=475.0, help="mean return at which CartPole counts as solved")
    parser.add_argument("--run-dir")
    args = parser.parse_args()

    run = gw.train(
        "CartPole-v1",
        "ppo",
        seed=0,
        total_steps=args.total_steps,
        run_dir=args.run_dir,
        evaluation={"interval": args.total_steps // 20},
        callbacks=[CartDistance(), StopWhenSolved(args.score, times=2)],
    )
    first, last = run.metrics()[0], run.metrics()[-1]
    print(f"stopped by {run.summary['stopped']}, after {last['env_steps']:,} steps")
    print(f"cart distance: {first['rollout/cart_distance']:.3f} at first, {last['rollout/cart_distance']:.3f} at last")


if __name__ == "__main__":
    main()
