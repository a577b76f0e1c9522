"""Layers without dropout and computed again; prefixes that rows share."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, tiny_model
from torch import nn
from transformers import OPTConfig, OPTForCausalLM
from transformers.cache_utils import DynamicCache

from groupwise.text.policy import CausalLM, find_prefixes, prefix_cache, recompute_layers, silence_dropout, suffix_cache

DROPOUTS = {"gpt2": ["attn_pdrop", "embd_pdrop", "resid_pdrop"]}
TOKENS = torch.arange(4, 10)[None]


def noisy_model(family):
    torch.manual_seed(0)
    if family == "opt":  # its layers drop out by themselves, and whole layers are dropped
        sizes = {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_hidden_layers": 2}
        dropout = {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5}
        return OPTForCausalLM(OPTConfig(vocab_size=40, num_attention_heads=4, **sizes, **dropout))
    config = tiny_model(family).config
    for name in DROPOUTS.get(family, ["attention_dropout"]):
        setattr(config, name, 0.5)
    return type(tiny_model(family))(config)


def logits(model):
    return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("family", [*FAMILIES, "opt"])
def test_a_policy_has_no_dropout_in_training_mode_either(family):
    model = noisy_model(family)
    expected = logits(model.eval())
    assert not torch.equal(logits(model.train()), expected)
    policy = CausalLM(model)
    assert torch.equal(logits(policy.train().model), expected)
    assert torch.equal(logits(policy.eval().model), expected)


def test_only_dropout_is_silenced():
    layer = nn.Sequential(nn.Dropout(0.5), nn.LayerNorm(2, eps=0.25))
    layer.dropped_tokens = 7
    layer.raindrop = 0.5
    silence_dropout(layer)
    assert (layer[0].p, layer[1].eps, layer.dropped_tokens, layer.raindrop) == (0.0, 0.25, 7, 0.0)


def test_layers_are_computed_again_in_either_mode_but_not_without_gradient():
    model = tiny_model()
    recompute_layers(model)
    calls = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for mode in (True, False):
        logits(model.train(mode)).sum().backward()
    assert len(calls) == 4
    with torch.no_grad():
        logits(model)
    assert len(calls) == 5


def test_rows_behind_prefixes_leave_the_cache_as_it_was():
    model = tiny_model()
    prefixes = prefix_cache(model.config)
    assert len(prefixes.layers) == len(DynamicCache(config=model.config).layers) == 2
    model(input_ids=torch.tensor([[4, 5], [6, 7]]), cache=prefixes, use_cache=True)
    assert prefixes.get_seq_length() == 2
    kept = prefixes.layers[0].keys
    cache = suffix_cache(model.config, prefixes, torch.tensor([1, 0, 1]))
    rows = torch.tensor([[8], [9], [10]])
    first, second = (model(input_ids=rows, cache=cache, use_cache=True).logits for _ in range(2))
    assert torch.equal(first, second)
    assert prefixes.layers[0].keys is kept
    plain = model(input_ids=torch.tensor([[6, 7, 8], [4, 5, 9], [6, 7, 10]])).logits[:, -1:]
    torch.testing.assert_close(first, plain, rtol=1e-5, atol=1e-6)
    assert kept.requires_grad  # unlike those of generation


def rows_of(texts, groups, width=None):
    width = width or max(map(len, texts))
    tokens = torch.full((len(texts), width), -7)
    valid, group = torch.zeros_like(tokens, dtype=torch.bool), torch.full_like(tokens, -1)
    for row, (text, number) in enumerate(zip(texts, groups, strict=True)):
        where = slice(0, len(text))
        tokens[row, where], valid[row, where], group[row, where] = torch.tensor(text), True, number
    return tokens, valid, group


def test_prefixes_by_hand():
    found = find_prefixes(*rows_of([[1, 2, 3, 4], [1, 2, 5], [6, 7], [6, 7, 8]], [0, 0, 4, 4]))
    # the third row is the beginning of the fourth: it keeps its last token for itself
    assert found.number.tolist() == [0, 0, 1, 1]
    assert found.length.tolist() == [2, 2, 1, 1]
    assert found.head[found.head_valid].tolist() == [1, 2, 6]
    assert found.head_valid.tolist() == [[True, True], [False, True]]
    assert [t[v].tolist() for t, v in zip(found.tail, found.tail_valid, strict=True)] == [[3, 4], [5], [7], [7, 8]]


def test_nothing_is_shared_without_members_or_a_common_token():
    assert find_prefixes(*rows_of([[1, 2, 3], [1, 2, 4]], [0, 1])) is None
    assert find_prefixes(*rows_of([[1, 2, 3], [9, 2, 3]], [0, 0])) is None


def test_a_row_without_members_makes_no_head_wider():
    long = [[1, 2, *range(5, 11)], [1, 2, *range(6, 12)]]
    found = find_prefixes(*rows_of([*long, list(range(6))], [0, 0, 1]))
    assert (found.length.tolist(), found.head.shape[1], found.tail.shape[1]) == ([2, 2, 2], 2, 6)


@given(texts=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=6), min_size=1, max_size=6), data=st.data())
def test_the_parts_hold_every_token_of_the_rows_once_in_its_place(texts, data):
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(texts), max_size=len(texts)))
    tokens, valid, group = rows_of(texts, groups, width=7)
    found = find_prefixes(tokens, valid, group)
    if found is None:
        return
    again = found.gather(found.head[..., None].float(), found.tail[..., None].float(), *valid.nonzero(as_tuple=True))
    assert torch.equal(again[:, 0], tokens[valid])
    assert len(found.head) == len(set(groups))
    assert bool((found.tail_valid.sum(dim=1) > 0).all())
