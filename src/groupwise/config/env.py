"""Settings of environments. Imports no torch and no simulator."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from pydantic import model_validator

from groupwise.config.base import Cfg, Keys

StartMode = Literal["native", "snapshot", "seed", "fresh", "none"]
"""How members share a start, best first: state set for all rows at once; state captured and restored by an adapter; a seeded reset; a seeded reset of a fresh environment. ``none``: they do not."""


class EnvCfg(Cfg):
    """The environment."""

    id: str = "CartPole-v1"
    """A registered Gymnasium id. ``<given in Python>`` stands for an object passed in Python."""
    kwargs: dict[str, Any] = {}
    """Arguments of ``gymnasium.make``."""
    num_envs: Annotated[int, Ge(1)] = 8
    """Environments that are stepped together."""
    max_episode_steps: Annotated[int, Ge(1)] | None = None
    """Episodes are truncated after that many steps. None: the limit of the registration."""
    vectorization: Literal["auto", "entry_point", "sync", "async", "torch"] = "auto"
    """``entry_point``: the environment's own vectorised version; ``sync``: in this process; ``async``: in other processes; ``torch``: a simulator in torch (CartPole only); ``auto``: ``entry_point`` for CartPole, otherwise ``sync``."""
    timeout: Annotated[float, Gt(0)] = 60.0
    """Seconds that a process of ``vectorization="async"`` may take to start or step its environments; to make them, at least 60. Then it is killed, and ``collection.on_env_error`` decides; PPO ends."""
    obs_keys: Keys | None = None
    """Entries of a Dict observation that the policy gets. None: all but those without a fixed shape, such as text."""
    action_masks: bool = False
    """Add ``info["action_mask"]`` to the observation. A Dict observation with the entry ``action_mask`` needs no setting. Actions that a mask forbids are never taken. Discrete and MultiDiscrete actions only."""
    start_mode: StartMode | Literal["auto"] = "auto"
    """How the members of a group share their start. ``auto``: the best mode that passes its check. ``none``: each has its own start. GRPO only."""
    num_random_noops: Annotated[int, Ge(0)] = 0
    """Episodes start after up to that many random actions, the same ones in a group, for environments that always start in one state. They count towards the step limit, but not as environment steps."""
    action_chunk: Annotated[int, Ge(1)] = 1
    """Actions that the policy decides on at once; the environment executes them open loop. Steps of the policy, such as ``algorithm.num_steps``, are then decisions, and the discount is per decision; ``max_episode_steps`` and ``total_steps`` count environment steps. Box actions only."""
    num_action_steps: Annotated[int, Ge(1)] | None = None
    """Of each chunk, only this many actions are executed, from the first on, before the policy decides anew (LeRobot's ``n_action_steps``). None: all of ``action_chunk``."""
    log_info: tuple[str, ...] = ()
    """Entries of ``info`` to log as ``rollout/info/<name>``: numbers at the last step of each episode, averaged over episodes like the return."""

    @property
    def kept_keys(self) -> tuple[str, ...] | None:
        """``obs_keys`` with that of masks from ``info``."""
        return (*self.obs_keys, "action_mask") if self.obs_keys and self.action_masks else self.obs_keys

    @property
    def actions_executed(self) -> int:
        """Actions of a chunk that are executed, unless the episode ends before."""
        return self.num_action_steps or self.action_chunk

    @model_validator(mode="after")
    def _check_steps(self) -> "EnvCfg":
        if self.actions_executed > self.action_chunk:
            raise ValueError(
                f"num_action_steps={self.num_action_steps} executes more actions than the policy decides on, which are "
                f"action_chunk={self.action_chunk}; fix: at most that many, or a longer action_chunk"
            )
        return self
