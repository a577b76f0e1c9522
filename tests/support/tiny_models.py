"""Language models of a few thousand random weights, of the families that are in use."""

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

EOS = 3
_ROPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 2,
    "eos_token_id": EOS,
    "pad_token_id": EOS,  # as many models have it: padding must never be taken for the end of a text
}
_MAKERS = {
    "llama": lambda size: LlamaForCausalLM(LlamaConfig(vocab_size=size, **_ROPE)),
    "smollm": lambda size: LlamaForCausalLM(LlamaConfig(vocab_size=size, **_ROPE, tie_word_embeddings=True)),
    "qwen2": lambda size: Qwen2ForCausalLM(Qwen2Config(vocab_size=size, **_ROPE)),
    "qwen3": lambda size: Qwen3ForCausalLM(Qwen3Config(vocab_size=size, **_ROPE, head_dim=8)),
    "gpt2": lambda size: GPT2LMHeadModel(
        GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=4, bos_token_id=2, eos_token_id=EOS, pad_token_id=EOS)
    ),
}
FAMILIES = sorted(_MAKERS)


def tiny_model(family="llama", seed=0, vocab_size=40):
    torch.manual_seed(seed)
    return _MAKERS[family](vocab_size)


def moved(model, by=0.2):
    """All weights that are trained away from where they begin: biases from 0, norms from 1, adapters from changing nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += by * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model
