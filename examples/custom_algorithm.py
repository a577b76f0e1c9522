"""An algorithm of your own: imitate the best attempts of each group, and forget the others.

Known as the cross-entropy method, or on language models as best-of-n imitation. It needs neither critic nor advantages
nor a ratio to an old policy, yet it gets groups, minibatches, several processes, checkpoints and the command line from
the library:

    python examples/custom_algorithm.py
    groupwise train CartPole-v1 --plugin examples/custom_algorithm.py --algorithm imitate_best --algorithm.elite 0.2
"""

import argparse
from typing import Annotated, Literal

from annotated_types import Ge, Le

import groupwise as gw
from groupwise.functional.reduce import gather_segments, segment_min_max
from groupwise.functional.returns import episode_return


class ImitateBestCfg(gw.GRPOCfg):
    """Settings of ``ImitateBest``; derived from ``GRPOCfg``, which has the group size and lends its presets."""

    name: Literal["imitate_best"] = "imitate_best"
    """Name in the registry."""
    elite: Annotated[float, Ge(0), Le(1)] = 0.5
    """Attempts in this upper share of their group's range of returns are imitated; 0 takes the best alone."""
    num_epochs: Annotated[int, Ge(1)] = 2
    """Passes over each rollout: few, for no ratio keeps the policy near the one that acted."""


@gw.register_algorithm(ImitateBestCfg)
class ImitateBest(gw.BaseAlgorithm):
    """Maximises the likelihood of what the best attempts of each group did."""

    grouped = True
    actor_only = True
    metric_names = ("loss", "entropy")

    def update(self, rollout):
        """Improve the policy by one rollout; returns 0-dim metrics."""
        batch = gw.transition_view(rollout)
        num_episodes = int(batch["episode_id"].max()) + 1
        group, _ = gw.episode_groups(batch, num_episodes)
        score = episode_return(batch["reward"], batch["episode_id"], num_episodes)
        low, high = segment_min_max(score, group, int(group.max()) + 1)
        # Where all did equally well all are imitated. That moves nothing on average, and never leaves an empty batch.
        elite = score >= (high - self.cfg.elite * (high - low))[group]
        imitated = gather_segments(elite.float(), batch["episode_id"]) > 0

        data = self.policy_inputs(batch)
        data["loss_mask"] = batch["loss_mask"] & imitated  # not in place: others read the rollout after us
        metrics = self.optimize(data, num_episodes)
        self.policy.update_normalizers(
            rollout, self.engine
        )  # the observation statistics move between updates, never within
        self.iteration += 1
        return metrics | {"train/elite_share": elite.float().mean()}

    def loss(self, batch, evaluation):
        """``-log_prob - ent_coef * entropy`` of each step; ``optimize`` takes the mean."""
        loss = -evaluation.log_prob - self.cfg.ent_coef * evaluation.entropy
        return gw.LossOutput(loss, (loss, evaluation.entropy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=60_000)
    parser.add_argument("--run-dir")
    args = parser.parse_args()

    cfg = ImitateBestCfg(group_size=8, num_steps=250)
    run = gw.train("CartPole-v1", cfg, seed=0, total_steps=args.total_steps // 2, run_dir=args.run_dir)
    print(f"half way: {run.summary['return_mean']:.1f}")

    # The name in config.json leads back to the class, so files, resume and the command line know it as one of theirs.
    assert gw.load_config(run.path / "config.json") == run.cfg
    run = gw.resume(run.path, args.total_steps)
    print(f"{run.cfg.algorithm.name} with elite {run.cfg.algorithm.elite}: {run.summary['return_mean']:.1f} in the end")


if __name__ == "__main__":
    main()
