"""A model for images and text with random weights, as a folder of transformers: 16 pixels, 2 layers."""

import torch
from tiny_tokenizers import tiny_tokenizer
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, PI0Config, PI0ForConditionalGeneration
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
)


def save_tiny_vlm(folder, chat=True):
    """SmolVLM's architecture, with its processor."""
    tokenizer = tiny_tokenizer(chat)
    tokenizer.pad_token = tokenizer.eos_token
    edge = {"longest_edge": 16}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=_TEMPLATE if chat else None)
    shared = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "attention_dropout": 0.5}
    cfg = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        vision_config={**shared, "num_hidden_layers": 1, "image_size": 16, "patch_size": 4},
        text_config={
            **shared,
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "pad_token_id": tokenizer.pad_token_id,
        },
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(cfg).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def save_tiny_pi0(folder):
    """PI0's architecture with its tokenizer, for images of 8 pixels, actions of 4 numbers and states of 3."""
    tokenizer = tiny_tokenizer(chat=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    shared = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    shared["attention_dropout"] = 0.5
    vocabulary = {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(tokenizer)}
    vision = {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4, "vision_use_head": False}
    cfg = PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": shared | vocabulary,
            "vision_config": shared | vision,
            "projection_dim": 32,
            "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        },
        dit_config=shared | vocabulary | {"hidden_size": 48},
        chunk_size=10,
        max_action_dim=4,
        max_state_dim=3,
    )
    torch.manual_seed(0)
    model = PI0ForConditionalGeneration(cfg)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
