import pytest
import torch
from tiny_models import tiny_model
from torch.nn.functional import scaled_dot_product_attention

from groupwise.config.policy import SamplingCfg
from groupwise.speed import cpu_attention
from groupwise.speed.cpu_attention import MOST, attend, attend_on_cpus
from groupwise.text.generation import complete
from groupwise.text.policy import CausalLM


def some(heads=6, groups=2, context=9, dtype=torch.float32, queries=3, out=8):
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, heads, queries, 8), (3, groups, context, 8), (3, groups, context, out))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


FIXED = torch.Generator().manual_seed(1)
MASKS = {
    "none": None,
    "bool": torch.rand(3, 1, 3, 9, generator=FIXED) < 0.7,
    "float": torch.randn(3, 1, 3, 9, generator=FIXED),
    "of each head": torch.randn(1, 6, 3, 9, generator=FIXED),
    "of all queries": torch.randn(3, 1, 1, 9, generator=FIXED),
}
MASKS["bool"][..., 4] = True


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_value_and_gradient_are_those_of_pytorch(mask, groups, scale, dtype, within):
    inputs = some(groups=groups, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    mask = MASKS[mask] if mask == "bool" or MASKS[mask] is None else MASKS[mask].double()
    expected = scaled_dot_product_attention(*exact, attn_mask=mask, scale=scale, enable_gqa=True)
    found = attend(*inputs, mask if mask is None or mask.dtype == torch.bool else mask.float(), scale)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    found.backward(upstream.to(dtype))
    expected.backward(upstream.double())
    assert found.dtype == dtype
    for ours, theirs in ((found, expected), *((a.grad, b.grad) for a, b in zip(inputs, exact, strict=True))):
        assert (ours - theirs).norm() < within * theirs.norm()


@pytest.mark.parametrize(("queries", "out"), [(1, 8), (1, 5), (4, 16)])
def test_one_query_and_values_of_another_width(queries, out):
    inputs = some(queries=queries, out=out)
    expected = scaled_dot_product_attention(*inputs, enable_gqa=True)
    with torch.no_grad():
        torch.testing.assert_close(attend(*inputs), expected)
    grads = [torch.autograd.grad(found.square().sum(), inputs) for found in (attend(*inputs), expected)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradient_by_finite_differences():
    torch.manual_seed(0)
    query, key, value = some(heads=2, groups=1, context=4, queries=2)
    inputs = [x.detach()[:1] for x in (query, key, value)]
    upstream = torch.randn(1, 2, 2, 8)
    leaves = [x.clone().requires_grad_() for x in inputs]
    (attend(*leaves) * upstream).sum().backward()
    for number, place in ((0, (0, 1, 0, 3)), (1, (0, 0, 2, 5)), (2, (0, 0, 3, 1))):
        sides = []
        for step in (1e-2, -1e-2):
            moved = [x.clone() for x in inputs]
            moved[number][place] += step
            sides.append((attend(*moved) * upstream).sum())
        assert leaves[number].grad[place].item() == pytest.approx((sides[0] - sides[1]).item() / 2e-2, abs=2e-3)


@pytest.mark.parametrize("nothing", [torch.zeros(1, 1, 1, 9, dtype=torch.bool), torch.full((1, 1, 1, 9), -torch.inf)])
def test_what_may_look_at_nothing_is_finite(nothing):
    inputs = some()
    found = attend(*inputs, nothing)
    found.sum().backward()
    assert all(x.isfinite().all() for x in (found, *(x.grad for x in inputs)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("low", ["-inf", "least"])
def test_an_added_mask_may_have_any_precision(dtype, low):
    query, key, value = (x.detach() for x in some())
    looks = torch.rand(1, 1, 1, key.shape[2], generator=torch.Generator().manual_seed(1)) < 0.5
    value_of = -torch.inf if low == "-inf" else torch.finfo(dtype).min
    added = torch.zeros(looks.shape, dtype=dtype).masked_fill(~looks, value_of)
    torch.testing.assert_close(attend(query, key, value, added), attend(query, key, value, looks))


@pytest.fixture
def calls(monkeypatch):
    """Shapes of the queries that were attended to here."""
    seen = []
    monkeypatch.setattr(cpu_attention, "attend", lambda q, *more: seen.append(tuple(q.shape)) or attend(q, *more))
    return seen


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_attends_to_padded_texts_with_it_and_to_plain_ones_as_before(family, dtype, calls):
    model = tiny_model(family).to(dtype).eval()
    tokens = torch.randint(40, (2, MOST + 1), generator=torch.Generator().manual_seed(0))
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[0, :5] = False  # so that there is a mask

    def log_probs(width):
        with torch.no_grad():
            logits = model(tokens[:, :width], attention_mask=valid[:, :width].long()).logits
        return logits.float().log_softmax(dim=-1)[valid[:, :width]]

    expected = [log_probs(width) for width in (9, MOST + 1)]
    policy = CausalLM(model, SamplingCfg(max_new_tokens=4), eos_ids=())
    attend_on_cpus(policy.network)
    calls.clear()
    found = [log_probs(width) for width in (9, MOST + 1)]
    assert calls == [(2, 4, 9, 8)] * 2  # layers; the longer texts went another way
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).square().mean().sqrt() < policy.rounding / 10
    calls.clear()
    with torch.no_grad():
        model(tokens[1:, :9])
    assert calls == []  # nothing is masked but what is ahead


def test_tokens_are_written_with_it(calls):
    policy = CausalLM(tiny_model("gpt2"), SamplingCfg(max_new_tokens=4), eos_ids=())
    attend_on_cpus(policy.network)
    calls.clear()
    complete(policy, [[5] * 20, [8]], torch.arange(4).view(2, 2))
    assert calls == [(2, 4, 20, 8)] * 2 + [(4, 4, 1, 8)] * 2 * 3  # prompts, then tokens that were read one by one


def test_a_model_with_another_attention_keeps_it():
    model = tiny_model()
    model.set_attn_implementation("eager")
    attend_on_cpus(CausalLM(model).network)
    assert model.config._attn_implementation == "eager"


def test_a_saved_model_does_not_ask_for_it(tmp_path):
    policy = CausalLM(tiny_model())
    attend_on_cpus(policy.network)
    policy.save_pretrained(tmp_path)
    assert cpu_attention.NAME not in (tmp_path / "config.json").read_text()
