"""What ``complete`` keeps to with every decoder. References are full forwards, without a cache and one text at a time."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import EOS, FAMILIES, moved, tiny_model
from tiny_tokenizers import character_tokenizer, sentence_tokenizer, tiny_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    MistralConfig,
    Qwen2Config,
)

from groupwise.config.policy import SamplingCfg
from groupwise.errors import ConfigError, DataError
from groupwise.speed.decoding import FastDecoder, StaticStep
from groupwise.text.generation import Decoder, DecodingState, complete, text_within
from groupwise.text.policy import CausalLM

PROMPTS = [[5, 6, 7], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]]
SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": EOS}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": EOS}
SLIDING = {  # windows of 6 tokens, which the longest prompt exceeds and every completion
    "mistral": MistralConfig(**SIZES, sliding_window=6),
    "qwen2-half": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "gemma3": Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    ),
}


def sharp_model(family="llama", vocab_size=40):
    """Random weights, large enough that tokens are far from equally likely."""
    torch.manual_seed(1)
    sliding = family in SLIDING
    model = AutoModelForCausalLM.from_config(SLIDING[family]) if sliding else tiny_model(family, 1, vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


@pytest.fixture(params=[Decoder, FastDecoder, partial(FastDecoder, StaticStep)], ids=["model", "fast", "static"])
def backend(request):
    """Makes the generation of a policy."""

    def make(policy):
        policy.decoder = request.param()
        return partial(complete, policy)

    return make


@pytest.fixture(params=[*FAMILIES, *SLIDING])
def family(request):
    return request.param


def seeds(count, group_size=1, first=0):
    return torch.arange(first, first + count * group_size).view(count, group_size)


def read(model, prompt, tokens):
    """Logits before each of the tokens, by one full forward."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()


def rows(prompts, completions):
    return [(prompt, c) for prompt, group in zip(prompts, completions, strict=True) for c in group]


def test_greedy_tokens_are_those_of_a_full_forward(family):
    policy = CausalLM(sharp_model(family))
    policy.decoder = FastDecoder()
    written = complete(policy, PROMPTS, seeds(3), SamplingCfg(max_new_tokens=70), deterministic=True)
    for prompt, completion in rows(PROMPTS, written):
        assert completion.tokens == read(policy.model, prompt, completion.tokens).argmax(dim=-1).tolist()


def test_log_probs_are_those_of_a_full_forward_under_the_processed_distribution(family):
    model, sampling = sharp_model(family), SamplingCfg(temperature=1.7, top_k=5, max_new_tokens=20)
    policy = CausalLM(model)
    policy.decoder = FastDecoder()  # for families that it does not know, transformers decodes
    written = complete(policy, PROMPTS, seeds(3, 3), sampling)
    for prompt, c in rows(PROMPTS, written):
        logits = read(model, prompt, c.tokens) / 1.7
        kept = torch.stack(c.support).long()
        assert kept.shape == (len(c.tokens), 5)
        likeliest = logits.topk(5).indices.sort().values
        assert torch.equal(kept, likeliest)
        place = (kept == torch.tensor(c.tokens)[:, None]).int().argmax(dim=1)
        expected = torch.distributions.Categorical(logits=logits.gather(1, kept)).log_prob(place)
        torch.testing.assert_close(torch.tensor(c.log_probs), expected, rtol=1e-4, atol=1e-4)


def test_same_seed_same_text_whatever_else_is_written(backend):
    generate = backend(CausalLM(sharp_model()))
    sampling = SamplingCfg(max_new_tokens=16, temperature=1.3)
    together = generate(PROMPTS, seeds(3, 3), sampling)
    turned = generate(PROMPTS[::-1], seeds(3, 3).flip(0, 1), sampling)
    assert [[c.tokens for c in group[::-1]] for group in turned[::-1]] == [[c.tokens for c in g] for g in together]
    for number, prompt in enumerate(PROMPTS):
        ((alone,),) = generate([prompt], torch.tensor([[3 * number + 1]]), sampling)
        assert alone.tokens == together[number][1].tokens
        assert alone.stop == together[number][1].stop
    other = generate(PROMPTS, seeds(3, 3, first=100), sampling)
    assert all(
        a.tokens != b.tokens for (_, a), (_, b) in zip(rows(PROMPTS, together), rows(PROMPTS, other), strict=True)
    )


ENDS = range(3, 40, 4)
"""Tokens that end a turn."""


def num_tokens(past):
    """Tokens of a text that is kept; those of all layers are as many."""
    (number,) = {half.shape[1] for layer in past for half in layer}
    return number


def in_turns(generate, sampling, counting=None, turns=4):
    """Turns with answers of one or two tokens between them, read from the cache and read whole."""
    texts, pasts = [list(prompt) for prompt in PROMPTS for _ in range(2)], [None] * 6
    for turn in range(turns):
        whole = generate(texts, seeds(6, first=10 * turn), sampling)
        if counting is not None:
            counting.clear()
        kept = generate(texts, seeds(6, first=10 * turn), sampling, pasts=pasts)
        new = [len(text) - (0 if past is None else num_tokens(past)) for text, past in zip(texts, pasts, strict=True)]
        if counting is not None:
            assert counting[0] == (6, max(new))
        pasts = [c.past for (c,) in kept]
        for number, ((one,), (other,), text) in enumerate(zip(kept, whole, texts, strict=True)):
            assert (one.tokens, one.stop) == (other.tokens, other.stop)
            assert other.past is None
            torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-5)
            text += one.tokens
            if one.stop == "length":
                assert one.past is None, "a turn that is cut is the last"
            else:
                assert num_tokens(one.past) == len(text) - 1, "all but the last token was read"
            text += [8, 9][: 1 + number % 2]
    return new


@pytest.mark.parametrize("sampling", [{}, {"repetition_penalty": 1.3}, {"top_k": 3}], ids=str)
def test_a_turn_goes_on_from_what_was_read_before(backend, sampling):
    policy = CausalLM(sharp_model(), eos_ids=ENDS)
    generate = backend(policy)
    read, hidden_states = [], policy.hidden_states

    def counting(tokens, valid, cache=None):
        read.append(tokens.shape)
        return hidden_states(tokens, valid, cache)

    policy.hidden_states = counting
    new = in_turns(generate, SamplingCfg(max_new_tokens=24, temperature=1.3, **sampling), read)
    assert set(new) == {2, 3}, "the last token of a turn, and the answer"


_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}
KINDS = {
    "mpt": {"vocab_size": 40, "d_model": 32, "n_heads": 4, "n_layers": 2},
    "gpt_neo": {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 6,
    },
    "deepseek_v3": SIZES | _LATENT | {"num_key_value_heads": 4},
}
"""Attention by ALiBi and in a local window, which count places of the cache and not positions; values narrower than keys."""


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_other_attention_go_on_too(kind):
    torch.manual_seed(1)
    model = moved(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind])), 0.1)
    generate = partial(complete, CausalLM(model, eos_ids=ENDS))
    in_turns(generate, SamplingCfg(max_new_tokens=24, temperature=1.3))


def test_a_turn_may_end_at_its_first_token_and_some_texts_have_no_past(backend):
    generate, sampling = backend(CausalLM(sharp_model(), eos_ids=range(40))), SamplingCfg(max_new_tokens=4)
    texts = [[5, 6, 7], [9], [10, 11]]
    first = generate(texts, seeds(3), sampling, pasts=[None] * 3)
    pasts = [c.past for (c,) in first]
    assert [*map(num_tokens, pasts)] == [3, 1, 2]
    texts = [[*text, *c.tokens, 4, 4][: 9 - n] for n, (text, (c,)) in enumerate(zip(texts, first, strict=True))]
    generate = backend(CausalLM(sharp_model()))
    kept = generate(texts, seeds(3, 2), sampling, pasts=[pasts[0], None, pasts[2]])
    whole = generate(texts, seeds(3, 2), sampling)
    assert [[c.tokens for c in group] for group in kept] == [[c.tokens for c in group] for group in whole]


def test_models_with_other_states_read_the_text_again(family):
    model = sharp_model(family)
    generate = partial(complete, CausalLM(model, eos_ids=range(40)))
    [(first,), *_] = generate(PROMPTS, seeds(3), SamplingCfg(max_new_tokens=3), pasts=[None] * 3)
    assert (first.past is None) == (family in SLIDING)


_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_LINEAR |= {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_state": 8, "mamba_n_groups": 1}
_EXPERTS = {"num_experts": 1, "num_experts_per_tok": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
HYBRIDS = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": _LINEAR | {"num_experts": 0, "mlp_only_layers": [0, 1]},
    "qwen3_5_text": _LINEAR,
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention"], "num_local_experts": 0},
    "jamba": _EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "nemotron_h": {
        "layer_types": ["mamba", "attention"],
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
}
"""Settings of models some of whose layers keep a recurrent state, or that of a convolution."""


def random_model(kind, **settings):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | settings))
    return moved(model, 0.1)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_states_of_layers_are_repeated_selected_and_free_of_padding(kind, backend):
    """Each row is read again alone, at once and without a cache; rows end at different steps."""
    model, sampling = random_model(kind, **HYBRIDS[kind]), SamplingCfg(temperature=1.3, max_new_tokens=12)
    policy = CausalLM(model, eos_ids=range(3, 9))
    written = backend(policy)(PROMPTS, seeds(3, 4), sampling)
    assert len({len(c.tokens) for _, c in rows(PROMPTS, written)}) > 3
    for prompt, c in rows(PROMPTS, written):
        expected = (read(model, prompt, c.tokens) / 1.3).log_softmax(dim=-1)
        expected = expected.gather(1, torch.tensor(c.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(c.log_probs), expected, rtol=1e-3, atol=1e-3)


NO_BEGIN = "keeps a state of the text that cannot begin several completions"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        *((kind, NO_BEGIN) for kind in ["mamba", "falcon_mamba", "rwkv"]),
        ("recurrent_gemma", "logits_soft_cap=30"),
    ],
)
def test_models_whose_states_cannot_begin_completions_are_refused(kind, reason):
    """They take no cache of transformers, or read the padding; RecurrentGemma caps its logits besides."""
    sizes = {"lru_width": 32, "block_types": ["recurrent", "attention"]} if kind == "recurrent_gemma" else {}
    with pytest.raises(ConfigError, match=f"{reason}.*; fix: "):
        CausalLM(random_model(kind, **sizes))


SETTINGS = [
    SamplingCfg(max_new_tokens=2),
    SamplingCfg(max_new_tokens=2, temperature=0.5, top_k=3),
    SamplingCfg(max_new_tokens=2, min_p=0.3, top_k=5),
    SamplingCfg(max_new_tokens=2, min_new_tokens=1),
    SamplingCfg(max_new_tokens=2, repetition_penalty=1.5, presence_penalty=1.0, temperature=0.8, top_p=0.9),
]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_pairs_of_tokens_come_as_often_as_they_are_likely(backend, sampling):
    model = sharp_model(vocab_size=8)
    policy, count = CausalLM(model), 6_000
    (group,) = backend(policy)([[5, 6]], seeds(1, count), sampling)
    expected = {}
    for first, p in stated(model, [5, 6], [], sampling).items():
        after = {None: 1.0} if first == EOS else stated(model, [5, 6], [first], sampling)
        expected |= {(first, second): p * q for second, q in after.items()}
    found = dict.fromkeys(expected, 0)
    for c in group:
        found[c.tokens[0], c.tokens[1] if len(c.tokens) > 1 else None] += 1  # KeyError: one that cannot be drawn
    # five standard errors of a frequency
    for pair, p in expected.items():
        assert abs(found[pair] / count - p) < 5 * (p * (1 - p) / count) ** 0.5 + 1e-4, pair


def stated(model, prompt, written, sampling):
    """Token -> probability, worked out token by token."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + written])).logits[0, -1].tolist()
    for token in {*prompt, *written}:
        logits[token] *= sampling.repetition_penalty ** (-1 if logits[token] > 0 else 1)
    for token in set(written):
        logits[token] -= sampling.presence_penalty
    if len(written) < sampling.min_new_tokens:
        logits[EOS] = -torch.inf
    logits = [logit / sampling.temperature for logit in logits]
    ordered = sorted(range(len(logits)), key=logits.__getitem__, reverse=True)[: sampling.top_k]
    weight = torch.tensor([logits[t] for t in ordered]).softmax(dim=0).tolist()
    if sampling.top_p is not None:
        count = next(n for n in range(1, len(weight) + 1) if sum(weight[:n]) >= sampling.top_p - 1e-6)
        weight = weight[:count]
    if sampling.min_p is not None:
        weight = [w for w in weight if w >= sampling.min_p * weight[0]]
    return {t: w / sum(weight) for t, w in zip(ordered, weight, strict=False)}


def test_every_end_of_text_ends_and_the_limit_cuts(backend):
    policy = CausalLM(sharp_model(), eos_ids=(3, 4, 30))
    completions = [c for _, c in rows(PROMPTS, backend(policy)(PROMPTS, seeds(3, 12), SamplingCfg(max_new_tokens=12)))]
    assert {c.stop for c in completions} == {"eos", "length"}
    assert {c.tokens[-1] for c in completions if c.stop == "eos"} == {3, 4, 30}
    for c in completions:
        assert len(c.tokens) == len(c.log_probs)
        assert not {3, 4, 30} & set(c.tokens[:-1])
        assert (c.stop == "eos") == (c.tokens[-1] in (3, 4, 30))
        assert c.stop == "eos" or len(c.tokens) == 12


def test_a_stop_string_ends_the_text_that_it_is_completed_in(backend):
    tokenizer = character_tokenizer()
    plus = tokenizer.convert_tokens_to_ids("+")
    sampling = SamplingCfg(max_new_tokens=14, stop=("1+", "25="), temperature=30)
    policy = CausalLM(sharp_model(vocab_size=len(tokenizer)), eos_ids=(EOS,), tokenizer=tokenizer)
    prompt = tokenizer("3 + 1")["input_ids"]  # its last character is half of a stop string
    (group,) = backend(policy)([prompt], seeds(1, 1000), sampling)
    assert {c.stop for c in group} == {"eos", "stop", "length"}
    for c in group:
        texts = [tokenizer.decode(c.tokens[:n]) for n in range(len(c.tokens) + 1)]
        ends = [n for n in range(1, len(texts)) if texts[n].endswith(("1+", "25="))]
        assert ends == ([len(c.tokens)] if c.stop == "stop" else [])
    assert any(c.tokens[0] == plus and len(c.tokens) > 1 for c in group)


def test_prompts_of_any_length_and_no_empty_one(backend):
    policy = CausalLM(sharp_model())
    generate, sampling = backend(policy), SamplingCfg(max_new_tokens=3)
    for length in (1, 300):
        prompt = [5 + n % 30 for n in range(length)]
        ((c,),) = generate([prompt], seeds(1), sampling, deterministic=True)
        assert c.tokens == read(policy.model, prompt, c.tokens).argmax(dim=-1).tolist()
    with pytest.raises(DataError, match="prompt 1 has no tokens"):
        generate([[5], []], seeds(2), sampling)
    with pytest.raises(ConfigError, match=r"stop=\('x',\) needs a tokenizer"):
        generate([[5]], seeds(1), SamplingCfg(stop=("x",)))


def test_the_models_own_generation_settings_say_nothing(backend):
    model = sharp_model()
    generate = backend(CausalLM(model))
    expected = generate(PROMPTS, seeds(3, 2), SamplingCfg(max_new_tokens=12))
    first = expected[0][0].tokens[0]
    settings = {"do_sample": True, "temperature": 0.1, "top_k": 2, "repetition_penalty": 3.0, "no_repeat_ngram_size": 1}
    settings |= {"suppress_tokens": [first], "forced_eos_token_id": 7, "min_new_tokens": 5, "max_length": 6}
    model.generation_config = GenerationConfig(**settings, num_beams=3, num_return_sequences=2, eos_token_id=EOS)
    found = generate(PROMPTS, seeds(3, 2), SamplingCfg(max_new_tokens=12))
    assert [c.tokens for _, c in rows(PROMPTS, found)] == [c.tokens for _, c in rows(PROMPTS, expected)]
    assert model.generation_config.num_beams == 3


def test_nothing_ends_before_the_minimum(backend):
    policy = CausalLM(sharp_model(), eos_ids=range(3, 30))
    sampling = SamplingCfg(max_new_tokens=9, min_new_tokens=5)
    completions = [c for _, c in rows(PROMPTS, backend(policy)(PROMPTS, seeds(3, 8), sampling))]
    assert min(len(c.tokens) for c in completions) == 6  # five tokens that do not end the text, and one that may
    assert {len(c.tokens) for c in completions} > {6}
    assert not any(3 <= token < 30 for c in completions for token in c.tokens[:5])


def test_ended_rows_may_stay_in_the_batch_until_many_have(backend):
    sampling = SamplingCfg(max_new_tokens=40, temperature=1.3)
    policy = CausalLM(sharp_model(), eos_ids=ENDS[::3])
    expected = complete(policy, PROMPTS, seeds(3, 50), sampling)
    found = backend(policy)(PROMPTS, seeds(3, 50), sampling)
    lengths = sorted(len(c.tokens) for _, c in rows(PROMPTS, expected))
    assert lengths[75] < 33 < lengths[-1], "half of the rows have left before the last end"
    assert [c.tokens for _, c in rows(PROMPTS, found)] == [c.tokens for _, c in rows(PROMPTS, expected)]
    assert [c.stop for _, c in rows(PROMPTS, found)] == [c.stop for _, c in rows(PROMPTS, expected)]


def test_what_does_not_fit_is_generated_in_parts(backend, caplog):
    policy, sampling = CausalLM(sharp_model(), eos_ids=ENDS), SamplingCfg(max_new_tokens=8)
    generate, read = backend(policy), policy.hidden_states

    def small(tokens, valid, cache=None):
        if len(tokens) > 2 and tokens.shape[1] > 1:  # all prompts
            raise torch.OutOfMemoryError("CUDA out of memory")
        return read(tokens, valid, cache)

    for size in (1, 3):
        policy.hidden_states, policy.decoder.most_rows = read, math.inf
        whole = generate(PROMPTS, seeds(3, size), sampling, pasts=[None] * 3)
        policy.hidden_states = small
        parts = generate(PROMPTS, seeds(3, size), sampling, pasts=[None] * 3)
        assert [[c.tokens for c in group] for group in parts] == [[c.tokens for c in group] for group in whole]
        assert policy.decoder.most_rows == 3 * size // 2
        assert f"at most {3 * size // 2} rows at once" in caplog.text


def test_members_of_one_prompt_are_parted_and_the_last_error_says_what_to_do(backend):
    policy, sampling = CausalLM(sharp_model()), SamplingCfg(max_new_tokens=4)
    generate = backend(policy)
    whole = generate(PROMPTS[:1], seeds(1, 5), sampling)

    policy.decoder.most_rows = 2
    parts = generate(PROMPTS[:1], seeds(1, 5), sampling)
    assert [c.tokens for c in parts[0]] == [c.tokens for c in whole[0]]

    def none_fits(tokens, valid, cache=None):
        raise MemoryError

    policy.hidden_states = none_fits
    with pytest.raises(MemoryError) as caught:
        generate(PROMPTS, seeds(3, 2), sampling)
    assert caught.value.__notes__ == [
        "no row fits; fix: a smaller sampling.max_new_tokens, shorter prompts or a smaller model"
    ]
    policy.decoder.most_rows = math.inf

    def other(tokens, valid, cache=None):
        raise RuntimeError("no such kernel")

    policy.hidden_states = other
    with pytest.raises(RuntimeError, match="no such kernel"):
        generate(PROMPTS, seeds(3, 2), sampling)


def written(texts, sampling, tokenizer):
    """What becomes of the texts when the model's logits leave it no choice but their tokens."""
    scripts = [tokenizer(text)["input_ids"] for text in texts]
    writing = DecodingState(torch.arange(len(texts)), sampling, [EOS], tokenizer)
    for step in range(sampling.max_new_tokens):
        logits = torch.full((len(writing.rows), len(tokenizer)), -60.0)
        for place, row in enumerate(writing.rows.tolist()):
            logits[place, scripts[row][step]] = 60.0
        writing.write(logits)
        kept = writing.unfinished
        writing.rows, writing.unfinished = writing.rows[kept], kept[kept]
        if not len(writing.rows):
            break
    return writing.completions()


def test_stop_strings_end_a_text_at_the_token_that_completes_them():
    tokenizer = tiny_tokenizer()
    texts = ["the café is shut, so what", "an answer</answer> and more text", "an answer it is", "abcabd"]
    short = written(texts, SamplingCfg(max_new_tokens=6, stop=("fé", "</answer>")), tokenizer)
    assert {c.stop for c in short} == {"length"}
    long = SamplingCfg(max_new_tokens=12, stop=("é", "r</a"))
    first, second, *others = written([t + 20 * "x" for t in texts], long, tokenizer)
    assert (first.stop, tokenizer.decode(first.tokens)) == ("stop", "the café")  # é is two tokens
    assert second.stop == "stop"
    assert "r</a" in tokenizer.decode(second.tokens)
    assert "r</a" not in tokenizer.decode(second.tokens[:-1])
    assert [c.stop for c in others] == ["length"] * 2
    # before the last of the three bytes the text reads as another character
    (c,) = written(["€€€€"], SamplingCfg(max_new_tokens=12, stop=("€€",)), tokenizer)
    assert (c.stop, len(c.tokens)) == ("stop", 6)
    (c,) = written(["€q€q"], SamplingCfg(max_new_tokens=8, min_new_tokens=4, stop=("€q",)), tokenizer)
    assert (c.stop, len(c.tokens)) == ("stop", 8)
    # its first space is the text's, which decoding drops
    for text, end in (("1", 1), ("31 1", 3)):
        (c,) = written([text + "3333"], SamplingCfg(max_new_tokens=4, stop=(" 1",)), sentence_tokenizer())
        assert (c.stop, len(c.tokens)) == ("stop", end)
    # the end of text goes before a stop string that it completes
    (c,) = written(["a<|im_end|>"], SamplingCfg(max_new_tokens=2, stop=("<|im_end|>",)), tokenizer)
    assert (c.stop, c.tokens[-1]) == ("eos", EOS)


@given(st.lists(st.integers(0, 270), max_size=6))
def test_the_text_of_tokens_within_others_is_what_they_add_to_it(tokens):
    assert text_within(tiny_tokenizer(), tokens) == tiny_tokenizer().decode(tokens)
    tokenizer = sentence_tokenizer()
    before = tokenizer("1")["input_ids"]
    assert text_within(tokenizer, tokens) == tokenizer.decode([*before, *tokens]).removeprefix("1")


@pytest.mark.parametrize(("minimum", "length"), [(1, 2), (2, 4), (3, 4), (4, 6)])
def test_a_stop_string_within_the_minimum_does_not_count_and_the_next_one_does(minimum, length):
    tokenizer = tiny_tokenizer()
    sampling = SamplingCfg(max_new_tokens=8, min_new_tokens=minimum, stop=("zq",))
    (c,) = written(["zqzqzqzq"], sampling, tokenizer)
    assert tokenizer.decode(c.tokens) == "zqzqzqzq"[:length]


def test_a_stop_string_far_into_a_text_is_found_without_reading_all_of_it_again():
    tokenizer, read = tiny_tokenizer(), []
    decode = tokenizer.decode
    tokenizer.decode = lambda tokens, **how: read.append(len(tokens)) or decode(tokens, **how)
    text = 40 * "€q " + "€end and on"
    (c,) = written([text], SamplingCfg(max_new_tokens=240, stop=("€end",)), tokenizer)
    assert c.stop == "stop"
    assert decode(c.tokens) == 40 * "€q " + "€end"
    assert max(read) <= 4 * len("€end") + 8
