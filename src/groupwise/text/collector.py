"""Rollouts of texts: groups of completions of the same prompt, scored by reward functions."""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch

from groupwise.collectors.vector import Collector, Episode
from groupwise.config.policy import SamplingCfg
from groupwise.config.run import TextRunCfg, TextTaskCfg
from groupwise.data.rollout import TensorDict
from groupwise.errors import ConfigError, DataError
from groupwise.policies.base import Policy
from groupwise.report.folder import wilson_95
from groupwise.seeding import derive_seed
from groupwise.text.data import EncodedPrompt, Example, Prompt, PromptEncoder, in_order, read_prompt
from groupwise.text.generation import Generate, complete
from groupwise.text.policy import CausalLM
from groupwise.text.rewards import RewardSet, TrainingState
from groupwise.text.task import TextTask
from groupwise.text.tools import AnyTool, make_tool
from groupwise.text.transcripts import (
    Dialogue,
    Transcript,
    open_group,
    rewards_of_groups,
    score,
    text_rollout,
    training_row,
    write,
)
from groupwise.training.evaluation import EvaluationResult, Evaluator, shown

MAX_UNSCORED = 3
"""Iterations in a row without any scorable completion, after which training stops."""
_VALUE_ROWS = 16


class TextCollector(Collector):
    """Generates and scores ``num_prompts`` groups per iteration.

    Prompts and completions depend on the seed and the position in the data alone.

    Args:
        prompts: to train on.
        rank, world_size: each process takes prompts of its own.
    """

    def __init__(
        self,
        policy: CausalLM,
        generate: Generate,
        prompts: Sequence[EncodedPrompt],
        dialogue: Dialogue,
        rewards: RewardSet,
        cfg: TextRunCfg,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        self.members: list[Transcript] = []
        """Completions of the last rollout, those of filtered groups included."""
        self.position = 0
        self.data_size = len(prompts)
        self.policy: CausalLM = policy
        self.prompts, self.rewards = prompts, rewards
        self.generate = generate
        self.rank, self.world_size = rank, world_size
        self._cfg, self._dialogue = cfg, dialogue
        self._collection = cfg.algorithm.groups.collection
        self._unscored = 0

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """The rollout of new groups: a row for each completion, as long as the longest.

        Raises:
            DataError: nothing could be scored, several times in a row.
        """
        kept: list[list[Transcript]] = []
        filtered: list[list[Transcript]] = []
        num_prompts, dynamic = self._cfg.num_prompts, self._collection.dynamic_sampling
        budget = int(num_prompts * (1 + (dynamic or 0)))
        taken, wanted = 0, num_prompts
        while wanted:
            groups = self._written(wanted, first=taken)
            score([*chain(*groups)], self.rewards, TrainingState(global_step=self.iteration, epoch=self._epoch))
            for group in groups:
                (filtered if dynamic is not None and has_no_variance(group) else kept).append(group)
            taken += wanted
            wanted = min(num_prompts - len(kept), budget - taken)
        self.position += taken  # only now: a rollout that fails is collected again, from the same prompts
        self.iteration += 1
        self.members = [*chain(*kept, *filtered)]
        scored = [(member, member.reward) for member in self.members if member.reward is not None]
        self._unscored = 0 if scored else self._unscored + 1
        if self._unscored == MAX_UNSCORED:
            raise DataError(
                f"no completion of {MAX_UNSCORED} iterations in a row could be scored: every reward was None or not finite; "
                f"fix: the rewards {', '.join(self.rewards.names)}, or the columns that they read"
            )
        self.finished = [
            Episode(float(reward), member.written, member.stop != "length")
            for member, reward in scored
            if not member.greedy
        ]
        self.last_steps = sum(member.written for member in self.members)
        self._metrics = text_metrics(self.members, self.rewards.names, self._cfg.task.success_threshold)
        self._metrics |= {"rollout/filtered_groups": float(len(filtered)), "rollout/epoch": self._epoch}
        self._metrics |= {f"reward/{name}": value for name, value in self.rewards.take_logged().items()}
        rows = [training_row(member, self._cfg) for member in chain(*kept)]
        rows += [training_row(member, self._cfg)._replace(reward=None) for member in chain(*filtered)]
        rollout = text_rollout(rows, device=self.policy.device)
        if not self.policy.actor_only:
            value = torch.cat([self.policy.values(part) for part in rollout.split(_VALUE_ROWS)])
            rollout["value"] = value
            rollout["next_value"] = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
        return rollout

    def recent_episodes(self) -> Sequence[Episode]:
        """The completions of the last rollout."""
        return self.finished

    def group_start(self, group: int) -> str:
        """The prompt of a group of the last rollout; a conversation as lines that begin with the role."""
        prompt = next(member.prompt.example.prompt for member in self.members if member.group == group)
        return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Each token as text, with the space before a word."""
        tokenizer = self.policy.tokenizer
        pieces = tokenizer.convert_ids_to_tokens(tokens)
        texts = [tokenizer.decode([token]) for token in tokens]
        # SentencePiece marks the space before a word, and decoding a word alone drops it
        return [f" {text}" if piece.startswith("\u2581") else text for piece, text in zip(pieces, texts, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, over all ranks."""
        return super().state_dict() | {"position": self.position * self.world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved ``state_dict``; other numbers of ranks may repeat the last prompts."""
        super().load_state_dict(state)
        self.position = state["position"] // self.world_size

    def close(self) -> None:
        """Close the reward functions and the tool."""
        self.rewards.close()
        self._dialogue.close()

    def _written(self, count: int, first: int) -> list[list[Transcript]]:
        """Groups of the next prompts, generated; ``first`` groups of this rollout precede them."""
        return self._write(self._open(count, first))

    def _open(self, count: int, first: int = 0, ahead: int = 0) -> list[list[Transcript]]:
        """Groups of the next prompts, not generated yet.

        Args:
            ahead: rollouts between this one and theirs.
        """
        stream = "completion", self.rank, self.iteration + ahead
        place = self.position + ahead * self._cfg.num_prompts
        return [
            open_group(self._prompt(place + number), number, self._cfg.algorithm, self._cfg.seed, *stream)
            for number in range(first, first + count)
        ]

    def _prompt(self, place: int) -> EncodedPrompt:
        """The prompt at a place of this process's part of the data, over all epochs."""
        return in_order(self.prompts, place * self.world_size + self.rank, self._cfg.seed)

    def _write(self, groups: list[list[Transcript]]) -> list[list[Transcript]]:
        """Generate the groups."""
        write([*chain(*groups)], self.generate, self._cfg.sampling, self._dialogue)
        return groups

    @property
    def _epoch(self) -> float:
        return self.position * self.world_size / len(self.prompts)


def has_no_variance(group: Sequence[Transcript]) -> bool:
    """Whether all rewards of the group are the same, or fewer than two members have any. Overlong penalties do not count.

    Rewards are compared in float32, as in the rollout: the order in which parts were added up makes no difference.
    """
    rewards = [member.reward for member in group if member.reward is not None and not member.greedy]
    return len(set(np.asarray(rewards, np.float32).tolist())) < 2


def text_metrics(
    members: Sequence[Transcript], reward_names: Sequence[str], success_threshold: float
) -> dict[str, float]:
    """Metrics of the sampled completions: rewards, lengths, how they ended, repetition."""
    sampled = [member for member in members if not member.greedy]
    lengths = [member.written for member in sampled]
    metrics = {
        "rollout/unscorable": float(sum(member.reward is None for member in sampled)),
        "rollout/length_max": float(max(lengths)),
        "rollout/length_min": float(min(lengths)),
        "rollout/turns_mean": fmean(member.turns for member in sampled),
        "rollout/repeated_ngrams": fmean(repeated_ngrams(member.tokens) for member in sampled),
        "rollout/ended_by_eos": fmean(member.stop == "eos" for member in sampled),
        "rollout/ended_by_stop": fmean(member.stop == "stop" for member in sampled),
        "completions/clipped_ratio": fmean(member.stop == "length" for member in sampled),
    }
    for number, name in enumerate(reward_names):
        values = [value for member in sampled if (value := member.parts[number]) is not None]
        if values:
            metrics[f"reward/{name}_mean"] = fmean(values)
    groups = rewards_of_groups(sampled)
    if groups:
        metrics["rollout/reward_std"] = fmean(pstdev(group) for group in groups)
        for k in (1, min(map(len, groups))):
            metrics[f"rollout/pass_at_{k}"] = fmean(pass_rate(group, success_threshold, k) for group in groups)
    return metrics


# Evaluation on held-out prompts: mean reward and pass@k

_PROMPTS_AT_ONCE = 32


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


# Completions of the user's own prompts


def is_single(prompts: object) -> bool:
    """Whether it is one prompt, a text or a list of messages, and not several."""
    return isinstance(prompts, str) or (isinstance(prompts, Sequence) and any(isinstance(p, Mapping) for p in prompts))


def read_prompts(prompts: str | Sequence[Any]) -> list[Prompt]:
    """One prompt or several, checked; a ``DataError`` names the one that is neither a text nor messages."""
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
    tool: AnyTool | None = None,
) -> list[list[str]]:
    """``count`` completions of each prompt.

    Args:
        task: how prompts become tokens, and which tool there is.
        tool: the task's tool, if it was given in Python.

    Raises:
        ConfigError: the policy has no tokenizer.
        DataError: a prompt is too long.
    """
    if policy.tokenizer is None:
        raise ConfigError("the policy has no tokenizer; fix: CausalLM(model, tokenizer=...)")
    task = task or TextTaskCfg()
    encoder = PromptEncoder(policy.tokenizer, task.model_copy(update={"on_long_prompt": "error"}))
    room = policy.max_prompt_length(sampling.max_new_tokens)
    encoded = encoder.select([Example(prompt, {}) for prompt in prompts], room)
    groups = [
        [Transcript(prompt, number, derive_seed(seed, "sample", number, i), deterministic) for i in range(count)]
        for number, prompt in enumerate(encoded)
    ]
    with closing(Dialogue(encoder, make_tool(task, tool), policy.context_length)) as dialogue:
        for first in range(0, len(groups), _PROMPTS_AT_ONCE):
            some = groups[first : first + _PROMPTS_AT_ONCE]
            write([*chain(*some)], partial(complete, policy), sampling, dialogue)
    return [[member.text for member in group] for group in groups]


def predict(policy: CausalLM, prompts: str | Sequence[Any], deterministic: bool) -> str | list[str]:
    """A completion of each prompt, as ``policy.predict`` returns it; random ones by torch's global generator."""
    seed = 0 if deterministic else int(torch.randint(2**31, ()))
    read = read_prompts(prompts)
    texts = write_texts(policy, read, 1, sampling=policy.sampling, deterministic=deterministic, seed=seed)
    return texts[0][0] if is_single(prompts) else [text for (text,) in texts]


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Share of the text's n-grams that occur earlier in it: 0 if all are new, near 1 in a loop; 0 for fewer than two."""
    count = len(tokens) - n + 1
    if count < 2:
        return 0.0
    return 1 - len({tuple(tokens[i : i + n]) for i in range(count)}) / count


def pass_at_k(completions: int, solved: int, k: int) -> float:
    """Chance that at least one of k completions solves the problem, estimated without bias from ``completions >= k`` of them.

        1 - C(completions - solved, k) / C(completions, k)

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1.
    """
    return 1 - math.comb(completions - solved, k) / math.comb(completions, k)


def pass_rate(rewards: Sequence[float], success_threshold: float, k: int) -> float:
    """``pass_at_k`` of a prompt's completions, of which those with at least the threshold as reward are right."""
    return pass_at_k(len(rewards), sum(reward >= success_threshold for reward in rewards), k)
