import pytest
import torch
from tiny_models import tiny_model
from torch.nn.functional import scaled_dot_product_attention

from groupwise.policies import few_queries
from groupwise.policies.causal_lm import CausalLM
from groupwise.policies.configs import SamplingCfg
from groupwise.policies.decoding import complete
from groupwise.policies.few_queries import FewQueries, attend


def some(heads=6, groups=2, context=9, dtype=torch.float32, queries=1):
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, heads, queries, 8), (3, groups, context, 8), (3, groups, context, 8))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


MASKS = {
    "none": None,
    "bool": torch.rand(3, 1, 1, 9) < 0.7,
    "float": torch.randn(3, 1, 1, 9),
    "of each head": torch.randn(1, 6, 1, 9),
}
MASKS["bool"][..., 4] = True


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_it_is_pytorchs_attention(mask, groups, queries, scale):
    query, key, value = some(groups=groups, queries=queries)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=MASKS[mask], scale=scale, enable_gqa=True)
    torch.testing.assert_close(attend(query, key, value, attn_mask=MASKS[mask], scale=scale, enable_gqa=True), expected)


@pytest.mark.parametrize("nothing", [torch.zeros(1, 1, 1, 9, dtype=torch.bool), torch.full((1, 1, 1, 9), -torch.inf)])
def test_what_may_look_at_nothing_is_finite(nothing):
    assert attend(*some(), attn_mask=nothing).isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "queries", "settings", "ours"),
    [
        (torch.bfloat16, 1, {}, True),
        (torch.float32, 1, {}, False),
        (torch.bfloat16, 17, {}, False),
        (torch.bfloat16, 1, {"is_causal": True}, False),
    ],
)
def test_only_few_queries_in_bfloat16_go_this_way(monkeypatch, dtype, queries, settings, ours):
    calls = []
    monkeypatch.setattr(few_queries, "attend", lambda *args, **kwargs: calls.append(1) or attend(*args, **kwargs))
    query, key, value = some(dtype=dtype, queries=queries)
    expected = scaled_dot_product_attention(query, key, value, enable_gqa=True, **settings)
    with FewQueries():
        found = scaled_dot_product_attention(query, key, value, enable_gqa=True, **settings)
    assert bool(calls) == ours
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_model_in_bfloat16_writes_with_it(monkeypatch):
    calls = []
    monkeypatch.setattr(few_queries, "attend", lambda *args, **kwargs: calls.append(1) or attend(*args, **kwargs))
    policy = CausalLM(tiny_model("gpt2").bfloat16(), SamplingCfg(max_new_tokens=4), eos_ids=())
    complete(policy, [[5] * 20, [8]], torch.arange(4).view(2, 2))
    assert len(calls) == 2 * 3  # layers times tokens that were read one by one
