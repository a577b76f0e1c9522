"""Rollouts of texts: groups of completions of the same prompt, scored by reward functions."""

import logging
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict

from groupwise.collectors.base import Collector, Episode
from groupwise.config.policy import SamplingCfg
from groupwise.errors import DataError
from groupwise.functional.shaping import overlong_penalty
from groupwise.functional.texts import pass_at_k, repeated_ngrams
from groupwise.policies.base import Policy
from groupwise.seeding import derive_seed
from groupwise.text.data import PromptOrder
from groupwise.text.generation import Generator
from groupwise.text.policy import CausalLM
from groupwise.text.prompts import EncodedPrompt, PromptEncoder
from groupwise.text.rewards import RewardSet, TrainingState
from groupwise.text.rollout import TextRow, text_rollout
from groupwise.text.transcripts import Scored, ToolDialogue, Transcript, score, write

log = logging.getLogger(__name__)

MAX_UNSCORED = 3
"""Iterations in a row in which nothing could be scored, after which something must be wrong."""
_VALUE_ROWS = 16


class TextTerms(NamedTuple):
    """How completions become rows to train on."""

    num_prompts: int
    """Of this process, in one iteration."""
    group_size: int = 1
    greedy_members: Literal[0, 1] = 0
    """Of each group, in addition."""
    filter_groups: bool = False
    dynamic_sampling: float = 0.0
    mask_truncated: bool = False
    overlong_buffer: int = 0
    success_threshold: float = 1.0


class TextCollector(Collector):
    """Generates and scores ``num_prompts`` groups per iteration.

    Which prompts come, and what is drawn, follows from the seed and the position in the data alone.

    Args:
        prompts: to train on.
        dialogue: who answers the model; None: a completion is one turn.
        rank, world_size: each process takes prompts of its own.
    """

    def __init__(
        self,
        policy: CausalLM,
        generator: Generator,
        prompts: Sequence[EncodedPrompt],
        encoder: PromptEncoder,
        rewards: RewardSet,
        sampling: SamplingCfg,
        terms: TextTerms,
        *,
        dialogue: ToolDialogue | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        self.scored: list[Scored] = []
        """Completions of the last rollout, skipped ones included."""
        self.position = 0
        """How many prompts this process has taken, epochs after each other."""
        self._policy = policy
        self._generator = generator
        self._prompts = prompts
        self._order = PromptOrder(len(prompts), derive_seed(seed, "data"))
        self._encoder = encoder
        self._rewards = rewards
        self._sampling = sampling
        self._terms = terms
        self._dialogue = dialogue
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._unscored = 0
        self._metrics: dict[str, float] = {}

    @property
    def num_examples(self) -> int:
        """How many prompts there are to train on."""
        return len(self._prompts)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the functions in ``Scored.parts``."""
        return self._rewards.names

    def sync(self, policy: Policy) -> None:
        """Give the generator the weights to write with."""
        assert isinstance(policy, CausalLM)
        self._generator.sync(policy)

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """The rollout of new groups; as long and as many rows as there are tokens and completions.

        Raises:
            RewardError: a reward function failed.
            DataError: nothing could be scored, several times in a row.
        """
        self._rewards.take_logged()  # of a rollout that failed
        terms = self._terms
        kept: list[list[Scored]] = []
        skipped: list[list[Scored]] = []
        budget = int(terms.num_prompts * (1 + terms.dynamic_sampling))
        taken, wanted = 0, terms.num_prompts
        while wanted:
            for group in self._new_groups(wanted, first=taken):
                equal = terms.filter_groups and did_equally_well(group)
                (skipped if equal else kept).append(group)
            taken += wanted
            wanted = min(terms.num_prompts - len(kept), budget - taken)
        self.position += taken  # only now: a rollout that fails is collected again, from the same prompts
        self.iteration += 1
        self.scored = [member for group in (*kept, *skipped) for member in group]
        self._check_scored()
        rows = [self._row(member) for group in kept for member in group]
        rows += [self._row(member)._replace(reward=None) for group in skipped for member in group]
        self._note(num_skipped=len(skipped))
        return self._with_values(text_rollout(rows, device=self._policy.device))

    def recent_episodes(self) -> Sequence[Episode]:
        """The completions of the last rollout: every one of them is whole."""
        return self.finished

    def metrics(self) -> dict[str, float]:
        """``rollout/*`` and ``reward/*`` numbers of the last ``collect``."""
        return super().metrics() | self._metrics

    def state_dict(self) -> dict[str, Any]:
        """What the next rollout depends on: where in the data it begins."""
        return super().state_dict() | {"position": self.position, "unscored": self._unscored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved ``state_dict``."""
        super().load_state_dict(state)
        self.position, self._unscored = state["position"], state["unscored"]

    def close(self) -> None:
        """Close the reward functions."""
        self._rewards.close()

    def _new_groups(self, count: int, first: int) -> list[list[Scored]]:
        """Groups of the next prompts, generated and scored; ``first`` groups of this rollout precede them."""
        places = [(self.position + first + i) * self._world_size + self._rank for i in range(count)]
        prompts = [self._prompts[self._order.take(place, 1)[0]] for place in places]
        transcripts = [
            Transcript(prompt, first + number, self._seed_of(first + number, member), member == self._terms.group_size)
            for number, prompt in enumerate(prompts)
            for member in range(self._terms.group_size + self._terms.greedy_members)
        ]
        write(
            transcripts,
            self._generator,
            self._sampling,
            dialogue=self._dialogue,
            context=self._policy.context_length,
        )
        scored = self._score(transcripts)
        size = self._terms.group_size + self._terms.greedy_members
        return [scored[i : i + size] for i in range(0, len(scored), size)]

    @property
    def _epoch(self) -> float:
        return self.position * self._world_size / len(self._prompts)

    def _seed_of(self, group: int, member: int) -> int:
        return derive_seed(self._seed, "completion", self._rank, self.iteration, group, member)

    def _score(self, transcripts: Sequence[Transcript]) -> list[Scored]:
        state = TrainingState(global_step=self.iteration, epoch=self._epoch)
        return score(transcripts, self._rewards, self._encoder, state)

    def _row(self, member: Scored) -> TextRow:
        transcript, terms, several = member.transcript, self._terms, len(self._rewards.names) > 1
        cut = transcript.stop == "length"
        reward = member.reward
        if reward is not None and terms.overlong_buffer:
            reward -= self._overlong(member)
        return TextRow(
            transcript.prompt.tokens,
            transcript.tokens,
            transcript.log_probs,
            reward,
            terminated=not cut,
            group=transcript.group,
            turn=None if self._dialogue is None else transcript.turn,
            support=transcript.support or None,
            trained=not (cut and terms.mask_truncated),
            greedy=transcript.greedy,
            reward_parts=tuple(part or 0.0 for part in member.parts) if several else (),
        )

    def _overlong(self, member: Scored) -> float:
        last_turn = torch.tensor([len(member.transcript.last_turn())])
        return float(overlong_penalty(last_turn, self._sampling.max_new_tokens, self._terms.overlong_buffer))

    def _check_scored(self) -> None:
        if any(member.reward is not None for member in self.scored):
            self._unscored = 0
            return
        self._unscored += 1
        log.warning("no completion of iteration %d could be scored: the update is skipped", self.iteration)
        if self._unscored == MAX_UNSCORED:
            raise DataError(
                f"no completion of {MAX_UNSCORED} iterations in a row could be scored: every reward was None or not finite; "
                f"fix: the rewards {', '.join(self._rewards.names)}, or the columns that they read"
            )

    def _note(self, num_skipped: int) -> None:
        """Update the metrics."""
        scored = [member for member in self.scored if member.reward is not None and not member.transcript.greedy]
        self.finished = [
            Episode(float(member.reward or 0.0), member.transcript.written, member.transcript.stop != "length")
            for member in scored
        ]
        self.recent.extend(self.finished)
        self.last_steps = sum(member.transcript.written for member in self.scored)
        self._metrics = text_metrics(self.scored, self._rewards.names, self._terms.success_threshold)
        self._metrics["rollout/filtered_groups"] = float(num_skipped)
        self._metrics["rollout/epoch"] = self._epoch
        self._metrics |= {f"reward/{name}": value for name, value in self._rewards.take_logged().items()}

    def _with_values(self, rollout: TensorDict) -> TensorDict:
        """The rollout with what the critic says, if there is one."""
        if self._policy.actor_only:
            return rollout
        parts = [self._policy.values(rollout[i : i + _VALUE_ROWS]) for i in range(0, len(rollout), _VALUE_ROWS)]
        value = torch.cat(parts)
        rollout["value"] = value
        rollout["next_value"] = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
        return rollout


def did_equally_well(group: Sequence[Scored]) -> bool:
    """Whether members have nothing to learn from each other: their rewards are the same, or fewer than two have any.

    Rewards are those of the functions: a group is not kept for its overlong members' penalty alone.
    """
    rewards = {member.reward for member in group if member.reward is not None and not member.transcript.greedy}
    return len(rewards) < 2


def text_metrics(scored: Sequence[Scored], reward_names: Sequence[str], success_threshold: float) -> dict[str, float]:
    """Metrics of the sampled completions: rewards, lengths, why they ended, repetition."""
    sampled = [member for member in scored if not member.transcript.greedy]
    worth = [member for member in sampled if member.reward is not None]
    lengths = [member.transcript.written for member in sampled]
    count = len(sampled)
    metrics = {
        "rollout/unscorable": count - float(len(worth)),
        "rollout/length_max": float(max(lengths)),
        "rollout/length_min": float(min(lengths)),
        "rollout/turns_mean": fmean(member.transcript.turns for member in sampled),
        "rollout/repeated_ngrams": fmean(repeated_ngrams(member.transcript.tokens) for member in sampled),
    }
    for stop, name in (
        ("eos", "rollout/ended_by_eos"),
        ("stop", "rollout/ended_by_stop"),
        ("length", "completions/clipped_ratio"),
    ):
        metrics[name] = sum(member.transcript.stop == stop for member in sampled) / count
    for number, name in enumerate(reward_names):
        values = [value for member in sampled if (value := member.parts[number]) is not None]
        if values:
            metrics[f"reward/{name}_mean"] = fmean(values)
    groups = _rewards_by_group(worth)
    if groups:
        metrics["rollout/reward_std"] = fmean(pstdev(group) for group in groups)
        metrics |= {f"rollout/{name}": value for name, value in pass_rates(groups, success_threshold).items()}
    return metrics


def pass_rates(groups: Sequence[Sequence[float]], success_threshold: float) -> dict[str, float]:
    """pass@1, and pass@k for the size of the smallest group, averaged over the groups of rewards."""
    size = min(map(len, groups))
    return {
        f"pass_at_{k}": fmean(pass_at_k(len(g), sum(reward >= success_threshold for reward in g), k) for g in groups)
        for k in sorted({1, size})
    }


def _rewards_by_group(worth: Sequence[Scored]) -> list[list[float]]:
    groups: dict[int, list[float]] = {}
    for member in worth:
        groups.setdefault(member.transcript.group, []).append(member.reward or 0.0)
    return list(groups.values())
