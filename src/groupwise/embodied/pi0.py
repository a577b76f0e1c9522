"""PI0 of transformers, new or of the user's: PaliGemma reads, and an action expert turns noise into actions.

``image`` is uint8 ``[B, views, H, W, 3]``, ``proprio`` float ``[B, P]``, ``instruction`` uint8 ``[B, L]``: UTF-8, zero-padded.
Source: https://arxiv.org/abs/2410.24164, as ``PI0ForConditionalGeneration`` has it.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from groupwise.config.policy import FlowCfg
from groupwise.embodied.vision_language import (
    HEAD_WIDTH,
    ObsSizes,
    byte_tokens,
    instructions,
    layer_sizes,
    loading,
    pixels,
    vision_sizes,
)
from groupwise.errors import ConfigError

_IMAGE_TOKEN = 256
"""Of a new model: after the bytes."""


class Prefix(NamedTuple):
    """B observations as the action expert reads them, in any number of denoising steps."""

    cache: Any
    """Keys and values of images and instruction in each layer."""
    mask: Int[Tensor, "batch token"]
    state: Float[Tensor, "batch state"]


class PI0(nn.Module):
    """Velocities of noisy actions, given an observation.

    A new model reads the instruction as bytes; that of a folder has a tokenizer and reads images in its own size. Actions
    and proprioception are padded with zeros to the model's ``max_action_dim`` and ``max_state_dim``. The length of a chunk
    is free.

    Args:
        num_actions: C, actions of a chunk.
        num_dims: A, numbers of an action.

    Raises:
        ConfigError: images of a new model are not made of square patches, a folder holds no whole PI0, or it is too small.
    """

    def __init__(self, sizes: ObsSizes, num_actions: int, num_dims: int, cfg: FlowCfg) -> None:
        super().__init__()
        self.tokenizer: Any = None
        if cfg.path:
            self.network, self.tokenizer = _load(cfg.path)
        else:
            self.network = _new(sizes, num_actions, num_dims, cfg)
        self.config: Any = self.network.config
        _check_room(cfg.path, "numbers of an action", num_dims, "max_action_dim", self.config.max_action_dim)
        _check_room(cfg.path, "numbers of proprio", sizes.proprio, "max_state_dim", self.config.max_state_dim)
        self.num_dims = int(self.config.max_action_dim)
        self.width = int(self.config.dit_config.hidden_size)
        vision = self.config.vlm_config.vision_config
        self.image_size = int(vision.image_size)
        self.image_tokens = sizes.views * (vision.image_size // vision.patch_size) ** 2

    def read(self, obs: TensorDict) -> Prefix:
        """Let the vision-language model read images and instructions."""
        text, written = self._text(obs["instruction"])
        images = text.new_full((len(text), self.image_tokens), self.config.vlm_config.image_token_id)
        tokens = torch.cat([images, text], dim=1)
        mask = torch.cat([torch.ones_like(images), written.long()], dim=1)
        views = self._resized(pixels(obs["image"]))
        model = self.network.model
        cameras = torch.ones(views.shape[:2], dtype=torch.bool, device=views.device)
        cache = model.vlm(
            inputs_embeds=model.embed_prefix(tokens, views, cameras, mask),
            attention_mask=mask,
            position_ids=mask.cumsum(dim=-1) - 1,
            token_type_ids=torch.zeros_like(tokens),  # attention in both directions
            use_cache=True,
        ).past_key_values
        proprio = obs["proprio"].float()
        return Prefix(cache, mask, pad(proprio, (0, self.config.max_state_dim - proprio.shape[-1])))

    def forward(
        self, seen: Prefix, noisy: Float[Tensor, "batch action padded"], time: Float[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch action padded"], Float[Tensor, "batch feature"]]:
        """Velocities at ``time`` (1 is noise, 0 are actions), and the summary of the observation."""
        hidden = self._expert(seen, self.network.embed_action_time(seen.state, noisy, time))
        return self.network.action_out_proj(hidden[:, 1:]), hidden[:, 0]

    def summary(self, seen: Prefix) -> Float[Tensor, "batch feature"]:
        """The expert's output for the proprioception, which attends to images and instruction, never to actions."""
        return self._expert(seen, self.network.embed_action_time.state_proj(seen.state).unsqueeze(1))[:, 0]

    def _expert(self, seen: Prefix, embedded: Float[Tensor, "batch token feature"]) -> Tensor:
        hidden: Tensor = self.network.model(
            action_embeds=embedded, attention_mask=seen.mask, past_key_values=seen.cache
        ).last_hidden_state
        seen.cache.crop(-embedded.shape[1])  # the next step does not attend to this one
        return hidden

    def _text(
        self, encoded: UInt8[Tensor, "batch byte"]
    ) -> tuple[Int[Tensor, "batch token"], Bool[Tensor, "batch token"]]:
        """Tokens of the instructions, padded on the right, and which of them are no padding."""
        if self.tokenizer is None:
            return byte_tokens(encoded)
        start = self.tokenizer.bos_token or ""
        texts = [f"{start}{text}\n" for text in instructions(encoded)]
        found = self.tokenizer(
            texts, padding=True, padding_side="right", add_special_tokens=False, return_tensors="pt"
        ).to(encoded.device)
        return found["input_ids"], found["attention_mask"].bool()

    def _resized(self, image: Float[Tensor, "batch view 3 height width"]) -> Float[Tensor, "batch view 3 side side"]:
        """Images of the model's size; those that are not square are padded with black below or on the right."""
        height, width, side = *image.shape[-2:], self.image_size
        if height == width == side:
            return image
        scale = side / max(height, width)
        height, width = round(height * scale), round(width * scale)
        small = interpolate(image.flatten(0, 1), (height, width), mode="bicubic", antialias=True).clamp(-1, 1)
        return pad(small, (0, side - width, 0, side - height), value=-1.0).reshape(*image.shape[:3], side, side)


def _new(sizes: ObsSizes, num_actions: int, num_dims: int, cfg: FlowCfg) -> Any:
    """A small PI0 with random weights, whose text tokens are bytes."""
    from transformers import PI0Config, PI0ForConditionalGeneration

    gemma = layer_sizes(cfg) | {
        "model_type": "gemma",
        "intermediate_size": 2 * cfg.hidden_size,
        "num_key_value_heads": cfg.hidden_size // HEAD_WIDTH,
        "head_dim": HEAD_WIDTH,
        "vocab_size": _IMAGE_TOKEN + 1,
    }
    vlm = {
        "model_type": "paligemma",
        "text_config": gemma,
        "vision_config": {"model_type": "siglip_vision_model", **vision_sizes(sizes, cfg)},
        "projection_dim": cfg.hidden_size,
        "image_token_id": _IMAGE_TOKEN,
    }
    config = PI0Config(
        vlm_config=vlm,
        dit_config=gemma,
        chunk_size=num_actions,
        max_action_dim=num_dims,
        max_state_dim=sizes.proprio,
    )
    return PI0ForConditionalGeneration(config)


def _load(path: str) -> tuple[Any, Any]:
    """The PI0 of a folder in float32, and its tokenizer."""
    from transformers import AutoTokenizer, PI0Config, PI0ForConditionalGeneration

    from groupwise.text.layers import silence_dropout
    from groupwise.text.load import find_model

    where = find_model(path)
    wanted = "a folder of PI0ForConditionalGeneration with config.json, model.safetensors and a tokenizer"
    with loading(f"{where} is no PI0", wanted):
        kind = PI0Config.get_config_dict(where)[0].get("model_type", "pi0")
        if kind != "pi0":
            raise ValueError(f"model_type is {kind!r}")
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        network, info = PI0ForConditionalGeneration.from_pretrained(
            where, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"{where} lacks {len(missing)} weights of its PI0, as {missing[0]}; fix: save_pretrained of the whole model"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    silence_dropout(network)
    return network, tokenizer


def _check_room(path: str, what: str, count: int, setting: str, room: int) -> None:
    if count > room:
        raise ConfigError(f"{path} takes {setting}={room}, got {count} {what}; fix: another model, or fewer of them")
