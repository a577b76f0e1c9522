"""Your own algorithm: imitate the best episodes of each group.

This is the cross-entropy method; on language models, best-of-n imitation. It has no critic, no advantages and no ratio.
Groups, minibatches, several processes, checkpoints and the command line come from the library:

    python examples/custom_algorithm.py
    groupwise train CartPole-v1 --plugin examples/custom_algorithm.py --algorithm imitate_best --algorithm.elite 0.2
"""

import argparse
from typing import Annotated

from annotated_types import Ge, Le

import groupwise as gw
from groupwise.algorithms.advantages import episode_groups
from groupwise.algorithms.base import BaseAlgorithm, LossOutput
from groupwise.data.rollout import transition_view
from groupwise.functional.advantages import episode_return
from groupwise.functional.reduce import gather_segments, segment_min_max


class ImitateBestCfg(gw.GRPOCfg, name="imitate_best"):
    """Settings of ``ImitateBest``. ``GRPOCfg`` has the group size and the presets of environments."""

    elite: Annotated[float, Ge(0), Le(1)] = 0.5
    """Episodes in this upper share of their group's range of returns are imitated; 0 takes the best alone."""
    num_epochs: Annotated[int, Ge(1)] = 2
    """Passes over each rollout. Few, because no clip limits the update."""


@gw.register_algorithm(ImitateBestCfg)
class ImitateBest(BaseAlgorithm):
    """Maximises the likelihood of the actions in the best episodes of each group."""

    grouped = True
    actor_only = True
    metric_names = ("loss", "entropy")

    def update(self, rollout):
        """Improve the policy by one rollout; returns metrics."""
        batch = transition_view(rollout)
        num_episodes = int(batch["episode_id"].max()) + 1
        group, _ = episode_groups(batch, num_episodes)
        score = episode_return(batch["reward"], batch["episode_id"], num_episodes)
        low, high = segment_min_max(score, group, int(group.max()) + 1)
        # A group with equal returns is imitated as a whole, so that no batch is empty.
        elite = score >= (high - self.cfg.elite * (high - low))[group]
        imitated = gather_segments(elite.float(), batch["episode_id"]) > 0

        data = self.policy_inputs(batch)
        data["loss_mask"] = batch["loss_mask"] & imitated  # not in place: nothing writes into a rollout
        metrics = self.optimize(data, num_episodes, {"train/elite_share": elite.float().mean()})
        self.policy.update_normalizers(rollout, self.engine)  # observation statistics move between updates only
        self.iteration += 1
        return metrics

    def loss(self, batch, evaluation):
        """``-log_prob - ent_coef * entropy`` of each step; ``optimize`` takes the mean."""
        loss = -evaluation.log_prob - self.cfg.ent_coef * evaluation.entropy
        return LossOutput(loss, (loss, evaluation.entropy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=60_000)
    parser.add_argument("--run-dir")
    args = parser.parse_args()

    cfg = ImitateBestCfg(group_size=8, num_steps=250)
    run = gw.train("CartPole-v1", cfg, seed=0, total_steps=args.total_steps // 2, run_dir=args.run_dir)
    print(f"half way: {run.summary['return_mean']:.1f}")

    # The registered name in config.json leads back to the class.
    assert gw.load_config(run.path / "config.json") == run.cfg
    if run.summary["env_steps"] < args.total_steps:  # the first half ends with a whole iteration
        run = gw.resume(run.path, args.total_steps)
    print(f"{run.cfg.algorithm.name} with elite {run.cfg.algorithm.elite}: {run.summary['return_mean']:.1f} in the end")


if __name__ == "__main__":
    main()
