"""Your own credit rule: the advantage of an episode is the share of other members that it beat.

GRPO standardises returns, so one outlier shrinks the differences between all others. Counting wins ignores by how much
a member was better. A rule maps a rollout to advantages; everything else is GRPO.

    python examples/custom_credit.py
    groupwise train CartPole-v1 --plugin examples/custom_credit.py --algorithm.credit.rule wins
"""

import argparse

import torch
from torch import Tensor

import groupwise as gw
from groupwise.algorithms.advantages import CreditInput, episode_groups
from groupwise.functional.advantages import episode_return
from groupwise.functional.reduce import gather_segments


@gw.register_credit("wins")
def wins(credit: CreditInput) -> Tensor:
    """Share of members beaten less share of members lost to, in [-1, 1], at every step of the episode."""
    batch = credit.batch
    # Ids say which episodes are one group. Rows do not: members may run one after another in one row.
    group, scored = episode_groups(batch, credit.num_episodes)
    score = episode_return(credit.reward, batch["episode_id"], credit.num_episodes)
    others = (group[:, None] == group) & scored & scored[:, None]
    balance = (score[:, None] - score).sign() * others
    advantage = balance.sum(1) / (others.sum(1) - 1).clamp(min=1)
    return gather_segments(advantage, batch["episode_id"])


def show() -> None:
    """Try the rule on four episodes of one step each."""
    rollout = {
        "reward": torch.tensor([[1.0], [2.0], [3.0], [1000.0]]),
        "episode_id": torch.arange(4)[:, None],
        "group_id": torch.zeros(4, 1, dtype=torch.int64),
        "loss_mask": torch.ones(4, 1, dtype=torch.bool),
    }
    credit = CreditInput(rollout, rollout["reward"], gw.CreditCfg(rule="wins"), 1.0, num_groups=1, num_episodes=4)
    print("returns 1, 2, 3, 1000 are worth", wins(credit)[:, 0].numpy().round(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=60_000)
    parser.add_argument("--run-dir")
    args = parser.parse_args()

    show()
    cfg = gw.GRPOCfg(
        group_size=16,  # one number per episode is a coarse signal; more members refine it
        num_steps=500,
        credit=gw.CreditCfg(rule="wins"),
        # Episodes weigh alike. In a mean over steps, long wins would outweigh short losses.
        objective=gw.ObjectiveCfg(aggregation="seq_mean_token_mean"),
    )
    run = gw.train("CartPole-v1", cfg, seed=0, total_steps=args.total_steps, run_dir=args.run_dir)
    print(f"trained with the credit rule {run.cfg.algorithm.credit.rule!r}: {run.summary['return_mean']:.1f}")


if __name__ == "__main__":
    main()
