"""Settings of policies. Imports no torch and no transformers."""

from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Len, Lt
from pydantic import model_validator

from groupwise.config.base import Cfg, Positive, PositiveInt


class PolicyCfg(Cfg):
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
    normalize_obs: bool = False
    """Scale float observations to running mean 0 and standard deviation 1."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    init_from: Path | None = None
    """Run folder, or checkpoint, whose weights the policy begins with; a critic that is not in it starts fresh, and the statistics of observations stay as they are there. The run's settings of the policy replace those of the preset. None: random weights."""


class SamplingCfg(Cfg):
    """How completions are sampled in training. Training scores under the same distribution."""

    temperature: Positive = 1.0
    """Divides the logits."""
    top_k: Annotated[int, Ge(2), Le(64)] | None = None
    """Sample among the k most likely tokens only. They are stored, and training scores among them. None: all."""
    max_new_tokens: PositiveInt = 64
    """Longest completion, or longest turn, in tokens."""
    stop: tuple[Annotated[str, Len(1)], ...] = ()
    """Strings that end a completion; they stay part of it."""

    @classmethod
    def explain_unknown(cls, key: str) -> str:
        """The message for a key that is not a field; says where those of evaluation belong."""
        if key not in EvalSamplingCfg.model_fields:
            return super().explain_unknown(key)
        return (
            f"{key} is for evaluation only, because in training a sampled token can leave the set when the policy changes "
            "(log-probability -inf); fix: top_k, or evaluation.sampling"
        )


class EvalSamplingCfg(SamplingCfg):
    """How completions are sampled in evaluation."""

    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    """Sample among the most likely tokens whose probabilities add up to this. None: all."""
    min_p: Annotated[float, Gt(0), Lt(1)] | None = None
    """Sample among tokens at least this times as likely as the most likely one. None: all."""


class LoRACfg(Cfg):
    """Low-rank adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685)."""

    r: PositiveInt = 16
    """Rank."""
    alpha: Positive = 32.0
    """The output of an adapter is scaled by alpha / r."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Modules that get an adapter, by the ends of their names. ``all-linear``: every linear layer except the output head."""


class ModelCfg(Cfg):
    """The language model."""

    path: str = ""
    """Folder, or id of the Hugging Face hub, of the model and its tokenizer."""
    precision: Literal["float32", "bfloat16", "autocast"] = "float32"
    """``float32`` and ``bfloat16``: weights and computation; ``autocast``: weights in float32, matrix products in bfloat16."""
    quantization: Literal["none", "nf4", "int8"] = "none"
    """Quantise the weights below LoRA adapters (extra ``quant``)."""
    lora: LoRACfg | None = None
    """Train adapters. None: train all weights."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, a third more time."""

    @model_validator(mode="after")
    def _check_quantization(self) -> "ModelCfg":
        if self.quantization != "none" and self.lora is None:
            raise ValueError(
                f"quantization={self.quantization!r} needs adapters, as quantised weights are not trained; got lora=None, fix: lora={{'r': 16}}"
            )
        return self
