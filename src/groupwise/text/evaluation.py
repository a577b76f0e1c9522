"""Evaluation of language models on held-out prompts, texts for prompts of the user's own, and episodes to look at."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

from groupwise.collectors.vector import Conversation
from groupwise.config.algorithm import BCCfg
from groupwise.config.policy import SamplingCfg
from groupwise.config.run import TextRunCfg, TextTaskCfg
from groupwise.errors import ConfigError, DataError, RewardError
from groupwise.policies.base import Policy
from groupwise.report.folder import wilson_95
from groupwise.seeding import derive_seed
from groupwise.text.collector import (
    Dialogue,
    Transcript,
    conversation_of,
    pass_at_k,
    rewards_of_groups,
    score,
    successes,
    verified_envs,
    write,
)
from groupwise.text.envs import GENERATORS, TextEnvs
from groupwise.text.generation import complete
from groupwise.text.policy import CausalLM
from groupwise.text.rewards import Prompt
from groupwise.text.task import EncodedPrompt, Example, PromptEncoder, Start, TextTask, demonstration, read_prompt
from groupwise.text.tool_env import env_of
from groupwise.training.evaluation import EvaluationResult, shown

_PROMPTS_AT_ONCE = 32

# Evaluation on held-out prompts: mean reward and pass@k


@dataclass(frozen=True, repr=False)
class TextEvaluation(EvaluationResult):
    """Rewards of several completions at each of n prompts.

    ``returns`` are the mean rewards of prompts, because completions of one prompt are no independent samples; ``lengths``
    are the tokens of each completion.
    """

    rewards: tuple[tuple[float, ...], ...]
    """Rewards of each prompt's scorable completions; prompts without any are left out."""
    success_threshold: float
    """A completion with at least this reward is right."""

    @property
    def completions_per_prompt(self) -> int:
        """The fewest scorable completions of a prompt."""
        return min(map(len, self.rewards))

    def pass_at(self, k: int) -> tuple[float, float, float]:
        """pass@k averaged over prompts, and its 95 % interval (Wilson's, over prompts)."""
        mean = fmean(pass_at_k(rewards, self.success_threshold, k) for rewards in self.rewards)
        return (mean, *wilson_95(mean, self.episodes))

    def line(self) -> str:
        """The summary in one line that scripts can read."""
        rates = [f"pass@{k}={mean:.6g} ci95={shown(ci95)}" for k, (mean, *ci95) in self._pass_rates().items()]
        mean = f"return_mean={self.return_mean:.6g} ci95={shown(self.ci95)}"
        if self.success_rate is not None:
            mean += f" success_rate={self.success_rate:.6g} ci95={shown(self.success_ci95)}"
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


class TextEvaluator:
    """Completes and scores held-out prompts, always the same ones with the same seeds."""

    def __init__(
        self,
        task: TextTask,
        held_out: Sequence[Example],
        cfg: TextRunCfg,
        policy: Policy,
        envs: TextEnvs | None = None,
        *,
        seed: int,
    ) -> None:
        assert isinstance(policy, CausalLM)
        if not held_out:
            raise ConfigError("no prompts are held out; fix: task.eval_data")
        if isinstance(cfg.algorithm, BCCfg):
            held_out = [demonstration(example) for example in held_out]
        encoder = PromptEncoder(policy.tokenizer, cfg.task)
        envs = envs or verified_envs(cfg, task, encoder, policy, held_out)
        self._sampling = cfg.evaluation.sampling or cfg.sampling
        of = "evaluation.sampling" if cfg.evaluation.sampling else "sampling"
        prompts = encoder.select(held_out, policy.max_prompt_length(self._sampling.max_new_tokens, of))
        self._prompts = prompts[: cfg.evaluation.prompts]
        self._cfg = cfg
        self._rewards = task.rewards(cfg.algorithm.on_nonfinite)
        self._generate = partial(complete, policy)
        self._dialogue = Dialogue(encoder, policy.context_length, envs)
        self._seed = seed

    def __call__(self) -> TextEvaluation:
        """Complete and score the prompts; a ``RewardError`` if none of the completions could be scored."""
        evaluation = self._cfg.evaluation
        completions = [
            Transcript(prompt, number, derive_seed(self._seed, "eval", number, member), evaluation.deterministic)
            for number, prompt in enumerate(self._prompts)
            for member in range(evaluation.completions_per_prompt)
        ]
        size = _PROMPTS_AT_ONCE * evaluation.completions_per_prompt
        for first in range(0, len(completions), size):
            some = completions[first : first + size]
            write(some, self._generate, self._sampling, self._dialogue)
            score(some, self._rewards)
            self._dialogue.release(some)
        self._rewards.take_logged()  # such metrics are of training alone
        rewards = tuple(map(tuple, rewards_of_groups(completions)))
        if not rewards:
            raise RewardError("no completion of the held-out prompts could be scored; fix: the rewards, or eval_data")
        lengths = tuple(completion.written for completion in completions)
        whole = [member for member in completions if member.episode is None or not member.episode.broken]
        won, threshold = successes(whole), self._cfg.task.success_threshold
        ends = {member.episode.ending for member in completions if member.episode is not None}
        if won is None and evaluation.metric == "success_rate" and not ends & {"terminated", "truncated"}:
            won = [False] * len(whole)  # all were cut, so the environment could not say
        names = tuple(str(one.prompt.example.columns.get("environment", "")) for one in whole)
        told: dict[str, Any] = {"successes": won and tuple(won), "tasks": names}
        return TextEvaluation(tuple(map(fmean, rewards)), lengths, rewards, threshold, **told)

    def close(self) -> None:
        """End the processes of the reward functions, and close the environments."""
        self._rewards.close()
        self._dialogue.close()


# Completions of the user's own prompts


def is_single(prompts: object) -> bool:
    """Whether it is one prompt, a text or a list of messages, and not several."""
    return isinstance(prompts, str) or (isinstance(prompts, Sequence) and any(isinstance(p, Mapping) for p in prompts))


def read_prompts(prompts: object) -> list[Prompt]:
    """One prompt or several, checked; a ``DataError`` names the one that is neither a text nor messages."""
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise DataError(
            f"prompts = {prompts!r:.80}: expected a text, a list of messages, or a list of these; fix: [message]"
        )
    several = [prompts] if is_single(prompts) else prompts
    return [read_prompt(f"prompt {number}", prompt) for number, prompt in enumerate(several)]


def write_texts(
    policy: CausalLM,
    prompts: Sequence[Prompt],
    count: int,
    *,
    sampling: SamplingCfg,
    task: TextTaskCfg | None = None,
    deterministic: bool,
    seed: int,
    envs: TextEnvs | None = None,
) -> list[list[str]]:
    """``count`` completions of each prompt, by the task's prompt settings and its tools, if there are any.

    Raises:
        ConfigError: the policy has no tokenizer.
        DataError: a prompt is too long.
    """
    task = task or TextTaskCfg()
    encoder = PromptEncoder(policy.tokenizer, task.model_copy(update={"on_long_prompt": "error"}))
    room = policy.max_prompt_length(sampling.max_new_tokens)
    examples = [Example(prompt, {}) for prompt in prompts]
    if envs is not None:
        starts = [Start(derive_seed(seed, "start", n), {task.prompt_column: one}) for n, one in enumerate(prompts)]
        examples = [one._replace(start=start) for one, start in zip(examples, starts, strict=True)]
    encoded = encoder.select(examples, room)
    groups = [
        [Transcript(prompt, number, derive_seed(seed, "sample", number, i), deterministic) for i in range(count)]
        for number, prompt in enumerate(encoded)
    ]
    with closing(Dialogue(encoder, policy.context_length, envs)) as dialogue:
        for first in range(0, len(groups), _PROMPTS_AT_ONCE):
            some = [*chain(*groups[first : first + _PROMPTS_AT_ONCE])]
            write(some, partial(complete, policy), sampling, dialogue)
    return [[member.text for member in group] for group in groups]


def play_episodes(
    policy: CausalLM, task: TextTask, count: int, *, sampling: SamplingCfg, deterministic: bool, seed: int
) -> list[Conversation]:
    """``count`` episodes of the task's environment, at starts that are drawn from those held out, or else from the others."""
    encoder, members, rows = PromptEncoder(policy.tokenizer, task.cfg), list[Transcript](), task.held_out()
    rows = rows or task.load()[0]
    for number in range(count):
        prompt = EncodedPrompt(rows[derive_seed(seed, "start", number) % len(rows)], ())
        members.append(Transcript(prompt, number, derive_seed(seed, "sample", number), deterministic))
    with closing(Dialogue(encoder, policy.context_length, fresh_envs(task))) as dialogue:
        write(members, partial(complete, policy), sampling, dialogue)
    return [conversation_of(member) for member in members]


def fresh_envs(task: TextTask) -> TextEnvs | None:
    """Instances of the task's environment or tools, none of which plays twice; None if it has neither.

    Each has generators of its own, where it draws from the process.
    """
    if (make := env_of(task)) is None:
        return None
    seconds = task.cfg.env_timeout
    return TextEnvs(make, "fresh", () if seconds else tuple(GENERATORS), seconds=seconds)
