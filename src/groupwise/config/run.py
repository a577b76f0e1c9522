"""The settings of a run: ``RunCfg`` for environments, ``TextRunCfg`` for texts. Imports no torch."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeAlias
from urllib.parse import urlsplit

from annotated_types import Ge, Gt
from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from groupwise.config.algorithm import AlgorithmCfg, BCCfg, CreditCfg, GRPOCfg, LinearCfg, PartsCfg, PPOCfg
from groupwise.config.base import DEVICE, GIVEN, URL, Cfg, Choice, Keys, Kwargs, Positive, PositiveInt
from groupwise.config.policy import AnyPolicyCfg, ModelCfg, PolicyCfg, SamplingCfg
from groupwise.errors import ConfigError

# Budgets

BUDGETS = {"total_steps": "env_steps", "total_iterations": "iteration", "total_epochs": "rollout/epoch"}
"""Settings of budgets, of which one is given, and the metrics that count their progress."""


class Budget(NamedTuple):
    """An amount of training."""

    name: str
    """The setting."""
    total: int | float
    unit: str
    """``steps``, ``iterations`` or ``epochs``."""
    metric: str
    """The metric that counts the progress."""
    tenth: int | float
    """A tenth of it; of steps and iterations whole ones."""

    @classmethod
    def only(cls, **totals: int | float | None) -> "Budget":
        """Make the budget that is given; raise a ``ConfigError`` if none is, or several."""
        given = {name: total for name, total in totals.items() if total is not None}
        if len(given) != 1:
            found = " and ".join(f"{name}={total:,}" for name, total in given.items()) or "none"
            raise ConfigError(f"training needs one of {', '.join(totals)}; got {found}, fix: give one of them")
        [(name, total)] = given.items()
        unit = name.removeprefix("total_")
        return cls(name, total, unit, BUDGETS[name], total / 10 if unit == "epochs" else max(1, total // 10))

    def check_exceeds(self, done: int | float, where: object) -> None:
        """Raise a ``ConfigError`` if ``where`` has done as much already."""
        name, total, unit = self.name, self.total, self.unit
        if total <= done:
            raise ConfigError(f"{name} = {total:,}, but {where} has {done:,} {unit} already; fix: a larger {name}")


# Environments

StartMode = Literal["native", "snapshot", "seed", "fresh", "none"]
"""How members share a start, best first: state set for all rows at once; state captured and restored by an adapter; a seeded reset; a seeded reset of a fresh environment. ``none``: they do not."""


class EnvCfg(Cfg):
    """The environment."""

    id: str = "CartPole-v1"
    """A registered Gymnasium id. ``<given in Python>`` stands for an object passed in Python."""
    kwargs: Kwargs = {}
    """Arguments of ``gymnasium.make``."""
    num_envs: Annotated[int, Ge(1)] = 8
    """Environments that are stepped together."""
    max_episode_steps: Annotated[int, Ge(1)] | None = None
    """Episodes are truncated after that many steps. None: the limit of the registration."""
    vectorization: Literal["auto", "entry_point", "sync", "async", "torch"] = "auto"
    """``entry_point``: the environment's own vectorised version; ``sync``: in this process; ``async``: in other processes; ``torch``: a simulator in torch (CartPole only); ``auto``: ``entry_point`` for CartPole, otherwise ``sync``."""
    timeout: Annotated[float, Gt(0)] = 60.0
    """Seconds that a process of ``vectorization="async"`` may take to start or step its environments; to make them, at least 60. Then it is killed, and ``collection.on_env_error`` decides; PPO ends."""
    obs_keys: Keys | None = None
    """Entries of a Dict observation that the policy gets, beside ``action_mask``. None: all but those without a fixed shape, such as text."""
    action_masks: bool = False
    """Add ``info["action_mask"]`` to the observation. A Dict observation with the entry ``action_mask`` needs no setting. Actions that a mask forbids are never taken. Discrete and MultiDiscrete actions only."""
    start_mode: Literal[StartMode, "auto"] = "auto"
    """How the members of a group share their start. ``auto``: the best mode that passes its check. ``none``: each has its own start. GRPO only."""
    num_random_noops: Annotated[int, Ge(0)] = 0
    """Episodes start after up to that many random actions, the same ones in a group, for environments that always start in one state. They count towards the step limit, but not as environment steps."""
    action_chunk: Annotated[int, Ge(1)] = 1
    """Actions that the policy decides on at once; the environment executes them open loop. Steps of the policy, such as ``algorithm.num_steps``, are then decisions, and the discount is per decision; ``max_episode_steps`` and ``total_steps`` count environment steps. Box actions only."""
    num_action_steps: Annotated[int, Ge(1)] | None = None
    """Number of actions of each chunk that are executed before the policy decides again (LeRobot's ``n_action_steps``). None: all of ``action_chunk``."""
    action_repeat: Annotated[int, Ge(1)] = 1
    """Environment steps that each action is executed for, the rewards summed (frame skip). Steps and limits count as with ``action_chunk``. It cannot be combined with chunks or action masks."""
    log_info: tuple[str, ...] = ()
    """Entries of ``info`` to log as ``rollout/info/<name>``: numbers at the last step of each episode, averaged over episodes like the return."""

    @property
    def actions_executed(self) -> int:
        """Actions of a chunk that are executed, unless the episode ends before."""
        return self.num_action_steps or self.action_chunk

    @property
    def decision_steps(self) -> int:
        """Environment steps of a decision, unless the episode ends before."""
        return self.actions_executed * self.action_repeat

    @property
    def is_multi_step(self) -> bool:
        """Whether a decision is a chunk, or an action that is repeated."""
        return self.action_chunk * self.action_repeat > 1

    @model_validator(mode="after")
    def _check(self) -> "EnvCfg":
        if self.kwargs.get("render_mode") == "human":
            raise ValueError(
                "kwargs: render_mode='human' opens windows in training; fix: leave it out, and watch with groupwise play, or "
                "in videos (evaluation.video_interval)"
            )
        if self.actions_executed > self.action_chunk:
            raise ValueError(
                f"num_action_steps={self.num_action_steps} is more than action_chunk={self.action_chunk}; fix: at most that many"
            )
        if self.action_repeat > 1 and (self.action_chunk > 1 or self.action_masks):
            other = f"action_chunk={self.action_chunk}" if self.action_chunk > 1 else "action_masks"
            raise ValueError(f"action_repeat={self.action_repeat} cannot be combined with {other}; fix: one of the two")
        return self


# Trackers


class TrackedRun(NamedTuple):
    """Facts about a run that its tracker needs."""

    folder: Path
    """The run folder."""
    run_id: str
    """Unique; a resumed run keeps it."""
    settings: dict[str, Any]
    """All settings, as plain data."""


class TrackerCfg(Choice, family="tracker"):
    """A place that metrics are sent to. Subclass it with a name and a ``build``."""

    def build(self, run: TrackedRun) -> Any:
        """The tracker of a run, as ``groupwise.training.trackers.Tracker`` describes it."""
        raise NotImplementedError(f"{type(self).__name__} has no build(run)")


class TensorBoardCfg(TrackerCfg, name="tensorboard"):
    """TensorBoard, in the run folder."""


class WandBCfg(TrackerCfg, name="wandb"):
    """Weights & Biases. ``WANDB_*`` variables hold where a setting is None."""

    project: str | None = None
    """Project. None: ``WANDB_PROJECT``, or ``groupwise``."""
    entity: str | None = None
    """User or team. None: ``WANDB_ENTITY``, or the account's own."""
    run_name: str | None = None
    """Name of the run. None: ``WANDB_NAME``, or that of the run folder."""
    group: str | None = None
    """Group of runs. None: ``WANDB_RUN_GROUP``."""
    tags: tuple[str, ...] | None = None
    """Tags of the run. None: ``WANDB_TAGS``."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """``offline`` keeps the run on disk. None: ``WANDB_MODE``, or ``online``."""


# Texts and rewards

GYM = "reasoning-gym:"
"""Prefix of reasoning-gym tasks."""


class RewardCfg(Cfg):
    """One reward function."""

    name: str
    """A registered reward: ``regex``, ``exact``, ``numeric``, ``math``, ``reasoning_gym``, or your own. ``<given in Python>`` stands for an object passed in Python."""
    weight: float = 1.0
    """Factor of its scores."""
    kwargs: Kwargs = {}
    """Arguments of the reward."""


TextStartMode = Literal["seed", "fresh", "snapshot", "none"]
"""How members of a group share the start of a text environment: a seeded reset; a seeded reset of a new instance; deep copies of one that was reset. ``none``: they do not."""


OF_CALLS = ("max_tool_calls", "max_parse_errors", "on_tool_error")
"""Settings of the task about tools that the model calls by name."""
_OF_EPISODES = (
    "max_episode_tokens", "max_observation_tokens", "on_long_observation", "env_threads", "env_timeout", "episode_timeout", *OF_CALLS,
)  # fmt: skip
_BY_ENCODER = ("add_generation_prompt", "continue_final_message", "return_dict", "tokenize", "tools")
"""Arguments of a chat template that follow from the prompt."""


class TextTaskCfg(Cfg):
    """Prompts and their rewards."""

    data: str = ""
    """Training prompts: a file (``.jsonl``, ``.json``, ``.csv``, ``.parquet``) or ``reasoning-gym:<task>``. ``<given in Python>`` stands for an object passed in Python. With ``env`` its rows are options of episodes; empty: episodes differ by their seeds."""
    env: str | None = None
    """A registered text environment, which answers each turn of the model and rewards it. ``<given in Python>`` stands for a class or function passed in Python. None: completions of prompts."""
    tools: tuple[str, ...] = ()
    """Registered functions that the model calls by name, with arguments, as its chat template has it. ``<given in Python>`` stands for one passed in Python. A turn without a call ends the episode."""
    env_kwargs: Kwargs = {}
    """Arguments of a registered environment."""
    start_mode: Literal[TextStartMode, "auto"] = "auto"
    """How members of a group share the start of an episode. ``auto``: the best that passes the check before training."""
    eval_data: str | None = None
    """Held-out prompts for evaluation, given in the same way. None: no evaluation."""
    data_kwargs: Kwargs = {}
    """Arguments of a reasoning-gym task."""
    data_size: PositiveInt = 1000
    """Number of training prompts of a reasoning-gym task, or of episodes of an environment without data."""
    eval_size: PositiveInt = 100
    """Number of evaluation prompts of a reasoning-gym task, or of episodes of an environment without data."""
    eval_overlap: Literal["drop", "keep"] = "drop"
    """Training prompts that are also in the evaluation data: drop them with a warning, or keep them."""
    prompt_column: str = "prompt"
    """Column of the prompt: a string, or a list of messages ``{"role": ..., "content": ...}``. Other columns go to the rewards."""
    system_prompt: str | None = None
    """First message of every conversation that has no system message. Needs a chat template."""
    chat: Literal["auto", "never"] = "auto"
    """``auto``: a string becomes a user message if the tokenizer has a chat template; ``never``: strings are used as they are."""
    chat_template_kwargs: Kwargs = {}
    """Further arguments of the chat template, such as ``{"enable_thinking": false}``."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt, in tokens. None: limited by the model's context only."""
    on_long_prompt: Literal["error", "drop"] = "error"
    """Prompts that are too long: raise an error, or drop them with a warning. They are never cut."""
    rewards: tuple[RewardCfg, ...] = ()
    """Reward functions; their weighted scores are added. Empty: ``reasoning_gym`` for reasoning-gym data."""
    reward_timeout: Positive | None = None
    """Seconds that a call of a reward function may take, in a process of its own; a call that takes longer gives no reward. It draws its own random numbers. None: rewards run in the process of training, without a limit. Built-in rewards have limits of their own."""
    success_threshold: float = 1.0
    """A completion with at least this reward counts as a success (pass@k)."""
    tool: str | None = None
    """A tool that answers the model's calls: ``calculator``, or your own registered one. Answers are not trained on. None: a completion is one turn."""
    tool_kwargs: Kwargs = {}
    """Arguments of the tool."""
    tool_timeout: Positive | None = None
    """Seconds that a call of the tool may take, in a process of its own; a call that takes longer is answered by an error, which the model reads. None: the tool runs in the process of training, without a limit."""
    tool_answer: str = "<result>{}</result>"
    """Format of an answer ``{}`` in plain text. In a conversation it is a message."""
    max_turns: PositiveInt = 2
    """Most turns of the model in one episode."""
    max_episode_tokens: PositiveInt | None = None
    """Most tokens of an episode after its prompt, those of observations and of a last whole turn included. None: limited by the model's context only."""
    max_observation_tokens: PositiveInt | None = None
    """Most tokens of an observation. None: limited by the model's context only."""
    keep_cache: bool = True
    """Keep the keys and values of earlier turns, so that they are not computed again. False: less memory. Servers have a cache of their own."""
    on_long_observation: Literal["cut", "end"] = "cut"
    """Observations that are too long: cut out the middle, and say so in its place; or end the episode."""
    max_tool_calls: PositiveInt | None = None
    """Most calls of tools in an episode, after which it ends. None: no limit."""
    max_parse_errors: PositiveInt = 3
    """Turns in a row with calls that cannot be read, or have wrong arguments, after which an episode ends. The model is told each time."""
    on_tool_error: Literal["tell", "raise"] = "tell"
    """An error that a tool raises: tell the model, or end the run."""
    env_threads: PositiveInt = 1
    """Environments that play at the same time, in threads. What they return does not depend on it."""
    env_timeout: Positive | None = None
    """Seconds that an environment may take to play a turn; then it is thrown away, and the episode tried again if ``collection.on_env_error="retry"``, otherwise left out of the loss. Also to begin an episode, which an error ends as ``collection.on_env_error`` says, after another try. None: no limit."""
    episode_timeout: Positive | None = None
    """Seconds after which an episode plays no further turn. Results then depend on the machine's speed. None: no limit."""

    @property
    def has_env(self) -> bool:
        """Whether an environment answers the model, if only by tools."""
        return self.env is not None or self.tool is not None or bool(self.tools)

    @property
    def by_seeds(self) -> bool:
        """Whether episodes of an environment differ by their seeds alone."""
        return self.env is not None and not self.data

    @property
    def given_in_python(self) -> set[str]:
        """Names of the Python objects that the settings have a placeholder for."""
        one = {name: (vars(self)[name],) for name in ("data", "eval_data", "tool", "env")}
        several = {"reward": [reward.name for reward in self.rewards], "tools": self.tools}
        return {name for name, values in {**one, **several}.items() if GIVEN in values}

    @model_validator(mode="after")
    def _check(self) -> "TextTaskCfg":
        unread = {} if self.tool else self.changed("tool_kwargs", "tool_timeout", "tool_answer")
        unread |= {} if self.has_env else self.changed("max_turns", "keep_cache")
        for name, value in unread.items():
            raise ValueError(f"{name}={value!r} has no effect without a tool; fix: tool='calculator', or leave it out")
        unread = {} if self.env else self.changed("env_kwargs", "start_mode")
        if not self.has_env:
            unread |= self.changed(*_OF_EPISODES)
        for name, value in unread.items():
            raise ValueError(f"{name}={value!r} has no effect without an environment; fix: env=..., or leave it out")
        if (self.env or self.tools) and self.on_long_prompt == "drop":
            raise ValueError(
                "on_long_prompt='drop' is of prompts that are known before training, and episodes of env or tools begin with what they "
                "render; fix: leave it out, and shorten the rows"
            )
        if self.tool and (self.env or self.tools):
            both = f"env={self.env!r}" if self.env else f"tools={self.tools!r}"
            raise ValueError(f"{both} and tool={self.tool!r} both answer the model; fix: one of the two")
        for name, value in (self.changed(*OF_CALLS) if self.tool else {}).items():
            raise ValueError(
                f"{name}={value!r} is of calls by name, and tool={self.tool!r} reads the text; fix: tools=[...]"
            )
        if self.tool and self.env_timeout is not None:
            raise ValueError(
                f"env_timeout={self.env_timeout:g} leaves a tool that hangs to itself, which all members share; fix: tool_timeout"
            )
        gym, gym_eval = self.data.startswith(GYM), (self.eval_data or "").startswith(GYM)
        if self.env and (gym or gym_eval):
            raise ValueError(f"env={self.env!r} takes no prompts of reasoning-gym; fix: no data, or rows of a file")
        if self.by_seeds and self.eval_data is not None:
            raise ValueError(
                "eval_data has no effect without data: held-out episodes have seeds; fix: data, or leave it out"
            )
        unread = {} if gym or self.by_seeds else self.changed("data_size")
        unread |= {} if gym_eval or self.by_seeds else self.changed("eval_size")
        for name, value in (unread | ({} if gym or gym_eval else self.changed("data_kwargs"))).items():
            raise ValueError(f"{name}={value!r} is of reasoning-gym tasks; fix: leave it out, or name such a task")
        for name in ("tool", "env"):
            if vars(self)[name] == GIVEN and (kwargs := vars(self)[f"{name}_kwargs"]):
                raise ValueError(f"{name}_kwargs={kwargs!r} are for a registered {name}; fix: leave them out")
        if self.tool_answer.count("{}") != 1:
            raise ValueError(f"tool_answer={self.tool_answer!r}: expected {{}} once; fix: '<result>{{}}</result>'")
        for name in self.changed("system_prompt", "chat_template_kwargs") if self.chat == "never" else ():
            raise ValueError(f"{name} is for a conversation, and chat='never' has none; fix: chat='auto'")
        for name in sorted({*_BY_ENCODER} & {*self.chat_template_kwargs}):
            raise ValueError(
                f"chat_template_kwargs: {name}={self.chat_template_kwargs[name]!r:.80} follows from the prompt; fix: leave it out"
            )
        return self


# Generation of completions


class GenerationCfg(Choice, family="generation", default="native"):
    """Where completions are generated in training."""


class NativeGenerationCfg(GenerationCfg, name="native"):
    """By the model that is trained, in the process of training."""


class ServerGenerationCfg(GenerationCfg, name="server"):
    """By vLLM servers, which read the new weights before each iteration."""

    programs = ("python", "args")
    urls: tuple[Annotated[str, Field(pattern=URL)], ...] = ("http://127.0.0.1:8000",)
    """Servers that run already. They take groups in turn; a group stays on one server."""
    python: Path | None = None
    """In place of ``urls``: the Python of a virtual environment with vLLM, with which the run starts a server of its own on this machine. In a file it needs ``--allow-programs``."""
    args: tuple[str, ...] = ()
    """Further arguments of the server that the run starts, such as ``["--enforce-eager"]``."""
    weights_dir: Path | None = None
    """Folder for the weights on their way, on a disk that the servers read under the same path. None: a temporary one on this machine."""
    timeout: Positive = 600.0
    """Seconds that a call, or the start of a server, may take."""
    retries: Annotated[int, Ge(0)] = 3
    """How often a call is repeated that got no answer, or an error of the server."""
    max_staleness: Annotated[int, Ge(0)] = 0
    """Updates that may lie between the weights that wrote a rollout and the weights that it trains. 0: servers wait for each update; 1 or more: they write the next rollouts meanwhile."""
    in_flight_updates: bool = False
    """With ``max_staleness``: servers load new weights while they generate, and running completions continue under these. False: they finish a rollout first."""

    @model_validator(mode="after")
    def _check(self) -> "ServerGenerationCfg":
        if not self.urls or (self.python is not None and self.changed("urls")):
            raise ValueError(f"generation has {len(self.urls)} urls and python={str(self.python)!r}; fix: one of them")
        for url in self.urls:
            try:
                urlsplit(url).port  # noqa: B018  raises where it is too large
            except ValueError as error:
                raise ValueError(f"urls = {url!r}: {error}; fix: http://127.0.0.1:8000") from None
        if self.in_flight_updates and not self.max_staleness:
            raise ValueError("in_flight_updates=True and max_staleness=0: nothing is in flight; fix: max_staleness=1")
        if self.args and self.python is None:
            raise ValueError(f"args={self.args!r} are of a server that the run starts; fix: none, or python=...")
        return self


EvaluationMetric: TypeAlias = Literal["return", "success_rate"]

DEFAULT_HORIZON = 1_000
"""Steps of an episode, of groups and of evaluations, where neither the environment nor a setting limits it."""


class EvaluationCfg(Cfg):
    """When and how the policy is evaluated, in its own environments."""

    interval: PositiveInt | None = None
    """Environment steps between evaluations, rounded up to whole iterations. None: a tenth of the budget. The last iteration is always evaluated."""
    episodes: PositiveInt = 20
    """Episodes per evaluation."""
    deterministic: bool = True
    """Take the most likely action. False: sample."""
    video_interval: PositiveInt | None = None
    """Evaluations between videos of an episode, as ``videos/step_<steps>.gif`` of the run folder. None: only ``policy.gif`` in the end."""
    num_logged_groups: Annotated[int, Ge(0)] = 8
    """Groups of the rollout that are kept with each evaluation, in ``groups/`` of the run folder. 0: none."""
    metric: EvaluationMetric = "return"
    """The score of an evaluation, for the best checkpoint and ``stop.threshold``: its mean return, or the share of its episodes that succeeded."""


class TextEvaluationCfg(Cfg):
    """When and how the policy is evaluated on held-out prompts."""

    interval: PositiveInt | None = None
    """Training tokens between evaluations, rounded up to whole iterations. None: a tenth of the budget. The last iteration is always evaluated."""
    prompts: PositiveInt | None = 128
    """Most prompts per evaluation, always the same. None: all."""
    completions_per_prompt: PositiveInt = 1
    """Completions per prompt. pass@k is reported for k up to this."""
    deterministic: bool = True
    """Take the most likely token; needs ``completions_per_prompt=1``. False: sample."""
    sampling: SamplingCfg | None = None
    """How completions are sampled; settings that are left out are those of training when the run is made. None: as in training."""
    metric: EvaluationMetric = "return"
    """The score of an evaluation, for the best checkpoint and ``stop.threshold``: its mean reward, or the share of a text environment's episodes that were won."""
    num_logged_groups: Annotated[int, Ge(0)] = 8
    """Groups of the rollout that are kept with each evaluation, in ``groups/`` of the run folder. 0: none."""

    @model_validator(mode="after")
    def _check_completions(self) -> "TextEvaluationCfg":
        if self.deterministic and self.completions_per_prompt > 1:
            raise ValueError(
                f"{self.completions_per_prompt} completions would all be the same; fix: deterministic=False"
            )
        return self


class StopCfg(Cfg):
    """When training ends before its budget."""

    threshold: float | None = None
    """Stop when an evaluation reaches this score: mean return (of texts: reward) or success rate, as ``evaluation.metric`` says. None: never."""
    time_limit: Annotated[float, Gt(0)] | None = None
    """Seconds of training after which it stops, at the end of the iteration; each resume gets all of them again. None: no limit."""


class LoggingCfg(Cfg):
    """Where metrics go besides ``metrics.jsonl``, and what the terminal shows."""

    report_to: tuple[SerializeAsAny[TrackerCfg], ...] = ()
    """Trackers that also get the metrics, each by name or with its parameters: ``[{"name": "wandb", "project": "arms"}]``."""
    progress: Literal["auto", "bar", "lines", "iterations", "none"] = "auto"
    """``bar``: live; ``lines``: a plain line now and then; ``iterations``: one for each iteration; ``auto``: a bar on a terminal, otherwise lines; ``none``."""


class SamplerMismatchCfg(Cfg):
    """Limits of the KL between sampler and trainer at the start of an update, in nats per step or token."""

    warn: Positive = 0.01
    """Warn once above this."""
    stop: Positive | None = 0.1
    """Stop training above this and keep the last checkpoint. None: never."""


class CommonCfg(Cfg):
    """Settings of every run."""

    score: ClassVar[str] = "return"
    """Word for what an episode earns."""
    unit: ClassVar[str] = "step"
    """Word for a unit of experience."""

    algorithm: SerializeAsAny[AlgorithmCfg] = GRPOCfg()
    """The algorithm, found by its ``name``."""
    total_steps: PositiveInt | None = 100_000
    """The budget in environment steps, or tokens for text. Training stops at the end of the iteration that reaches it. None where another budget is given."""
    total_iterations: PositiveInt | None = None
    """The budget in iterations, in place of ``total_steps``."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of all randomness."""
    device: Annotated[str, Field(pattern=DEVICE)] = "cpu"
    """Device of the policy: ``cpu``, ``cuda``, ``cuda:1``, or ``auto`` (a GPU if there is one)."""
    ddp_timeout: Annotated[float, Gt(0)] = 1800.0
    """Seconds that processes of ``torchrun`` wait for one another; longer than evaluations and checkpoints, which rank 0 makes alone."""
    speed: Literal["auto", "off"] = "auto"
    """Fast paths. ``auto``: where they pay, updates are compiled from 20,000 optimiser steps on, and on a GPU rollouts of torch environments are one CUDA graph; ``off``: none, every step is computed by the code that the docs explain."""
    checkpoint_interval: PositiveInt | None = None
    """Steps between checkpoints. None: a tenth of the budget. Does not change what is learned."""
    keep_checkpoints: PositiveInt = 3
    """The latest checkpoints that stay on disk. If the last one is damaged, a run resumes from the one before."""
    stop: StopCfg = StopCfg()
    """Early stopping."""
    sampler_mismatch: SamplerMismatchCfg = SamplerMismatchCfg()
    """Limits of the KL between sampler and trainer."""
    logging: LoggingCfg = LoggingCfg()
    """Trackers and progress."""
    run_dir: Path | None = None
    """Folder of the run, new or empty. None: a new one under ``runs/``."""

    def with_progress(self, progress: str | None) -> Self:
        """These settings with another ``logging.progress``, if it is not None."""
        if progress is None:
            return self
        return self.model_copy(update={"logging": LoggingCfg(**dict(self.logging) | {"progress": progress})})

    @property
    def budget(self) -> Budget:
        """How long training lasts."""
        return Budget.only(**{name: getattr(self, name) for name in BUDGETS if name in type(self).model_fields})

    @property
    def subject(self) -> str:
        """Name of the environment or data, for folders and plots."""
        raise NotImplementedError

    @model_validator(mode="before")
    @classmethod
    def _default_budget(cls, data: Any) -> Any:
        """No default budget where another one is given."""
        if isinstance(data, dict) and "total_steps" not in data and any(data.get(name) is not None for name in BUDGETS):
            return data | {"total_steps": None}
        return data

    @model_validator(mode="after")
    def _check_algorithm(self) -> "CommonCfg":
        schedule, budget = self.algorithm.schedule, self.budget
        if isinstance(schedule, LinearCfg) and schedule.warmup >= max(1, budget.total):  # below 1 it is a share
            raise ValueError(
                f"algorithm.schedule.warmup={schedule.warmup} is not less than {budget.name}={budget.total:,}; "
                f"fix: a share of training below 1, or fewer {budget.unit}"
            )
        got = type(self.algorithm)
        if got is not AlgorithmCfg.named(self.algorithm.name):
            raise ValueError(f"{got.__name__} has no name of its own; fix: class {got.__name__}(..., name='my_name')")
        return self


class RunCfg(CommonCfg):
    """Settings of a run on an environment."""

    env: EnvCfg = EnvCfg()
    """The environment."""
    policy: SerializeAsAny[AnyPolicyCfg] = PolicyCfg()
    """The policy, with its parameters."""
    evaluation: EvaluationCfg = EvaluationCfg()
    """Evaluation during and after training."""

    @property
    def subject(self) -> str:
        """The environment's id."""
        return self.env.id

    @model_validator(mode="after")
    def _check(self) -> "RunCfg":
        algorithm = self.algorithm
        if algorithm.objective.ratio == "turn" and type(algorithm) in (GRPOCfg, PPOCfg):  # a user's own may have turns
            raise ValueError("algorithm.objective.ratio='turn' needs turn_id in the rollout; fix: ratio='token'")
        if self.env.start_mode == "none" and algorithm.groups.collection.noise == "shared":
            raise ValueError(
                "env.start_mode='none' gives members starts of their own, and algorithm.collection.noise='shared' equal ones; "
                "fix: noise='independent', or another start_mode"
            )
        credit = algorithm.credit if isinstance(algorithm, GRPOCfg) else CreditCfg()
        if credit.rule == "composed" and isinstance(credit.reward, PartsCfg) and not credit.reward.names:
            raise ValueError(
                "algorithm.credit.reward='parts' compares the parts of a reward, and its names are empty; "
                "fix: credit.reward.names=('reward_forward', ...), as the environment's info calls them"
            )
        if credit.remembers and getattr(self.policy, "normalize_reward", False):
            raise ValueError(
                "policy.normalize_reward=True changes the unit of rewards from update to update, and "
                "algorithm.credit.baseline='lstd' keeps sums of earlier ones; fix: policy.normalize_reward=False (these "
                "advantages do not need it), or baseline.decay=0"
            )
        _check_threshold(self.stop.threshold, self.evaluation.metric)
        return self


def text_subject(env: object, data: object) -> str:
    """A name for folders and plots of the environment, or of the file or task, that prompts come from."""
    name = str(env or data or "").rpartition(":")[2]
    return "text" if name.startswith("<") or not name else Path(name).stem


def _check_threshold(threshold: float | None, metric: EvaluationMetric) -> None:
    if metric == "success_rate" and threshold is not None and not 0 < threshold <= 1:
        raise ValueError(f"stop.threshold={threshold:g} is no success rate; fix: more than 0 and at most 1")


class TextRunCfg(CommonCfg):
    """Settings of a run on a language model."""

    score: ClassVar[str] = "reward"
    unit: ClassVar[str] = "token"

    task: TextTaskCfg = TextTaskCfg()
    """Prompts and rewards."""
    model: ModelCfg = ModelCfg()
    """The language model."""
    sampling: SamplingCfg = SamplingCfg()
    """How completions are sampled in training."""
    generation: SerializeAsAny[GenerationCfg] = NativeGenerationCfg()
    """Where completions are generated in training, by name or with its parameters: ``{"name": "server", "urls": ["http://127.0.0.1:8000"]}``."""
    engine: Literal["ddp", "fsdp"] = "ddp"
    """How several processes train together. ``ddp``: each holds everything that is trained; ``fsdp``: each holds a part of its parameters, gradients and optimiser state. The policy itself is whole in both."""
    cpu_offload: bool = False
    """Keep the parts of ``engine="fsdp"`` in the host's memory: parameters, gradients and optimiser state. The optimiser steps on the CPU, so updates are slower. It changes nothing where one process trains."""
    total_epochs: Positive | None = None
    """The budget in passes over the training prompts, in place of ``total_steps``."""
    num_prompts: PositiveInt = 8
    """Prompts per iteration, of each process. GRPO writes ``group_size`` completions of each."""
    mask_truncated_completions: bool = False
    """Leave completions cut at the length limit out of the loss. They stay members of their group."""
    overlong_buffer: Annotated[int, Ge(0)] = 0
    """Number of tokens before the length limit over which the reward falls linearly by up to 1 (DAPO). 0: no penalty."""
    evaluation: TextEvaluationCfg = TextEvaluationCfg()
    """Evaluation during and after training."""

    @property
    def subject(self) -> str:
        """Name of the environment, or of the file or task that the prompts come from."""
        return text_subject(self.task.env, self.task.data)

    @field_validator("evaluation")
    @classmethod
    def _complete_sampling(cls, evaluation: TextEvaluationCfg, info: ValidationInfo) -> TextEvaluationCfg:
        """The evaluation's sampling over that of training, which is absent where it is wrong itself."""
        own, training = evaluation.sampling, info.data.get("sampling")
        if own is None or training is None:
            return evaluation
        whole = SamplingCfg(**dict(training) | {name: vars(own)[name] for name in own.model_fields_set})
        return evaluation.model_copy(update={"sampling": whole})

    @model_validator(mode="after")
    def _check(self) -> "TextRunCfg":
        if self.cpu_offload and self.engine != "fsdp":
            raise ValueError("cpu_offload=True has no effect with engine='ddp'; fix: engine='fsdp'")
        if self.engine == "fsdp" and self.model.quantization != "none":
            raise ValueError("engine='fsdp' cannot divide the weights of model.quantization; fix: engine='ddp'")
        if self.generation.name != "native" and self.sampling.has_filters:
            raise ValueError(
                f"generation={self.generation.name!r} gives no tokens that top_k, top_p and min_p keep; "
                "fix: leave these out of sampling, or generation='native'"
            )
        penalty = self.sampling.presence_penalty
        if self.generation.name != "native" and abs(penalty) > 2:
            raise ValueError(f"sampling.presence_penalty={penalty:g}: vLLM takes -2 to 2; fix: generation='native'")
        _check_threshold(self.stop.threshold, self.evaluation.metric)
        if self.evaluation.metric == "success_rate" and self.task.env is None:
            raise ValueError("evaluation.metric='success_rate' needs episodes; fix: task.env, or metric='return'")
        if self.stop.threshold is not None and self.task.eval_data is None and not self.task.by_seeds:
            raise ValueError(f"stop.threshold={self.stop.threshold} needs held-out prompts; fix: task.eval_data")
        if self.overlong_buffer > (longest := self.sampling.max_new_tokens):
            raise ValueError(f"overlong_buffer={self.overlong_buffer} > max_new_tokens={longest}; fix: a smaller one")
        if (self.task.max_episode_tokens or longest) < longest:
            raise ValueError(
                f"task.max_episode_tokens={self.task.max_episode_tokens} is less than a turn, sampling.max_new_tokens={longest}; fix: a "
                "smaller max_new_tokens"
            )
        algorithm, objective = self.algorithm, self.algorithm.objective
        unread = self.sampling.changed("top_k", "top_p", "min_p", "min_new_tokens") | self.task.changed("env", "tools")
        unread |= self.changed("generation", "mask_truncated_completions", "overlong_buffer")
        for name, value in unread.items() if isinstance(algorithm, BCCfg) else ():
            raise ValueError(
                f"{name}={value!r} is of completions that a policy samples, and algorithm='bc' learns those of the data; fix: leave it "
                f"out{' (in evaluation.sampling it may stay)' * (name in SamplingCfg.model_fields)}"
            )
        grpo = algorithm if isinstance(algorithm, GRPOCfg) else GRPOCfg()
        credit, collection = grpo.credit, grpo.collection
        if not self.task.has_env and type(algorithm) in (GRPOCfg, PPOCfg):  # a user's own may have turns
            needs = "needs turns, and a completion is one without a tool or an environment; fix: task.tool or task.env"
            if objective.ratio == "turn":
                raise ValueError(f"algorithm.objective.ratio='turn' {needs}, or ratio='sequence'")
            if credit.rule == "composed" and credit.returns in ("turn", "turn_to_go"):
                raise ValueError(f"algorithm.credit.returns={credit.returns!r} {needs}, or credit.returns='outcome'")
        by_parts = credit.rule == "composed" and isinstance(credit.reward, PartsCfg)
        if by_parts and (credit.returns in ("turn", "turn_to_go") or self.overlong_buffer):
            name = "overlong_buffer" if self.overlong_buffer else f"algorithm.credit.returns={credit.returns!r}"
            raise ValueError(
                f"{name} has no effect on parts of a reward, which are known at the end of a completion; fix: credit.reward='total', or "
                "leave it out"
            )
        by_token = credit.returns == "process" or (
            credit.returns == "return_to_go" and (credit.group_key.name == "group_step" or grpo.gamma < 1)
        )
        if self.task.has_env and credit.rule == "composed" and by_token:
            raise ValueError(
                f"algorithm.credit.returns={credit.returns!r}, with group_key={credit.group_key.name!r} and "
                f"gamma={grpo.gamma:g}, counts tokens, and an environment answers turns of any length; fix: "
                "credit.returns='turn_to_go' with group_key='group_step'"
            )
        of_states = credit.baseline.states or (credit.baseline.name == "gigpo" and not self.task.has_env)
        if credit.rule == "composed" and of_states:
            raise ValueError(
                f"algorithm.credit.baseline={credit.baseline.name!r} compares states of an environment, and a text has none: its "
                "observations are single tokens; fix: baseline='mean', or for 'gigpo' a text environment (task.env, task.tools)"
            )
        if self.task.tool and (unread := collection.changed("on_env_error")):
            raise ValueError(
                f"algorithm.collection.on_env_error={unread['on_env_error']!r} is of environments, and an error of tool={self.task.tool!r} "
                "ends the run; fix: leave it out, and let the tool return a text"
            )
        names = ("noise", "horizon", "partial_groups", *(() if self.task.has_env else ("on_env_error",)))
        unread = algorithm.changed("num_steps")
        unread |= algorithm.changed("data", "holdout", "label_noise") if isinstance(algorithm, BCCfg) else {}
        unread |= {f"collection.{name}": value for name, value in collection.changed(*names).items()}
        unread |= {"credit.reward.names": grpo.reward_parts} if grpo.reward_parts else {}
        unread_gamma = type(algorithm) is GRPOCfg and not credit.discounts  # a user's own algorithm may discount
        if unread_gamma and algorithm.gamma != 1 and algorithm.changed("gamma"):
            raise ValueError(
                f"algorithm.gamma={algorithm.gamma:g} has no effect with credit.returns={credit.returns!r}; fix: leave it out"
            )
        for name, value in unread.items():
            raise ValueError(f"algorithm.{name}={value!r} has no effect on text; fix: leave it out")
        staleness = self.generation.max_staleness if isinstance(self.generation, ServerGenerationCfg) else 0
        corrected = objective.old_log_prob == "sampled" or objective.importance_sampling_correction.reweights
        if staleness and not corrected:
            raise ValueError(
                f"generation.max_staleness={staleness} needs the probabilities of earlier weights; "
                "fix: algorithm.objective={'importance_sampling_correction': 'tis', 'old_log_prob': 'recomputed'}, or "
                "{'old_log_prob': 'sampled'}"
            )
        if staleness and collection.dynamic_sampling is not None:
            raise ValueError(
                f"generation.max_staleness={staleness} asks for prompts before collection.dynamic_sampling has chosen; "
                "fix: dynamic_sampling=None, or max_staleness=0"
            )
        return self
