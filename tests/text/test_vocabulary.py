import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.text import vocabulary
from groupwise.text.vocabulary import token_scores

pytestmark = pytest.mark.usefixtures("computed_there")


def plain(hidden, weight, token, temperature, support=None):
    """The whole matrix at once, by torch's own log-softmax; ids that could not be drawn at minus infinity."""
    logits = hidden @ weight.T / temperature
    if support is not None:
        logits = torch.full_like(logits, -torch.inf).scatter(1, support, logits.gather(1, support))
    log_p = torch.log_softmax(logits, dim=-1)
    return log_p.gather(1, token[:, None])[:, 0], -(log_p.exp() * log_p.clamp(min=-1e9)).sum(dim=-1)


def test_by_hand():
    # logits [0, ln 3] at temperature 1: p = [1/4, 3/4]; at temperature 1/2: [1/10, 9/10]
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3)]])
    scores = token_scores(hidden, weight, torch.tensor([0, 1]))
    torch.testing.assert_close(scores.log_prob, torch.tensor([math.log(1 / 4), math.log(3 / 4)]))
    entropy = torch.tensor(-(math.log(1 / 4) / 4 + 3 * math.log(3 / 4) / 4)).expand(2)
    torch.testing.assert_close(scores.entropy, entropy)
    sharper = token_scores(hidden, weight, torch.tensor([0, 1]), temperature=0.5)
    torch.testing.assert_close(sharper.log_prob, torch.tensor([math.log(0.1), math.log(0.9)]))
    # the same among ids 0 and 1 of more
    more = torch.cat([weight, torch.tensor([[9.0], [math.log(2)]])])
    kept = token_scores(hidden, more, torch.tensor([0, 1]), support=torch.tensor([[0, 1], [1, 0]]))
    torch.testing.assert_close(kept.log_prob, scores.log_prob)
    torch.testing.assert_close(kept.entropy, entropy)


def leaves_of(trained, hidden, weight):
    """The two that get a gradient."""
    leaves = {"both": (hidden, weight), "hidden": (hidden,), "weight": (weight,)}[trained]
    for leaf in leaves:
        leaf.requires_grad_()
    return leaves


@settings(deadline=None, max_examples=80)
@given(
    count=st.integers(1, 9),
    ids=st.integers(1, 30),
    kept=st.none() | st.integers(1, 8),
    chunk=st.integers(1, 200),
    temperature=st.floats(0.3, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    trained=st.sampled_from(["both", "hidden", "weight"]),
    of=st.sampled_from([(0, 1), (0,), (1,)]),
    seed=st.integers(0, 2**31),
)
def test_value_and_gradient_are_those_of_the_whole_softmax_in_float64(
    count, ids, kept, chunk, temperature, dtype, trained, of, seed
):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = ((2 * torch.randn(n, 5, generator=generator)).to(dtype) for n in (count, ids))
    leaves = leaves_of(trained, hidden, weight)
    token, support = torch.randint(ids, (count,), generator=generator), None
    if kept is not None:
        support = torch.stack([torch.randperm(ids, generator=generator)[:kept] for _ in range(count)])
        token = support.amax(dim=1)
    upstream = torch.randn(2, count, generator=generator)
    padded = None if support is None else torch.cat([support, torch.full((count, 1), -1)], dim=1)
    how = {"temperature": temperature, "chunk_elements": chunk}
    ours = token_scores(hidden, weight, token, support=padded, **how)
    theirs = plain(hidden.double(), weight.double(), token, temperature, support)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected.float(), rtol=1e-5, atol=3e-5)
    mine, expected = (
        torch.autograd.grad(sum((upstream[i] * scores[i]).sum() for i in of), leaves) for scores in (ours, theirs)
    )
    rounding = 1e-4 if dtype == torch.float32 else 2**-8  # bfloat16 gradients are rounded, once
    for a, b in zip(mine, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b.double(), rtol=rounding, atol=2e-4)


def test_no_tokens_are_no_scores():
    hidden, weight = torch.ones(0, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    scores = token_scores(hidden, weight, torch.ones(0, dtype=torch.long))
    gradients = torch.autograd.grad(sum(score.sum() for score in scores), (hidden, weight))
    assert [tuple(score.shape) for score in scores] == [(0,), (0,)]
    assert (gradients[0].shape, gradients[1].abs().sum()) == ((0, 3), 0)


@pytest.mark.parametrize("trained", ["both", "hidden"])
def test_huge_logits_lose_nothing_but_their_own_rounding(trained):
    # 10,000 (1 + k / 4096) = 10,000 + 625 k / 256 are exact in float32; a normaliser beside 10,000 would round to 0.0005
    hidden, weight = torch.full((3, 1), 1e4), 1 + torch.tensor([[0.0], [1.0], [-3.0], [1.0], [2.0]]) / 4096
    leaves = leaves_of(trained, hidden, weight)
    token = torch.tensor([4, 0, 1])
    ours = token_scores(hidden, weight, token, chunk_elements=4)
    theirs = plain(hidden.double(), weight.double(), token, 1.0)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), expected, rtol=1e-6, atol=1e-6)
    mine, expected = (torch.autograd.grad(scores[0].sum(), leaves) for scores in (ours, theirs))
    # of hidden: the weights differ by 1e-4 of themselves, so that is how much of the gradient is left
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_has_no_gradient_costs_no_second_pass(monkeypatch):
    calls = []
    compute = vocabulary.logits_of
    monkeypatch.setattr(vocabulary, "logits_of", lambda *args: calls.append(1) or compute(*args))
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4)
    scores = token_scores(hidden, weight, torch.tensor([0, 1, 2]))
    torch.autograd.grad(scores.log_prob.sum(), hidden, retain_graph=True)
    assert len(calls) == 1  # the head is frozen, and only log-probabilities have a gradient
    torch.autograd.grad(scores.entropy.sum(), hidden)
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_within_autocast_scores_and_gradients_are_exact(dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 64).to(dtype).requires_grad_(), torch.randn(20, 64).to(dtype).requires_grad_()

    def results():
        log_prob = token_scores(hidden, weight, torch.arange(6)).log_prob
        return log_prob, *torch.autograd.grad(log_prob.sum(), (hidden, weight))

    outside = results()
    with torch.autocast("cpu", torch.bfloat16):
        inside = results()
    for a, b in zip(inside, outside, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_half_precision_is_summed_in_full_precision():
    # 1,024 gradient contributions of 2^-11 to one weight: in bfloat16 a running sum stops growing at 1/8
    count = 1024
    hidden = torch.full((count, 1), 2.0**-10, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    scores = token_scores(hidden, weight, torch.zeros(count, dtype=torch.long), chunk_elements=2)
    scores.log_prob.sum().backward()
    # each token gives (1 - 1/2) * 2^-10
    torch.testing.assert_close(weight.grad, torch.tensor([[0.5], [-0.5]], dtype=torch.bfloat16))
    assert scores.log_prob.dtype == torch.float32


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


@pytest.mark.parametrize("trained", ["both", "hidden"])
@pytest.mark.parametrize("support", [None, torch.ones(300, 2, dtype=torch.int32)])
def test_never_holds_more_than_it_is_allowed(support, trained):
    hidden, weight, token = torch.randn(300, 4), torch.randn(100, 4), torch.ones(300, dtype=torch.long)
    leaves_of(trained, hidden, weight)
    with Largest() as seen:
        token_scores(hidden, weight, token, support=support, chunk_elements=800).log_prob.sum().backward()
    # the inputs themselves have 1,200 numbers, all logits 30,000
    assert 800 <= seen.largest <= 3_000
    assert (weight.grad is None) == (trained == "hidden")
    wide = torch.randn(300, 64, requires_grad=True)
    with torch.no_grad(), Largest() as seen:  # scoring alone keeps nothing
        scores = token_scores(wide, torch.randn(6, 64), 0 * token, support=support, chunk_elements=60)
    assert not scores.log_prob.requires_grad
    assert seen.largest < wide.numel()
