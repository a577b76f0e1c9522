"""Transcripts: the turns of the model and the tool's answers at a prompt, and their rewards."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from groupwise.config.policy import SamplingCfg
from groupwise.seeding import derive_seed
from groupwise.text.data import Completion as CompletionText
from groupwise.text.generation import Generator
from groupwise.text.prompts import EncodedPrompt, PromptEncoder
from groupwise.text.rewards import RewardSet, TrainingState
from groupwise.text.sampling import Completion
from groupwise.text.tools import Tool, ask
from groupwise.text.turns import AnswerEncoder, as_messages


class Reply(NamedTuple):
    """The tool's answer."""

    text: str
    tokens: list[int]
    """All tokens between two turns of the model."""


@dataclass
class Transcript:
    """One completion of a group, in the tokens that were really sampled."""

    prompt: EncodedPrompt
    group: int
    seed: int
    greedy: bool = False
    tokens: list[int] = field(default_factory=list)
    """All tokens after the prompt."""
    log_probs: list[float] = field(default_factory=list)
    """Of each token; 0 where the model did not write it."""
    turn: list[int] = field(default_factory=list)
    """Which of the model's turns wrote the token; -1: none did."""
    support: list[list[int]] = field(default_factory=list)
    stop: Literal["eos", "stop", "length"] = "length"
    """What ended the model's last turn."""
    turns: int = 0
    """How many turns the model has had."""
    answers: list[str] = field(default_factory=list)
    """The tool's answer after each turn but the last."""

    @property
    def written(self) -> int:
        """Tokens that the model wrote."""
        return sum(turn >= 0 for turn in self.turn)

    def last_turn(self) -> list[int]:
        """Tokens of the model's last turn."""
        return self.of_turn(self.turns - 1)

    def of_turn(self, number: int) -> list[int]:
        """Tokens of one of the model's turns, from 0."""
        return [token for token, turn in zip(self.tokens, self.turn, strict=True) if turn == number]

    def take(self, completion: Completion) -> None:
        """Add a turn of the model's."""
        count = len(completion.tokens)
        self._add(completion.tokens, completion.log_probs, [self.turns] * count)
        self.support += completion.support or []
        self.stop = completion.stop
        self.turns += 1

    def answer(self, reply: Reply) -> None:
        """Add the tool's answer."""
        count = len(reply.tokens)
        self._add(reply.tokens, [0.0] * count, [-1] * count)
        if self.support:
            self.support += [[-1] * len(self.support[-1])] * count
        self.answers.append(reply.text)

    def _add(self, tokens: Sequence[int], log_probs: Sequence[float], turn: Sequence[int]) -> None:
        self.tokens += tokens
        self.log_probs += log_probs
        self.turn += turn


class ToolDialogue:
    """Asks the tool after each turn but the last.

    Args:
        max_turns: of the model.
    """

    def __init__(self, tool: Tool, encoder: PromptEncoder, answers: AnswerEncoder, max_turns: int) -> None:
        self._tool = tool
        self._encoder = encoder
        self._answers = answers
        self._max_turns = max_turns

    def reply(self, transcript: Transcript) -> Reply | None:
        """The tool's answer to the completion's last turn.

        Raises:
            ToolError: it failed.
        """
        if transcript.turns >= self._max_turns:
            return None
        turn = transcript.last_turn()
        answer = ask(self._tool, self._encoder.decode(turn))
        if answer is None:
            return None
        end = turn[-1] if transcript.stop == "eos" else None
        return Reply(answer, self._answers.encode(answer, end))


def write(
    transcripts: Sequence[Transcript],
    generator: Generator,
    sampling: SamplingCfg,
    *,
    dialogue: ToolDialogue | None = None,
    context: int | None = None,
) -> None:
    """Generate every transcript to its end; members of a group share the encoding of their prompt.

    Args:
        context: tokens that the model has positions for; a completion that has no room for another turn ends as cut.
    """
    running = list(transcripts)
    while running:
        for deterministic in (False, True):
            part = [transcript for transcript in running if transcript.greedy == deterministic]
            for group in _of_one_size(part):
                _write_turn(group, generator, sampling, deterministic)
        running = [] if dialogue is None else [a for a in running if _goes_on(a, dialogue, sampling, context)]


def _write_turn(
    groups: list[list[Transcript]], generator: Generator, sampling: SamplingCfg, deterministic: bool
) -> None:
    """One turn of groups that are equally large and whose members stand at the same text."""
    texts = [[*members[0].prompt.tokens, *members[0].tokens] for members in groups]
    seeds = [[derive_seed(member.seed, "turn", member.turns) for member in members] for members in groups]
    completions = generator.generate(texts, torch.tensor(seeds), sampling, deterministic)
    for members, written in zip(groups, completions, strict=True):
        for member, completion in zip(members, written, strict=True):
            member.take(completion)


def _of_one_size(transcripts: Sequence[Transcript]) -> list[list[list[Transcript]]]:
    """Completions that stand at the same text together, these groups by how large they are."""
    groups: dict[tuple[int, tuple[int, ...]], list[Transcript]] = {}
    for transcript in transcripts:
        groups.setdefault((transcript.group, tuple(transcript.tokens)), []).append(transcript)
    by_size: dict[int, list[list[Transcript]]] = {}
    for group in groups.values():
        by_size.setdefault(len(group), []).append(group)
    return list(by_size.values())


def _goes_on(transcript: Transcript, dialogue: ToolDialogue, sampling: SamplingCfg, context: int | None) -> bool:
    """Whether the completion was answered and has another turn."""
    reply = None if transcript.stop == "length" else dialogue.reply(transcript)
    if reply is None:
        return False
    length = len(transcript.prompt.tokens) + len(transcript.tokens) + len(reply.tokens) + sampling.max_new_tokens
    if context is not None and length > context:
        transcript.stop = "length"
        return False
    transcript.answer(reply)
    return True


class Scored(NamedTuple):
    """A transcript and its reward."""

    transcript: Transcript
    text: str
    reward: float | None
    """None: unscorable."""
    parts: Sequence[float | None]
    """Score of each reward function."""


def score(
    transcripts: Sequence[Transcript], rewards: RewardSet, encoder: PromptEncoder, state: TrainingState | None = None
) -> list[Scored]:
    """The completions with their texts and rewards.

    Raises:
        RewardError: a reward function failed.
    """
    examples = [transcript.prompt.example for transcript in transcripts]
    names = dict.fromkeys(name for example in examples for name in example.columns)
    columns = {name: [example.columns.get(name) for example in examples] for name in names}
    texts = [text_of(transcript, encoder) for transcript in transcripts]
    completions = [_completion(transcript, text, encoder) for transcript, text in zip(transcripts, texts, strict=True)]
    ids = [transcript.tokens for transcript in transcripts]
    scores = rewards.score([example.prompt for example in examples], completions, ids, columns, state)
    return [
        Scored(transcript, text, reward, parts)
        for transcript, text, reward, *parts in zip(transcripts, texts, scores.reward, *scores.parts, strict=True)
    ]


def text_of(transcript: Transcript, encoder: PromptEncoder) -> str:
    """All that was written, with the answers in between as they stand in a text."""
    if not transcript.answers:
        return encoder.decode(transcript.tokens)
    answers = [encoder.inline(answer) for answer in transcript.answers]
    return "".join(
        part for pair in zip(_texts_of_turns(transcript, encoder), [*answers, ""], strict=True) for part in pair
    )


def _completion(transcript: Transcript, text: str, encoder: PromptEncoder) -> CompletionText:
    if isinstance(transcript.prompt.example.prompt, str) or not transcript.answers:
        return text
    return as_messages(_texts_of_turns(transcript, encoder), transcript.answers)


def _texts_of_turns(transcript: Transcript, encoder: PromptEncoder) -> list[str]:
    return [encoder.decode(transcript.of_turn(number)) for number in range(transcript.turns)]
