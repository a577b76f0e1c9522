"""Evaluation of a language model on held-out prompts: mean reward and pass@k."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from groupwise.config.run import TextRunCfg
from groupwise.errors import ConfigError, DataError
from groupwise.policies.base import Policy
from groupwise.report.scores import wilson_95
from groupwise.seeding import derive_seed
from groupwise.text.data import Example
from groupwise.text.generation import complete
from groupwise.text.metrics import pass_rate
from groupwise.text.policy import CausalLM
from groupwise.text.prompts import PromptEncoder
from groupwise.text.task import TextTask
from groupwise.text.transcripts import Dialogue, Transcript, rewards_of_groups, score, write
from groupwise.training.components import Evaluator
from groupwise.training.evaluation import EvaluationResult, shown

_PROMPTS_AT_ONCE = 32


@dataclass(frozen=True, repr=False)
class TextEvaluation(EvaluationResult):
    """Rewards of several completions at each of n prompts.

    ``returns`` are the mean rewards of prompts, because completions of one prompt are no independent samples; ``lengths``
    are the tokens of each completion.
    """

    rewards: tuple[tuple[float, ...], ...]
    """Of each prompt's scorable completions; prompts without any are left out."""
    success_threshold: float
    """A completion with at least this reward is right."""

    @property
    def completions_per_prompt(self) -> int:
        """The fewest scorable completions of a prompt."""
        return min(map(len, self.rewards))

    def pass_at(self, k: int) -> tuple[float, float, float]:
        """pass@k averaged over prompts, and its 95 % interval (Wilson's, over prompts)."""
        mean = fmean(pass_rate(rewards, self.success_threshold, k) for rewards in self.rewards)
        return (mean, *wilson_95(mean, self.episodes))

    def line(self) -> str:
        """The summary in one line that scripts can read."""
        rates = [f"pass@{k}={mean:.6g} ci95={shown(ci95)}" for k, (mean, *ci95) in self._pass_rates().items()]
        mean = f"return_mean={self.return_mean:.6g} ci95={shown(self.ci95)}"
        counts = f"prompts={self.episodes} completions_per_prompt={self.completions_per_prompt}"
        return " ".join([mean, *rates, counts])

    def report(self) -> dict[str, Any]:
        """All of it as plain data."""
        rates = {f"pass_at_{k}": {"mean": mean, "ci95": ci95} for k, (mean, *ci95) in self._pass_rates().items()}
        numbers = super().report() | {"completions_per_prompt": self.completions_per_prompt}
        return numbers | rates | {"rewards": [list(rewards) for rewards in self.rewards]}

    def metrics(self) -> dict[str, float]:
        """``eval/*`` numbers for the log."""
        return super().metrics() | {f"eval/pass_at_{k}": mean for k, (mean, *_) in self._pass_rates().items()}

    def _pass_rates(self) -> dict[int, tuple[float, float, float]]:
        """pass@k for the powers of two up to the number of completions, and for that number."""
        most = self.completions_per_prompt
        return {k: self.pass_at(k) for k in (*(2**i for i in range(most.bit_length())), most)}


class TextEvaluator(Evaluator):
    """Completes and scores held-out prompts, always the same ones with the same seeds."""

    def __init__(
        self, task: TextTask, held_out: Sequence[Example], cfg: TextRunCfg, policy: Policy, *, seed: int
    ) -> None:
        assert isinstance(policy, CausalLM)
        if not held_out:
            raise ConfigError("no prompts are held out; fix: task.eval_data")
        encoder = PromptEncoder(policy.tokenizer, cfg.task)
        prompts = encoder.select(held_out, policy.max_prompt_length(cfg.sampling.max_new_tokens))
        self._prompts = prompts[: cfg.evaluation.prompts]
        self._cfg = cfg
        self._rewards = task.rewards(cfg.algorithm.on_nonfinite)
        self._generate = partial(complete, policy)
        self._dialogue = Dialogue(encoder, task.tool(), policy.context_length)
        self._seed = seed

    def __call__(self) -> TextEvaluation:
        """Complete and score the prompts; a ``DataError`` if none of the completions could be scored."""
        evaluation = self._cfg.evaluation
        completions: list[Transcript] = []
        for first in range(0, len(self._prompts), _PROMPTS_AT_ONCE):
            transcripts = [
                Transcript(prompt, number, derive_seed(self._seed, "eval", number, member), evaluation.deterministic)
                for number, prompt in enumerate(self._prompts[first : first + _PROMPTS_AT_ONCE], start=first)
                for member in range(evaluation.completions_per_prompt)
            ]
            write(transcripts, self._generate, evaluation.sampling or self._cfg.sampling, self._dialogue)
            score(transcripts, self._rewards)
            completions += transcripts
        self._rewards.take_logged()  # such metrics are of training alone
        rewards = tuple(map(tuple, rewards_of_groups(completions)))
        if not rewards:
            raise DataError("no completion of the held-out prompts could be scored; fix: the rewards, or eval_data")
        lengths = tuple(completion.written for completion in completions)
        return TextEvaluation(tuple(map(fmean, rewards)), lengths, rewards, self._cfg.task.success_threshold)

    def close(self) -> None:
        """Close the reward functions and the tool."""
        self._rewards.close()
        self._dialogue.close()
