"""The settings of a run: ``RunCfg`` for environments, ``TextRunCfg`` for texts. Imports no torch."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Gt
from pydantic import Field, SerializeAsAny, model_validator

from groupwise.config.algorithm import AlgorithmCfg, BCCfg, GRPOCfg, LinearCfg, PPOCfg
from groupwise.config.base import Cfg, Positive, PositiveInt
from groupwise.config.budget import BUDGETS, Budget
from groupwise.config.credit import CreditCfg, PartsCfg
from groupwise.config.env import EnvCfg
from groupwise.config.generation import GenerationCfg, NativeGenerationCfg, ServerGenerationCfg
from groupwise.config.policy import AnyPolicyCfg, ModelCfg, PolicyCfg, SamplingCfg
from groupwise.config.text import TextTaskCfg
from groupwise.config.trackers import TrackerCfg

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
    """How completions are sampled. None: as in training."""
    num_logged_groups: Annotated[int, Ge(0)] = 8
    """Groups of the rollout that are kept with each evaluation, in ``groups/`` of the run folder. 0: none."""

    @model_validator(mode="after")
    def _check_completions(self) -> "TextEvaluationCfg":
        if self.deterministic and self.completions_per_prompt > 1:
            raise ValueError(
                f"completions_per_prompt={self.completions_per_prompt} of a deterministic policy are all the same; fix: deterministic=False"
            )
        return self


class StopCfg(Cfg):
    """When training ends before its budget."""

    threshold: float | None = None
    """Stop when an evaluation reaches this score: mean return or success rate, as ``evaluation.metric`` says; for text the mean reward. None: never."""
    time_limit: Annotated[float, Gt(0)] | None = None
    """Seconds of training after which it stops, at the end of the iteration. None: no limit."""


class LoggingCfg(Cfg):
    """Where metrics go besides ``metrics.jsonl``, and what the terminal shows."""

    report_to: tuple[SerializeAsAny[TrackerCfg], ...] = ()
    """Trackers that also get the metrics, each by name or with its parameters: ``[{"name": "wandb", "project": "arms"}]``."""
    progress: Literal["auto", "bar", "lines", "iterations", "none"] = "auto"
    """``bar``: live; ``lines``: a plain line now and then; ``iterations``: one for each iteration; ``auto``: a bar on a terminal, otherwise lines; ``none``."""

    @model_validator(mode="after")
    def _check(self) -> "LoggingCfg":
        names = [tracker.name for tracker in self.report_to]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"report_to names {twice[0]!r} {len(twice)} times; fix: once")
        return self


class SamplerMismatchCfg(Cfg):
    """Limits of the KL between sampler and trainer at the start of an update, in nats per token."""

    warn: Positive = 0.01
    """Warn once above this."""
    stop: Positive | None = 0.1
    """Stop training above this and keep the last checkpoint. None: never."""


class CommonCfg(Cfg):
    """Settings of every run."""

    algorithm: SerializeAsAny[AlgorithmCfg] = GRPOCfg()
    """The algorithm, found by its ``name``."""
    total_steps: PositiveInt | None = 100_000
    """The budget in environment steps, or tokens for text. Training stops at the end of the iteration that reaches it. None where another budget is given."""
    total_iterations: PositiveInt | None = None
    """The budget in iterations, in place of ``total_steps``."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of all randomness."""
    device: Annotated[str, Field(pattern=r"^(cpu|auto|cuda(:\d+)?)$")] = "cpu"
    """Device of the policy: ``cpu``, ``cuda``, ``cuda:1``, or ``auto`` (a GPU if there is one)."""
    ddp_timeout: Annotated[float, Gt(0)] = 1800.0
    """Seconds that processes of ``torchrun`` wait for one another; longer than evaluations and checkpoints, which rank 0 makes alone."""
    speed: Literal["auto", "off"] = "auto"
    """Fast paths. ``auto``: where they pay, updates are compiled from 20,000 optimiser steps on; ``off``: none, every step is computed by the code that the docs explain."""
    checkpoint_interval: PositiveInt | None = None
    """Steps between checkpoints. None: a tenth of the budget. Does not change what is learned."""
    keep_checkpoints: PositiveInt = 3
    """The latest checkpoints that stay on disk. If the last one is damaged, a run resumes from the one before."""
    stop: StopCfg = StopCfg()
    """Early stopping."""
    logging: LoggingCfg = LoggingCfg()
    """Trackers and progress."""
    run_dir: Path | None = None
    """Folder of the run, new or empty. None: a new one under ``runs/``."""

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
        if isinstance(schedule, LinearCfg) and schedule.warmup >= budget.total:
            raise ValueError(
                f"algorithm.schedule.warmup={schedule.warmup} is not less than {budget.name}={budget.total:,}; fix: a share of "
                f"training below 1, or fewer {budget.unit}"
            )
        expected = AlgorithmCfg.named(self.algorithm.name)
        if type(self.algorithm) is not expected:
            got = type(self.algorithm).__name__
            raise ValueError(
                f"algorithm {self.algorithm.name!r} is registered for {expected.__name__}, got {got}; fix: register_algorithm({got})"
            )
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

    def expected_steps(self, world_size: int = 1) -> int:
        """Environment steps of the run, or about as many where the budget is one of iterations."""
        if self.total_steps is not None:
            return self.total_steps
        return (self.total_iterations or 0) * self.env.num_envs * self.algorithm.num_steps * world_size

    @model_validator(mode="after")
    def _check(self) -> "RunCfg":
        algorithm = self.algorithm
        if algorithm.objective.ratio == "turn" and type(algorithm) in (GRPOCfg, PPOCfg):  # a user's own may have turns
            raise ValueError(
                "algorithm.objective.ratio='turn' needs turn_id in the rollout, which environments do not give; fix: "
                "ratio='token' or 'sequence', another preset, or GRPO by hand on rollouts that have turn_id"
            )
        credit = algorithm.credit if isinstance(algorithm, GRPOCfg) else CreditCfg()
        if credit.rule == "composed" and isinstance(credit.reward, PartsCfg) and not credit.reward.names:
            raise ValueError(
                "algorithm.credit.reward='parts' compares the parts of a reward, and its names are empty; fix: "
                "credit.reward.names=('reward_forward', ...), as the environment's info calls them, or credit.reward='total'"
            )
        threshold = self.stop.threshold
        if self.evaluation.metric == "success_rate" and threshold is not None and not 0 < threshold <= 1:
            raise ValueError(
                f"stop.threshold={threshold:g} is no success rate, which evaluation.metric='success_rate' compares it with; "
                "fix: more than 0 and at most 1, or evaluation.metric='return'"
            )
        return self


class TextRunCfg(CommonCfg):
    """Settings of a run on a language model."""

    task: TextTaskCfg = TextTaskCfg()
    """Prompts and rewards."""
    model: ModelCfg = ModelCfg()
    """The language model."""
    sampling: SamplingCfg = SamplingCfg()
    """How completions are sampled in training."""
    generation: SerializeAsAny[GenerationCfg] = NativeGenerationCfg()
    """What generates completions in training, by name or with its parameters: ``{"name": "server", "urls": ["http://127.0.0.1:8000"]}``."""
    engine: Literal["ddp", "fsdp"] = "ddp"
    """How several processes train together. ``ddp``: each holds all of what is trained; ``fsdp``: a part of its parameters, gradients and optimiser state. The policy itself is whole in both."""
    cpu_offload: bool = False
    """Keep the parts of ``engine="fsdp"`` in the host's memory: parameters, gradients and optimiser state. The optimiser steps on the CPU, so updates are slower. It changes nothing where one process trains."""
    total_epochs: Positive | None = None
    """The budget in passes over the training prompts, in place of ``total_steps``."""
    num_prompts: PositiveInt = 8
    """Prompts per iteration. GRPO writes ``group_size`` completions of each."""
    mask_truncated_completions: bool = False
    """Leave completions cut at the length limit out of the loss. They stay members of their group."""
    overlong_buffer: Annotated[int, Ge(0)] = 0
    """Number of tokens before the length limit over which the reward falls linearly by up to 1 (DAPO). 0: no penalty."""
    sampler_mismatch: SamplerMismatchCfg = SamplerMismatchCfg()
    """Limits of the KL between sampler and trainer."""
    evaluation: TextEvaluationCfg = TextEvaluationCfg()
    """Evaluation during and after training."""

    @property
    def subject(self) -> str:
        """Name of the file or task that the prompts come from."""
        name = self.task.data.rpartition(":")[2]
        return "text" if name.startswith("<") or not name else Path(name).stem

    @model_validator(mode="after")
    def _check(self) -> "TextRunCfg":
        if isinstance(self.algorithm, BCCfg):
            raise ValueError(
                "algorithm='bc' clones demonstrations in environments; fix: train on texts by grpo, or fine-tune by another library"
            )
        if self.task.tool is None and type(self.algorithm) in (GRPOCfg, PPOCfg):
            self._check_turns()
        unread = self.algorithm.changed("num_steps")
        if isinstance(self.algorithm, GRPOCfg):
            names = ("noise", "horizon", "partial_groups", "on_env_error")
            unread |= {f"collection.{name}": value for name, value in self.algorithm.collection.changed(*names).items()}
            if self.algorithm.reward_parts:
                unread["credit.reward.names"] = self.algorithm.reward_parts
        for name, value in unread.items():
            raise ValueError(f"algorithm.{name}={value!r} has no effect on text; fix: leave it out")
        self._check_discount()
        if self.cpu_offload and self.engine != "fsdp":
            raise ValueError(
                f"cpu_offload=True has no effect with engine={self.engine!r}; fix: engine='fsdp', or cpu_offload=False"
            )
        if self.engine == "fsdp" and self.model.quantization != "none":
            raise ValueError(
                f"engine='fsdp' cannot divide weights with model.quantization={self.model.quantization!r}; fix: 'none', or "
                "engine='ddp'"
            )
        if self.generation.name != "native" and self.sampling.has_filters:
            raise ValueError(
                f"generation={self.generation.name!r} gives no tokens that top_k, top_p and min_p keep, among which training "
                "scores; fix: leave these out of sampling, or generation='native'"
            )
        if isinstance(self.generation, ServerGenerationCfg) and self.generation.max_staleness:
            self._check_stale_rollouts(self.generation.max_staleness)
        if self.stop.threshold is not None and self.task.eval_data is None:
            raise ValueError(f"stop.threshold={self.stop.threshold} needs held-out prompts; fix: task.eval_data")
        if self.overlong_buffer > self.sampling.max_new_tokens:
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer} is more than sampling.max_new_tokens={self.sampling.max_new_tokens}; "
                "fix: a smaller one"
            )
        return self

    def _check_stale_rollouts(self, staleness: int) -> None:
        objective = self.algorithm.objective
        if objective.old_log_prob == "recomputed" and not objective.importance_sampling_correction.reweights:
            raise ValueError(
                f"generation.max_staleness={staleness} trains on completions of earlier weights, whose probabilities "
                "algorithm.objective.old_log_prob='recomputed' alone leaves out; fix: "
                "algorithm.objective.importance_sampling_correction='tis', or old_log_prob='sampled'"
            )
        if isinstance(self.algorithm, GRPOCfg) and self.algorithm.collection.dynamic_sampling is not None:
            raise ValueError(
                f"generation.max_staleness={staleness} has the next prompts written before it is known how many "
                "collection.dynamic_sampling takes; fix: dynamic_sampling=None, or max_staleness=0"
            )

    def _check_discount(self) -> None:
        algorithm = self.algorithm
        if type(algorithm) is not GRPOCfg or algorithm.credit.discounts:  # a user's own may discount
            return
        if "gamma" in algorithm.model_fields_set and algorithm.gamma != 1:
            raise ValueError(
                f"algorithm.gamma={algorithm.gamma:g} has no effect with credit.returns={algorithm.credit.returns!r}; fix: leave it "
                "out, or credit.returns='return_to_go'"
            )

    def _check_turns(self) -> None:
        needs = "needs turns, and without a tool a completion is one turn; fix: task.tool"
        if self.algorithm.objective.ratio == "turn":
            raise ValueError(f"algorithm.objective.ratio='turn' {needs}, or ratio='sequence'")
        credit = self.algorithm.credit if isinstance(self.algorithm, GRPOCfg) else CreditCfg()
        if credit.rule == "composed" and credit.returns == "turn":
            raise ValueError(f"algorithm.credit.returns='turn' {needs}, or credit.returns='outcome'")
