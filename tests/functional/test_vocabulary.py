import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.functional.vocabulary import token_scores


def plain(hidden, weight, token, temperature):
    """The whole matrix at once, by torch's own log-softmax."""
    log_p = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return log_p.gather(1, token[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)


def test_by_hand():
    # logits [0, ln 3] at temperature 1: p = [1/4, 3/4]; at temperature 1/2: [1/10, 9/10]
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3)]])
    scores = token_scores(hidden, weight, torch.tensor([0, 1]))
    torch.testing.assert_close(scores.log_prob, torch.tensor([math.log(1 / 4), math.log(3 / 4)]))
    entropy = -(math.log(1 / 4) / 4 + 3 * math.log(3 / 4) / 4)
    torch.testing.assert_close(scores.entropy, torch.tensor([entropy, entropy]))
    sharper = token_scores(hidden, weight, torch.tensor([0, 1]), temperature=0.5)
    torch.testing.assert_close(sharper.log_prob, torch.tensor([math.log(0.1), math.log(0.9)]))


@settings(deadline=None)
@given(
    count=st.integers(0, 7),
    vocabulary=st.integers(1, 9),
    chunk=st.integers(1, 40),
    temperature=st.floats(0.3, 3),
    seed=st.integers(0, 2**31),
)
def test_value_and_gradient_are_those_of_the_whole_softmax(count, vocabulary, chunk, temperature, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    hidden, weight = draw(count, 5).requires_grad_(), draw(vocabulary, 5).requires_grad_()
    token = torch.randint(vocabulary, (count,), generator=generator)
    upstream = draw(count), draw(count)
    results = []
    for scores in (
        token_scores(hidden, weight, token, temperature=temperature, chunk_elements=chunk),
        plain(hidden, weight, token, temperature),
    ):
        total = sum((a * b).sum() for a, b in zip(scores, upstream, strict=True))
        results.append((*scores, *torch.autograd.grad(total, (hidden, weight))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradient_by_finite_differences_of_entropy_alone():
    torch.manual_seed(0)
    hidden, weight, token = torch.randn(3, 4), torch.randn(6, 4), torch.tensor([0, 5, 2])
    hidden.requires_grad_()
    (gradient,) = torch.autograd.grad(token_scores(hidden, weight, token).entropy.sum(), hidden)
    step = 1e-2
    for i, j in ((0, 0), (2, 3)):
        shift = torch.zeros(3, 4)
        shift[i, j] = step
        up, down = (token_scores(hidden.detach() + s, weight, token).entropy.sum() for s in (shift, -shift))
        assert gradient[i, j].item() == pytest.approx((up - down).item() / (2 * step), abs=1e-3)


def test_half_precision_is_summed_in_full_precision():
    # 4,096 gradient contributions of 2^-12 to one weight: in bfloat16 a running sum stops growing at 1/16
    count = 4096
    hidden = torch.full((count, 1), 2.0**-12, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    scores = token_scores(hidden, weight, torch.zeros(count, dtype=torch.long), chunk_elements=2)
    scores.log_prob.sum().backward()
    # each token gives (1 - 1/2) * 2^-12
    torch.testing.assert_close(weight.grad, torch.tensor([[0.5], [-0.5]], dtype=torch.bfloat16))
    assert scores.log_prob.dtype == torch.float32


def test_a_frozen_head_gets_no_gradient_and_hidden_states_do():
    hidden = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(6, 4)
    token_scores(hidden, weight, torch.tensor([0, 1, 2])).log_prob.sum().backward()
    assert weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_never_holds_all_logits(monkeypatch):
    largest = 0
    plain_matmul = torch.Tensor.__matmul__

    def watched(self, other):
        nonlocal largest
        out = plain_matmul(self, other)
        largest = max(largest, out.numel())
        return out

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    hidden = torch.randn(64, 4, requires_grad=True)
    scores = token_scores(hidden, torch.randn(100, 4), torch.zeros(64, dtype=torch.long), chunk_elements=800)
    scores.log_prob.sum().backward()
    assert 0 < largest <= 800


def masked(hidden, weight, token, temperature, support, barred, barred_ids):
    """The whole matrix at once in float64, what cannot be drawn at minus infinity, by torch's own distribution."""
    logits = hidden.double() @ weight.double().T / temperature
    keep = torch.ones_like(logits, dtype=torch.bool)
    for row, ids in enumerate(support.tolist()):
        if ids[0] >= 0:
            keep[row] = torch.isin(torch.arange(len(weight)), torch.tensor(ids))
        if barred[row]:
            keep[row, barred_ids] = False
    p = torch.distributions.Categorical(logits=logits.masked_fill(~keep, -torch.inf))
    return p.log_prob(token), torch.stack([torch.distributions.Categorical(probs=q[q > 0]).entropy() for q in p.probs])


def some_choice(generator, count, vocabulary, kept, unrestricted):
    """Supports, marks of what is barred, and a token that could be drawn, of each row; ids 0 and 1 can be barred."""
    support = torch.stack([torch.randperm(vocabulary, generator=generator)[:kept] for _ in range(count)])
    support[torch.rand(count, generator=generator) < unrestricted] = -1
    barred = torch.rand(count, generator=generator) < 0.5
    token = torch.where(support[:, 0] >= 0, support.amax(dim=1), 2)
    return support, barred & (token > 1), token


@settings(deadline=None)
@given(
    count=st.integers(1, 7),
    kept=st.integers(1, 6),
    unrestricted=st.sampled_from([0.0, 0.5, 1.0]),
    chunk=st.integers(1, 100),
    temperature=st.floats(0.3, 3),
    seed=st.integers(0, 2**31),
)
def test_among_what_could_be_drawn_value_and_gradient_are_those_of_a_masked_softmax(
    count, kept, unrestricted, chunk, temperature, seed
):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, 5, generator=generator).requires_grad_() for n in (count, 9))
    support, barred, token = some_choice(generator, count, 9, kept, unrestricted)
    barred_ids = torch.tensor([0, 1])
    ours = token_scores(
        hidden,
        weight,
        token,
        temperature=temperature,
        support=support,
        barred=barred,
        barred_ids=barred_ids,
        chunk_elements=chunk,
    )
    theirs = masked(hidden, weight, token, temperature, support, barred, barred_ids)
    upstream = torch.randn(2, count, generator=generator)
    for scores, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(scores, expected.float(), rtol=1e-4, atol=1e-5)
    results = (
        torch.autograd.grad(sum((a * b).sum() for a, b in zip(scores, upstream, strict=True)), (hidden, weight))
        for scores in (ours, theirs)
    )
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-5)


def test_a_support_by_hand():
    # logits [0, ln 3, 9, ln 2]; among ids 0 and 1: p = [1/4, 3/4]; with id 0 barred among 0, 1, 3: 3/5 and 2/5
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3)], [9.0], [math.log(2)]])
    scores = token_scores(hidden, weight, torch.tensor([1, 0]), support=torch.tensor([[0, 1], [1, 0]]))
    torch.testing.assert_close(scores.log_prob, torch.tensor([math.log(3 / 4), math.log(1 / 4)]))
    barred = token_scores(
        hidden[:1],
        weight,
        torch.tensor([3]),
        support=torch.tensor([[3, 0, 1]]),
        barred=torch.tensor([True]),
        barred_ids=torch.tensor([0]),
    )
    torch.testing.assert_close(barred.log_prob, torch.tensor([math.log(2 / 5)]))
    torch.testing.assert_close(barred.entropy, torch.tensor([-0.4 * math.log(0.4) - 0.6 * math.log(0.6)]))


def test_half_precision_supports_are_multiplied_in_full_precision():
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 64).bfloat16(), torch.randn(20, 64).bfloat16()
    support = torch.arange(8).expand(6, 8)
    token = torch.arange(6)
    halves = token_scores(hidden, weight, token, support=support)
    full = token_scores(hidden.float(), weight.float(), token, support=support)
    torch.testing.assert_close(halves.log_prob, full.log_prob)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


@pytest.mark.parametrize("support", [None, torch.arange(10).expand(300, 10)])
def test_never_holds_more_than_it_is_allowed(support):
    hidden = torch.randn(300, 4, requires_grad=True)
    weight = torch.randn(100, 4, requires_grad=True)
    barred = torch.ones(300, dtype=torch.bool)
    with Largest() as seen:
        scores = token_scores(
            hidden,
            weight,
            torch.ones(300, dtype=torch.long),
            support=support,
            barred=barred,
            barred_ids=torch.tensor([0]),
            chunk_elements=800,
        )
        scores.log_prob.sum().backward()
    # the inputs themselves have 1,200 numbers, all logits 30,000, the weights of all supports 12,000
    assert 800 <= seen.largest <= 3_000
