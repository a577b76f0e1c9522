"""Transcripts: the turns of the model and the tool's answers at a prompt, and their rewards."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.config.algorithm import AlgorithmCfg, GRPOCfg
from groupwise.config.policy import SamplingCfg
from groupwise.config.run import TextRunCfg
from groupwise.seeding import derive_seed
from groupwise.text.data import Message
from groupwise.text.generation import Generate
from groupwise.text.prompts import EncodedPrompt, PromptEncoder
from groupwise.text.rewards import RewardSet, TrainingState
from groupwise.text.rollout import TextRow
from groupwise.text.sampling import Completion
from groupwise.text.tools import AnyTool, IsolatedTool, Tool, ask


@dataclass
class Transcript:
    """One completion of a group, in the tokens that were sampled."""

    prompt: EncodedPrompt
    group: int
    seed: int
    greedy: bool = False
    tokens: list[int] = field(default_factory=list)
    """All tokens after the prompt."""
    log_probs: list[float] = field(default_factory=list)
    """Of each token; 0 for the tool's."""
    turn: list[int] = field(default_factory=list)
    """The model's turn that wrote each token; -1: the tool's."""
    support: list[Tensor] = field(default_factory=list)
    """The tokens that could be drawn, if not all could."""
    policy_version: list[int] = field(default_factory=list)
    """From servers: the iteration whose policy generated each token; -1: the tool's."""
    stop: Literal["eos", "stop", "length"] = "length"
    """How the model's last turn ended."""
    turns: int = 0
    """Number of the model's turns."""
    text: str = ""
    """All that the model wrote, with the tool's answers in between as plain text."""
    messages: list[Message] = field(default_factory=list)
    """The same as messages."""
    reward: float | None = None
    """None: unscorable."""
    parts: Sequence[float | None] = ()
    """Score of each reward function."""

    @property
    def written(self) -> int:
        """Tokens that the model wrote."""
        return sum(turn >= 0 for turn in self.turn)

    def add_turn(self, completion: Completion, text: str) -> None:
        """Add a turn of the model."""
        self._add(completion.tokens, completion.log_probs, self.turns)
        self.support += completion.support or []
        self.policy_version += completion.policy_version or []
        self.stop = completion.stop
        self.turns += 1
        self.text += text
        self.messages.append({"role": "assistant", "content": text})

    def add_answer(self, answer: str, text: str, tokens: Sequence[int]) -> None:
        """Add the tool's answer, as plain text, too, and all tokens between two turns of the model."""
        self._add(tokens, [0.0] * len(tokens), -1)
        if self.support:
            self.support += [torch.tensor([-1], dtype=torch.int32)] * len(tokens)
        if self.policy_version:
            self.policy_version += [-1] * len(tokens)
        self.text += text
        self.messages.append({"role": "tool", "content": answer})

    def _add(self, tokens: Sequence[int], log_probs: Sequence[float], turn: int) -> None:
        self.tokens += tokens
        self.log_probs += log_probs
        self.turn += [turn] * len(tokens)


class Dialogue:
    """What follows a turn of the model: the tool's answer, if there is a tool.

    Args:
        context: tokens that the model has positions for. None: no limit.
    """

    def __init__(self, encoder: PromptEncoder, tool: AnyTool | None = None, context: int | None = None) -> None:
        self.encoder = encoder
        self._tool, self._asking = tool, Lock()
        self._context = context
        if tool is not None:
            encoder.encode_answer("84")  # a template that cannot is refused before training

    def stopping(self, sampling: SamplingCfg) -> SamplingCfg:
        """The sampling with turns that end where a call ends."""
        ends = self._tool.stop if isinstance(self._tool, Tool) else ()
        return sampling.model_copy(update={"stop": tuple(dict.fromkeys((*sampling.stop, *ends)))})

    def answer(self, transcript: Transcript, max_new_tokens: int) -> bool:
        """Add the tool's answer to the last turn; False if the completion is over.

        A completion that has no room for an answer and another turn counts as cut.
        """
        if self._tool is None or transcript.stop == "length" or transcript.turns >= self.encoder.cfg.max_turns:
            return False
        with self._asking:  # several rollouts may be written at the same time
            answer = ask(self._tool, transcript.messages[-1]["content"])
        if answer is None:
            return False
        tokens = self.encoder.encode_answer(answer, transcript.tokens[-1] if transcript.stop == "eos" else None)
        length = len(transcript.prompt.tokens) + len(transcript.tokens) + len(tokens) + max_new_tokens
        if self._context is not None and length > self._context:
            transcript.stop = "length"
            return False
        transcript.add_answer(answer, self.encoder.inline(answer), tokens)
        return True

    def close(self) -> None:
        """End the tool's process, if it has one."""
        if isinstance(self._tool, IsolatedTool):
            self._tool.close()


def open_group(
    prompt: EncodedPrompt, number: int, algorithm: AlgorithmCfg, seed: int, *stream: int | str
) -> list[Transcript]:
    """The members of a group, not written yet; the seed of each follows from ``seed``, ``stream``, group and member.

    Args:
        number: of the group in its rollout.
    """
    grpo = algorithm if isinstance(algorithm, GRPOCfg) else None
    sampled = 1 if grpo is None else grpo.group_size
    size = sampled + (0 if grpo is None else grpo.credit.baseline.greedy_members)
    return [Transcript(prompt, number, derive_seed(seed, *stream, number, i), greedy=i == sampled) for i in range(size)]


def write(transcripts: Sequence[Transcript], generate: Generate, sampling: SamplingCfg, dialogue: Dialogue) -> None:
    """Generate every transcript to its end; members of a group share the encoding of their prompt."""
    sampling, running = dialogue.stopping(sampling), list(transcripts)
    while running:
        for groups in _batches(running):
            texts = [[*members[0].prompt.tokens, *members[0].tokens] for members in groups]
            seeds = [[derive_seed(member.seed, "turn", member.turns) for member in members] for members in groups]
            written = generate(texts, torch.tensor(seeds), sampling, deterministic=groups[0][0].greedy)
            for member, completion in zip(chain(*groups), chain(*written), strict=True):
                member.add_turn(completion, dialogue.encoder.decode(completion.tokens))
        running = [member for member in running if dialogue.answer(member, sampling.max_new_tokens)]


def _batches(transcripts: Sequence[Transcript]) -> list[list[list[Transcript]]]:
    """Transcripts with the same text so far in one group; groups that can be generated in one call in one batch."""
    groups: dict[tuple[bool, int, tuple[int, ...]], list[Transcript]] = defaultdict(list)
    for member in transcripts:
        groups[member.greedy, member.group, tuple(member.tokens)].append(member)
    batches: dict[tuple[bool, int], list[list[Transcript]]] = defaultdict(list)
    for (greedy, *_), group in groups.items():
        batches[greedy, len(group)].append(group)
    return list(batches.values())


def score(transcripts: Sequence[Transcript], rewards: RewardSet, state: TrainingState | None = None) -> None:
    """Fill in the rewards of completions."""
    examples = [member.prompt.example for member in transcripts]
    columns = {name: [example.columns[name] for example in examples] for name in examples[0].columns}
    prompts = [example.prompt for example in examples]
    # after a prompt of messages the completion is messages, as in TRL
    completions = [
        member.text if isinstance(p, str) else member.messages for p, member in zip(prompts, transcripts, strict=True)
    ]
    scores = rewards.score(prompts, completions, [member.tokens for member in transcripts], columns, state)
    for member, reward, *parts in zip(transcripts, scores.reward, *scores.parts, strict=True):
        member.reward, member.parts = reward, parts


def training_row(member: Transcript, cfg: TextRunCfg) -> TextRow:
    """What training reads of a completion with its reward."""
    cut, reward = member.stop == "length", member.reward
    if reward is not None and cfg.overlong_buffer:
        length = torch.tensor([member.turn.count(member.turns - 1)])  # of the last turn
        reward -= float(overlong_penalty(length, cfg.sampling.max_new_tokens, cfg.overlong_buffer))
    return TextRow(
        member.prompt.tokens,
        member.tokens,
        member.log_probs,
        reward,
        terminated=not cut,
        group=member.group,
        turn=member.turn,
        support=member.support or None,
        policy_version=member.policy_version or None,
        trained=not (cut and cfg.mask_truncated_completions),
        greedy=member.greedy,
        reward_parts=tuple(part or 0.0 for part in member.parts) if len(member.parts) > 1 else (),
    )


def rewards_of_groups(transcripts: Sequence[Transcript]) -> list[list[float]]:
    """The rewards of each group's scorable members; groups without any are left out."""
    groups: dict[int, list[float]] = defaultdict(list)
    for member in transcripts:
        if member.reward is not None:
            groups[member.group].append(member.reward)
    return list(groups.values())


@torch.no_grad()
def overlong_penalty(
    length: Int[Tensor, " completion"], max_length: int, overlong_buffer: int
) -> Float[Tensor, " completion"]:
    """Share of the penalty, in [0, 1]: 0 up to ``max_length - overlong_buffer``, from there linearly to 1 at ``max_length``.

    Args:
        overlong_buffer: at least 1, at most ``max_length``.

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 13.
    """
    return ((length - (max_length - overlong_buffer)).float() / overlong_buffer).clamp(0.0, 1.0)
