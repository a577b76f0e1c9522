"""A model for images and text with random weights, as a folder of transformers: 16 pixels, 2 layers."""

import torch
from tiny_tokenizers import tiny_tokenizer
from transformers import Idefics3Config, Idefics3ForConditionalGeneration
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
