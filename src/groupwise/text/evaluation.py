"""Evaluation of a language model on held-out prompts: mean reward, and the chance that k completions hold a right one."""

from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from groupwise.config.run import TextRunCfg
from groupwise.errors import ConfigError, DataError
from groupwise.functional.texts import pass_at_k
from groupwise.policies.base import Policy
from groupwise.report.scores import half_width_95, wilson_95
from groupwise.seeding import derive_seed
from groupwise.text.data import Example
from groupwise.text.generation import Generator
from groupwise.text.policy import CausalLM
from groupwise.text.prompts import EncodedPrompt, PromptEncoder
from groupwise.text.rewards import RewardSet
from groupwise.text.task import TextTask
from groupwise.text.tools import Tool, make_tool
from groupwise.text.transcripts import ToolDialogue, Transcript, score, text_of, write
from groupwise.text.turns import AnswerEncoder
from groupwise.training.components import Evaluator, UserObjects
from groupwise.training.evaluation import shown

_PROMPTS_AT_ONCE = 32


class TextEvaluation(NamedTuple):
    """Rewards of several completions at each of n prompts."""

    rewards: tuple[tuple[float, ...], ...]
    """Of each prompt's completions that could be scored; prompts without any are left out."""
    lengths: tuple[int, ...]
    """Tokens of each completion."""
    success_threshold: float
    """From this reward on a completion is right."""

    @property
    def returns(self) -> tuple[float, ...]:
        """Mean reward of each prompt's completions: completions at one prompt are no independent samples."""
        return tuple(fmean(rewards) for rewards in self.rewards)

    @property
    def episodes(self) -> int:
        """How many prompts there were."""
        return len(self.rewards)

    @property
    def completions_per_prompt(self) -> int:
        """Of each prompt, at least so many."""
        return min(map(len, self.rewards))

    @property
    def return_mean(self) -> float:
        """Mean reward."""
        return fmean(self.returns)

    @property
    def return_std(self) -> float:
        """Unbiased standard deviation of the prompts' mean rewards; 0 for one prompt."""
        return stdev(self.returns) if self.episodes > 1 else 0.0

    @property
    def length_mean(self) -> float:
        """Mean tokens of a completion."""
        return fmean(self.lengths)

    @property
    def ci95(self) -> tuple[float, float]:
        """95 % confidence interval of the mean reward over prompts, by Student's t; NaN twice for one prompt."""
        half = half_width_95(self.return_std, self.episodes)
        return self.return_mean - half, self.return_mean + half

    def pass_at(self, k: int) -> tuple[float, float, float]:
        """Share of prompts that k completions solve, and its 95 % interval (Wilson's, over prompts)."""
        mean = fmean(pass_at_k(len(r), sum(one >= self.success_threshold for one in r), k) for r in self.rewards)
        return (mean, *wilson_95(mean, self.episodes))

    def __repr__(self) -> str:
        """Mean, interval and number; the rewards themselves may be thousands."""
        low, high = self.ci95
        return (
            f"TextEvaluation(return_mean={self.return_mean:.6g}, ci95=({low:.6g}, {high:.6g}), prompts={self.episodes}, "
            f"completions_per_prompt={self.completions_per_prompt}, pass_at_1={self.pass_at(1)[0]:.6g})"
        )

    def line(self) -> str:
        """What a script reads from a line."""
        solved = (
            f"pass@{k}={mean:.6g} ci95={shown((low, high))}" for k, (mean, low, high) in self._pass_rates().items()
        )
        mean = f"return_mean={self.return_mean:.6g} ci95={shown(self.interval)}"
        return " ".join(
            [mean, *solved, f"prompts={self.episodes} completions_per_prompt={self.completions_per_prompt}"]
        )

    def report(self) -> dict[str, Any]:
        """All of it as plain data."""
        rates = {f"pass_at_{k}": {"mean": m, "ci95": [low, high]} for k, (m, low, high) in self._pass_rates().items()}
        numbers = {"return_mean": self.return_mean, "ci95": self.interval, "episodes": self.episodes}
        numbers |= {"completions_per_prompt": self.completions_per_prompt, "length_mean": self.length_mean}
        return numbers | rates | {"rewards": [list(rewards) for rewards in self.rewards]}

    @property
    def interval(self) -> list[float] | None:
        """``ci95``; None for one prompt."""
        return list(self.ci95) if self.episodes > 1 else None

    def _pass_rates(self) -> dict[int, tuple[float, float, float]]:
        ks = sorted(
            {2**i for i in range(self.completions_per_prompt.bit_length()) if 2**i <= self.completions_per_prompt}
            | {self.completions_per_prompt}
        )
        return {k: self.pass_at(k) for k in ks}

    def metrics(self) -> dict[str, float]:
        """``eval/*`` numbers for the log."""
        return {
            "eval/return_mean": self.return_mean,
            "eval/return_std": self.return_std,
            "eval/length_mean": self.length_mean,
            "eval/episodes": float(self.episodes),
        } | {f"eval/pass_at_{k}": mean for k, (mean, _, _) in self._pass_rates().items()}


class TextEvaluator(Evaluator):
    """Completes and scores held-out prompts, always the same ones with the same seeds."""

    def __init__(
        self,
        cfg: TextRunCfg,
        prompts: Sequence[EncodedPrompt],
        encoder: PromptEncoder,
        rewards: RewardSet,
        generator: Generator,
        *,
        dialogue: ToolDialogue | None = None,
        context: int | None = None,
        seed: int,
    ) -> None:
        self._cfg = cfg
        self._prompts = prompts[: cfg.evaluation.prompts]
        self._encoder = encoder
        self._rewards = rewards
        self._generator = generator
        self._dialogue = dialogue
        self._context = context
        self._seed = seed

    @classmethod
    def of(cls, cfg: TextRunCfg, given: UserObjects, policy: Policy, *, seed: int) -> "TextEvaluator":
        """What evaluates the policy of a run, from its settings.

        Raises:
            ConfigError: no prompts are held out.
        """
        task = task_of(cfg, given)
        return cls.on(task, task.load().eval, cfg, policy, seed=seed)

    @classmethod
    def on(
        cls, task: TextTask, held_out: Sequence[Example], cfg: TextRunCfg, policy: Policy, *, seed: int
    ) -> "TextEvaluator":
        """What evaluates the policy on these examples."""
        assert isinstance(policy, CausalLM)
        if not held_out:
            raise ConfigError("no prompts are held out; fix: task.eval_data")
        encoder = PromptEncoder(policy.tokenizer, cfg.task)
        prompts = encoder.select(held_out, policy.max_prompt_length(cfg.sampling.max_new_tokens))
        return cls(
            cfg,
            prompts,
            encoder,
            task.rewards(),
            Generator(policy),
            dialogue=dialogue_of(task.tool(), encoder, policy, cfg),
            context=policy.context_length,
            seed=seed,
        )

    def __call__(self) -> TextEvaluation:
        """Complete and score the prompts.

        Raises:
            RewardError: a reward function failed.
            DataError: no completion could be scored.
        """
        rewards: list[tuple[float, ...]] = []
        lengths: list[int] = []
        for first in range(0, len(self._prompts), _PROMPTS_AT_ONCE):
            transcripts = self._transcripts(first, self._prompts[first : first + _PROMPTS_AT_ONCE])
            lengths += [transcript.written for transcript in transcripts]
            rewards += self._score(transcripts)
        scored = tuple(group for group in rewards if group)
        if not scored:
            raise DataError("no completion of the held-out prompts could be scored; fix: the rewards, or eval_data")
        return TextEvaluation(scored, tuple(lengths), self._cfg.task.success_threshold)

    def prepare(self) -> None:
        """Nothing: prompts were encoded when this was made."""

    def close(self) -> None:
        """Close the reward functions."""
        self._rewards.close()

    def _transcripts(self, first: int, prompts: Sequence[EncodedPrompt]) -> list[Transcript]:
        """Completions of the prompts, whose numbers begin at ``first``."""
        evaluation = self._cfg.evaluation
        transcripts = [
            Transcript(prompt, number, derive_seed(self._seed, "eval", number, member), evaluation.deterministic)
            for number, prompt in enumerate(prompts, start=first)
            for member in range(evaluation.completions_per_prompt)
        ]
        sampling = evaluation.sampling or self._cfg.sampling
        write(transcripts, self._generator, sampling, dialogue=self._dialogue, context=self._context)
        return transcripts

    def _score(self, transcripts: Sequence[Transcript]) -> list[tuple[float, ...]]:
        """Rewards of each prompt's completions."""
        size = self._cfg.evaluation.completions_per_prompt
        said = [member.reward for member in score(transcripts, self._rewards, self._encoder)]
        self._rewards.take_logged()  # evaluation tells none of it, and it would add up
        groups = [said[i : i + size] for i in range(0, len(said), size)]
        return [tuple(reward for reward in group if reward is not None) for group in groups]


def write_texts(
    cfg: TextRunCfg,
    policy: Policy,
    prompt: str,
    count: int,
    *,
    deterministic: bool,
    seed: int,
    tool: Callable[[str], str | None] | None = None,
) -> list[str]:
    """Completions of one prompt.

    Args:
        tool: the one that the run was given as a Python object, if it was.

    Raises:
        ConfigError: it was, and it is missing.
    """
    assert isinstance(policy, CausalLM)
    encoder = PromptEncoder(policy.tokenizer, cfg.task)
    (chosen,) = encoder.select([Example(prompt, {})], policy.max_prompt_length(cfg.sampling.max_new_tokens))
    transcripts = [Transcript(chosen, 0, derive_seed(seed, "sample", i), deterministic) for i in range(count)]
    dialogue = dialogue_of(make_tool(cfg.task, tool), encoder, policy, cfg)
    write(transcripts, Generator(policy), cfg.sampling, dialogue=dialogue, context=policy.context_length)
    return [text_of(transcript, encoder) for transcript in transcripts]


def task_of(cfg: TextRunCfg, given: UserObjects) -> TextTask:
    """The task that the settings describe."""
    return TextTask.from_cfg(cfg.task, data=given.data, eval_data=given.eval_data, reward=given.reward, tool=given.tool)


def dialogue_of(tool: Tool | None, encoder: PromptEncoder, policy: CausalLM, cfg: TextRunCfg) -> ToolDialogue | None:
    """Who answers the model; None if it has no tool."""
    if tool is None:
        return None
    return ToolDialogue(tool, encoder, AnswerEncoder(policy.tokenizer, cfg.task, encoder), cfg.task.max_turns)
