"""How long training lasts."""

from typing import NamedTuple

from groupwise.errors import ConfigError

BUDGETS = {"total_steps": "env_steps", "total_iterations": "iteration", "total_epochs": "rollout/epoch"}
"""The settings, of which one is given, and the metrics that count what is done of them."""


class Budget(NamedTuple):
    """An amount of training."""

    name: str
    """The setting."""
    total: int | float

    @classmethod
    def only(cls, **totals: int | float | None) -> "Budget":
        """The one that is given.

        Raises:
            ConfigError: none is, or several.
        """
        given = {name: total for name, total in totals.items() if total is not None}
        if len(given) != 1:
            found = " and ".join(f"{name}={total:,}" for name, total in given.items()) or "none"
            raise ConfigError(f"training needs one of {', '.join(totals)}; got {found}, fix: give one of them")
        return cls(*given.popitem())

    def check_exceeds(self, done: int | float, where: object) -> None:
        """Refuse a budget that is used up.

        Args:
            where: what has done as much.

        Raises:
            ConfigError: it is not more than ``done``.
        """
        if self.total <= done:
            name, total, unit = self.name, self.total, self.unit
            raise ConfigError(f"{name} = {total:,}, but {where} has {done:,} {unit} already; fix: a larger {name}")

    @property
    def unit(self) -> str:
        """``steps``, ``iterations`` or ``epochs``."""
        return self.name.removeprefix("total_")

    @property
    def metric(self) -> str:
        """The metric that counts what is done."""
        return BUDGETS[self.name]

    @property
    def tenth(self) -> int | float:
        """A tenth of it; of steps and iterations whole ones."""
        return self.total / 10 if self.unit == "epochs" else max(1, self.total // 10)
