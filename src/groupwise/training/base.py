"""The events of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict
from torch import Tensor

from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.envs.base import EnvStep
    from groupwise.training.evaluation import EvaluationResult
    from groupwise.training.trainer import Trainer


def check_callbacks(callbacks: Any) -> tuple["Callback", ...]:
    """The user's callbacks.

    Raises:
        ConfigError: they are no list, or one is no ``Callback``.
    """
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks = {callbacks!r:.80}: expected a list; fix: callbacks=[...]")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(f"{callback!r:.80} is no Callback; fix: give instances of subclasses of gw.Callback")
    return tuple(callbacks)


class Callback:
    """Receives training events; override what you need. Values added to ``metrics`` are logged."""

    def on_training_start(self, trainer: "Trainer") -> None:
        """Before the first iteration, also of a resumed run."""

    def on_step(self, trainer: "Trainer", action: Tensor, step: "EnvStep") -> None:
        """After each step of all environments, if you override it; else it costs nothing. Of language models: an error.

        Args:
            action: [N, ...] as the environments got it, or of environments in torch as the policy gave it.
            step: what they returned; copy what you keep. Rows that wait for the others of their group have reward 0.
        """

    def on_rollout_end(self, trainer: "Trainer", rollout: TensorDict) -> None:
        """After collection, before the update. The rollout must not be changed."""

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """After the update."""

    def on_evaluation_end(self, trainer: "Trainer", evaluation: "EvaluationResult") -> None:
        """After an evaluation, before its iteration ends."""

    def on_checkpoint(self, trainer: "Trainer", path: Path) -> None:
        """After a checkpoint was written to ``path``. Training went on meanwhile, so ``trainer`` may be further."""

    def on_training_end(self, trainer: "Trainer") -> None:
        """After the last iteration, unless an error or the user's interrupt ended the run."""

    def on_interrupt(self, trainer: "Trainer") -> None:
        """After an interrupt or an error, unless it came during the update, or is a ``DataError`` or ``DivergedError``.

        The trainer is as its last complete iteration left it. ``on_iteration_end`` may not have been called for it.
        """

    def close(self) -> None:
        """The last call, also after an error: free files and displays."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data that a resumed run needs; saved in every checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved ``state_dict``."""
