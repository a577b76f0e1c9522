"""A vision-language-action policy: images, an instruction and proprioception to a chunk of action tokens.

Each dimension of each action is one of ``bins`` tokens, at equal distances between its bounds. All tokens of a chunk come from
one forward pass, by a learned query each, and are drawn independently given the observation (OpenVLA-OFT's parallel decoding,
https://arxiv.org/abs/2502.19645). Nothing here is pretrained unless the model is the user's.
"""

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from groupwise.config.policy import LoRACfg, VLACfg
from groupwise.data.rollout import Nested, TensorSpec
from groupwise.data.spaces import is_batched, obs_to_tensor, space_kind, subspaces
from groupwise.embodied.chunks import executed_actions
from groupwise.embodied.vision_language import ObsSizes, make_model
from groupwise.errors import UnsupportedSpaceError
from groupwise.policies.base import Action, Batch, Evaluation, Policy
from groupwise.policies.discrete_heads import Categorical

_HEAD_STD = 0.01
_DEFAULT = VLACfg()


class VLAPolicy(Policy):
    """Acts by tokens; each has a probability ratio, or each action, or the chunk (``cfg.unit``).

    The policy's own action, which the rollout stores, is the tokens ``[C, A]``. Log-probabilities are in float32, of the
    distribution at ``cfg.temperature``. Images stay uint8 until the model reads them.

    Args:
        observation_space: a Dict of ``image`` uint8 [views, H, W, 3], ``proprio`` float [P], ``instruction`` uint8 [L].
        action_space: a bounded Box of floats, ``[A]`` or a chunk of them ``[C, A]``.
        actor_only: False adds a value head: a linear layer on the mean of the queries, 0 at first.
        gamma: not used: rewards are not scaled.

    Raises:
        UnsupportedSpaceError: other spaces; says what is missing.
        ConfigError: the model and the images do not fit, or there is no such model.
        MissingExtraError: transformers or peft are not installed.
    """

    scored_by = "token"
    gives_distribution = False
    value_modules = ("value_head",)

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        cfg: VLACfg = _DEFAULT,
        *,
        actor_only: bool = False,
        gamma: float = 0.99,
    ) -> None:
        super().__init__()
        sizes = obs_sizes(observation_space)
        low, high = _bounds(action_space)
        self.observation_space, self.action_space = observation_space, action_space
        self.cfg = cfg
        self.actor_only = actor_only
        self.num_actions, self.num_dims = low.shape
        self.num_units = {"token": low.numel(), "action": len(low), "chunk": 1}[cfg.unit]
        self.action_spec = TensorSpec(tuple(low.shape), torch.int64)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        self.low: Tensor
        self.high: Tensor
        self.distribution = Categorical(cfg.bins)
        self.model = make_model(sizes, cfg)
        width = self.model.width
        self.queries = nn.Parameter(0.02 * torch.randn(low.numel(), width))
        self.token_head = nn.Linear(width, cfg.bins)
        nn.init.normal_(self.token_head.weight, std=_HEAD_STD)
        nn.init.zeros_(self.token_head.bias)
        self.value_head = None if actor_only else nn.Linear(width, 1)
        if self.value_head is not None:
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        if cfg.lora is not None:  # the frozen weights are those of ``cfg.path``
            self._saved = {name for name, p in self.named_parameters() if p.requires_grad}
            self.register_state_dict_post_hook(_keep_trained)  # type: ignore[no-untyped-call]
            self.register_load_state_dict_post_hook(_expect_trained)  # type: ignore[no-untyped-call]
        self.eval()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        observation_space: Any,
        action_space: Any,
        *,
        lora: LoRACfg | None = None,
        actor_only: bool = False,
        **settings: Any,
    ) -> "VLAPolicy":
        """A policy on a model for images and text: a folder, or an id of the hub. Its action tokens are new.

        Args:
            lora: train adapters. None: train all weights.
            settings: further fields of ``VLACfg``: ``bins``, ``unit``, ``temperature``.
        """
        cfg = VLACfg(path=str(path), lora=lora, **settings)
        return cls(observation_space, action_space, cfg, actor_only=actor_only)

    @torch.no_grad()
    def act(self, obs: Nested, deterministic: bool = False, generator: torch.Generator | None = None) -> Action:
        """Tokens ``[B, C, A]`` for B observations, without gradient; ``deterministic`` takes the likeliest ones."""
        logits, value = self._forward(obs)
        tokens = self.distribution.mode(logits) if deterministic else self.distribution.sample(logits, generator)
        log_prob = self._of_units(self.distribution.log_prob(logits, tokens))
        return Action(tokens.reshape(-1, *self.action_spec.shape), log_prob, value)  # type: ignore[union-attr]

    def evaluate(self, batch: Batch) -> Evaluation:
        """Scores of the tokens, with gradient: log_prob and entropy ``[B, K]``, value ``[B]``."""
        logits, value = self._forward(batch["obs"])
        log_prob, entropy = self.distribution.score(logits, batch["action"].flatten(1))
        return Evaluation(self._of_units(log_prob), self._of_units(entropy), value)

    @torch.no_grad()
    def value(self, obs: Nested) -> Tensor:
        """V(obs) of shape [B], without gradient."""
        value = self._forward(obs)[1]
        return super().value(obs) if value is None else value

    @torch.no_grad()
    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """Environment actions for one observation or a batch of them: numpy in, numpy out.

        Raises:
            DataError: an observation that does not fit the space.
        """
        batched = is_batched(self.observation_space, obs)
        tensor = obs_to_tensor(self.observation_space, obs, self.device, batched=batched)
        tokens = self.act(tensor if batched else tensor.unsqueeze(0), deterministic).action
        array = self.env_action(tokens).cpu().numpy().astype(self.action_space.dtype, copy=False)
        return array if batched else array[0]

    def unit_mask(self, batch: Batch) -> Bool[Tensor, "*batch unit"]:
        """The units of actions that were executed; a whole chunk counts if any was."""
        executed = executed_actions(batch, self.num_actions)
        match self.cfg.unit:
            case "token":
                return executed.repeat_interleave(self.num_dims, dim=-1)
            case "action":
                return executed
            case "chunk":
                return executed.any(dim=-1, keepdim=True)

    def env_action(self, action: Int[Tensor, "*batch action dim"]) -> Float[Tensor, "..."]:
        """The numbers that the tokens stand for, ``[*batch, *action_space.shape]``."""
        share = action.to(self.low.dtype) / (self.cfg.bins - 1)
        return torch.lerp(self.low, self.high, share).reshape(*action.shape[:-2], *self.action_space.shape)

    def own_action(self, action: Float[Tensor, "..."]) -> Int[Tensor, "*batch action dim"]:
        """The nearest tokens of environment actions ``[*batch, *action_space.shape]``: for cloning demonstrations."""
        batch = action.shape[: action.dim() - len(self.action_space.shape)]
        share = (action.reshape(*batch, *self.low.shape) - self.low) / (self.high - self.low)
        return (share * (self.cfg.bins - 1)).round().long().clamp(0, self.cfg.bins - 1)

    def _forward(self, obs: Nested) -> tuple[Float[Tensor, "batch token bin"], Float[Tensor, " batch"] | None]:
        """Logits of every token at the temperature, and the value if there is a critic."""
        hidden = self.model(obs, self.queries)
        logits = self.token_head(hidden).float() / self.cfg.temperature
        if self.value_head is None:
            return logits, None
        value: Tensor = self.value_head(hidden.mean(dim=1)).float()
        return logits, value.squeeze(-1)

    def _of_units(self, score: Float[Tensor, "batch token"]) -> Float[Tensor, "batch unit"]:
        """Sums over the tokens of each unit."""
        return score if self.cfg.unit == "token" else score.reshape(len(score), self.num_units, -1).sum(dim=-1)


def obs_sizes(space: Any) -> ObsSizes:
    """Sizes of a robot's observation.

    Raises:
        UnsupportedSpaceError: the space is another one; names the part that is missing or wrong.
    """
    parts = subspaces(space) if space_kind(space) == "dict" else None
    form = {"image": ("uint8", 4), "proprio": ("f", 1), "instruction": ("uint8", 1)}
    fix = (
        "fix: a Dict of image uint8 [views, H, W, 3], proprio float [P] and instruction uint8 [L] (UTF-8, zero-padded)"
    )
    if parts is None or parts.keys() != form.keys():
        found = space if parts is None else f"a Dict of {', '.join(parts)}"
        raise UnsupportedSpaceError(f"a VLA policy observes image, proprio and instruction, got {found}; {fix}")
    for name, (dtype, num_dims) in form.items():
        part = parts[name]
        is_it = space_kind(part) == "box" and dtype in (part.dtype.name, part.dtype.kind)
        if not is_it or len(part.shape) != num_dims or (name == "image" and part.shape[-1] != 3):
            raise UnsupportedSpaceError(f"a VLA policy cannot read {name!r} of {part}; {fix}")
    views, height, width, _ = parts["image"].shape
    return ObsSizes(views, height, width, parts["proprio"].shape[0])


def _bounds(space: Any) -> tuple[Float[Tensor, "action dim"], Float[Tensor, "action dim"]]:
    """Bounds of each dimension of each action of a chunk."""
    is_box = space_kind(space) == "box" and space.dtype.kind == "f" and len(space.shape) in (1, 2)
    if not is_box or not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise UnsupportedSpaceError(
            f"action tokens need a bounded Box of floats [A], or a chunk of them [C, A], got {space}; fix: "
            "gymnasium.wrappers.RescaleAction or TransformAction"
        )
    low, high = (
        torch.from_numpy(bound.astype(np.float32)).reshape(-1, space.shape[-1]) for bound in (space.low, space.high)
    )
    return low, high


def _keep_trained(
    policy: VLAPolicy, state: MutableMapping[str, Tensor], prefix: str, metadata: Mapping[str, Any]
) -> None:
    """Remove the frozen weights of the model below adapters from a state dict."""
    for name in [name for name in state if name.startswith(prefix) and name.removeprefix(prefix) not in policy._saved]:
        del state[name]


def _expect_trained(policy: VLAPolicy, keys: Any) -> None:
    """Do not report as missing what ``_keep_trained`` removes."""
    keys.missing_keys[:] = [name for name in keys.missing_keys if name in policy._saved]
