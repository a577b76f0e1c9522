"""Settings of policies. Imports no torch and no transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Len, Lt, MultipleOf
from pydantic import create_model, model_validator

from groupwise.config.base import Cfg, Choice, Keys, Positive, PositiveInt
from groupwise.errors import require_name


class AnyPolicyCfg(Choice, family="policy", default="actor_critic"):
    """Which policy. ``register_policy`` adds yours."""

    policy: ClassVar[type | None] = None
    """The ``Policy`` that ``register_policy`` gave these settings; it takes ``(observation_space, action_space, cfg, *, actor_only, gamma)``."""
    init_from: Path | None = None
    """Run folder, or checkpoint, whose weights the policy begins with; a critic that is not in it starts fresh, and the statistics of observations stay as they are there. The run's settings of the policy replace those of the preset. None: random weights."""


class PolicyCfg(AnyPolicyCfg, name="actor_critic"):
    """Networks, action distribution and normalisers of a control policy."""

    hidden_sizes: tuple[Annotated[int, Ge(1)], ...] = (64, 64)
    """Width of each hidden layer."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Activation function."""
    trunk: Literal["separate", "shared"] = "separate"
    """Whether actor and critic share all layers except their heads."""
    log_std_init: float = 0.0
    """Initial log standard deviation of Gaussian actions."""
    squash_output: bool = False
    """Squash Box actions into their bounds with tanh. False: clip them on their way to the environment."""
    actor_keys: Keys | None = None
    """Entries of a Dict observation that the actor reads. None: all."""
    critic_keys: Keys | None = None
    """Entries that the critic reads, and the states of the baselines ``knn`` and ``lstd``. None: all. Actor and critic with keys of their own share no layers."""
    normalize_obs: bool = False
    """Scale observations of floats, and of uint8 that are no images, to running mean 0 and standard deviation 1."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""

    @model_validator(mode="after")
    def _check_trunk(self) -> "PolicyCfg":
        if self.trunk == "shared" and (keys := self.changed("actor_keys", "critic_keys")):
            raise ValueError(f"trunk='shared' has one encoder, {', '.join(keys)} asks for two; fix: trunk='separate'")
        return self


T = TypeVar("T", bound=type)


def register_policy(name: str, cfg: type[AnyPolicyCfg] = PolicyCfg) -> Callable[[T], T]:
    """Class decorator that makes a ``Policy`` available as ``policy="name"``, also in files and on the command line.

    Args:
        cfg: the class of its settings, which the policy gets as its third argument; a subclass of ``AnyPolicyCfg`` or
            ``PolicyCfg`` if it has settings of its own.

    Raises:
        ConfigError: the name is taken, or missing.
    """
    require_name("policy", name)

    def register(policy: T) -> T:
        words: Any = {"__module__": policy.__module__, "__doc__": policy.__doc__, "__cls_kwargs__": {"name": name}}
        create_model(f"{policy.__name__}Cfg", __base__=cfg, **words).policy = policy
        return policy

    return register


class RecurrentCfg(PolicyCfg, name="recurrent"):
    """A control policy with a memory: an LSTM or GRU between encoder and layers. Actor and critic have one each, unless ``trunk`` is ``shared``."""

    cell: Literal["lstm", "gru"] = "lstm"
    """Kind of recurrent layer."""
    hidden_size: PositiveInt = 64
    """Width of the recurrent layer."""


class LoRACfg(Cfg):
    """Low-rank adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685)."""

    r: PositiveInt = 16
    """Rank."""
    alpha: Positive = 32.0
    """The output of an adapter is scaled by alpha / r."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) instead (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732)."""
    dora: bool = False
    """Train the norm of each output's weights, too (DoRA, Liu et al. 2024, https://arxiv.org/abs/2402.09353). vLLM servers take no such adapters."""
    init: Literal["kaiming", "gaussian", "orthogonal"] = "kaiming"
    """First weights, by peft: A uniform or Gaussian and B zero, or both orthogonal. The model begins as it was."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Modules that get an adapter, by the ends of their names. ``all-linear``: every linear layer except the output head."""

    @model_validator(mode="after")
    def _check_rank(self) -> "LoRACfg":
        if self.init == "orthogonal" and self.r % 2:
            raise ValueError(f"init='orthogonal' needs an even rank, got r={self.r}; fix: r={self.r + 1}")
        return self


class VLACfg(AnyPolicyCfg, name="vla", source="https://arxiv.org/abs/2502.19645"):
    """A vision-language-action policy: transformers' SigLIP and Llama, or a model of yours, with action tokens."""

    path: str = ""
    """Folder, or id of the Hugging Face hub, of a model for images and text. Empty: a new one, with random weights and the sizes below."""
    lora: LoRACfg | None = None
    """With ``path``: train adapters. None: train all weights."""
    hidden_size: Annotated[int, Ge(32), MultipleOf(32)] = 128
    """Width of a new model."""
    num_layers: PositiveInt = 3
    """Layers of the vision encoder, and of the language model, of a new model."""
    patch_size: PositiveInt = 8
    """Width of an image patch of a new model, in pixels. Four patches make a token."""
    bins: Annotated[int, Ge(2)] = 21
    """Tokens of each action dimension: numbers at equal distances from its lower to its upper bound, both included. An odd number has the middle (OpenVLA: 256)."""
    unit: Literal["token", "action", "chunk"] = "token"
    """Part of an action that has a probability ratio: each token, each action of the chunk, or the whole chunk, executed or not (RLinf's ``logprob_type``)."""
    temperature: Positive = 1.0
    """Divides the logits, in sampling and in training (SimpleVLA-RL and RLinf: 1.6)."""

    @model_validator(mode="after")
    def _check_path(self) -> "VLACfg":
        if not self.path and self.lora is not None:
            raise ValueError("lora trains adapters of the model in path, which is empty; fix: path='my_model'")
        if unread := self.path and self.changed("hidden_size", "num_layers", "patch_size"):
            raise ValueError(f"{', '.join(unread)}: of a new model, but path={self.path!r} is one; fix: leave it out")
        return self


MAX_KEPT = 1024
"""Most tokens that ``top_k``, ``top_p`` and ``min_p`` keep at a step."""


class SamplingCfg(Cfg):
    """How completions are sampled. Training scores under the same distribution; it stores the tokens that filters keep."""

    repetition_penalty: Positive = 1.0
    """Divides positive and multiplies negative logits of tokens that the prompt or the completion has. 1: none."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the completion, or the turn, has. 0: none."""
    temperature: Positive = 1.0
    """Divides the logits, after the penalties."""
    top_k: Annotated[int, Ge(2), Le(MAX_KEPT)] | None = None
    """Sample among the k most likely tokens only. None: all."""
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    """Sample among the most likely tokens whose probabilities add up to this, at most 1,024. None or 1: all."""
    min_p: Annotated[float, Ge(0), Lt(1)] | None = None
    """Sample among tokens at least this times as likely as the most likely one, at most 1,024. None or 0: all."""
    max_new_tokens: PositiveInt = 64
    """Longest completion, or longest turn, in tokens."""
    min_new_tokens: Annotated[int, Ge(0)] = 0
    """Tokens of a completion, or turn, before it may end: until then end-of-text tokens cannot be drawn, and stop strings do not count."""
    stop: tuple[Annotated[str, Len(1)], ...] = ()
    """Strings that end a completion; they stay part of it."""

    @model_validator(mode="after")
    def _check_lengths(self) -> "SamplingCfg":
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} > max_new_tokens={self.max_new_tokens}; fix: a smaller one"
            )
        return self

    @property
    def has_filters(self) -> bool:
        """Whether only some tokens can be drawn."""
        return self.top_k is not None or self.top_p not in (None, 1) or bool(self.min_p)

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the text by more than the model."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.min_new_tokens > 0


class ModelCfg(Cfg):
    """The language model."""

    path: str = ""
    """Folder, or id of the Hugging Face hub, of the model and its tokenizer."""
    init_from: Path | None = None
    """Run folder, or checkpoint, whose weights training begins with, as after ``algorithm="bc"``; a critic that is not in it starts fresh. Its settings of the model are those of this run, too, where they are not given."""
    precision: Literal["float32", "bfloat16", "autocast"] = "float32"
    """``float32`` and ``bfloat16``: weights and computation; ``autocast``: weights in float32, matrix products in bfloat16. ``bfloat16`` is for adapters, which stay in float32: weights trained in it lose small steps to rounding."""
    quantization: Literal["none", "nf4", "int8"] = "none"
    """Quantise the weights below LoRA adapters (extra ``quant``)."""
    lora: LoRACfg | None = None
    """Train adapters. None: train all weights."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, a third more time."""

    @model_validator(mode="after")
    def _check_quantization(self) -> "ModelCfg":
        if self.quantization != "none" and self.lora is None:
            raise ValueError(f"quantization={self.quantization!r} needs adapters; got lora=None, fix: lora={{'r': 16}}")
        if self.quantization != "none" and self.lora is not None and self.lora.init == "orthogonal":
            raise ValueError("lora.init='orthogonal' is not for quantised weights; fix: 'kaiming' or 'gaussian'")
        if self.quantization == "int8" and self.lora is not None and self.lora.dora:
            raise ValueError("lora.dora=True is not for quantization='int8'; fix: quantization='nf4', or dora=False")
        return self
