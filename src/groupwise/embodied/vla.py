"""A vision-language-action policy: images, an instruction and proprioception to a chunk of action tokens.

Each dimension of each action is one of ``bins`` tokens, at equal distances between its bounds. All tokens of a chunk come from
one forward pass, by a learned query each, and are drawn independently given the observation (OpenVLA-OFT's parallel decoding,
https://arxiv.org/abs/2502.19645). Nothing here is pretrained unless the model is the user's.
"""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from groupwise.config.load import ADAPTER_CONFIG
from groupwise.config.policy import LoRACfg, VLACfg
from groupwise.data.rollout import Nested, TensorDict, TensorSpec
from groupwise.data.spaces import space_kind, subspaces
from groupwise.errors import ConfigError, DataError, UnsupportedSpaceError, require_extra
from groupwise.policies.actor_critic import ActorCritic
from groupwise.policies.base import Action, Batch, Evaluation, Policy
from groupwise.policies.heads import Categorical, inner_float32, make_head
from groupwise.system import limiting

HEAD_WIDTH = 32


class NewModel(nn.Module):
    """transformers' SigLIP and Llama with random weights.

    A token is 2 x 2 image patches, a byte of the instruction, or the proprioception. Attention is bidirectional: every query
    sees the whole observation and the other queries. The instruction stands last, so its padding moves no other token.

    Args:
        image: views, height, width and channels of the images.
        proprio: size of the proprioception.

    Raises:
        ConfigError: images are not square, or no multiple of two patches.
    """

    def __init__(self, image: tuple[int, ...], proprio: int, cfg: VLACfg) -> None:
        from transformers import LlamaConfig, LlamaModel, SiglipVisionConfig, SiglipVisionModel

        super().__init__()
        views, height, wide, _ = image
        if height != wide or height % (2 * cfg.patch_size):
            raise ConfigError(
                f"images of {height} x {wide} pixels are not squares made of 2 x 2 patches of "
                f"policy.patch_size={cfg.patch_size}; fix: square images, or another patch_size"
            )
        self.width = width = cfg.hidden_size
        layers = {"hidden_size": width, "num_hidden_layers": cfg.num_layers, "num_attention_heads": width // HEAD_WIDTH}
        # SigLIP's own activation approximates "gelu" by tanh, which takes five times as long on a CPU
        vision = {
            "intermediate_size": 4 * width,
            "image_size": height,
            "patch_size": cfg.patch_size,
            "hidden_act": "gelu",
        }
        self.vision = SiglipVisionModel(SiglipVisionConfig(**layers, **vision, vision_use_head=False))
        tokens = {"vocab_size": 256, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        language = LlamaConfig(**layers, **tokens, intermediate_size=2 * width, use_cache=False)
        self.language = LlamaModel(language)
        self.connector = nn.Linear(4 * width, width)
        self.view = nn.Parameter(0.02 * torch.randn(views, 1, width))
        self.proprio = nn.Linear(proprio, width)

    def forward(self, obs: TensorDict, queries: Float[Tensor, "query feature"]) -> Float[Tensor, "batch query feature"]:
        """Last hidden states of the queries."""
        image = obs["image"]
        pixels = image.movedim(-1, 2).float() / 127.5 - 1  # as SigLIP reads them
        patches: Tensor = self.vision(pixels.flatten(0, 1)).last_hidden_state
        side = round(patches.shape[1] ** 0.5) // 2
        # four neighbouring patches make a token
        blocks = patches.reshape(*image.shape[:2], side, 2, side, 2, self.width).movedim(3, 4)
        tokens = self.connector(blocks.reshape(*image.shape[:2], side * side, 4 * self.width))
        images = (tokens + self.view).flatten(1, 2)
        proprio = self.proprio(obs["proprio"]).unsqueeze(1)
        seen = [images, proprio, queries.expand(len(images), -1, -1)]
        end = sum(part.shape[1] for part in seen)
        written = obs["instruction"] != 0
        longest = int(written.sum(dim=1).max())
        text, written = obs["instruction"][:, :longest].long(), written[:, :longest]
        tokens = torch.cat([*seen, self.language.embed_tokens(text)], dim=1)
        visible = torch.cat([written.new_ones(len(images), end), written], dim=1)
        mask = visible[:, None, None, :].expand(-1, -1, tokens.shape[1], -1)
        hidden: Tensor = self.language(inputs_embeds=tokens, attention_mask=mask).last_hidden_state
        return hidden[:, end - len(queries) : end]


class PretrainedModel(nn.Module):
    """A model for images and text from a folder or the hub, with its processor: any ``AutoModelForImageTextToText``.

    It reads its own chat template with the views and the instruction, then the proprioception and the queries, with the
    attention that it was trained with (causal, as a rule). Shorter instructions are padded on the left.

    Raises:
        ConfigError: no such model, no processor with it, weights that are absent or not finite, or adapters in the folder.
    """

    def __init__(self, path: str, lora: LoRACfg | None, proprio: int) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        from groupwise.text.load import (
            failures,
            find_model,
            in_short,
            refuse_absent,
            refuse_nonfinite,
            with_adapters,
        )
        from groupwise.text.policy import silence_dropout

        super().__init__()
        where = find_model(path)
        if (Path(where) / ADAPTER_CONFIG).is_file():  # transformers would load the base that they name, unchecked
            raise ConfigError(f"{where} has adapters; fix: merge them, and save the whole model")
        try:
            self.processor: Any = AutoProcessor.from_pretrained(where, trust_remote_code=False)
            found: Any = AutoModelForImageTextToText.from_pretrained(
                where, dtype=torch.float32, trust_remote_code=False, use_safetensors=True, output_loading_info=True
            )
        except torch.OutOfMemoryError:
            raise
        except failures() as error:
            raise ConfigError(
                f"{where} is no model for images and text that transformers can load ({in_short(error)}); fix: a folder with "
                "config.json, weights and the processor of an AutoModelForImageTextToText"
            ) from None
        model: Any = found[0]
        refuse_absent(found[1], where)
        refuse_nonfinite(model, where)
        silence_dropout(model)
        self.model: Any = model if lora is None else with_adapters(model, lora)
        self.has_adapters = lora is not None
        self.width = int(model.get_input_embeddings().embedding_dim)
        self.proprio = nn.Linear(proprio, self.width)

    def forward(self, obs: TensorDict, queries: Float[Tensor, "query feature"]) -> Float[Tensor, "batch query feature"]:
        """Last hidden states of the queries; a ``DataError`` for an instruction that is not UTF-8."""
        network = self.model.get_base_model() if self.has_adapters else self.model
        images = [list(views) for views in obs["image"].cpu().numpy()]
        try:
            texts = [bytes(row).rstrip(b"\0").decode() for row in obs["instruction"].cpu().numpy()]
        except UnicodeDecodeError as error:
            raise DataError(f"instruction is not UTF-8 ({error}); fix: text.encode(), padded with zeros") from error
        prompts = [self._prompt(text, len(images[0])) for text in texts]
        inputs = self.processor(text=prompts, images=images, return_tensors="pt", padding=True, padding_side="left")
        inputs = inputs.to(self.proprio.weight.device)
        embedded = network.get_input_embeddings()(inputs.pop("input_ids"))
        more = [self.proprio(obs["proprio"]).unsqueeze(1), queries.expand(len(embedded), -1, -1)]
        tokens = torch.cat([embedded, *more], dim=1)
        mask = nn.functional.pad(inputs.pop("attention_mask"), (0, 1 + len(queries)), value=1)
        position = (mask.cumsum(dim=1) - 1).clamp(min=0)
        out = network.base_model(
            inputs_embeds=tokens, attention_mask=mask, position_ids=position, use_cache=False, **inputs
        )
        hidden: Tensor = out.last_hidden_state
        return hidden[:, -len(queries) :].float()

    def _prompt(self, instruction: str, views: int) -> str:
        from groupwise.text.task import SECONDS_OF_TEMPLATE

        if getattr(self.processor, "chat_template", None) is None:
            return self.processor.image_token * views + instruction  # type: ignore[no-any-return]
        content = [*[{"type": "image"}] * views, {"type": "text", "text": instruction}]
        message = {"role": "user", "content": content}
        with limiting(SECONDS_OF_TEMPLATE):
            prompt: str = self.processor.apply_chat_template([message], add_generation_prompt=True)
        return prompt


class ChunkActorCritic(ActorCritic):
    """An ``ActorCritic`` for ``Box [C, *A]``: a Gaussian for each action of the chunk, and a probability ratio for each.

    Each action's log-probability is joint over its dimensions. Actions that were not executed count in no ratio and no
    entropy. Arguments as of ``ActorCritic``.
    """

    scored_by = "token"

    def __init__(self, observation_space: Any, action_space: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(observation_space, action_space, *args, **kwargs)
        self.num_units = len(action_space.low)
        low, high, shape = action_space.low[0], action_space.high[0], action_space.shape[1:]
        one = gymnasium.spaces.Box(low, high, shape, action_space.dtype)
        self.head = make_head(one, self.cfg)

    def unit_mask(self, batch: Batch) -> Bool[Tensor, "*batch unit"]:
        """The actions that were executed."""
        return executed_actions(batch, self.num_units)

    def _params(self, features: Tensor) -> Tensor:
        """Means and log standard deviations of each action, ``[B, C, 2 * A]``."""
        params = super()._params(features)
        parts = (part.reshape(*params.shape[:-1], self.num_units, -1) for part in params.chunk(2, dim=-1))
        return torch.cat(list(parts), dim=-1)


def executed_actions(batch: Batch, size: int) -> Bool[Tensor, "*batch action"]:
    """Which of a chunk's ``size`` actions were executed: the first ``executed``, or all if the rollout does not say."""
    executed: Int[Tensor, "*batch"] | None = batch.get("executed")
    if executed is None:
        episode: Any = batch["episode_id"]
        return torch.ones(*episode.shape, size, dtype=torch.bool, device=episode.device)
    return torch.arange(size, device=executed.device) < executed.unsqueeze(-1)


_DEFAULT = VLACfg()


class VLAPolicy(Policy):
    """A policy on images, proprioception and an instruction, for chunks of C actions of A numbers.

    It acts by tokens; each has a probability ratio, or each action, or the chunk (``cfg.unit``). The policy's own action, which the
    rollout stores, is the tokens ``[C, A]``. Log-probabilities are in float32, of the distribution at ``cfg.temperature``. Images
    stay uint8 until the model reads them.

    Args:
        observation_space: a Dict of ``image`` uint8 [views, H, W, 3], ``proprio`` float [P], ``instruction`` uint8 [L].
        action_space: a bounded Box of floats, ``[A]`` or a chunk of them ``[C, A]``.
        actor_only: False adds a value head: a linear layer on the mean of the queries, 0 at first.
        gamma: not used: rewards are not scaled.

    Raises:
        UnsupportedSpaceError: other spaces.
        ConfigError: the model does not fit images, proprioception or actions, or there is no such model.
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
        require_extra("transformers", "text")
        parts = subspaces(observation_space) or {}
        forms = {
            name: (part.dtype.name if part.dtype.kind == "u" else part.dtype.kind, len(part.shape))
            for name, part in parts.items()
            if space_kind(part) == "box"
        }
        fits = forms == {"image": ("uint8", 4), "proprio": ("f", 1), "instruction": ("uint8", 1)} and len(parts) == 3
        if not fits or parts["image"].shape[-1] != 3:
            missing = ", ".join(name for name in ("image", "proprio", "instruction") if name not in parts)
            raise UnsupportedSpaceError(
                f"a VLA policy cannot read {observation_space}{f', which has no {missing}' * bool(missing)}; fix: a Dict of image "
                "uint8 [views, H, W, 3], proprio float [P] and instruction uint8 [L] (UTF-8, zero-padded), and nothing else"
            )
        is_box = (
            space_kind(action_space) == "box" and action_space.dtype.kind == "f" and len(action_space.shape) in (1, 2)
        )
        if not is_box or not (
            np.isfinite([action_space.low, action_space.high]).all() and (action_space.low < action_space.high).all()
        ):
            raise UnsupportedSpaceError(
                "a VLA policy needs a Box of floats [A], or a chunk of them [C, A], with low < high and both finite, got "
                f"{action_space}; fix: the robot's limits as the bounds of action_space (gymnasium.wrappers.TransformAction)"
            )
        self.cfg = cfg
        self.observation_space, self.action_space = observation_space, action_space
        self.actor_only = actor_only
        bounds = inner_float32(action_space.low, action_space.high)
        for name, bound in zip(("low", "high"), bounds, strict=True):
            self.register_buffer(name, bound.reshape(-1, action_space.shape[-1]), persistent=False)
        self.low: Tensor
        self.high: Tensor
        self.num_actions, self.num_dims = self.low.shape
        num_tokens = self.low.numel()
        self.num_units = {"token": num_tokens, "action": self.num_actions, "chunk": 1}[cfg.unit]
        self.action_spec = TensorSpec((self.num_actions, self.num_dims), torch.int64)
        self.distribution = Categorical(np.array(cfg.bins), np.array(0))
        proprio = parts["proprio"].shape[0]
        image = parts["image"].shape
        self.model = PretrainedModel(cfg.path, cfg.lora, proprio) if cfg.path else NewModel(image, proprio, cfg)
        width = self.model.width
        self.queries = nn.Parameter(0.02 * torch.randn(num_tokens, width))
        self.token_head = nn.Linear(width, cfg.bins)
        nn.init.normal_(self.token_head.weight, std=0.01)
        nn.init.zeros_(self.token_head.bias)
        self.value_head = None if actor_only else nn.Linear(width, 1)
        if self.value_head is not None:
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        if cfg.lora is not None:  # the frozen weights are those of ``cfg.path``
            self.save_only({name for name, p in self.named_parameters() if p.requires_grad})
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
        share = action.to(self.low.dtype) / (self.cfg.bins - 1)
        return torch.lerp(self.low, self.high, share).reshape(*share.shape[:-2], *self.action_space.shape)

    def own_action(self, action: Float[Tensor, "..."]) -> Int[Tensor, "*batch action dim"]:
        """The nearest tokens of environment actions ``[*batch, *action_space.shape]``: for cloning demonstrations."""
        batch = action.shape[: action.dim() - len(self.action_space.shape)]
        share = (action.reshape(*batch, *self.low.shape) - self.low) / (self.high - self.low)
        return (share * (self.cfg.bins - 1)).round().long().clamp(0, self.cfg.bins - 1)

    @torch.no_grad()
    def value(self, obs: Nested) -> Tensor:
        """V(obs) of shape [B], without gradient."""
        value = self._forward(obs)[1]
        return super().value(obs) if value is None else value

    def _forward(self, obs: Nested) -> tuple[Float[Tensor, "batch token bin"], Float[Tensor, " batch"] | None]:
        """Logits of every token at the temperature, and the value if there is a critic."""
        hidden = self.model(obs, self.queries)
        value = None if self.value_head is None else self.value_head(hidden.mean(dim=1)).squeeze(-1).float()
        return self.token_head(hidden).float() / self.cfg.temperature, value

    def _of_units(self, score: Float[Tensor, "batch token"]) -> Float[Tensor, "batch unit"]:
        """Sums over the tokens of each unit."""
        return score if self.cfg.unit == "token" else score.reshape(len(score), self.num_units, -1).sum(dim=-1)
