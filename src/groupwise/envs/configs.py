"""Settings of environments. Imports no torch and no simulator."""

from typing import Annotated, Any, Literal

from annotated_types import Ge

from groupwise.cfg import Cfg


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
    vectorization: Literal["auto", "entry_point", "sync", "async"] = "auto"
    """``entry_point``: the environment's own vectorised version; ``sync``: in this process; ``async``: a process each. ``auto`` looks it up in the committed table ``envs/vectorization.json``."""
    autoreset: Literal["next_step", "same_step", "disabled"] = "disabled"
    """Who resets a finished environment. PPO takes any; GRPO resets itself and needs ``disabled``."""
