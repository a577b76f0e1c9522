"""Prompts and rewards as an environment of one step, for training loops by hand."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.config.base import refuse_unknown
from groupwise.config.text import GYM
from groupwise.errors import ConfigError, DataError
from groupwise.text.completions import Completions
from groupwise.text.data import Completion, Example, Prompt, in_order, read_rows
from groupwise.text.rewards import TrainingState
from groupwise.text.task import TextTask

MakePrompt = str | Callable[[Mapping[str, Any]], Any]
_SETTINGS = ("data_kwargs", "data_size", "eval_size", "eval_overlap", "prompt_column", "reward_timeout")


class PromptEnv:
    """Gives prompts, and rewards for groups of completions; with a training set and a held-out set.

    Training prompts come in the order of ``gw.train`` with this seed, ``num_prompts=batch_size``.

    Args:
        data, eval_data, reward, reward_weights: as ``TextTask`` takes them.
        prompt: makes the prompt of a row: a template over its columns, ``"What is {question}?"``, or a function that returns a
            text or messages. None: the column ``prompt``.
        batch_size: prompts at a time.
        settings: ``prompt_column``, ``data_size``, ``eval_size``, ``data_kwargs``, ``eval_overlap`` and ``reward_timeout`` of
            ``TextTaskCfg``.

    Raises:
        ConfigError: a setting is unknown or impossible, or there is no reward.
        DataError: no examples, examples that cannot be read, or that lack a column.
    """

    def __init__(
        self,
        data: object,
        eval_data: object = None,
        *,
        reward: object = None,
        reward_weights: Sequence[float] | None = None,
        prompt: MakePrompt | None = None,
        batch_size: int = 8,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        refuse_unknown(settings, (*_SETTINGS, "reward", "reward_weights", "prompt", "batch_size", "seed"), "PromptEnv")
        if batch_size < 1:
            raise ConfigError(f"batch_size = {batch_size}: expected at least 1")
        if prompt is not None:
            if "prompt_column" in settings:
                raise ConfigError("prompt makes the prompts that prompt_column would name; fix: one of the two")
            data, eval_data = (None if rows is None else with_prompts(rows, prompt) for rows in (data, eval_data))
        task = TextTask(data, reward=reward, eval_data=eval_data, reward_weights=reward_weights, **settings)
        self.batch_size, self.seed = batch_size, seed
        self.rewards = task.rewards()
        """The reward functions."""
        self.train_set, self.eval_set = task.load()
        for examples, name in ((self.train_set, "data"), (self.eval_set, "eval_data")):
            if examples:
                self.rewards.check_columns(examples[0].columns, name)
        self.logged: dict[str, float] = {}
        """Means of what functions logged by ``log_metric`` at the last step."""
        self._evaluating = False
        self._batch: list[Example] = []
        self._trained = self._evaluated = 0
        """Training prompts, and held-out ones, before the batch."""

    def __len__(self) -> int:
        """Number of training prompts; in ``eval_mode`` of held-out ones."""
        return len(self.eval_set if self._evaluating else self.train_set)

    @property
    def num_epochs(self) -> int:
        """Finished passes over the training set."""
        return self._trained // len(self.train_set)

    def reset(self, *, reset_dataloaders: bool = False) -> list[Prompt]:
        """A batch of prompts: the next one that was not answered; in ``eval_mode`` the first held-out one.

        Args:
            reset_dataloaders: begin again with the first training prompts.
        """
        if self._evaluating:
            self._evaluated = 0
        elif reset_dataloaders:
            self._trained = 0
        return self._next()

    def step(
        self, completions: Completions | Sequence[Sequence[str]]
    ) -> tuple[list[Prompt], Float[Tensor, "prompt member"]]:
        """The next batch of prompts, and the rewards of a group of completions for each prompt of the batch before.

        NaN: no reward function could score the completion. In ``eval_mode`` each prompt comes once; then there are none.

        Raises:
            DataError: not one group for each prompt.
            RewardError: a function failed.
        """
        texts = completions.texts if isinstance(completions, Completions) else completions
        count, sizes = len(texts), {len(group) for group in texts}
        if count != len(self._batch) or len(sizes) != 1:
            raise DataError(
                f"{count} groups, of {sorted(sizes)} completions, for {len(self._batch)} prompts; fix: reset(), then one for "
                "each, of equally many"
            )
        tokens = completions.tokens if isinstance(completions, Completions) else [[[]] * len(group) for group in texts]
        rewards = torch.tensor(self._score(list(chain(*texts)), list(chain(*tokens)))).view(count, -1)
        self.logged = self.rewards.take_logged()
        if self._evaluating:
            self._evaluated += count
        else:
            self._trained += count
        return self._next(), rewards

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Held-out prompts inside ``with``; training continues where it was afterwards.

        Raises:
            ConfigError: there are none.
        """
        if not self.eval_set:
            raise ConfigError("no prompts are held out; fix: PromptEnv(data, eval_data, ...)")
        kept = self._evaluating, self._batch
        self._evaluating, self._batch, self._evaluated = True, [], 0
        try:
            yield
        finally:
            self._evaluating, self._batch = kept

    def close(self) -> None:
        """Free what the reward functions hold."""
        self.rewards.close()

    def _next(self) -> list[Prompt]:
        if self._evaluating:
            self._batch = self.eval_set[self._evaluated : self._evaluated + self.batch_size]
        else:
            numbers = range(self._trained, self._trained + self.batch_size)
            self._batch = [in_order(self.train_set, number, self.seed) for number in numbers]
        return [example.prompt for example in self._batch]

    def _score(self, texts: Sequence[str], tokens: Sequence[Sequence[int]]) -> list[float]:
        """Rewards of the batch's completions, group after group."""
        group_size = len(texts) // len(self._batch)
        examples = [example for example in self._batch for _ in range(group_size)]
        columns = {name: [example.columns[name] for example in examples] for name in examples[0].columns}
        completions = [_answer(example.prompt, text) for example, text in zip(examples, texts, strict=True)]
        steps = 0 if self._evaluating else self._trained
        state = TrainingState(global_step=steps // self.batch_size, epoch=steps / len(self.train_set))
        scores = self.rewards.score([example.prompt for example in examples], completions, tokens, columns, state)
        return [math.nan if reward is None else reward for reward in scores.reward]


def with_prompts(data: object, prompt: MakePrompt) -> list[dict[str, Any]]:
    """The rows of the data with a column ``prompt``.

    Raises:
        DataError: a row lacks a column of the template, or the data cannot be read.
    """
    if isinstance(data, str) and data.startswith(GYM):
        raise ConfigError(f"{data} has prompts of its own; fix: prompt=None")
    make = prompt.format_map if isinstance(prompt, str) else prompt
    rows = []
    for number, row in enumerate(read_rows(data)):
        if not isinstance(row, Mapping):
            raise DataError(
                f"example {number}: expected a mapping of columns; got {row!r:.80}; fix: {{'question': ...}}"
            )
        try:
            rows.append({**row, "prompt": make(row)})
        except KeyError as error:
            raise DataError(
                f"example {number} has no column {error} for the prompt; it has {', '.join(map(repr, row))}; fix: another "
                "prompt, or {{ and }} for braces"
            ) from error
    return rows


def _answer(prompt: Prompt, text: str) -> Completion:
    """The completion as rewards read it: after messages a message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
