"""Transcripts: the turns of the model and the tool's answers at a prompt, and their rewards."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Literal

import torch
from torch import Tensor

from groupwise.config.algorithm import AlgorithmCfg, GRPOCfg
from groupwise.config.policy import SamplingCfg
from groupwise.config.run import TextRunCfg
from groupwise.functional.shaping import overlong_penalty
from groupwise.seeding import derive_seed
from groupwise.text.data import Completion as CompletionText
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
    stop: Literal["eos", "stop", "length"] = "length"
    """How the model's last turn ended."""
    turns: int = 0
    """Number of the model's turns."""
    answers: list[str] = field(default_factory=list)
    """The tool's answer after each turn but the last."""
    text: str = ""
    """All that the model wrote, with the tool's answers in between as plain text; once it is scored."""
    reward: float | None = None
    """None: unscorable."""
    parts: Sequence[float | None] = ()
    """Score of each reward function."""

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

    def add_turn(self, completion: Completion) -> None:
        """Add a turn of the model."""
        self._add(completion.tokens, completion.log_probs, self.turns)
        self.support += completion.support or []
        self.stop = completion.stop
        self.turns += 1

    def add_answer(self, answer: str, tokens: Sequence[int]) -> None:
        """Add the tool's answer, and all tokens between two turns of the model."""
        self._add(tokens, [0.0] * len(tokens), -1)
        if self.support:
            self.support += [torch.tensor([-1], dtype=torch.int32)] * len(tokens)
        self.answers.append(answer)

    def _add(self, tokens: Sequence[int], log_probs: Sequence[float], turn: int) -> None:
        self.tokens += tokens
        self.log_probs += log_probs
        self.turn += [turn] * len(tokens)


class ToolDialogue:
    """Asks the tool after each turn but the last.

    Args:
        context: tokens that the model has positions for. None: no limit.
    """

    def __init__(self, tool: AnyTool, encoder: PromptEncoder, context: int | None = None) -> None:
        self._tool = tool
        self._encoder = encoder
        self._context = context
        encoder.encode_answer("84")  # a template that cannot is refused before training

    def stopping(self, sampling: SamplingCfg) -> SamplingCfg:
        """The sampling with turns that end where a call ends."""
        ends = self._tool.stop if isinstance(self._tool, Tool) else ()
        return sampling.model_copy(update={"stop": tuple(dict.fromkeys((*sampling.stop, *ends)))})

    def answer(self, transcript: Transcript, max_new_tokens: int) -> bool:
        """Add the tool's answer to the last turn; False if the completion is over.

        A completion that has no room for an answer and another turn counts as cut.
        """
        if transcript.stop == "length" or transcript.turns >= self._encoder.cfg.max_turns:
            return False
        turn = transcript.last_turn()
        answer = ask(self._tool, self._encoder.decode(turn))
        if answer is None:
            return False
        tokens = self._encoder.encode_answer(answer, turn[-1] if transcript.stop == "eos" else None)
        length = len(transcript.prompt.tokens) + len(transcript.tokens) + len(tokens) + max_new_tokens
        if self._context is not None and length > self._context:
            transcript.stop = "length"
            return False
        transcript.add_answer(answer, tokens)
        return True

    def close(self) -> None:
        """End the tool's process, if it has one."""
        if isinstance(self._tool, IsolatedTool):
            self._tool.close()


def dialogue_of(tool: AnyTool | None, encoder: PromptEncoder, context: int | None) -> ToolDialogue | None:
    """The dialogue with the tool; None without one."""
    return None if tool is None else ToolDialogue(tool, encoder, context)


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


def write(
    transcripts: Sequence[Transcript],
    generate: Generate,
    sampling: SamplingCfg,
    dialogue: ToolDialogue | None = None,
) -> None:
    """Generate every transcript to its end; members of a group share the encoding of their prompt."""
    sampling = sampling if dialogue is None else dialogue.stopping(sampling)
    running = list(transcripts)
    while running:
        for groups in _batches(running):
            texts = [[*members[0].prompt.tokens, *members[0].tokens] for members in groups]
            seeds = [[derive_seed(member.seed, "turn", member.turns) for member in members] for members in groups]
            written = generate(texts, torch.tensor(seeds), sampling, deterministic=groups[0][0].greedy)
            for member, completion in zip(chain(*groups), chain(*written), strict=True):
                member.add_turn(completion)
        running = [] if dialogue is None else [t for t in running if dialogue.answer(t, sampling.max_new_tokens)]


def _batches(transcripts: Sequence[Transcript]) -> list[list[list[Transcript]]]:
    """Transcripts with the same text so far in one group; groups that can be generated in one call in one batch."""
    groups: dict[tuple[bool, int, tuple[int, ...]], list[Transcript]] = {}
    for transcript in transcripts:
        key = transcript.greedy, transcript.group, tuple(transcript.tokens)
        groups.setdefault(key, []).append(transcript)
    batches: dict[tuple[bool, int], list[list[Transcript]]] = {}
    for (greedy, *_), group in groups.items():
        batches.setdefault((greedy, len(group)), []).append(group)
    return list(batches.values())


def score(
    transcripts: Sequence[Transcript], rewards: RewardSet, encoder: PromptEncoder, state: TrainingState | None = None
) -> None:
    """Fill in the texts and rewards of completions."""
    examples = [transcript.prompt.example for transcript in transcripts]
    columns = {name: [example.columns[name] for example in examples] for name in examples[0].columns}
    completions: list[CompletionText] = []
    for transcript in transcripts:
        transcript.text = text_of(transcript, encoder)
        messages = [{"role": role, "content": content} for role, content in _turns(transcript, encoder)]
        # after a prompt of messages the completion is messages, as in TRL
        completions.append(transcript.text if isinstance(transcript.prompt.example.prompt, str) else messages)
    ids = [transcript.tokens for transcript in transcripts]
    scores = rewards.score([example.prompt for example in examples], completions, ids, columns, state)
    for transcript, reward, *parts in zip(transcripts, scores.reward, *scores.parts, strict=True):
        transcript.reward, transcript.parts = reward, parts


def training_row(member: Transcript, cfg: TextRunCfg) -> TextRow:
    """What training reads of a completion with its reward."""
    cut, reward = member.stop == "length", member.reward
    if reward is not None and cfg.overlong_buffer:
        length = torch.tensor([len(member.last_turn())])
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
        trained=not (cut and cfg.mask_truncated_completions),
        greedy=member.greedy,
        reward_parts=tuple(part or 0.0 for part in member.parts) if len(member.parts) > 1 else (),
    )


def rewards_of_groups(transcripts: Sequence[Transcript]) -> list[list[float]]:
    """The rewards of each group's scorable members; groups without any are left out."""
    groups: dict[int, list[float]] = {}
    for transcript in transcripts:
        if transcript.reward is not None:
            groups.setdefault(transcript.group, []).append(transcript.reward)
    return list(groups.values())


def text_of(transcript: Transcript, encoder: PromptEncoder) -> str:
    """All that the model wrote, with the tool's answers in between as plain text."""
    turns = _turns(transcript, encoder)
    return "".join(encoder.inline(content) if role == "tool" else content for role, content in turns)


def _turns(transcript: Transcript, encoder: PromptEncoder) -> list[tuple[str, str]]:
    """Role and content of the model's turns and of the tool's answers between them."""
    written = [("assistant", encoder.decode(transcript.of_turn(number))) for number in range(transcript.turns)]
    answers = [("tool", answer) for answer in transcript.answers]
    return [turn for pair in zip_longest(written, answers) for turn in pair if turn is not None]
