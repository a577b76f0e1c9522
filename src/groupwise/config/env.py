"""Settings of environments. Imports no torch and no simulator."""

from typing import Annotated, Any, Literal

from annotated_types import Ge

from groupwise.config.base import Cfg

StartMode = Literal["native", "snapshot", "seed", "fresh"]
"""How siblings share a start, best first: state set for all rows at once; state captured and restored by an adapter; a seeded reset; a seeded reset of a fresh environment."""


class EnvCfg(Cfg):
    """Which environment, and how many of it at once."""

    id: str = "CartPole-v1"
    """A registered Gymnasium id. ``<given in Python>`` stands for an object that was passed in."""
    kwargs: dict[str, Any] = {}
    """Arguments of ``gymnasium.make``."""
    num_envs: Annotated[int, Ge(1)] = 8
    """Environments stepped together."""
    max_episode_steps: Annotated[int, Ge(1)] | None = None
    """Episodes are cut (truncated) after so many steps. None: the limit that the environment was registered with."""
    vectorization: Literal["auto", "entry_point", "sync", "async", "envpool", "torch"] = "auto"
    """``entry_point``: the environment's own vectorised version; ``sync``: in this process; ``async``: in processes of their own; ``envpool``: EnvPool's C++ version of that name (extra ``envpool``); ``torch``: the task as a simulator in torch, in float32, on the device that is trained on (Gymnasium's classic control; HalfCheetah-v5 by MuJoCo Warp, extra ``mujoco-warp``). ``auto``: ``entry_point`` for CartPole, else ``sync``."""
    start_mode: Literal["auto", "native", "snapshot", "seed", "fresh"] = "auto"
    """How siblings of a group share their start. ``auto`` takes the best mode that passes its check; a named one must pass. Only with groups, as the next two."""
    num_random_noops: Annotated[int, Ge(0)] = 0
    """Up to so many random actions (0 to this, drawn from the start's seed) before a group starts, for environments whose resets are all alike. They count towards the step limit, as Gymnasium counts. 0: none."""
    reward_parts: tuple[str, ...] = ()
    """Entries of ``info`` that the reward is made of, such as ``reward_forward``; stored beside the reward for credit that needs them."""
    autoreset: Literal["next_step", "same_step", "disabled"] = "disabled"
    """Who resets a finished environment. PPO takes any; GRPO resets itself and needs ``disabled``."""
