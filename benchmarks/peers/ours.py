"""groupwise: PPO, or with ``--algorithm grpo`` GRPO.

All use ``gw.train``, as a user calls it: rates at the peers' settings, passes with the preset and all that a run
writes.
"""

import argparse
import sys
import tempfile
from typing import Any

from settings import Settings
from worker import Watch, parse

ENVS = ("CartPole-v1", "Acrobot-v1", "HalfCheetah-v5", "LunarLander-v3", "Pendulum-v1")


def rate(args: Any, how: Any) -> None:
    """PPO at the peers' settings; compiled, it compiles in the first iteration, which is not timed."""
    import groupwise as gw

    settings: Settings = args.cfg
    cfg = gw.PPOCfg(
        num_steps=settings.num_steps,
        num_epochs=settings.num_epochs,
        minibatch_size=settings.minibatch_size,
        learning_rate=settings.learning_rate,
        schedule="linear" if settings.annealed else "none",
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        ent_coef=settings.ent_coef,
        clip_coef=0.2,
    )
    normalized = {"normalize_obs": settings.normalized, "normalize_reward": settings.normalized}
    with tempfile.TemporaryDirectory() as folder:
        gw.train(
            args.env,
            cfg,
            policy=gw.PolicyCfg(**normalized),
            num_envs=settings.num_envs,
            speed=how,
            seed=args.seed,
            total_steps=args.steps,
            run_dir=f"{folder}/run",
            callbacks=[listener(args)],
            checkpoint_interval=10 * args.steps,
            logging={"progress": "none"},
            evaluation={"interval": 10 * args.steps, "episodes": 1},
        )


def until_pass(args: Any, algorithm: str) -> None:
    """The preset, with everything that a run writes."""
    import groupwise as gw
    from groupwise.config import resolve

    if args.env != "CartPole-v1":  # whose budget is the same for all
        args.steps = resolve(args.env, algorithm).total_steps
    with tempfile.TemporaryDirectory() as folder:
        gw.train(
            args.env,
            algorithm,
            seed=args.seed,
            total_steps=args.steps,
            run_dir=f"{folder}/run",
            callbacks=[listener(args)],
            logging={"progress": "none"},
            evaluation={"interval": args.steps, "episodes": 1},  # the worker evaluates, as it does every library
        )


def listener(args: Any) -> Any:
    """What tells a ``Watch`` of each iteration, ends the run, and then prints."""
    from groupwise import Callback

    watch = Watch(args)

    class Listener(Callback):
        def on_iteration_end(self, trainer: Any, rollout: Any, metrics: dict[str, float]) -> None:
            returns = [episode.episode_return for episode in trainer.collector.recent]
            if watch.iteration(trainer.env_steps, returns, trainer.algorithm.policy.predict):
                watch.finish()
                trainer.stop("the worker has what it needs")

    return Listener()


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--algorithm", choices=["ppo", "grpo"], default="ppo")
    own.add_argument("--speed", choices=["auto", "off"], default="auto")
    chosen, sys.argv[1:] = own.parse_known_args()
    args = parse("zoo", ENVS)
    if args.task == "rate":
        rate(args, chosen.speed)
    else:
        until_pass(args, chosen.algorithm)
