"""Language models of a few thousand random weights, of the families that are in use."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

EOS = 3
# the end pads, as in many models: padding must never be taken for the end of a text
_TOKENS = {"bos_token_id": 2, "eos_token_id": EOS, "pad_token_id": EOS}
_ROPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_ROPE |= {"num_key_value_heads": 2}
_SIZES = {
    "llama": _ROPE,
    "smollm": _ROPE | {"tie_word_embeddings": True},
    "qwen2": _ROPE,
    "qwen3": _ROPE | {"head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}
FAMILIES = sorted(_SIZES)


def tiny_model(family="llama", seed=0, vocab_size=40):
    torch.manual_seed(seed)
    kind = "llama" if family == "smollm" else family
    cfg = AutoConfig.for_model(kind, vocab_size=vocab_size, **_SIZES[family], **_TOKENS)
    return AutoModelForCausalLM.from_config(cfg)


def moved(model, by=0.2):
    """All weights that are trained away from where they begin: biases from 0, norms from 1, adapters from changing nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += by * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model
