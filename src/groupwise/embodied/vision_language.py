"""What a VLA policy thinks with: a vision encoder and a language model, new or of the user's.

Both map an observation and Q query vectors to Q vectors, in one forward pass. ``image`` is uint8 ``[B, views, H, W, 3]``,
``proprio`` float ``[B, P]``, ``instruction`` uint8 ``[B, L]``: UTF-8, zero-padded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from tensordict import TensorDict
from torch import Tensor, nn

from groupwise.config.policy import LoRACfg, VLACfg
from groupwise.errors import ConfigError, DataError

HEAD_WIDTH = 32
_BYTES = 256


class ObsSizes(NamedTuple):
    """Sizes of a robot's observation."""

    views: int
    height: int
    width: int
    """Of an image, in pixels."""
    proprio: int


class NewModel(nn.Module):
    """transformers' SigLIP and Llama with random weights.

    A token is 2 x 2 image patches, a byte of the instruction, or the proprioception. Attention is bidirectional: every query
    sees the whole observation and the other queries. The instruction stands last, so its padding moves no other token.

    Raises:
        ConfigError: images are not square, or no multiple of two patches.
    """

    def __init__(self, sizes: ObsSizes, cfg: VLACfg) -> None:
        from transformers import LlamaConfig, LlamaModel, SiglipVisionConfig, SiglipVisionModel

        super().__init__()
        self.width = width = cfg.hidden_size
        self.vision = SiglipVisionModel(
            SiglipVisionConfig(
                **vision_sizes(sizes, cfg, patches=2),
                hidden_act="gelu",  # SigLIP's own approximates it by tanh, which takes five times as long on a CPU
            )
        )
        self.language = LlamaModel(
            LlamaConfig(
                **layer_sizes(cfg),
                vocab_size=_BYTES,
                intermediate_size=2 * width,
                pad_token_id=None,
                bos_token_id=None,
                eos_token_id=None,
                use_cache=False,
            )
        )
        self.connector = nn.Linear(4 * width, width)
        self.view = nn.Parameter(0.02 * torch.randn(sizes.views, 1, width))
        self.proprio = nn.Linear(sizes.proprio, width)

    def forward(self, obs: TensorDict, queries: Float[Tensor, "query feature"]) -> Float[Tensor, "batch query feature"]:
        """Last hidden states of the queries."""
        images = self._images(obs["image"])
        proprio = self.proprio(obs["proprio"]).unsqueeze(1)
        seen = [images, proprio, queries.expand(len(images), -1, -1)]
        end = sum(part.shape[1] for part in seen)
        text, written = byte_tokens(obs["instruction"])
        tokens = torch.cat([*seen, self.language.embed_tokens(text)], dim=1)
        visible = torch.cat([written.new_ones(len(images), end), written], dim=1)
        mask = visible[:, None, None, :].expand(-1, -1, tokens.shape[1], -1)
        hidden: Tensor = self.language(inputs_embeds=tokens, attention_mask=mask).last_hidden_state
        return hidden[:, end - len(queries) : end]

    def _images(self, image: UInt8[Tensor, "batch view height width 3"]) -> Float[Tensor, "batch token feature"]:
        """Four neighbouring patches make a token."""
        patches: Tensor = self.vision(pixels(image).flatten(0, 1)).last_hidden_state
        side = round(patches.shape[1] ** 0.5) // 2
        blocks = patches.reshape(*image.shape[:2], side, 2, side, 2, self.width).movedim(3, 4)
        tokens = self.connector(blocks.reshape(*image.shape[:2], side * side, 4 * self.width))
        out: Tensor = (tokens + self.view).flatten(1, 2)
        return out


class PretrainedModel(nn.Module):
    """A model for images and text from a folder or the hub, with its processor: any ``AutoModelForImageTextToText``.

    It reads its own chat template with the views and the instruction, then the proprioception and the queries, with the
    attention that it was trained with (causal, as a rule). Shorter instructions are padded on the left.

    Raises:
        ConfigError: no such model, or no processor with it.
    """

    def __init__(self, path: str, lora: LoRACfg | None, sizes: ObsSizes) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        from groupwise.text.layers import silence_dropout
        from groupwise.text.load import find_model, with_adapters

        super().__init__()
        where = find_model(path)
        wanted = "a folder with config.json, weights and the processor of an AutoModelForImageTextToText"
        with loading(f"{where} is no model for images and text", wanted):
            self.processor: Any = AutoProcessor.from_pretrained(where, trust_remote_code=False)
            model: Any = AutoModelForImageTextToText.from_pretrained(
                where, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
            )
        silence_dropout(model)
        self.model: Any = model if lora is None else with_adapters(model, lora)
        self.has_adapters = lora is not None
        self.width = int(model.get_input_embeddings().embedding_dim)
        self.proprio = nn.Linear(sizes.proprio, self.width)

    def forward(self, obs: TensorDict, queries: Float[Tensor, "query feature"]) -> Float[Tensor, "batch query feature"]:
        """Last hidden states of the queries."""
        network = self.model.get_base_model() if self.has_adapters else self.model
        inputs = self._inputs(obs).to(self.proprio.weight.device)
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

    def _inputs(self, obs: TensorDict) -> Any:
        """What the processor makes of views and instructions."""
        images = [list(views) for views in obs["image"].cpu().numpy()]
        texts = [self._prompt(text, len(images[0])) for text in instructions(obs["instruction"])]
        return self.processor(text=texts, images=images, return_tensors="pt", padding=True, padding_side="left")

    def _prompt(self, instruction: str, views: int) -> str:
        if getattr(self.processor, "chat_template", None) is None:
            return self.processor.image_token * views + instruction  # type: ignore[no-any-return]
        content = [*[{"type": "image"}] * views, {"type": "text", "text": instruction}]
        message = {"role": "user", "content": content}
        prompt: str = self.processor.apply_chat_template([message], add_generation_prompt=True)
        return prompt


@contextmanager
def loading(problem: str, fix: str) -> Iterator[None]:
    """Turns what transformers raises about a folder into a ``ConfigError``."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"{problem} that transformers can load ({first}); fix: {fix}") from None


def layer_sizes(cfg: VLACfg) -> dict[str, int]:
    """Of a new model."""
    heads = cfg.hidden_size // HEAD_WIDTH
    return {"hidden_size": cfg.hidden_size, "num_hidden_layers": cfg.num_layers, "num_attention_heads": heads}


def vision_sizes(sizes: ObsSizes, cfg: VLACfg, patches: int = 1) -> dict[str, int]:
    """Of the vision encoder of a new model.

    Args:
        patches: along each side of what becomes a token.

    Raises:
        ConfigError: images are not square, or not made of whole tokens.
    """
    if sizes.height != sizes.width or sizes.height % (patches * cfg.patch_size):
        raise ConfigError(
            f"images of {sizes.height} x {sizes.width} pixels are not squares made of {patches} x {patches} patches of "
            f"policy.patch_size={cfg.patch_size}; fix: square images, or another patch_size"
        )
    own = {"intermediate_size": 4 * cfg.hidden_size, "image_size": sizes.height, "patch_size": cfg.patch_size}
    return layer_sizes(cfg) | own | {"vision_use_head": False}


def byte_tokens(
    encoded: UInt8[Tensor, "batch byte"],
) -> tuple[Int[Tensor, "batch token"], Bool[Tensor, "batch token"]]:
    """The bytes of instructions up to the end of the longest one, and which of them are no padding."""
    written = encoded != 0
    longest = int(written.sum(dim=1).max())
    return encoded[:, :longest].long(), written[:, :longest]


def pixels(image: UInt8[Tensor, "batch view height width 3"]) -> Float[Tensor, "batch view 3 height width"]:
    """Images in [-1, 1], as SigLIP reads them."""
    return image.movedim(-1, 2).float() / 127.5 - 1


def instructions(encoded: UInt8[Tensor, "batch byte"]) -> list[str]:
    """The instructions as text.

    Raises:
        DataError: bytes that are not UTF-8.
    """
    try:
        return [bytes(row).rstrip(b"\0").decode() for row in encoded.cpu().numpy()]
    except UnicodeDecodeError as error:
        raise DataError(f"instruction is not UTF-8 ({error}); fix: text.encode(), padded with zeros") from error
