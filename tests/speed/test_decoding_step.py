import warnings
from copy import deepcopy

import pytest
import torch
from tiny_models import moved, tiny_model
from token_steps import read_in_turn, rounded
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from groupwise.config.policy import LoRACfg, SamplingCfg
from groupwise.errors import SlowPathWarning
from groupwise.speed import decoding as decoding_step
from groupwise.speed.decoding import FastDecoder, LlamaStep, StaticStep
from groupwise.text import generation
from groupwise.text.generation import Prompts, Step, complete
from groupwise.text.load import with_adapters
from groupwise.text.policy import CausalLM

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PROMPTS = [[5, 6, 7], [9], [10, 11, 12, 13, 14, 15]]


def llama(**more):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | more))


def mistral(window):
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window))


MODELS = {
    "llama": tiny_model,
    "smollm": lambda: tiny_model("smollm"),
    "qwen2": lambda: tiny_model("qwen2"),
    "qwen3": lambda: tiny_model("qwen3"),
    "mistral": lambda: mistral(None),
    "one head of keys": lambda: llama(num_key_value_heads=1),
    "a head of keys each": lambda: llama(num_key_value_heads=4),
    "wide heads": lambda: llama(head_dim=20),
    "biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "another activation": lambda: llama(hidden_act="gelu"),
    "scaled positions": lambda: llama(rope_parameters=LLAMA3),
    "yarn": lambda: llama(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    ),
    "adapters": lambda: with_adapters(tiny_model(), LoRACfg(r=4)),
    "adapters on queries alone": lambda: with_adapters(tiny_model("qwen2"), LoRACfg(r=4, targets=("q_proj",))),
}


def fast(model, sampling, **more):
    policy = CausalLM(model, sampling, **more)
    policy.decoder = FastDecoder()
    return policy


@torch.no_grad()
def both(policy, lengths=(5, 2, 9), group_size=2, max_new_tokens=80, kinds=(LlamaStep, Step)):
    """The fast step and transformers', behind the same prompts."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(40, (n,), generator=generator).tolist() for n in lengths]
    tokens, valid = generation.left_padded(prompts, policy.device)
    steps = []
    for kind in kinds:
        cache = DynamicCache(config=policy.network.config)
        policy.hidden_states(tokens, valid, cache)
        assert decoding_step.has_llama_shape(policy.network, cache)
        steps.append(kind(policy, Prompts(cache, valid, group_size, max_new_tokens)))
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_are_those_of_transformers_while_rows_leave_and_caches_grow(name):
    by = (
        0.05 if "adapters" in name else 0.2
    )  # at 0.2, rounding moves adapters' outputs by more than what `exact` allows
    policy = CausalLM(moved(MODELS[name](), by=by))
    read_in_turn(*both(policy), policy.device)


@pytest.mark.parametrize("name", ["llama", "qwen3", "adapters"])
@pytest.mark.parametrize("lengths", [(5, 2, 9), (4, 4)], ids=["padding", "no padding"])
def test_places_of_fixed_size_change_nothing(name, lengths):
    policy = CausalLM(moved(MODELS[name](), by=0.1))
    steps = both(policy, lengths, group_size=6 // len(lengths), kinds=(LlamaStep, StaticStep))
    read_in_turn(*steps, policy.device)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_norms_of_less_precision_than_the_rest_are_rounded_no_further(name):
    model = moved(MODELS[name](), by=0.05)
    for part, module in model.named_modules():
        if part.endswith("norm"):
            module.bfloat16()
    policy = CausalLM(model)
    read_in_turn(*both(policy), policy.device, count=10)


@pytest.mark.parametrize("name", ["llama", "qwen3", "adapters"])
@pytest.mark.parametrize("precision", ["weights", "autocast"])
def test_hidden_states_in_bfloat16_differ_by_rounding(name, precision):
    model, autocast = moved(MODELS[name](), by=0.05), torch.bfloat16 if precision == "autocast" else None
    policy = CausalLM(model if autocast else model.bfloat16(), autocast=autocast)
    with policy.computing():
        read_in_turn(*both(policy), policy.device, rounded, count=10)


def test_prompts_of_one_length_need_no_mask():
    policy = CausalLM(moved(tiny_model()))
    read_in_turn(*both(policy, lengths=(4, 4, 4)), policy.device)


@pytest.mark.parametrize("name", MODELS)
def test_known_models_write_with_it(name):
    policy = fast(moved(MODELS[name]()), SamplingCfg(max_new_tokens=8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        complete(policy, PROMPTS, torch.arange(12).view(3, 4))
    assert policy.decoder.used == "llama"


def hooked_layer(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output + 1)


def weights_elsewhere(model):
    layer = model.model.layers[0].mlp
    layer.forward = lambda x: layer.down_proj(layer.up_proj(x))


def scaled_scores(model):
    for layer in model.model.layers:
        layer.self_attn.scaling = 3.0


@pytest.mark.parametrize("change", [hooked_layer, weights_elsewhere, scaled_scores])
def test_a_model_that_computes_otherwise_is_decoded_by_transformers(change):
    model = moved(tiny_model())
    change(model)
    policy, plain = fast(model, SamplingCfg(max_new_tokens=12)), CausalLM(model, SamplingCfg(max_new_tokens=12))
    with pytest.warns(SlowPathWarning, match=r"LlamaForCausalLM decodes with transformers"):
        found = complete(policy, PROMPTS, torch.arange(12).view(3, 4))
    assert policy.decoder.used == "transformers"
    assert found == complete(plain, PROMPTS, torch.arange(12).view(3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        complete(policy, PROMPTS, torch.arange(12).view(3, 4))


class OtherMLP(torch.nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.down = mlp.down_proj
        self.up = mlp.up_proj

    def forward(self, x):
        return self.down(self.up(x).relu())


def another_perceptron():
    model = tiny_model()
    model.model.layers[1].mlp = OtherMLP(model.model.layers[1].mlp)
    return model


UNKNOWN = {
    "gpt2": lambda: tiny_model("gpt2"),
    "window": lambda: mistral(16),
    "another perceptron": another_perceptron,
    "angles by length": lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_models_are_decoded_by_transformers_without_a_warning(name):
    policy = fast(UNKNOWN[name](), SamplingCfg(max_new_tokens=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        complete(policy, PROMPTS, torch.arange(3)[:, None])
    assert policy.decoder.used == "untried"


def test_a_hook_on_a_projection_is_called():
    model = moved(tiny_model())
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, args, output: output * 2)
    policy = fast(model, SamplingCfg(max_new_tokens=8))
    complete(policy, PROMPTS, torch.arange(3)[:, None])
    assert policy.decoder.used == "llama"
    read_in_turn(*both(policy), policy.device, count=2)


def test_new_weights_are_used_by_the_next_call():
    policy = fast(tiny_model(), SamplingCfg(max_new_tokens=20), eos_ids=())
    other = fast(moved(tiny_model()), SamplingCfg(max_new_tokens=20), eos_ids=())
    seeds = torch.arange(6).view(3, 2)
    before = complete(policy, PROMPTS, seeds)
    policy.load_state_dict(other.state_dict())
    assert complete(policy, PROMPTS, seeds) == complete(other, PROMPTS, seeds) != before


def test_what_a_hook_keeps_while_completions_are_written_can_be_trained_on():
    model, kept = tiny_model(), []
    policy = fast(model, SamplingCfg(max_new_tokens=4))
    complete(policy, PROMPTS, torch.arange(3)[:, None])
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda _, __, output: kept.append(output))
    complete(policy, PROMPTS, torch.arange(3)[:, None])
    scale = torch.ones(1, requires_grad=True)
    (kept[0] * scale).sum().backward()
    assert scale.grad.isfinite()


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_one_kernel_give_the_same_scores_and_gradients(name, dtype):
    models = [moved(MODELS[name](), by=0.2).to(dtype) for _ in range(2)]
    decoding_step.fuse_norms(models[1])
    copied = deepcopy(models[1])
    tokens = torch.arange(36).view(3, 12)
    for model in (*models, copied):
        model(input_ids=tokens).logits.float().logsumexp(dim=-1).mean().backward()
    norms = [part for part, _ in models[0].named_parameters() if "norm" in part]
    assert len(norms) == {"qwen3": 9}.get(name, 5)
    parts = zip(*(model.named_parameters() for model in (*models, copied)), strict=True)
    for (part, plain), (_, fused), (_, copy) in parts:
        size = plain.grad.float().norm()
        assert (fused.grad.float() - plain.grad.float()).norm() <= (1e-5 if dtype == torch.float32 else 0.05) * size, (
            part
        )
        assert torch.equal(copy.grad, fused.grad)
    x = torch.randn(4, 32, dtype=dtype) * 3
    before, after = (model.base_model.norm(x) for model in models)
    torch.testing.assert_close(
        after, before, rtol=1e-6 if dtype == torch.float32 else 0.0, atol=1e-6 if dtype == torch.float32 else 0.0
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "adapters"])
def test_a_graph_gives_what_its_kernels_give_one_by_one(name):
    policy = CausalLM(moved(MODELS[name](), by=0.1).cuda())
    read_in_turn(*both(policy, kinds=(LlamaStep, StaticStep)), policy.device)


@pytest.mark.gpu
def test_texts_by_graphs_are_those_of_transformers():
    policy = CausalLM(moved(MODELS["qwen2"](), by=0.2).cuda(), eos_ids=range(3, 40, 12))
    sampling, seeds = SamplingCfg(max_new_tokens=40), torch.arange(150).view(3, 50)
    expected = complete(policy, PROMPTS, seeds, sampling)
    policy.decoder = FastDecoder()
    found = complete(policy, PROMPTS, seeds, sampling)
    assert policy.decoder.used == "llama"
    assert [[c.tokens for c in group] for group in found] == [[c.tokens for c in group] for group in expected]


@pytest.mark.gpu
def test_what_cannot_be_recorded_is_decoded_without_a_graph():
    model = moved(MODELS["llama"](), by=0.2).cuda()
    policy = fast(model, SamplingCfg(max_new_tokens=6))
    act = model.base_model.layers[0].mlp.act_fn
    forward = act.forward

    def waiting(x):
        float(x.sum())
        return forward(x)

    act.forward = waiting
    with pytest.warns(SlowPathWarning, match="tokens are not decoded by a CUDA graph"):
        found = complete(policy, PROMPTS, torch.arange(6).view(3, 2))
    policy.decoder = generation.Decoder()
    expected = complete(policy, PROMPTS, torch.arange(6).view(3, 2))
    assert [[c.tokens for c in group] for group in found] == [[c.tokens for c in group] for group in expected]
    assert torch.randn(2, device="cuda").isfinite().all(), "generators still work"
