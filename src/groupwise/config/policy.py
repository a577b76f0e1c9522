"""Settings of policies. Imports no torch and no transformers."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Len, Lt
from pydantic import model_validator

from groupwise.config.base import Cfg, Positive, PositiveInt


class PolicyCfg(Cfg):
    """Networks, action distribution and normalisers of a control policy."""

    hidden_sizes: tuple[Annotated[int, Ge(1)], ...] = (64, 64)
    """Width of each hidden layer."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Between layers."""
    trunk: Literal["separate", "shared"] = "separate"
    """Whether actor and critic share everything but their heads."""
    log_std_init: float = 0.0
    """Initial log deviation of Gaussian actions (Box spaces)."""
    squash_output: bool = False
    """Bounded Box actions: squash the Gaussian's sample into the box by tanh, in place of clipping it on its way to the environment."""
    normalize_obs: bool = False
    """Scale observations to running mean 0 and deviation 1 (float observations only)."""
    normalize_reward: bool = False
    """Divide rewards by the running deviation of the discounted return."""


class SamplingCfg(Cfg):
    """How a language model writes completions in training. Training scores under exactly this distribution."""

    temperature: Positive = 1.0
    """Divides the logits."""
    top_k: Annotated[int, Ge(2), Le(64)] | None = None
    """Only so many of the likeliest tokens can be drawn; they are stored with each token, and training scores among them. None: all."""
    max_new_tokens: PositiveInt = 64
    """A completion is cut (truncated) after so many tokens; over several turns, each turn's part of it."""
    stop: tuple[Annotated[str, Len(1)], ...] = ()
    """Texts that end a completion, which keeps them."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_nucleus(cls, data: object) -> object:
        if isinstance(data, dict) and "top_p" not in cls.model_fields:
            for key in ("top_p", "min_p"):
                if data.get(key) is not None:
                    raise ValueError(
                        f"{key}={data[key]!r} is for evaluation only: as the policy changes, a drawn token can leave the "
                        "set that it keeps, and its log-probability would be minus infinity; fix: top_k, or evaluation.sampling"
                    )
        return data


class EvalSamplingCfg(SamplingCfg):
    """How a language model writes completions in evaluation, whose tokens nobody scores."""

    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    """Only the likeliest tokens whose probabilities add up to this can be drawn. None: all."""
    min_p: Annotated[float, Gt(0), Lt(1)] | None = None
    """Only tokens can be drawn that are at least this times as likely as the likeliest. None: all."""


class LoRACfg(Cfg):
    """Low-rank adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685) in place of training every weight."""

    r: PositiveInt = 16
    """Rank of each adapter."""
    alpha: Positive = 32.0
    """The adapter's output counts alpha / r times."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Modules that get an adapter, by the ends of their names; ``all-linear``: every linear layer but the output head."""


class ModelCfg(Cfg):
    """Which language model is trained, and how it is held in memory."""

    path: str = ""
    """Folder or hub id, as transformers takes it; its tokenizer lies with it."""
    precision: Literal["float32", "bfloat16", "autocast"] = "float32"
    """``float32`` and ``bfloat16``: of weights and computation; ``autocast``: weights in float32, matrix products in bfloat16."""
    quantization: Literal["none", "nf4", "int8"] = "none"
    """Of the weights below LoRA adapters, by bitsandbytes (extra ``quant``)."""
    lora: LoRACfg | None = None
    """Train adapters. None: every weight."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass, which then computes the layer again: less memory, a third more time."""

    @model_validator(mode="after")
    def _check_quantization(self) -> "ModelCfg":
        if self.quantization != "none" and self.lora is None:
            raise ValueError(
                f"quantization={self.quantization!r} holds weights that cannot be trained; got lora=None, fix: lora={{'r': 16}}"
            )
        return self
