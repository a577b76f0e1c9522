"""Behaviour cloning of completions: those of the data take the place of sampled ones."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.collectors.vector import Collector
from groupwise.config.run import TextRunCfg
from groupwise.data.rollout import TensorDict, transition_view
from groupwise.engines import Engine
from groupwise.errors import ConfigError, DataError
from groupwise.text.collector import TextRow, in_order, text_rollout
from groupwise.text.policy import CausalLM
from groupwise.text.task import Example, PromptEncoder
from groupwise.training.trainer import Callback, Trainer

_SCORED_AT_ONCE = 32
"""Number of held-out rows in one forward pass."""


def demonstrated_rows(
    demos: Sequence[Example], encoder: PromptEncoder, policy: CausalLM, stops: tuple[str, ...] = ()
) -> list[TextRow]:
    """Rows in the tokens that rollouts of the demonstrations would have: only the model's turns have a loss. A turn ends by the token of
    the chat template, or the end of text, unless its text ends by one of the stop strings.

    Raises:
        DataError: one has no room in the model's context.
    """
    rows = list[TextRow]()
    end = policy.eos_ids[0] if policy.eos_ids else None
    with suppress(ConfigError, ValueError):  # a template without turns after the assistant's
        for first in encoder.encode_answer([{"role": "user", "content": "?"}])[:1] if encoder.conversational else ():
            end = first if first in policy.eos_ids or encoder.tokenizer.decode([first]) in stops else end
    for example, prompt in encoder.select(demos, policy.context_length):
        tokens, numbers, closed = list[int](), list[int](), end
        for number, message in enumerate(example.turns):
            text, answers = message["content"], number % 2 == 1
            if answers:
                more = encoder.encode_answer([message], closed)
            else:
                closed = None if text.endswith(stops) else end
                more = encoder.encode_turn(text, closed)
            tokens += more
            numbers += [-1 if answers else number // 2] * len(more)
        if policy.context_length is not None and len(prompt) + len(tokens) > policy.context_length:
            raise DataError(
                f"prompt and completion have {len(prompt) + len(tokens)} tokens, and the model has positions for "
                f"{policy.context_length}: {str(example.prompt)[:80]!r}; fix: leave the row out"
            )
        rows.append(TextRow(prompt, tokens, [0.0] * len(tokens), 0.0, terminated=True, group=len(rows), turn=numbers))
    return rows


class CompletionCollector(Collector):
    """Hands out ``num_prompts`` rows per iteration, in the order in which ``TextCollector`` takes prompts."""

    prompts = ()  # that completions would be sampled for

    def __init__(self, policy: CausalLM, rows: Sequence[TextRow], cfg: TextRunCfg, engine: Engine) -> None:
        super().__init__()
        self.policy, self.rows, self.data_size = policy, rows, len(rows)
        self._cfg, self._engine = cfg, engine

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """The rollout of the next rows; a step is a token that is learned."""
        size, count = self._engine.world_size, self._cfg.num_prompts
        places = [(self.position + number) * size + self._engine.rank for number in range(count)]
        rows = [in_order(self.rows, place, self._cfg.seed)._replace(group=n) for n, place in enumerate(places)]
        rollout = text_rollout(rows, device=self.policy.device)
        self.position, self.iteration = self.position + count, self.iteration + 1
        self.last_steps = int(rollout["loss_mask"].sum())
        self._metrics = {"rollout/epoch": self.position * size / self.data_size}
        return rollout

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, over all ranks."""
        return super().state_dict() | {"position": self.position * self._engine.world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved ``state_dict``; other numbers of ranks may repeat the last rows."""
        super().load_state_dict(state)
        self.position = state["position"] // self._engine.world_size

    def close(self) -> None:
        """Nothing is open."""


class CompletionScores(Callback):
    """Adds the loss of held-out rows to the metrics, whenever an evaluation is due."""

    def __init__(self, algorithm: BaseAlgorithm, rows: Sequence[TextRow], interval: int | None) -> None:
        self.algorithm, self.rows, self.interval = algorithm, rows, interval

    @torch.no_grad()
    def on_iteration_end(self, trainer: Trainer, rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Add ``eval/demo_loss``, the mean of ``-log_prob`` over all tokens of the model's turns."""
        policy, losses = self.algorithm.policy, list[torch.Tensor]()
        for first in (
            range(0, len(self.rows), _SCORED_AT_ONCE) if trainer.passed(self.interval) or trainer.is_done() else ()
        ):
            some = text_rollout(self.rows[first : first + _SCORED_AT_ONCE], device=policy.device)
            inputs = self.algorithm.policy_inputs(transition_view(some))
            losses.append(-self.algorithm.score(policy, inputs).log_prob[inputs["loss_mask"]])
        if losses:
            metrics["eval/demo_loss"] = float(torch.cat(losses).double().mean())
