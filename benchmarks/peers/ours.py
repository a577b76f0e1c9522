"""groupwise: PPO, or with ``--algorithm grpo`` GRPO, or with ``--vectorization envpool`` in EnvPool's environments.

A rate is of a bare ``Trainer``, at the same settings as the peers'. A pass is of ``gw.train``, as a user calls it, with
the preset and a run folder.
"""

import argparse
import sys
import tempfile
from typing import Any

from settings import Settings
from worker import Watch, parse

ENVS = ("CartPole-v1", "Acrobot-v1", "HalfCheetah-v5", "LunarLander-v3", "Pendulum-v1")


def rate(args: Any, kernel: Any) -> None:
    """PPO without a run folder; compiled, it compiles in the first iteration, which is not timed."""
    import torch

    import groupwise as gw

    torch.set_num_threads(1)  # as gw.train does for small networks
    torch.manual_seed(args.seed)
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
    rows = settings.num_envs
    env = gw.make_env(gw.EnvCfg(id=args.env, num_envs=rows), grouped=False)
    networks = gw.PolicyCfg(normalize_obs=settings.normalized, normalize_reward=settings.normalized, mlp_kernel=kernel)
    policy = gw.ActorCritic(env.observation_space, env.action_space, networks, gamma=cfg.gamma)
    buffer = gw.RolloutBuffer(rows, cfg.num_steps, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=True)
    trainer = gw.Trainer(
        gw.PPO(cfg, policy),
        gw.VectorCollector(env, policy, seed=args.seed),
        buffer,
        num_steps=cfg.num_steps,
        total_steps=args.steps,
        seed=args.seed,
        callbacks=[listener(args)],
    )
    trainer.train()


def until_pass(args: Any, algorithm: str, vectorization: str) -> None:
    """The preset, with everything that a run writes."""
    import groupwise as gw
    from groupwise.config import resolve

    if args.env != "CartPole-v1":  # whose budget is the same for all
        args.steps = resolve(args.env, algorithm).total_steps
    kwargs = {"num_threads": 1} if vectorization == "envpool" else {}
    with tempfile.TemporaryDirectory() as folder:
        gw.train(
            gw.EnvCfg(id=args.env, vectorization=vectorization, kwargs=kwargs),
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
    own.add_argument("--kernel", choices=["by_hand", "compiled"], default="by_hand")
    own.add_argument("--vectorization", choices=["auto", "envpool"], default="auto")
    chosen, sys.argv[1:] = own.parse_known_args()
    args = parse("zoo", ENVS)
    if args.task == "rate":
        rate(args, chosen.kernel)
    else:
        until_pass(args, chosen.algorithm, chosen.vectorization)
