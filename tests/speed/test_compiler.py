"""Compiled functions give what the functions give, from the same draws, or are not used."""

import gc
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn

from groupwise.engines import compiler
from groupwise.engines.compiler import Compiled
from groupwise.errors import SlowPathWarning
from groupwise.lean_tensordict import TensorDict


class Moved(NamedTuple):
    place: torch.Tensor
    parts: dict[str, torch.Tensor]
    nothing: None = None


class Walk:
    """Steps of random length in a wind, which is no argument."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.wind = torch.tensor([0.5, -0.5])
        self.calls = 0

    def __call__(self, before, parts, turn):
        self.calls += 1
        noise = torch.randn(before.shape, generator=self.generator)
        drawn = torch.rand(len(noise), generator=self.generator).clamp_(min=0.1).log_()
        place = before + turn * (noise + self.wind).tanh() * drawn[:, None]
        count = parts["count"] + (drawn > -1)
        return Moved(place, {"count": count, "obs": TensorDict({"x": place * 2}, batch_size=[len(place)])})


def walked(walk, compiled, steps=6):
    place, count, seen = torch.zeros(5, 2), torch.zeros(5, dtype=torch.int64), []
    for step in range(steps):
        place, parts, nothing = compiled(place, {"count": count}, torch.tensor(float(step)))
        assert nothing is None
        count = parts["count"]
        seen.append(torch.cat([place, parts["obs"]["x"], count[:, None]], dim=1))
    return torch.stack(seen)


def test_results_and_draws_are_the_functions():
    walk, other = Walk(3), Walk(3)
    compiled = Compiled(walk, name="walking", fix="nothing")
    with torch.inference_mode():
        torch.testing.assert_close(walked(walk, compiled), walked(other, other), rtol=1e-5, atol=1e-6)
    assert compiled.is_compiled
    assert walk.calls == 2  # the first call, and the one that was traced
    assert torch.equal(walk.generator.get_state(), other.generator.get_state())


def test_tensors_besides_the_arguments_are_read_at_each_call():
    layer = nn.Linear(3, 2)
    compiled = Compiled(lambda x: layer(x) + layer.bias, name="a layer", fix="nothing")
    for _ in range(3):
        x = torch.randn(4, 3)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), layer(x) + layer.bias)
            layer.weight.mul_(2.0)
            layer.bias.add_(1.0)
    assert compiled.is_compiled


def test_arguments_are_left_as_they_were():
    def function(x):
        y = x.clone()
        y.add_(1).mul_(3)
        return y, x

    compiled = Compiled(function, name="adding", fix="nothing")
    for value in (1.0, 2.0):
        x = torch.full((3,), value)
        y, same = compiled(x)
        assert torch.equal(x, torch.full((3,), value))
        assert torch.equal(same, x)
        assert torch.equal(y, 3 * (x + 1))


def test_other_layouts_and_other_shapes_are_no_business_of_the_caller():
    compiled = Compiled(lambda x: x * torch.arange(6.0).view(2, 3), name="weighing", fix="nothing")
    x = torch.arange(6.0).view(2, 3)
    for given in (x, x.T.contiguous().T, x[:1], x):
        assert torch.equal(compiled(given), given * torch.arange(6.0).view(2, 3))
    assert compiled.is_compiled


def test_numbers_that_are_not_finite_are_alike():
    compiled = Compiled(lambda x: x.log(), name="logarithms", fix="nothing")
    for _ in range(2):
        assert compiled(torch.tensor([-1.0, 0.0, 1.0]))[1:].tolist() == [-torch.inf, 0.0]
    assert compiled.is_compiled


def by_other_draws(generator):
    return lambda x: x + torch.empty(3).uniform_(generator=generator)


def by_looking(_):
    return lambda x: x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("make", "says"),
    [(by_other_draws, r"RuntimeError: uniform_ draws from a generator"), (by_looking, "without the compiler")],
)
def test_what_cannot_be_compiled_is_called_as_it_stands(make, says):
    generator, other = (torch.Generator().manual_seed(1) for _ in range(2))
    compiled = Compiled(make(generator), name="adding", fix="compile=False")
    x, reference = torch.ones(3), make(other)
    with pytest.warns(SlowPathWarning, match=says) as told:
        assert torch.equal(compiled(x), reference(x))
    assert "fix: a C++ compiler on the PATH, or compile=False" in str(told[0].message)
    assert not compiled.is_compiled
    assert torch.equal(compiled(x), reference(x))  # and nobody tries again


def test_wrong_results_are_not_used(monkeypatch):
    monkeypatch.setattr(compiler, "compile_function", lambda function, _, **__: lambda inputs: [inputs[0] * 1.01])
    compiled = Compiled(lambda x: x * 1.0, name="copying", fix="nothing")
    with pytest.warns(SlowPathWarning, match="result 0 differs from the traced function's"):
        compiled(torch.ones(3))
    assert torch.equal(compiled(torch.ones(3)), torch.ones(3))


def test_whose_method_it_is_is_freed():
    """Without a search for cycles, which may come late or never."""

    class Owner:
        def __init__(self):
            self.compiled = Compiled(self.double, name="doubling", fix="nothing")

        def double(self, x):
            return 2 * x

    owner = Owner()
    for _ in range(2):
        assert torch.equal(owner.compiled(torch.ones(2)), torch.full((2,), 2.0))
    known = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert known() is None
    finally:
        gc.enable()
