"""Rollouts of texts: groups of completions of the same prompt, in turns with an environment, scored by reward functions."""

import functools
import logging
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from statistics import fmean, pstdev
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from groupwise.collectors.vector import Collector, Conversation, Episode
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.config.policy import SamplingCfg
from groupwise.config.run import TextRunCfg
from groupwise.data.rollout import RolloutBuffer, TensorDict
from groupwise.engines import Engine
from groupwise.errors import ConfigError, DataError, EnvError, RewardError
from groupwise.seeding import derive_seed
from groupwise.text.calls import Call, read_calls
from groupwise.text.envs import (
    ApartError,
    Ending,
    TextEnvs,
    TextEpisode,
    TextStartReport,
    check_text_starts,
    make_for,
    play_samples,
)
from groupwise.text.generation import Completion, Generate, Past, complete, text_within
from groupwise.text.policy import TOKEN, CausalLM
from groupwise.text.rewards import Message, Prompt, RewardSet, TrainingState
from groupwise.text.task import LONGEST_TOKEN, EncodedPrompt, Example, PromptEncoder, Start, TextTask
from groupwise.text.tool_env import env_of

log = logging.getLogger(__name__)

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
    """Reward of the completion, or of each of its tokens. None: it could not be scored, so it has no loss and is not compared."""
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
    anchor: Sequence[str] | None = None
    """The state that the turn of each token answers; empty for tokens of others."""


def text_rollout(rows: Sequence[TextRow]) -> TensorDict:
    """The rollout ``[N, T+1]`` of the rows, padded on the right, on the CPU: what is computed of it but scores is little.

    ``loss_mask`` is True where the model wrote the action, in rows that are scored and not greedy.

    Slot t holds token t and, as its action, token t+1; a completion's reward is at its last token. ``step`` counts from
    the prompt's first token, so that members' steps correspond. Keys that no row has are left out: ``support`` and
    ``policy_version`` (-1 at tokens of others), ``trained``, ``greedy``, ``reward_parts``, ``anchor`` (a number for each state).

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
    counts = torch.tensor([row.reward is not None and not row.greedy for row in rows])[:, None]
    ended = torch.tensor([row.terminated for row in rows])[:, None]
    rewards = [
        row.reward if isinstance(row.reward, Sequence) else [0.0] * (len(row.completion) - 1) + [row.reward or 0.0]
        for row in rows
    ]
    keys = {
        "obs": tokens,
        "action": tokens.roll(-1, dims=1) * valid,
        "reward": _spread(rewards, prompt - 1, num_slots, 0.0),
        "terminated": last & ended,
        "truncated": last & ~ended,
        "valid": valid,
        "loss_mask": valid & (place >= prompt[:, None] - 1) & (turn >= 0) & counts,
        "sample_log_prob": _spread([row.log_probs for row in rows], prompt - 1, num_slots, 0.0),
        "group_id": torch.where(valid, torch.tensor([row.group for row in rows])[:, None], -1),
        "episode_id": torch.where(valid, torch.arange(len(rows))[:, None], -1),
        "step": place * valid,
        "turn_id": turn,
    }
    if any(row[7:] != _USUAL for row in rows):
        keys |= _rare_keys(rows, prompt, valid, last)
    return TensorDict(keys, batch_size=(len(rows), num_slots))


_USUAL = tuple(TextRow._field_defaults.values())[1:]
"""The fields after ``turn`` of most rows."""


def _rare_keys(rows: Sequence[TextRow], prompt: Tensor, valid: Tensor, last: Tensor) -> dict[str, Tensor]:
    """Keys of the rollout that are left out if no row has them."""
    keys, num_slots = {}, valid.shape[1]
    if any(row.support for row in rows):
        kept = pad_sequence([ids for row in rows for ids in row.support or ()], batch_first=True, padding_value=-1)
        keys["support"] = torch.full((len(rows), num_slots, kept.shape[1]), -1, dtype=torch.int32)
        keys["support"][_places([row.support or () for row in rows], prompt - 1)] = kept.int()
    if any(row.policy_version for row in rows):
        keys["policy_version"] = _spread([row.policy_version or () for row in rows], prompt - 1, num_slots, -1)
    if not all(row.trained for row in rows):
        keys["trained"] = valid & torch.tensor([row.trained for row in rows])[:, None]
    if any(row.greedy for row in rows):
        keys["greedy"] = valid & torch.tensor([row.greedy and row.reward is not None for row in rows])[:, None]
    if any(row.anchor for row in rows):
        numbers = {"": -1}
        anchor = [[numbers.setdefault(state, len(numbers) - 1) for state in row.anchor or ()] for row in rows]
        keys["anchor"] = _spread(anchor, prompt - 1, num_slots, -1)
    if any(row.reward_parts for row in rows):
        none = (0.0,) * max(len(row.reward_parts) for row in rows)
        parts = torch.tensor([row.reward_parts or none for row in rows], dtype=torch.float32)
        keys["reward_parts"] = parts[:, None] * last[..., None]
    return keys


class TextBuffer(RolloutBuffer):
    """Checks rollouts of texts, whose size varies: it holds none before one is added."""

    row_name = "completion"

    def __init__(self, **settings: Any) -> None:
        super().__init__(0, 0, obs_spec=TOKEN, action_spec=TOKEN, **settings)

    def start_rollout(self) -> TensorDict:
        """An empty rollout, which the collector replaces."""
        return self._empty


def _spread(entries: Sequence[Sequence[Any]], first: Tensor, num_slots: int, empty: Any) -> Tensor:
    """Entries of each row from its slot ``first`` on, ``empty`` elsewhere."""
    out = torch.full((len(entries), num_slots), empty, dtype=torch.float32 if isinstance(empty, float) else torch.int64)
    for row, start, values in zip(out, first.tolist(), entries, strict=True):
        # from the list itself takes torch four times as long
        row[start : start + len(values)] = torch.from_numpy(np.asarray(values))
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
    """All tokens after the prompt. Each has an entry in the lists below, which are those of ``TextRow``."""
    log_probs: list[float] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    support: list[Tensor] = field(default_factory=list)
    policy_version: list[int] = field(default_factory=list)
    stop: Literal["eos", "stop", "length"] = "length"
    """How the model's last turn ended."""
    turns: int = 0
    text: str = ""
    """All that the model wrote, with the tool's answers in between as plain text."""
    messages: list[Message] = field(default_factory=list)
    """The text as messages."""
    reward: float | None = None
    """None if it cannot be scored."""
    parts: Sequence[float | None] = ()
    """Score of each reward function."""
    episode: TextEpisode | None = None
    """Episode of a text environment, which answers the model's turns and rewards them."""
    ends: tuple[str, ...] = ()
    """Texts that end a turn in that environment, besides those of the sampling."""

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


class Dialogue:
    """Continues after a turn of the model: adds what the environment answers, if there is one.

    Args:
        context: tokens of the longest text that the model reads.
    """

    def __init__(self, encoder: PromptEncoder, context: int | None = None, envs: TextEnvs | None = None) -> None:
        self.encoder, self.envs = encoder, envs
        self.keeps_cache = envs is not None and encoder.cfg.keep_cache
        self._context = context

    def begin(self, members: Sequence[Transcript], max_new_tokens: int) -> None:
        """Begin the episodes of groups, whose first observations are their prompts."""
        assert self.envs is not None
        longest = min(self.encoder.cfg.max_prompt_tokens or math.inf, (self._context or math.inf) - max_new_tokens)
        groups: dict[int, list[Transcript]] = defaultdict(list)
        for member in members:
            if member.episode is None:
                groups[member.group].append(member)
        for group in groups.values():
            example, encoded = group[0].prompt.example, dict[str, EncodedPrompt]()
            assert example.start is not None
            try:
                episodes, prompts = self.envs.open(example.start, len(group))
            except ApartError as error:
                alike = "although they were alike before training; fix: draw all from the seed of reset()"
                raise EnvError(f"{error}, {alike}") from error
            for member, member.episode, prompt in zip(group, episodes, prompts, strict=True):
                member.ends = member.episode.ends
                tools = member.episode.tools
                if (key := repr((prompt, tools))) not in encoded:
                    begun = example._replace(prompt=prompt)
                    encoded[key] = EncodedPrompt(begun, tuple(self.encoder.encode(begun, tools)))
                member.prompt = encoded[key]
                if (length := len(member.prompt.tokens)) > longest:
                    also = ", with the tools" if tools else ""
                    raise EnvError(
                        f"the first observation of an episode has {length} tokens{also}, and {longest} have room: {str(prompt)[:80]!r}; "
                        "fix: shorter ones, a larger max_prompt_tokens or a smaller max_new_tokens"
                    )

    def answer(self, running: Sequence[Transcript], max_new_tokens: int) -> list[Transcript]:
        """Add the answers of the environments to the last turns; the completions that go on.

        A completion that has no room for an answer and another turn counts as cut. A turn that was cut has no answer; the last one
        that is allowed is played, although the model does not read what it leads to.
        """
        assert self.envs is not None
        answers = self.envs.each(self._play, running)
        return [one for one, answer in zip(running, answers, strict=True) if self._add(one, answer, max_new_tokens)]

    def _add(self, transcript: Transcript, answer: Sequence[Message], max_new_tokens: int) -> bool:
        """Add the messages that the model reads next; False if there are none, or no room."""
        episode, cfg, tokens = transcript.episode, self.encoder.cfg, list[int]()
        if answer and cfg.max_observation_tokens is not None:
            shown = [{**m, "content": self.encoder.shorten(m["content"], cfg.max_observation_tokens)} for m in answer]
            if cfg.on_long_observation == "end" and shown != [*answer]:
                transcript.stop, shown = "length", []
            answer = shown
        if answer:
            context = math.inf if self._context is None else self._context - len(transcript.prompt.tokens)
            room = min(context, cfg.max_episode_tokens or math.inf) - len(transcript.tokens) - max_new_tokens
            fits = sum(len(m["content"]) for m in answer) <= LONGEST_TOKEN * room  # encoding more may take minutes
            if fits:
                tokens = self.encoder.encode_answer(answer, transcript.tokens[-1])
            if not fits or len(tokens) > room:
                transcript.stop, answer = "length", ()
        if not answer:
            if episode is not None and self.envs is not None:
                self.envs.finish(episode, "max_tokens")
            return False
        transcript.tokens += tokens
        transcript.log_probs += [0.0] * len(tokens)
        transcript.turn += [-1] * len(tokens)
        if transcript.support:
            transcript.support += [torch.tensor([-1], dtype=torch.int32)] * len(tokens)
        if transcript.policy_version:
            transcript.policy_version += [-1] * len(tokens)
        transcript.text += "".join(map(self.encoder.as_text, answer))
        transcript.messages += answer
        return True

    def _play(self, transcript: Transcript) -> Sequence[Message]:
        """The environment's answer to a turn; none if the episode is over."""
        episode, cfg = transcript.episode, self.encoder.cfg
        assert episode is not None
        assert self.envs is not None
        if transcript.stop == "length":
            return ()
        if cfg.episode_timeout is not None and time.monotonic() - episode.began > cfg.episode_timeout:
            self.envs.finish(episode, "timeout")
            return ()
        said = transcript.messages[-1]
        text = said["content"]
        if episode.tools:
            last = transcript.tokens[-transcript.turn.count(transcript.turns - 1) :]
            text = self.encoder.read_turn(last, text, episode.tools)
            said["content"], calls = read_calls(text)
            called = [call.message() for call in calls if isinstance(call, Call)]
            said |= {"tool_calls": called} if called else {}
        answer = self.envs.play(episode, text)
        if transcript.turns >= cfg.max_turns:
            self.envs.finish(episode, "max_turns")
        return answer if episode.ending is None else ()

    def release(self, transcripts: Sequence[Transcript]) -> None:
        """Take back the environments of episodes that are scored."""
        for transcript in transcripts:
            if transcript.episode is not None and self.envs is not None:
                self.envs.release(transcript.episode)

    def close(self) -> None:
        """Close the environments, if there are any."""
        if self.envs is not None:
            self.envs.close()


def open_group(
    prompt: EncodedPrompt, number: int, algorithm: AlgorithmCfg, seed: int, *stream: int | str
) -> list[Transcript]:
    """The members of a group, not written yet; the seed of each follows from ``seed``, ``stream``, group and member."""
    sampled, size = algorithm.groups.size, algorithm.groups.size + algorithm.groups.greedy_members
    return [Transcript(prompt, number, derive_seed(seed, *stream, number, i), greedy=i == sampled) for i in range(size)]


CHECKS = 5
"""How often the start of environments that may fail now and then is checked."""
Pasts = dict[int, Past | None]
"""Keys and values of the texts so far, by ``id`` of the transcript."""


def write(transcripts: Sequence[Transcript], generate: Generate, sampling: SamplingCfg, dialogue: Dialogue) -> None:
    """Generate every transcript to its end, all turns of the same number together."""
    running, pasts = list(transcripts), Pasts()
    if dialogue.envs is not None:
        dialogue.begin(transcripts, sampling.max_new_tokens)
    while running:
        write_turn(running, generate, sampling, dialogue, pasts)
        if dialogue.envs is None:
            return
        running = dialogue.answer(running, sampling.max_new_tokens)
        pasts = {id(member): pasts[id(member)] for member in running}


def write_turn(
    running: Sequence[Transcript], generate: Generate, sampling: SamplingCfg, dialogue: Dialogue, pasts: Pasts
) -> None:
    """Generate the next turn of each transcript.

    Members with the same text so far are encoded once; such sets of one size, whose turns end alike, are generated in one call.
    """
    alike, calls = defaultdict[Any, list[Transcript]](list), defaultdict[Any, list[list[Transcript]]](list)
    for member in running:
        alike[member.greedy, member.group, (*member.prompt.tokens, *member.tokens)].append(member)
    for members in alike.values():
        calls[members[0].greedy, len(members), members[0].ends].append(members)
    for (greedy, _, ends), groups in calls.items():
        how = sampling.model_copy(update={"stop": (*sampling.stop, *ends)}) if ends else sampling
        texts = [[*members[0].prompt.tokens, *members[0].tokens] for members in groups]
        seeds = [[derive_seed(member.seed, "turn", member.turns) for member in members] for members in groups]
        known = [pasts.get(id(members[0])) for members in groups] if dialogue.keeps_cache else None
        written = generate(texts, torch.tensor(seeds), how, deterministic=greedy, pasts=known)
        for member, completion in zip(chain(*groups), chain(*written), strict=True):
            plain = dialogue.encoder.conversational or not member.turns
            decode = dialogue.encoder.tokenizer.decode if plain else partial(text_within, dialogue.encoder.tokenizer)
            member.add_turn(completion, decode(completion.tokens, skip_special_tokens=True))
            pasts[id(member)] = completion.past


def verified_envs(
    cfg: TextRunCfg, task: TextTask, encoder: PromptEncoder, policy: CausalLM, examples: Sequence[Example]
) -> TextEnvs | None:
    """The environment's instances, after the check that members of a group share a start; None if there is no environment.

    The check plays turns that the environment samples, else turns of the policy. An ``EnvError`` if members differ.
    """
    if (make := env_of(task)) is None:
        return None
    limits: dict[str, Any] = {"threads": cfg.task.env_threads, "seconds": cfg.task.env_timeout}
    limits["on_error"] = cfg.algorithm.groups.collection.on_env_error
    if cfg.task.env is None:  # tools begin nothing: the prompt is the start
        make_for(make, Start(0)).close()  # what is no tool is refused at once
        encoder.encode_answer([{"role": "tool", "content": "84"}])  # and a template that has no place for an answer
        return TextEnvs(make, "seed", (), TextStartReport("seed", (), 0, start_varies=True), **limits)
    dialogue, sampling = Dialogue(encoder, context=policy.context_length, envs=TextEnvs(make, "none")), cfg.sampling

    def play(episode: TextEpisode, start: Start, prompt: Prompt) -> list[str]:
        if episode.env is not None and episode.env.samples_turns:
            return play_samples(episode, start, prompt, max_turns=cfg.task.max_turns)
        example = Example(prompt, {}, start)
        tokens = tuple(encoder.encode(example, episode.tools))
        member = Transcript(EncodedPrompt(example, tokens), 0, start.seed, episode=episode, ends=episode.ends)
        write([member], partial(complete, policy), sampling, dialogue)
        return episode.turns

    starts = [example.start for example in examples if example.start is not None]
    tries = 1 if limits["on_error"] == "raise" else CHECKS
    report = check_text_starts(make, cfg.task.start_mode, starts, play, cfg.task.env_timeout, tries)
    if report.mode != "none" and not report.turns:
        log.warning(
            "the check of shared starts compared no turn, as the policy ended none within sampling.max_new_tokens=%d, so members may "
            "part unnoticed; fix: sample_action(rng) of the environment, a larger max_new_tokens, or sampling.stop",
            sampling.max_new_tokens,
        )
    if report.kept and cfg.task.env_timeout is not None:
        raise ConfigError(
            f"the environment draws from the process's {' and '.join(report.kept)}, so a call that takes too long cannot be left to "
            "itself; fix: a generator of its own, as np.random.default_rng(seed), or env_timeout=None"
        )
    return TextEnvs(make, report.mode, report.kept, report, **limits)


def score(transcripts: Sequence[Transcript], rewards: RewardSet, state: TrainingState | None = None) -> None:
    """Fill in the rewards of completions. Episodes that an error ended have none, and no function gets them."""
    if not (transcripts := [one for one in transcripts if one.episode is None or not one.episode.broken]):
        return
    examples = [member.prompt.example for member in transcripts]
    columns = {name: [example.columns[name] for example in examples] for name in examples[0].columns}
    columns |= columns_of_episodes(transcripts) if transcripts[0].episode is not None else {}
    # after a prompt of messages the completion is messages, as in TRL
    completions = [m.text if isinstance(m.prompt.example.prompt, str) else m.messages for m in transcripts]
    scores = rewards.score([e.prompt for e in examples], completions, [m.tokens for m in transcripts], columns, state)
    for member, reward, *parts in zip(transcripts, scores.reward, *scores.parts, strict=True):
        member.reward, member.parts = reward, parts


def columns_of_episodes(transcripts: Sequence[Transcript]) -> dict[str, list[Any]]:
    """Columns of episodes that reward functions get besides the rows."""
    episodes = [member.episode for member in transcripts if member.episode is not None]
    environments = [episode.env and episode.env.unwrapped for episode in episodes]
    return {"episode_return": [episode.total for episode in episodes], "environments": environments}


def training_row(member: Transcript, cfg: TextRunCfg) -> TextRow:
    """The row of the rollout for a completion with its reward."""
    cut, reward = member.stop == "length", member.reward
    if reward is not None and cfg.overlong_buffer:
        last_turn = torch.tensor([member.turn.count(member.turns - 1)])
        reward -= float(overlong_penalty(last_turn, cfg.sampling.max_new_tokens, cfg.overlong_buffer))
    parts = tuple(part or 0.0 for part in member.parts) if len(member.parts) > 1 else ()
    row = TextRow(
        member.prompt.tokens, member.tokens, member.log_probs, reward, terminated=not cut, group=member.group, turn=member.turn,
        support=member.support or None, policy_version=member.policy_version or None, greedy=member.greedy, reward_parts=parts,
        trained=not (cut and cfg.mask_truncated_completions),
    )  # fmt: skip
    return row if member.episode is None else as_episode(row, member.episode)


def as_episode(row: TextRow, episode: TextEpisode) -> TextRow:
    """The row with each turn's reward at its last token, what else it earned at the last one, the environment's end, and states."""
    anchor = ["" if turn < 0 or episode.broken else episode.anchors[turn] for turn in row.turn or ()]
    row = row._replace(terminated=episode.ending in ("terminated", "no_call"), anchor=anchor)
    if row.reward is None or row.turn is None:
        return row
    assert isinstance(row.reward, float)
    rewards = [0.0] * len(row.completion)
    for turn, reward in enumerate(episode.rewards):
        rewards[len(rewards) - 1 - row.turn[::-1].index(turn)] = reward
    rewards[-1] += row.reward - sum(episode.rewards)
    return row._replace(reward=rewards)


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


# Collection of groups

Item = TypeVar("Item")
MAX_UNSCORED = 3
"""Iterations in a row without any scorable completion, after which training stops."""
_VALUE_ROWS = 16


@functools.lru_cache(maxsize=2)
def shuffled(size: int, seed: int, epoch: int) -> list[int]:
    """The order in which an epoch takes the examples."""
    order = list(range(size))
    random.Random(derive_seed(seed, "prompts", epoch)).shuffle(order)
    return order


def in_order(items: Sequence[Item], number: int, seed: int) -> Item:
    """Item ``number`` of training with this seed: each epoch is a new shuffle."""
    epoch, place = divmod(number, len(items))
    return items[shuffled(len(items), derive_seed(seed, "data"), epoch)[place]]


class DataCollector(Collector):
    """Takes what it collects from data; each rank takes items of its own."""

    def __init__(self, policy: CausalLM, data_size: int, cfg: TextRunCfg, rank: int, world_size: int) -> None:
        super().__init__()
        self.policy: CausalLM = policy
        self.data_size, self.rank, self.world_size = data_size, rank, world_size
        self._cfg = cfg

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, over all ranks, and the number of items in them."""
        return super().state_dict() | {"position": self.position * self.world_size, "data_size": self.data_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved ``state_dict``; other numbers of ranks may repeat the last items."""
        super().load_state_dict(state)
        self.position = state["position"] // self.world_size
        if (before := state.get("data_size", self.data_size)) != self.data_size:
            log.warning(
                "the data now have %d usable rows, and had %d when the run was saved: the next prompts differ from those of an "
                "uninterrupted run", self.data_size, before,
            )  # fmt: skip


class TextCollector(DataCollector):
    """Generates and scores ``num_prompts`` groups per iteration.

    Prompts and completions depend on the seed and the position in the data alone.
    """

    repeatable: ClassVar = True

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
        super().__init__(policy, len(prompts), cfg, rank, world_size)
        self.members: list[Transcript] = []
        """Completions of the last rollout, those of filtered groups included."""
        self.generate, self.prompts, self.rewards = generate, prompts, rewards
        self._dialogue = dialogue
        self._unscored = 0

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """The rollout of new groups: a row for each completion. A ``RewardError`` if nothing could be scored, several times in a row."""
        kept, filtered = list[list[Transcript]](), list[list[Transcript]]()
        num_prompts, dynamic = self._cfg.num_prompts, self._cfg.algorithm.groups.collection.dynamic_sampling
        budget, taken, wanted = int(num_prompts * (1 + (dynamic or 0))), 0, num_prompts
        state = TrainingState(self.iteration, epoch=self.position * self.world_size / self.data_size)
        while wanted:
            groups = self._written(wanted, first=taken)
            score([*chain(*groups)], self.rewards, state)
            if self._dialogue.envs is not None:
                self._dialogue.release([*chain(*groups)])
            for group in groups:
                (filtered if dynamic is not None and has_no_variance(group) else kept).append(group)
            taken += wanted
            wanted = min(num_prompts - len(kept), budget - taken)
        self.members = [*chain(*kept, *filtered)]
        sampled = [(one, one.reward, one.prompt.example.columns) for one in self.members if not one.greedy]
        self.finished = [
            Episode(float(r), one.written, one.stop != "length", one.episode.success if one.episode else None, str(row.get("environment", "")))
            for one, r, row in sampled if r is not None
        ]  # fmt: skip
        self._unscored = 0 if self.finished else self._unscored + 1
        if self._unscored == MAX_UNSCORED:
            why = self._why_unscored([one for one, *_ in sampled])
            raise RewardError(f"no completion of {MAX_UNSCORED} iterations in a row could be scored: {why}")
        self.last_steps = sum(member.written for member in self.members)
        self._metrics = text_metrics(self.members, self.rewards.names, self._cfg.task.success_threshold)
        if self.iteration == 0:
            self._warn_of_lost_completions()
        self._metrics |= {f"reward/{name}": value for name, value in self.rewards.take_logged().items()}
        epoch = (self.position + taken) * self.world_size / self.data_size
        self._metrics |= {"rollout/filtered_groups": float(len(filtered)), "rollout/epoch": epoch}
        rows = [training_row(member, self._cfg) for member in chain(*kept)]
        rows += [training_row(member, self._cfg)._replace(reward=None) for member in chain(*filtered)]
        rollout = text_rollout(rows) if self.policy.actor_only else self._with_values(text_rollout(rows))
        # only now: a rollout that fails is collected again, from the same prompts
        self.position, self.iteration = self.position + taken, self.iteration + 1
        return rollout

    def _why_unscored(self, members: Sequence[Transcript]) -> str:
        """The likely cause of completions without a reward, and how to mend it."""
        failed = sum(member.episode is not None and member.episode.broken for member in members)
        if 2 * failed > len(members):
            return f"{failed} episodes failed; fix: the environment or the tools, as their errors say, or a longer task.env_timeout"
        names = ", ".join(self.rewards.names)
        return f"every reward was None, not finite or failed; fix: the rewards {names}, or the columns that they read"

    def _warn_of_lost_completions(self) -> None:
        """Warn after a first rollout whose completions mostly have no reward, or whose turns were all cut."""
        sampled, most = [member for member in self.members if not member.greedy], self._cfg.sampling.max_new_tokens
        unscored = [member for member in sampled if member.reward is None]
        if 2 * len(unscored) > len(sampled):
            log.warning(
                "%d of %d completions have no reward and are not trained on: %s",
                len(unscored),
                len(sampled),
                self._why_unscored(unscored),
            )
        if all(
            member.episode is not None and (member.turns, member.stop, member.written) == (1, "length", most)
            for member in sampled
        ):
            log.warning(
                "every first turn was cut at sampling.max_new_tokens=%d, so no tool or environment has read one; fix: a larger "
                "max_new_tokens, or sampling.stop, which ends a turn",
                most,
            )

    def _with_values(self, rollout: TensorDict) -> TensorDict:
        """The rollout with the critic's values; 0 after a row, also one that was cut: its reward is of all that it wrote."""
        rollout["value"] = value = torch.cat([self.policy.values(part) for part in rollout.split(_VALUE_ROWS)])
        after = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
        rollout["next_value"] = after.masked_fill(rollout["terminated"] | rollout["truncated"], 0)
        return rollout

    def recent_episodes(self) -> Sequence[Episode]:
        """The completions of the last rollout."""
        return self.finished

    def conversation(self, row: int) -> Conversation:
        """Texts of a row of the last rollout."""
        return conversation_of(self.members[row])

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Each token as text, with the space before a word."""
        tokenizer = self.policy.tokenizer
        pieces = [piece or "" for piece in tokenizer.convert_ids_to_tokens(tokens)]  # a model may have more rows
        texts = [tokenizer.decode([token]) for token in tokens]
        # SentencePiece marks the space before a word, and decoding a word alone drops it
        return [f" {text}" if piece.startswith("\u2581") else text for piece, text in zip(pieces, texts, strict=True)]

    def close(self) -> None:
        """End the processes of the reward functions, and close the environments."""
        self.rewards.close()
        self._dialogue.close()

    def _written(self, count: int, first: int) -> list[list[Transcript]]:
        """Groups of the next prompts, generated; ``first`` groups of this rollout precede them."""
        groups = self._open(count, first)
        write([*chain(*groups)], self.generate, self._cfg.sampling, self._dialogue)
        return groups

    def _open(self, count: int, first: int = 0, ahead: int = 0) -> list[list[Transcript]]:
        """Groups of the next prompts, not generated yet; ``ahead`` rollouts are between this one and theirs."""
        stream, groups = ("completion", self.rank, self.iteration + ahead), list[list[Transcript]]()
        for number in range(first, first + count):
            place = (self.position + ahead * self._cfg.num_prompts + number) * self.world_size + self.rank
            prompt = in_order(self.prompts, place, self._cfg.seed)
            groups.append(open_group(prompt, number, self._cfg.algorithm, self._cfg.seed, *stream))
        return groups


# Demonstrations, in place of sampled completions


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


class CompletionCollector(DataCollector):
    """Hands out ``num_prompts`` demonstrated rows per iteration, in the order in which ``TextCollector`` takes prompts."""

    prompts = ()  # that completions would be sampled for

    def __init__(self, policy: CausalLM, rows: Sequence[TextRow], cfg: TextRunCfg, engine: Engine) -> None:
        super().__init__(policy, len(rows), cfg, engine.rank, engine.world_size)
        self.rows = rows

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """The rollout of the next rows; a step is a token that is learned."""
        places = [(self.position + n) * self.world_size + self.rank for n in range(self._cfg.num_prompts)]
        rows = [in_order(self.rows, place, self._cfg.seed)._replace(group=n) for n, place in enumerate(places)]
        rollout = text_rollout(rows)
        self.position, self.iteration = self.position + len(rows), self.iteration + 1
        self.last_steps = int(rollout["loss_mask"].sum())
        self._metrics = {"rollout/epoch": self.position * self.world_size / self.data_size}
        return rollout

    def close(self) -> None:
        """Nothing is open."""


# What completions show: texts and metrics


def conversation_of(member: Transcript) -> Conversation:
    """Texts of a completion, also the answer to the last turn, which the model did not read.

    A prompt of messages is lines that begin with the role.
    """
    prompt, messages, episode = member.prompt.example.prompt, list(member.messages), member.episode
    start = prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
    if episode is None:
        return Conversation(start, messages)
    if messages[-1]["role"] == "assistant" and len(episode.observations) == member.turns:
        messages += [message for message in episode.answer if message["content"]]
    rewards = list(episode.rewards)
    if episode.final_reward:
        rewards[-1:] = [sum(rewards[-1:]) + episode.final_reward]
    return Conversation(start, messages, rewards, episode.ending, episode.success)


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
        if values := [part for one in sampled if one.parts and (part := one.parts[number]) is not None]:
            metrics[f"reward/{name}_mean"] = fmean(values)
    if groups := rewards_of_groups(sampled):
        metrics["rollout/reward_std"] = fmean(pstdev(group) for group in groups)
        for k in (1, max(Counter(member.group for member in sampled).values())):
            if rates := [pass_at_k(group, success_threshold, k) for group in groups if len(group) >= k]:
                metrics[f"rollout/pass_at_{k}"] = fmean(rates)
    return metrics | (episode_metrics(sampled) if sampled[0].episode is not None else {})


def episode_metrics(members: Sequence[Transcript]) -> dict[str, float]:
    """How episodes ended, and how many groups have members whose environments answered the same turns differently."""
    episodes = [member.episode for member in members if member.episode is not None]
    count, endings = len(episodes), [episode.ending for episode in episodes]
    counts = sum((episode.counts for episode in episodes), Counter[str]())
    metrics = {f"rollout/stop_{ending}": endings.count(ending) / count for ending in get_args(Ending)}
    metrics |= {f"rollout/{name}": counts[name] / count for name in ("tool_calls", "tool_errors", "parse_errors")}
    metrics |= {
        "rollout/env_errors": float(counts["env_errors"]),
        "rollout/observation_tokens_mean": fmean(member.turn.count(-1) for member in members),
        "rollout/turns_max": float(max(member.turns for member in members)),
        "time/env_seconds": sum(episode.busy for episode in episodes),
        "time/env_call_max": max(episode.slowest for episode in episodes),
    }
    if (won := successes(members)) is not None:
        metrics["rollout/success_rate"] = fmean(won)
    answers: dict[Any, set[Any]] = defaultdict(set)
    for member in members:
        assert member.episode is not None
        for number, answer in enumerate(zip(member.episode.observations, member.episode.rewards, strict=False), 1):
            answers[member.group, tuple(member.episode.turns[:number])].add(answer)
    metrics["rollout/starts_apart"] = float(len({group for (group, _), found in answers.items() if len(found) > 1}))
    return metrics


def successes(members: Sequence[Transcript]) -> list[bool] | None:
    """Success of each episode, False for one that was cut. None if the environment never says."""
    episodes = [member.episode for member in members if member.episode is not None]
    found = [episode.success for episode in episodes if not episode.broken]
    return None if set(found) <= {None} else [bool(success) for success in found]


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Share of the text's n-grams that occur earlier in it: 0 if all are new, near 1 in a loop; 0 for fewer than two."""
    count = len(tokens) - n + 1
    return 1 - len({tuple(tokens[i : i + n]) for i in range(count)}) / count if count > 1 else 0.0


def pass_at_k(rewards: Sequence[float], success_threshold: float, k: int) -> float:
    """Chance that at least one of k completions solves the problem, estimated without bias from the rewards of n of them.

        1 - C(n - solved, k) / C(n, k)

    Args:
        rewards: of n >= k completions of one prompt; those of at least the threshold solve it, compared as ``has_no_variance`` does.

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1.
    """
    solved = int((np.asarray(rewards, np.float32) >= np.float32(success_threshold)).sum())
    return 1 - math.comb(len(rewards) - solved, k) / math.comb(len(rewards), k)
