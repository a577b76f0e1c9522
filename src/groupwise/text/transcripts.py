"""Turns of the model and answers of the tool: transcripts, their rewards, and their rows in a rollout."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from groupwise.config.algorithm import AlgorithmCfg
from groupwise.config.policy import SamplingCfg
from groupwise.config.run import TextRunCfg
from groupwise.data.rollout import RolloutBuffer, TensorDict, TensorSpec
from groupwise.errors import DataError
from groupwise.seeding import derive_seed
from groupwise.text.data import EncodedPrompt, Message, PromptEncoder
from groupwise.text.generation import Completion, Generate
from groupwise.text.rewards import RewardSet, TrainingState
from groupwise.text.tools import AnyTool, IsolatedTool, Tool, ask

# Texts as a rollout: tokens are the observations, next tokens the actions


class TextRow(NamedTuple):
    """A prompt and one completion of it.

    The completion is the model's tokens and, over several turns, the tool's answers in between. Sequences after
    ``completion`` have an entry for each of its tokens; entries of the tool's tokens are ignored.
    """

    prompt: Sequence[int]
    completion: Sequence[int]
    log_probs: Sequence[float]
    """Log-probabilities under the distribution that the tokens were drawn from."""
    reward: float | Sequence[float] | None
    """Reward of the completion, or of each of its tokens. None: unscorable, so that the row neither has a loss nor is a baseline."""
    terminated: bool
    """Whether the model ended it; False: it was cut at the length limit."""
    group: int
    """Number of the prompt in this iteration."""
    turn: Sequence[int] | None = None
    """The model's turn that wrote each token, from 0; -1: the tool's. None: one turn wrote all."""
    support: Sequence[Tensor] | None = None
    """The tokens that could be drawn at each step, ``[kept]``; -1 fills up. None: all of them."""
    policy_version: Sequence[int] | None = None
    """Iteration whose policy generated each token, for texts from servers; -1 for the tool's tokens."""
    trained: bool = True
    """False: the row counts in its group, but has no loss."""
    greedy: bool = False
    """Whether the most likely token was taken each time: such a row is the baseline of the others (ReMax)."""
    reward_parts: tuple[float, ...] = ()
    """The unweighted score of each reward function; 0 where it has none."""


def text_rollout(rows: Sequence[TextRow], *, device: torch.device | str = "cpu") -> TensorDict:
    """The rollout ``[N, T+1]`` of the rows, padded on the right; ``loss_mask`` is True where the model wrote the action.

    Slot t holds token t and, as its action, token t+1; a completion's reward is at its last token. ``step`` counts from
    the prompt's first token, so that members' steps correspond. Keys that no row has are left out: ``support`` and
    ``policy_version`` (-1 at tokens of others), ``trained``, ``greedy``, ``reward_parts``.

    Raises:
        DataError: a prompt or completion without tokens, or not one log-probability for each token.
    """
    for number, row in enumerate(rows):
        lengths = len(row.prompt), len(row.completion), len(row.log_probs)
        if 0 in lengths or lengths[1] != lengths[2]:
            raise DataError(
                f"row {number} has {lengths[0]} prompt tokens, {lengths[1]} completion tokens and {lengths[2]} log_probs; fix: at "
                "least one token in each, and a log-probability for each completion token"
            )
    prompt = torch.tensor([len(row.prompt) for row in rows])
    total = prompt + torch.tensor([len(row.completion) for row in rows])
    num_slots = int(total.max())
    place = torch.arange(num_slots)
    valid, last = place < total[:, None] - 1, place == total[:, None] - 2
    tokens = _spread([[*row.prompt, *row.completion] for row in rows], torch.zeros_like(prompt), num_slots, 0)
    turn = _spread([row.turn or [0] * len(row.completion) for row in rows], prompt - 1, num_slots, -1)
    counts = torch.tensor([row.reward is not None and not row.greedy for row in rows])
    ended = torch.tensor([row.terminated for row in rows])
    rewards = [
        row.reward if isinstance(row.reward, Sequence) else [0.0] * (len(row.completion) - 1) + [row.reward or 0.0]
        for row in rows
    ]
    keys = {
        "obs": tokens,
        "action": tokens.roll(-1, dims=1) * valid,
        "reward": _spread(rewards, prompt - 1, num_slots, 0.0),
        "terminated": last & ended[:, None],
        "truncated": last & ~ended[:, None],
        "valid": valid,
        "loss_mask": valid & (place >= prompt[:, None] - 1) & (turn >= 0) & counts[:, None],
        "sample_log_prob": _spread([row.log_probs for row in rows], prompt - 1, num_slots, 0.0),
        "group_id": torch.where(valid, torch.tensor([row.group for row in rows])[:, None], -1),
        "episode_id": torch.where(valid, torch.arange(len(rows))[:, None], -1),
        "step": place * valid,
        "turn_id": turn,
    }
    if rows[0].support:
        kept = pad_sequence([ids for row in rows for ids in row.support or ()], batch_first=True, padding_value=-1)
        keys["support"] = torch.full((len(rows), num_slots, kept.shape[1]), -1, dtype=torch.int32)
        keys["support"][_places([row.support or () for row in rows], prompt - 1)] = kept.int()
    if rows[0].policy_version:
        keys["policy_version"] = _spread([row.policy_version or () for row in rows], prompt - 1, num_slots, -1)
    if not all(row.trained for row in rows):
        keys["trained"] = valid & torch.tensor([row.trained for row in rows])[:, None]
    if any(row.greedy for row in rows):
        keys["greedy"] = valid & torch.tensor([row.greedy and row.reward is not None for row in rows])[:, None]
    if any(row.reward_parts for row in rows):
        keys["reward_parts"] = torch.tensor([row.reward_parts for row in rows])[:, None] * last[..., None]
    return TensorDict(keys, batch_size=(len(rows), num_slots)).to(device)


class TextBuffer(RolloutBuffer):
    """Checks rollouts of texts; their size varies, so nothing is allocated before."""

    row_name = "completion"

    def __init__(self, action_spec: TensorSpec, **settings: Any) -> None:
        super().__init__(0, 0, obs_spec=action_spec, action_spec=action_spec, **settings)

    def start_rollout(self) -> TensorDict:
        """An empty rollout, which the collector replaces."""
        return self._empty

    def add(self, rollout: TensorDict) -> None:
        """Take a collected rollout, of any number of rows, after checking it."""
        self.num_rows = rollout.shape[0]
        super().add(rollout)


def _spread(entries: Sequence[Sequence[Any]], first: Tensor, num_slots: int, empty: Any) -> Tensor:
    """Entries of each row from its slot ``first`` on, ``empty`` elsewhere."""
    fill = torch.tensor(empty)
    out = fill.expand(len(entries), num_slots).clone()
    out[_places(entries, first)] = torch.tensor([entry for values in entries for entry in values], dtype=fill.dtype)
    return out


def _places(entries: Sequence[Sequence[Any]], first: Tensor) -> tuple[Tensor, Tensor]:
    """Row and slot of each entry, where each row's entries begin at its slot ``first``."""
    lengths = torch.tensor([len(values) for values in entries])
    row = torch.arange(len(entries)).repeat_interleave(lengths)
    return row, torch.arange(len(row)) + (first - lengths.cumsum(0) + lengths)[row]


# Transcripts: the model's turns, the tool's answers, and their rewards


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
    """Log-probability of each token; 0 for the tool's."""
    turn: list[int] = field(default_factory=list)
    """The model's turn that wrote each token; -1: the tool's."""
    support: list[Tensor] = field(default_factory=list)
    """The tokens that could be drawn, if not all could."""
    policy_version: list[int] = field(default_factory=list)
    """Iteration whose policy generated each token, for texts from servers; -1 for the tool's tokens."""
    stop: Literal["eos", "stop", "length"] = "length"
    """How the model's last turn ended."""
    turns: int = 0
    """Number of the model's turns."""
    text: str = ""
    """All that the model wrote, with the tool's answers in between as plain text."""
    messages: list[Message] = field(default_factory=list)
    """The text as messages."""
    reward: float | None = None
    """Reward of the transcript; None if it cannot be scored."""
    parts: Sequence[float | None] = ()
    """Score of each reward function."""

    @property
    def written(self) -> int:
        """Tokens that the model wrote."""
        return sum(turn >= 0 for turn in self.turn)

    def add_turn(self, completion: Completion, text: str) -> None:
        """Add a turn of the model."""
        self.tokens += completion.tokens
        self.log_probs += completion.log_probs
        self.turn += [self.turns] * len(completion.tokens)
        self.support += completion.support or []
        self.policy_version += completion.policy_version or []
        self.stop = completion.stop
        self.turns += 1
        self.text += text
        self.messages.append({"role": "assistant", "content": text})

    def add_answer(self, answer: str, text: str, tokens: Sequence[int]) -> None:
        """Add the tool's answer, as plain text, too, and all tokens between two turns of the model."""
        self.tokens += tokens
        self.log_probs += [0.0] * len(tokens)
        self.turn += [-1] * len(tokens)
        if self.support:
            self.support += [torch.tensor([-1], dtype=torch.int32)] * len(tokens)
        if self.policy_version:
            self.policy_version += [-1] * len(tokens)
        self.text += text
        self.messages.append({"role": "tool", "content": answer})


class Dialogue:
    """Continues after a turn of the model: adds the tool's answer, if there is a tool.

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
    sampled = algorithm.groups.size
    size = sampled + algorithm.groups.greedy_members
    return [Transcript(prompt, number, derive_seed(seed, *stream, number, i), greedy=i == sampled) for i in range(size)]


def write(transcripts: Sequence[Transcript], generate: Generate, sampling: SamplingCfg, dialogue: Dialogue) -> None:
    """Generate every transcript to its end; members of a group share the encoding of their prompt."""
    sampling, running = dialogue.stopping(sampling), list(transcripts)
    while running:
        # members with the same text so far are encoded once; such sets of one size are generated in one call
        alike: dict[tuple[bool, int, tuple[int, ...]], list[Transcript]] = defaultdict(list)
        for member in running:
            alike[member.greedy, member.group, tuple(member.tokens)].append(member)
        calls: dict[tuple[bool, int], list[list[Transcript]]] = defaultdict(list)
        for (greedy, *_), members in alike.items():
            calls[greedy, len(members)].append(members)
        for (greedy, _), groups in calls.items():
            texts = [[*members[0].prompt.tokens, *members[0].tokens] for members in groups]
            seeds = [[derive_seed(member.seed, "turn", member.turns) for member in members] for members in groups]
            written = generate(texts, torch.tensor(seeds), sampling, deterministic=greedy)
            for member, completion in zip(chain(*groups), chain(*written), strict=True):
                member.add_turn(completion, dialogue.encoder.decode(completion.tokens))
        running = [member for member in running if dialogue.answer(member, sampling.max_new_tokens)]


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
    """The row of the rollout for a completion with its reward."""
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
