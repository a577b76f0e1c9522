"""Rows of one process: attempts stepped one after another, which write what they say into arrays."""

import traceback
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy.typing as npt

from groupwise.envs.attempts import EnvMaker, EnvRow, StartCache, StartMethod
from groupwise.envs.board import OUTCOMES, Arrays, ObsWriter, step_arrays
from groupwise.errors import DataError, EnvError

OnError: TypeAlias = Literal["raise", "report"]
"""What becomes of an error in an environment's ``step``: it is passed on, or the row is reported as failed and paused."""


class RowCfg(NamedTuple):
    """What a row is."""

    make: EnvMaker
    env_id: str
    observation_space: Any
    action_space: Any
    max_episode_steps: int | None
    """At which the environment truncates; None if it does not."""
    method: StartMethod
    num_random_noops: int = 0
    reward_parts: tuple[str, ...] = ()
    on_error: OnError = "raise"


class LocalRows:
    """Attempts that are stepped one after another in this process, and write into arrays what they say.

    Args:
        arrays: as ``layout_of`` describes them.
        first: number of the first row, for messages.
    """

    def __init__(self, cfg: RowCfg, arrays: Arrays, first: int = 0) -> None:
        self._cfg = cfg
        self._arrays = arrays
        self._first = first
        self._starts = StartCache()
        num_rows = len(arrays["reward"])
        self.attempts = [
            EnvRow(cfg.make, cfg.method, num_random_noops=cfg.num_random_noops, starts=self._starts)
            for _ in range(num_rows)
        ]
        self._writer = ObsWriter(cfg.observation_space, arrays)
        self._outcomes = [arrays[name] for name in OUTCOMES]
        self._of_step = step_arrays(arrays)
        self._failures: list[str] = []
        self._has_shown_traceback = False

    def step(self, rows: Sequence[int], actions: npt.NDArray[Any]) -> bool:
        """One step of these rows; whether any ended or failed. The others get reward 0 and are not done."""
        attempts, write, parts = self.attempts, self._writer.write, self._cfg.reward_parts
        reward, terminated, truncated, _ = self._outcomes
        for array in self._of_step:
            array.fill(0)
        any_ended = False
        for row, action in zip(rows, actions, strict=True):
            try:
                obs, reward[row], ended, cut, info = attempts[row].step(action)
            except Exception as error:
                self._fail(row, error)
                any_ended = True
                continue
            try:
                write(row, obs)
            except DataError as error:
                raise self._misshapen("step", error) from error
            if ended or cut:
                terminated[row], truncated[row], any_ended = ended, cut, True
            if parts:
                self._store_parts(row, info)
        return any_ended

    def start(self, rows: Sequence[int], start_seeds: Sequence[int], noise_seeds: Sequence[int]) -> None:
        """Start these rows."""
        for row, start, noise in zip(rows, start_seeds, noise_seeds, strict=True):
            self._show(row, self.attempts[row].start(start, noise))

    @property
    def extra_steps(self) -> int:
        """Environment steps taken outside ``step``."""
        return sum(attempt.extra_steps for attempt in self.attempts)

    def take_failures(self) -> list[str]:
        """What is to be logged about rows that failed; the first with its traceback."""
        failures, self._failures = self._failures, []
        return failures

    def forget_starts(self) -> None:
        """Drop the captured starts, so that the next attempt at each resets anew."""
        self._starts.clear()

    def close(self) -> None:
        """Free the environments."""
        for attempt in self.attempts:
            attempt.close()

    def _show(self, row: int, obs: Any) -> None:
        try:
            self._writer.write(row, obs)
        except DataError as error:
            raise self._misshapen("reset", error) from error

    def _misshapen(self, method: Literal["reset", "step"], error: DataError) -> DataError:
        return DataError(
            f"{method}() of {self._cfg.env_id} returned what its observation_space does not allow: {error}"
        )

    def _store_parts(self, row: int, info: dict[str, Any]) -> None:
        try:
            self._arrays["reward_parts"][row] = [info[key] for key in self._cfg.reward_parts]
        except KeyError as error:
            raise EnvError(
                f"{self._cfg.env_id} has no reward part {error}: its info holds {sorted(info)}; fix: env.reward_parts"
            ) from error

    def _fail(self, row: int, error: Exception) -> None:
        where = f"row {self._first + row} of {self._cfg.env_id}"
        if self._cfg.on_error == "raise":
            error.add_note(f"in {where}")
            raise error
        trace = "" if self._has_shown_traceback else "\n" + "".join(traceback.format_exception(error))
        self._has_shown_traceback = True
        self._failures.append(f"{where} failed, and was replaced: {error!r}{trace}")
        self.attempts[row].renew()
        self._arrays["reward"][row] = 0.0
        self._arrays["failed"][row] = True
