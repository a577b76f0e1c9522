"""What every function of the package promises: no waiting for the device, nothing written into inputs, few imports."""

import ast
import random
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch
from shapes import CHECKED_CALLS

import groupwise.functional
from groupwise.functional import advantages, kl, reduce

torch.manual_seed(0)
X, Y, Z = torch.randn(3, 4, 6)
IDS = torch.arange(4)[:, None].expand(4, 6).contiguous()
STEP = torch.arange(6).expand(4, 6).contiguous()
MASK = torch.rand(4, 6) < 0.7
OFF = ~MASK
PER_KEY = torch.ones(4)
COUNT = torch.tensor(3.0)
LINE, LINE_IDS, LINE_MASK = X[0].clone(), STEP[0].clone(), MASK[0].clone()

CALLS = {
    reduce.local: ((X,), {}),
    reduce.segment_sum: ((X, IDS, 4, MASK), {}),
    reduce.segment_mean: ((X, IDS, 4, MASK), {}),
    reduce.segment_min_max: ((X, IDS, 4, MASK), {}),
    reduce.gather_segments: ((PER_KEY, IDS), {}),
    reduce.masked_mean: ((X, MASK), {}),
    reduce.whiten: ((X, MASK), {}),
    reduce.whiten_segments: ((X, IDS, 4, MASK), {}),
    reduce.token_mean_weights: ((MASK, IDS, 4), {}),
    reduce.loss_weights: ((MASK, IDS, 4, "seq_mean_token_mean"), {}),
    advantages.discounted_sum: ((X, Y), {}),
    advantages.return_to_go: ((X, MASK, 0.9), {}),
    advantages.episode_return: ((X, IDS, 4), {}),
    advantages.gae: ((X, Y, Z, MASK, OFF), {"gamma": 0.9, "gae_lambda": 0.9}),
    advantages.group_relative: (
        (X, IDS, 4),
        {"baseline": "leave_one_out", "scale": "std", "member": MASK, "zeros": PER_KEY},
    ),
    advantages.batch_scale: (("batch_std", X, MASK, PER_KEY, 1e-4, reduce.local), {}),
    advantages.kl_shaping: ((X, IDS, 4, MASK), {}),
    advantages.finished_count: ((IDS, STEP, MASK, 4, 6), {}),
    reduce.kth_largest: ((X, COUNT, MASK), {}),
    reduce.highest: ((X, 0.2, MASK), {}),
    reduce.covariance: ((X, Y, MASK), {}),
    reduce.top_fraction: ((X, 0.2, MASK), {}),
    reduce.random_fraction: ((X, 0.2, OFF, MASK), {}),
    reduce.element_noise: ((7, X, STEP), {}),
    kl.categorical_kl: ((X, Y), {}),
    kl.bernoulli_kl: ((X, Y), {}),
    kl.gaussian_kl: ((X, Y, Z, X), {}),
    reduce.explained_variance: ((X, Y, MASK), {}),
    reduce.zero_variance_groups: ((LINE, LINE_IDS, 6, LINE_MASK), {}),
}
CHOICES = [
    *({"scale": scale} for scale in ("std", "population_std", "batch_std", "mean", "nonzero_share", "none")),
    *({"baseline": baseline} for baseline in ("mean", "leave_one_out")),
    {"baseline": "mean", "weight": Y.abs()},
]
EVERY = [pytest.param(f, args, kw, id=f.__name__) for f, (args, kw) in CALLS.items()]
EVERY += [
    pytest.param(f, args, {**kw, **choice}, id=f"{f.__name__}-{'-'.join(map(str, choice))}{i}")
    for f, (args, kw) in CALLS.items()
    if f is advantages.group_relative
    for i, choice in enumerate(CHOICES)
]
MODULES = [reduce, advantages, kl]


def on_meta(x):
    return x.to("meta") if isinstance(x, torch.Tensor) else x


def tensors(args, kw):
    return [x for x in (*args, *kw.values()) if isinstance(x, torch.Tensor)]


def test_every_function_is_listed():
    public = {
        value
        for module in MODULES
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    }
    assert public == set(CALLS)


@pytest.mark.parametrize(("function", "args", "kw"), EVERY)
def test_needs_no_number_from_the_device(function, args, kw):
    """Meta tensors have shapes but no numbers: ``.item()``, ``nonzero`` and boolean indexing would raise."""
    function(*map(on_meta, args), **{name: on_meta(x) for name, x in kw.items()})


@pytest.mark.parametrize(("function", "args", "kw"), EVERY)
def test_writes_nothing_into_its_inputs(function, args, kw):
    before = [(x._version, x.clone()) for x in tensors(args, kw)]
    function(*args, **kw)
    for x, (version, copy) in zip(tensors(args, kw), before, strict=True):
        assert x._version == version
        assert torch.equal(x, copy)


@pytest.mark.gpu
@pytest.mark.parametrize(("function", "args", "kw"), EVERY)
def test_can_be_captured_in_a_cuda_graph(function, args, kw):
    args = [x.cuda() if isinstance(x, torch.Tensor) else x for x in args]
    kw = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in kw.items()}
    expected = function(*args, **kw)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*args, **kw)
    graph.replay()
    torch.testing.assert_close(out, expected)


def test_imports_torch_jaxtyping_and_the_standard_library_only():
    allowed = {"torch", "jaxtyping"} | sys.stdlib_module_names
    for path in Path(groupwise.functional.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for name in names:
                assert name.split(".")[0] in allowed or name.startswith("groupwise.functional.")


def test_shapes_of_calls_are_checked():
    """Of the first calls of each function in each test."""
    with pytest.raises(jaxtyping.TypeCheckError, match="mask"):
        reduce.masked_mean(X, MASK[:2])
    for _ in range(CHECKED_CALLS):
        reduce.masked_mean(X, MASK)
    assert reduce.masked_mean(
        X, torch.ones(6, dtype=torch.bool)
    ).isfinite()  # a shape that its signature does not allow


def test_checks_of_calls_draw_from_no_generator_of_the_process():
    beartype = pytest.importorskip("beartype")

    def check(values: list[int]) -> None:
        """Looks at one item, whichever it draws."""

    check, before = beartype.beartype(check), random.getstate()
    with pytest.raises(beartype.roar.BeartypeCallHintParamViolation):
        any(check([1, "two"]) for _ in range(100))
    assert random.getstate() == before
