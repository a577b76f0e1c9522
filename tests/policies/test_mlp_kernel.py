import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.errors import ConfigError
from groupwise.policies import mlp_kernel
from groupwise.policies.configs import PolicyCfg
from groupwise.policies.networks import MLP

WIDTH = st.integers(1, 20)


@pytest.fixture(autouse=True, scope="module")
def any_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlp_kernel, "ROWS", 0)
        patch.setattr(mlp_kernel, "ROWS_WITH_GRADIENT", 0)
        yield


@pytest.fixture
def calls(monkeypatch):
    """How often the kernel has run."""
    seen, kernel = [], mlp_kernel.mlp
    monkeypatch.setattr(mlp_kernel, "mlp", lambda *args, **more: seen.append(1) or kernel(*args, **more))
    return seen


def pair(num_inputs, hidden_sizes, num_outputs, activation):
    """The same network by the kernel and layer by layer."""
    torch.manual_seed(0)
    cfg = PolicyCfg(hidden_sizes=hidden_sizes, activation=activation)
    fast = MLP(num_inputs, cfg, num_outputs)
    for parameter in fast.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    reference = MLP(num_inputs, cfg.model_copy(update={"mlp_kernel": "torch"}), num_outputs)
    reference.load_state_dict(fast.state_dict())
    return fast, reference


@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(st.integers(0, 6), max_size=2),
    num_inputs=WIDTH,
    hidden_sizes=st.lists(WIDTH, max_size=3).map(tuple),
    num_outputs=WIDTH | st.none(),
    activation=st.sampled_from(mlp_kernel.ACTIVATIONS),
)
def test_outputs_and_gradients_are_those_of_the_layers(batch, num_inputs, hidden_sizes, num_outputs, activation):
    fast, reference = pair(num_inputs, hidden_sizes, num_outputs, activation)
    x = torch.randn(*batch, num_inputs)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = fast(inputs[0]), reference(inputs[1])
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), expected)
    towards = torch.randn_like(expected)
    for outputs in (found, expected):
        (outputs * towards).sum().backward()
    one, other = (
        [leaf.grad, *(p.grad for p in n.parameters())] for leaf, n in zip(inputs, (fast, reference), strict=True)
    )
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_an_input_without_gradient_gets_none(calls):
    fast, _ = pair(4, (8,), 2, "tanh")
    fast(torch.randn(3, 4)).sum().backward()
    assert calls
    assert all(parameter.grad is not None for parameter in fast.parameters())


@pytest.mark.parametrize("way", ["doubles", "another activation", "switched off", "compiling", "no layers", "few rows"])
def test_what_the_kernel_does_not_serve_goes_layer_by_layer(monkeypatch, calls, way):
    more = {"another activation": {"activation": "elu"}, "switched off": {"mlp_kernel": "torch"}}
    network, x = MLP(4, PolicyCfg(**more.get(way, {})), 2), torch.randn(3, 4)
    if way == "doubles":
        network, x = network.double(), x.double()
    if way == "no layers":
        network = MLP(4, PolicyCfg(hidden_sizes=()))
    if way == "few rows":
        monkeypatch.setattr(mlp_kernel, "ROWS_WITH_GRADIENT", 4)
    if way == "compiling":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    network(x)
    assert not calls


def test_acting_takes_the_kernel_for_fewer_rows(monkeypatch, calls):
    monkeypatch.setattr(mlp_kernel, "ROWS_WITH_GRADIENT", 6)
    monkeypatch.setattr(mlp_kernel, "ROWS", 3)
    network = MLP(4, PolicyCfg(), 2)
    for rows, acting, learning in ((2, 0, 0), (3, 1, 0), (5, 1, 0), (6, 1, 1)):
        with torch.no_grad():
            network(torch.randn(rows, 4))
        assert len(calls) == acting
        network(torch.randn(rows, 4))
        assert len(calls) == acting + learning
        calls.clear()


def test_a_copy_computes_with_its_own_weights():
    network = MLP(4, PolicyCfg(), 2)
    twin, x = copy.deepcopy(network), torch.randn(3, 4)
    before = network(x)
    with torch.no_grad():
        twin.head.bias += 1
    torch.testing.assert_close(twin(x), before + 1)
    torch.testing.assert_close(network(x), before)


def test_a_second_derivative_is_refused():
    network, x = MLP(4, PolicyCfg(), 1), torch.randn(3, 4, requires_grad=True)
    with pytest.raises(ConfigError, match="mlp_kernel='torch'"):
        torch.autograd.grad(network(x).sum(), x, create_graph=True)
