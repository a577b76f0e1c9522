"""A language model and GRPO for training loops by hand, in AgileRL's manner. The parts are those of ``gw.train``."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.config.algorithm import AlgorithmCfg, FixedLengthCfg, with_max_length, with_rewards
from groupwise.config.base import GIVEN, explain, refuse_unknown
from groupwise.config.policy import LoRACfg, ModelCfg, SamplingCfg
from groupwise.config.run import TextRunCfg, TextTaskCfg
from groupwise.data.rollout import TensorDict
from groupwise.engines import Engine
from groupwise.errors import ConfigError, DataError, DivergedError, RewardError, RunFolderError, require_count
from groupwise.report.folder import RunFolder
from groupwise.text.build import SAMPLER_FIX, build_algorithm, identity_of, policy_to_train
from groupwise.text.collector import (
    Dialogue,
    TextBuffer,
    Transcript,
    in_order,
    open_group,
    score,
    text_rollout,
    training_row,
    verified_envs,
    write,
)
from groupwise.text.envs import TextEnvs
from groupwise.text.evaluation import read_prompts
from groupwise.text.generation import complete
from groupwise.text.policy import CausalLM
from groupwise.text.rewards import Prompt, TrainingState
from groupwise.text.task import EncodedPrompt, Example, PromptEncoder, TextTask, text_cfg
from groupwise.training.callbacks import CheckSamplerMismatch
from groupwise.training.checkpoint import Checkpoint, load_checkpoint, load_policy, serialize, write_checkpoint

# Groups of completions, passed between agent and environment


class Completions(list[Tensor]):
    """Groups of completions: for each of B prompts, token ids ``[G, L]`` of prompt and completion, padded with 0; and their texts."""

    def __init__(self, groups: Sequence[Sequence[Transcript]]) -> None:
        rows = [[torch.tensor([*member.prompt.tokens, *member.tokens]) for member in group] for group in groups]
        super().__init__(pad_sequence(group, batch_first=True) for group in rows)
        self.groups = groups

    @property
    def texts(self) -> list[list[str]]:
        """The completions without their prompts and without special tokens."""
        return [[member.text for member in group] for group in self.groups]


# Prompts, or starts of episodes, and their rewards

_OF_PROMPTS = ("chat", "chat_template_kwargs", "max_prompt_tokens", "system_prompt")
"""Settings of the task that are the agent's."""


class PromptEnv:
    """Gives prompts, and rewards for groups of completions; with a training set and a held-out set.

    Training prompts come in the order of ``gw.train`` with this seed, ``num_prompts=batch_size``. With ``env``, ``tools`` or
    ``tool`` a batch is the starts of as many groups of episodes, which ``LanguageAgent.play`` plays side by side.

    Args:
        data, eval_data, reward, reward_weights, env, tools, tool: as ``TextTask`` takes them.
        batch_size: prompts at a time.
        settings: other fields of ``TextTaskCfg``, but those of the agent.

    Raises:
        ConfigError: a setting is unknown or impossible, or there is no reward.
        DataError: no examples, examples that cannot be read, or that lack a column.
    """

    def __init__(
        self,
        data: object = "",
        eval_data: object = None,
        *,
        reward: object = None,
        reward_weights: Sequence[float] | None = None,
        batch_size: int = 8,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        others = {"rewards", "on_long_prompt", *_OF_PROMPTS}
        named = {*TextTaskCfg.model_fields, "reward", "reward_weights", "batch_size", "seed"} - others
        refuse_unknown(settings, named, "PromptEnv")
        require_count("batch_size", batch_size)
        self.task = TextTask(data, reward=reward, eval_data=eval_data, reward_weights=reward_weights, **settings)
        self.batch_size, self.seed = batch_size, seed
        self.rewards = self.task.rewards()
        self.train_set, self.eval_set = self.task.load()
        self.envs: TextEnvs | None = None
        """Instances of the environment, since the first ``play``."""
        self.playing: list[Transcript] = []
        """Episodes whose rewards are still to come."""
        of_episodes = ("environments", "episode_return") if self.task.cfg.has_env else ()
        for examples, name in ((self.train_set, "data"), (self.eval_set, "eval_data")):
            if examples:
                self.rewards.check_columns((*examples[0].columns, *of_episodes), name)
        self.logged: dict[str, float] = {}
        """Means of metrics that functions logged by ``log_metric`` at the last step."""
        self.batch: list[Example] = []
        """The examples of the prompts that are to be answered."""
        self._evaluating = False
        self._trained = self._evaluated = 0  # prompts before the batch

    def __len__(self) -> int:
        """Number of training prompts; in ``eval_mode`` of held-out ones."""
        return len(self.eval_set if self._evaluating else self.train_set)

    @property
    def num_epochs(self) -> int:
        """Finished passes over the training set."""
        return self._trained // len(self.train_set)

    def reset(self, *, reset_dataloaders: bool = False) -> list[Prompt]:
        """A batch of prompts: the next one that was not answered; in ``eval_mode`` the first held-out one.

        Args:
            reset_dataloaders: begin again with the first training prompts.
        """
        if self._evaluating:
            self._evaluated = 0
        elif reset_dataloaders:
            self._trained = 0
        return self._next()

    def step(
        self, completions: Completions | Sequence[Sequence[str]]
    ) -> tuple[list[Prompt], Float[Tensor, "prompt member"]]:
        """The next batch of prompts, and the rewards of a group of completions for each prompt of the batch before.

        NaN: no reward function could score the completion. In ``eval_mode`` each prompt comes once; then there are none.

        Raises:
            DataError: not one group for each prompt.
            RewardError: a function failed.
        """
        if wrong := [group for group in completions if isinstance(group, str)]:
            raise DataError(f"{wrong[0]!r:.80} is a text, expected a group; fix: a list of completions for each prompt")
        groups = completions.groups if isinstance(completions, Completions) else [*map(_transcripts, completions)]
        count, sizes = len(groups), {len(group) for group in groups}
        if count != len(self.batch) or len(sizes) != 1:
            raise DataError(
                f"{count} groups, of {sorted(sizes)} completions, for {len(self.batch)} prompts; fix: reset(), then one for "
                "each, of equally many"
            )
        prompts, members = [EncodedPrompt(example, ()) for example in self.batch], list(chain(*groups))
        if self.task.cfg.has_env:
            if any(member.episode is None for member in members):
                raise DataError("the completions are of no episodes; fix: agent.play(env), in place of get_action")
        else:
            members = [
                replace(one, prompt=prompt) for prompt, group in zip(prompts, groups, strict=True) for one in group
            ]
        steps = 0 if self._evaluating else self._trained
        score(members, self.rewards, TrainingState(steps // self.batch_size, epoch=steps / len(self.train_set)))
        earned = [math.nan if one.reward is None else one.reward for one in members]
        rewards = torch.tensor(earned, dtype=torch.float32).view(count, -1)
        self.logged = self.rewards.take_logged()
        self.release()
        if self._evaluating:
            self._evaluated += count
        else:
            self._trained += count
        return self._next(), rewards

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Held-out prompts inside ``with``; training continues where it was afterwards.

        Raises:
            ConfigError: there are none.
        """
        if not self.eval_set:
            raise ConfigError("no prompts are held out; fix: PromptEnv(data, eval_data, ...)")
        kept = self._evaluating, self.batch, self.playing
        self._evaluating, self.batch, self.playing, self._evaluated = True, [], [], 0
        try:
            yield
        finally:
            self.release()
            self._evaluating, self.batch, self.playing = kept

    def release(self) -> None:
        """Take back the environments of episodes that were played."""
        for member in self.playing:
            if member.episode is not None and self.envs is not None:
                self.envs.release(member.episode)
        self.playing = []

    def close(self) -> None:
        """Free the resources of the reward functions, and close the environments."""
        self.rewards.close()
        if self.envs is not None:
            self.envs.close()

    def _next(self) -> list[Prompt]:
        if self._evaluating:
            self.batch = self.eval_set[self._evaluated : self._evaluated + self.batch_size]
        else:
            numbers = range(self._trained, self._trained + self.batch_size)
            self.batch = [in_order(self.train_set, number, self.seed) for number in numbers]
        return [example.prompt for example in self.batch]


def _transcripts(texts: Sequence[str]) -> list[Transcript]:
    none = EncodedPrompt(Example("", {}), ())
    return [Transcript(none, 0, 0, text=one, messages=[{"role": "assistant", "content": one}]) for one in texts]


Experiences = tuple[Any, Sequence[Tensor], Any]
"""Completions and masks of ``get_action``, and their rewards ``[B, G]``."""
_OF_RUN = ("device", "mask_truncated_completions", "overlong_buffer", "sampler_mismatch")


class LanguageAgent:
    """Samples groups of completions, and learns from their rewards by ``GRPO.update``.

    With the prompts and rewards of a ``PromptEnv``, the same settings and seed, the parameters are those of ``gw.train``.

    Args:
        model: a folder or hub id, a ``ModelCfg``, or a ``CausalLM`` with its own sampling.
        algorithm: a ``GRPOCfg`` or some of its fields, over the defaults of text runs.
        preset: credit and objective of a paper or library, by name.
        lora: trains adapters.
        index: a number of your own, which ``clone`` changes.
        settings: further fields of ``TextRunCfg``: ``device``, ``mask_truncated_completions``, ``overlong_buffer``
            and ``sampler_mismatch``; and of ``TextTaskCfg``: ``system_prompt``, ``chat``, ``chat_template_kwargs`` and
            ``max_prompt_tokens``.

    Raises:
        ConfigError: a setting is unknown or impossible, or only works in ``gw.train``.
    """

    def __init__(
        self,
        model: str | Path | ModelCfg | CausalLM,
        algorithm: str | AlgorithmCfg | dict[str, Any] | None = None,
        *,
        preset: str | None = None,
        lora: LoRACfg | Mapping[str, Any] | None = None,
        sampling: SamplingCfg | Mapping[str, Any] | None = None,
        seed: int = 0,
        index: int = 0,
        **settings: Any,
    ) -> None:
        for name in ("tool", "tools", "env"):
            if name in settings:
                raise ConfigError(f"{name}: a LanguageAgent plays episodes of a PromptEnv; fix: PromptEnv({name}=...)")
        refuse_unknown(settings, (*_OF_PROMPTS, *_OF_RUN), "LanguageAgent")
        given = model if isinstance(model, CausalLM) else None
        task = TextTaskCfg(**{name: settings.pop(name) for name in _OF_PROMPTS if name in settings})
        of_run = {**settings, "model": None if given else model, "lora": lora, "sampling": sampling, "seed": seed}
        try:
            cfg = text_cfg(task, algorithm, preset, given, {**of_run})
        except ConfigError as error:
            try:  # they may be of episodes alone
                cfg = text_cfg(task.model_copy(update={"env": GIVEN}), algorithm, preset, given, of_run)
            except ConfigError:
                raise error from None
        self._build(cfg, given, index)

    def _build(self, cfg: TextRunCfg, given: CausalLM | None, index: int, *, restored: bool = False) -> None:
        if cfg.algorithm.groups.size == 1:
            raise ConfigError(f"a LanguageAgent learns from groups, by grpo; got {cfg.algorithm.name!r}, fix: gw.train")
        if cfg.algorithm.groups.collection.dynamic_sampling is not None:
            raise ConfigError("collection.dynamic_sampling needs a collector; fix: gw.train, or leave it out")
        aggregation = cfg.algorithm.objective.aggregation
        self._fills_length = isinstance(aggregation, FixedLengthCfg) and aggregation.max_length is None
        self._saved_cfg = cfg
        task, algorithm = cfg.task.model_copy(update={"env": None}), with_rewards(cfg.algorithm, (1.0,))
        self.cfg = cfg.model_copy(update={"task": task, "algorithm": algorithm})
        """The settings, as those of a run on prompts."""
        self.index = index
        self.algorithm: BaseAlgorithm = build_algorithm(self.cfg, given, Engine(), restored=restored)
        """The ``GRPO``, with the policy."""
        policy_to_train(self.algorithm)
        self.metrics: dict[str, float] = {}
        """Metrics of the last ``learn``, by the names of ``metrics.jsonl``."""
        self.iteration = 0
        """Batches of completions sampled in training."""
        self._given_in_python = ["policy"] if given else []
        self._encoder = PromptEncoder(self.policy.tokenizer, self.cfg.task)
        self._mismatch = CheckSamplerMismatch(self.cfg.sampler_mismatch, SAMPLER_FIX)
        self._buffer = TextBuffer(on_nonfinite=self.cfg.algorithm.on_nonfinite, device=self.policy.device)

    @property
    def policy(self) -> CausalLM:
        """The language model."""
        assert isinstance(self.algorithm.policy, CausalLM)
        return self.algorithm.policy

    def get_action(self, prompts: str | Sequence[Any], training: bool = True) -> tuple[Completions, list[Tensor]]:
        """Completions of each prompt, and masks ``[G, L - 1]`` of their tokens.

        Args:
            prompts: texts or lists of messages; also a single one.
            training: a group for each prompt. False: its most likely completion, which nothing is learned from.

        Raises:
            ConfigError: settings that only work on episodes.
            DataError: a prompt is too long, or neither a text nor messages.
        """
        if training:
            self._as_run(self.cfg.task)
        return self._write([Example(prompt, {}) for prompt in read_prompts(prompts)], training, Dialogue(self._encoder))

    def play(self, env: PromptEnv, training: bool = True) -> tuple[Completions, list[Tensor]]:
        """Episodes from each start of the environment's batch, and masks of the tokens that are the model's, as of ``get_action``.

        Before the first ones, it is checked that members of a group share a start.

        Raises:
            EnvError: they do not, the environment failed, or a first observation is too long.
            ConfigError: settings that do not work on episodes; or the loss is divided by the length of one turn, which the agent took
                for the longest completion.
        """
        cfg = self._as_run(env.task.cfg)
        encoder = PromptEncoder(self.policy.tokenizer, cfg.task)
        env.envs = env.envs or verified_envs(cfg, env.task, encoder, self.policy, env.train_set)
        if env.envs is None:
            raise ConfigError("there are no episodes to play; fix: PromptEnv(env=...), or get_action")
        aggregation, turn = self.cfg.algorithm.objective.aggregation, self.cfg.sampling.max_new_tokens
        if self._fills_length and env.task.cfg.max_turns > 1:
            raise ConfigError(
                f"aggregation={aggregation.name!r} divides by max_length={turn}, one turn, and these episodes have up to "
                f"{env.task.cfg.max_turns}; fix: objective.aggregation.max_length={env.task.cfg.max_turns * turn} of the algorithm"
            )
        if not env.batch:
            raise DataError("the environment has no batch; fix: env.reset()")
        env.release()
        completions, masks = self._write(env.batch, training, Dialogue(encoder, self.policy.context_length, env.envs))
        env.playing = [*chain(*completions.groups)]
        return completions, masks

    def _as_run(self, task: TextTaskCfg) -> TextRunCfg:
        """The settings as those of a run on the task, checked again."""
        of_prompts = {name: vars(self.cfg.task)[name] for name in _OF_PROMPTS}
        try:
            return TextRunCfg.model_validate(dict(self.cfg) | {"task": task.model_copy(update=of_prompts)})
        except ValidationError as error:
            by_play = "" if task.has_env else ", which LanguageAgent.play takes as PromptEnv(env=...)"
            raise ConfigError("; ".join(explain(error.errors())) + by_play) from error

    def _write(
        self, examples: Sequence[Example], training: bool, dialogue: Dialogue
    ) -> tuple[Completions, list[Tensor]]:
        cfg = self.cfg
        encoded = dialogue.encoder.select(examples, self.policy.max_prompt_length(cfg.sampling.max_new_tokens))
        stream = "completion", 0, self.iteration  # as the collector's, of rank 0
        groups = [
            open_group(prompt, number, cfg.algorithm, cfg.seed, *stream)
            if training
            else [Transcript(prompt, number, 0, greedy=True)]
            for number, prompt in enumerate(encoded)
        ]
        write(list(chain(*groups)), partial(complete, self.policy), cfg.sampling, dialogue)
        self.iteration += training
        masks = []
        for group in groups:
            written = [[False] * (len(one.prompt.tokens) - 1) + [turn >= 0 for turn in one.turn] for one in group]
            masks.append(pad_sequence([torch.tensor(mask) for mask in written], batch_first=True))
        return Completions(groups), masks

    def learn(self, experiences: Experiences) -> tuple[float, float]:
        """Update the policy; returns the loss, and the KL to the reference, 0 without one.

        Args:
            experiences: completions and masks of ``get_action``, and rewards ``[B, G]``; NaN: no reward. Tokens that you take out
                of a mask have no loss.

        Raises:
            DataError: shapes that do not fit, or rewards that are infinite.
            DivergedError: a metric of the update is NaN or infinite.
            SamplerMismatchError: sampler and trainer are two different policies.
        """
        if not isinstance(experiences[0], Completions):
            raise DataError(f"completions are a {type(experiences[0]).__name__}; fix: what get_action returned")
        self._buffer.add(self._rollout(*experiences))
        self.metrics = self.algorithm.update(self._buffer.get())
        for name, value in self.metrics.items():
            if not math.isfinite(value) and self.cfg.algorithm.on_nonfinite == "stop":
                raise DivergedError.because(f"{name} is {value} in iteration {self.iteration}")
        self._mismatch.check(self.metrics, self.iteration)
        return self.metrics["train/loss"], self.metrics["train/kl"]

    def test(self, env: PromptEnv) -> float:
        """Mean reward of the most likely completion of each held-out prompt.

        Raises:
            ConfigError: no prompts are held out.
            RewardError: no completion could be scored.
        """
        rewards = []
        with env.eval_mode():
            prompts = env.reset()
            while prompts:
                act = partial(self.play, env) if env.task.cfg.has_env else partial(self.get_action, prompts)
                prompts, scored = env.step(act(training=False)[0])
                rewards.append(scored.flatten())
        mean = float(torch.cat(rewards).double().nanmean())
        if math.isnan(mean):
            raise RewardError("no completion of the held-out prompts could be scored; fix: the rewards, or eval_data")
        return mean

    def set_progress(self, step: int, num_steps: int) -> None:
        """Set a schedule of the learning rate to ``step`` of ``num_steps`` calls of ``learn``."""
        self.algorithm.set_progress(step / num_steps, num_steps, 1 / num_steps)

    def clone(self, index: int | None = None) -> "LanguageAgent":
        """A copy that shares nothing, with the state of the optimiser."""
        twin = copy.deepcopy(self)
        twin.index = self.index if index is None else index
        return twin

    def save(self, path: str | Path) -> None:
        """Write settings and a checkpoint into a folder, in place of those of an earlier ``save``.

        It is a run folder, which ``gw.sample``, ``gw.Run.load`` and ``groupwise export`` read, too. With settings of episodes
        alone, such as ``gigpo``, ``gw.sample`` needs the ``env`` again, and plays in it.

        Raises:
            RunFolderError: the folder is that of a training run, or has other files.
        """
        folder, settings = RunFolder(Path(path)), self._saved_cfg.model_dump(mode="json")
        if folder.metrics.exists():
            raise RunFolderError(f"{path} is the folder of a training run, which would be lost; fix: another folder")
        if folder.latest.is_dir():
            folder.rewrite_config(settings)
        else:
            folder = RunFolder.create(settings, Path(path), given_in_python=self._given_in_python)
        state: dict[str, Any] = {"env_steps": 0, "iteration": self.iteration, "index": self.index}
        state["algorithm"] = self.algorithm.state_dict()
        content = serialize(Checkpoint(self.policy.state_dict(), state))
        write_checkpoint(folder.latest, content, identity_of(self._saved_cfg, self.policy))

    @classmethod
    def load(cls, path: str | Path, model: CausalLM | None = None) -> "LanguageAgent":
        """The agent that ``save`` wrote, or that of a text run, which continues exactly.

        Args:
            model: the model that the agent was given in Python; it gets the saved weights.

        Raises:
            RunFolderError, CheckpointError: there is none, or it is damaged.
            ConfigError: the agent was given a model in Python, or the run's settings only work in ``gw.train``.
        """
        folder = RunFolder.open(Path(path))
        if model is None and "policy" in folder.read_provenance()["given_in_python"]:
            raise ConfigError(f"{path} was given a model in Python; fix: LanguageAgent.load({str(path)!r}, model=...)")
        settings = folder.read_config()
        if "task" not in settings:
            raise ConfigError(f"{path} is a run on an environment, without a language model; fix: gw.Run.load")
        agent, cfg = cls.__new__(cls), TextRunCfg(**settings)
        task = TextTaskCfg(**{name: vars(cfg.task)[name] for name in _OF_PROMPTS})  # the rest is of a PromptEnv
        ours = cfg
        if cfg.task.has_env and folder.metrics.exists():  # of a run's turns, which a PromptEnv need not have
            longest = cfg.task.max_turns * cfg.sampling.max_new_tokens
            ours = cfg.model_copy(update={"algorithm": with_max_length(cfg.algorithm, longest)})
        try:
            ours = TextRunCfg.model_validate(dict(ours) | {"task": task})
        except ValidationError:  # they are of episodes alone
            ours = ours.model_copy(update={"task": task.model_copy(update={"env": GIVEN})})
        agent._build(ours, model, 0, restored=True)
        saved = load_checkpoint(folder.latest, identity_of(cfg, agent.policy), agent.policy)
        load_policy(agent.policy, saved.policy, folder.latest)
        agent.algorithm.load_state_dict(saved.state["algorithm"])
        agent.iteration, agent.index = saved.state["iteration"], saved.state.get("index", 0)
        return agent

    def _rollout(self, completions: Completions, masks: Sequence[Tensor], rewards: Any) -> TensorDict:
        """The rollout that is learned from, with no loss where a mask is False."""
        scores = torch.as_tensor(rewards, dtype=torch.float64)
        shape, shapes = (len(completions), len(completions.groups[0])), [tuple(mask.shape) for mask in masks]
        if scores.shape != shape or shapes != [(len(ids), ids.shape[1] - 1) for ids in completions]:
            raise DataError(
                f"rewards of shape {tuple(scores.shape)} and masks of shapes {shapes} for {shape[0]} groups of {shape[1]} "
                "completions; fix: rewards [B, G], and a mask [G, L - 1] for each group"
            )
        rows = [
            training_row(replace(member, reward=None if math.isnan(reward) else reward), self.cfg)
            for member, reward in zip(chain(*completions.groups), scores.flatten().tolist(), strict=True)
        ]
        rollout = text_rollout(rows)
        padded = [functional.pad(mask.bool(), (0, rollout.shape[1] - mask.shape[1])) for mask in masks]
        trained = torch.cat(padded).to(rollout.device)
        if bool((rollout["loss_mask"] & ~trained).any()):
            rollout["trained"] = trained & rollout.get("trained", rollout["valid"])
        return rollout
