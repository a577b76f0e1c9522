"""A vision-language-action policy: images, an instruction and proprioception to a chunk of action tokens.

Each dimension of each action is one of ``bins`` tokens, at equal distances between its bounds. All tokens of a chunk come from
one forward pass, by a learned query each, and are drawn independently given the observation (OpenVLA-OFT's parallel decoding,
https://arxiv.org/abs/2502.19645). Nothing here is pretrained unless the model is the user's.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from groupwise.config.policy import VLACfg
from groupwise.data.rollout import Nested, TensorSpec
from groupwise.embodied.chunks import executed_actions
from groupwise.embodied.robot_policy import RobotPolicy
from groupwise.embodied.vision_language import NewModel, PretrainedModel
from groupwise.policies.base import Action, Batch, Evaluation
from groupwise.policies.discrete_heads import Categorical

_HEAD_STD = 0.01
_DEFAULT = VLACfg()


class VLAPolicy(RobotPolicy):
    """Acts by tokens; each has a probability ratio, or each action, or the chunk (``cfg.unit``).

    The policy's own action, which the rollout stores, is the tokens ``[C, A]``. Log-probabilities are in float32, of the
    distribution at ``cfg.temperature``. Images stay uint8 until the model reads them.

    The value head reads the mean of the queries. Arguments and errors are those of ``RobotPolicy``.
    """

    settings = VLACfg
    scored_by = "token"
    cfg: VLACfg

    def __init__(self, observation_space: Any, action_space: Any, cfg: VLACfg = _DEFAULT, **arguments: Any) -> None:
        super().__init__(observation_space, action_space, cfg, **arguments)
        num_tokens = self.low.numel()
        self.num_units = {"token": num_tokens, "action": self.num_actions, "chunk": 1}[cfg.unit]
        self.action_spec = TensorSpec((self.num_actions, self.num_dims), torch.int64)
        self.distribution = Categorical(cfg.bins)
        self.model = PretrainedModel(cfg.path, cfg.lora, self.sizes) if cfg.path else NewModel(self.sizes, cfg)
        width = self.model.width
        self.queries = nn.Parameter(0.02 * torch.randn(num_tokens, width))
        self.token_head = nn.Linear(width, cfg.bins)
        nn.init.normal_(self.token_head.weight, std=_HEAD_STD)
        nn.init.zeros_(self.token_head.bias)
        self.value_head = self._make_value_head(width)
        if cfg.lora is not None:  # the frozen weights are those of ``cfg.path``
            self._saved = {name for name, p in self.named_parameters() if p.requires_grad}
            self.register_state_dict_post_hook(_keep_trained)  # type: ignore[no-untyped-call]
            self.register_load_state_dict_post_hook(_expect_trained)  # type: ignore[no-untyped-call]
        self.eval()

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
        return self._from_share(action.to(self.low.dtype) / (self.cfg.bins - 1))

    def own_action(self, action: Float[Tensor, "..."]) -> Int[Tensor, "*batch action dim"]:
        """The nearest tokens of environment actions ``[*batch, *action_space.shape]``: for cloning demonstrations."""
        return (self._to_share(action) * (self.cfg.bins - 1)).round().long().clamp(0, self.cfg.bins - 1)

    def _forward(self, obs: Nested) -> tuple[Float[Tensor, "batch token bin"], Float[Tensor, " batch"] | None]:
        """Logits of every token at the temperature, and the value if there is a critic."""
        hidden = self.model(obs, self.queries)
        return self.token_head(hidden).float() / self.cfg.temperature, self._value(hidden.mean(dim=1))

    def _summary(self, obs: Nested) -> Float[Tensor, "batch feature"]:
        summary: Tensor = self.model(obs, self.queries).mean(dim=1)
        return summary

    def _of_units(self, score: Float[Tensor, "batch token"]) -> Float[Tensor, "batch unit"]:
        """Sums over the tokens of each unit."""
        return score if self.cfg.unit == "token" else score.reshape(len(score), self.num_units, -1).sum(dim=-1)


def _keep_trained(
    policy: VLAPolicy, state: MutableMapping[str, Tensor], prefix: str, metadata: Mapping[str, Any]
) -> None:
    """Remove the frozen weights of the model below adapters from a state dict."""
    for name in [name for name in state if name.startswith(prefix) and name.removeprefix(prefix) not in policy._saved]:
        del state[name]


def _expect_trained(policy: VLAPolicy, keys: Any) -> None:
    """Do not report as missing what ``_keep_trained`` removes."""
    keys.missing_keys[:] = [name for name in keys.missing_keys if name in policy._saved]
