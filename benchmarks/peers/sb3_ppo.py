"""Stable-Baselines3's PPO, or with the same interface SBX's (``sbx_ppo.py``)."""

from typing import Any

from settings import Settings
from worker import Watch, parse

ENVS = ("CartPole-v1", "Acrobot-v1", "HalfCheetah-v5", "LunarLander-v3", "Pendulum-v1")


def build(args: Any, ppo: Any, **options: Any) -> Any:
    """The model, with its environments."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    cfg: Settings = args.cfg
    env: Any = make_vec_env(args.env, n_envs=cfg.num_envs, seed=args.seed)
    if cfg.normalized:
        env = VecNormalize(env, gamma=cfg.gamma)
    if cfg.state_dependent and args.task != "rate":
        options |= {"use_sde": True, "sde_sample_freq": 4}
    return ppo(
        "MlpPolicy",
        env,
        n_steps=cfg.num_steps,
        batch_size=cfg.minibatch_size,
        n_epochs=cfg.num_epochs,
        learning_rate=(lambda left: left * cfg.learning_rate) if cfg.annealed else cfg.learning_rate,
        clip_range=(lambda left: left * 0.2) if cfg.annealed else 0.2,  # the zoo anneals both
        gamma=cfg.gamma,
        gae_lambda=cfg.gae_lambda,
        ent_coef=cfg.ent_coef,
        seed=args.seed,
        **options,
    )


def train(args: Any, model: Any) -> None:
    """Train, and print what came of it."""
    from stable_baselines3.common.callbacks import BaseCallback

    watch, seen = Watch(args), model.get_vec_normalize_env()

    def act(obs: Any) -> Any:
        return model.predict(obs if seen is None else seen.normalize_obs(obs), deterministic=True)[0]

    class Listener(BaseCallback):
        over = False

        def _iteration(self) -> None:
            if self.num_timesteps and not self.over:
                returns = [episode["r"] for episode in self.model.ep_info_buffer]
                self.over = watch.iteration(self.num_timesteps, returns, act)

        def _on_rollout_start(self) -> None:
            self._iteration()  # the update of the iteration before is done

        def _on_step(self) -> bool:
            return not self.over

        def _on_training_end(self) -> None:
            self._iteration()

    model.learn(args.steps, callback=Listener())
    watch.finish()


if __name__ == "__main__":
    args = parse("zoo", ENVS)

    from stable_baselines3 import PPO

    train(args, build(args, PPO, device="cpu"))
