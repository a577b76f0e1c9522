import copy
import math

import pytest
import torch

from groupwise.algorithms import optim
from groupwise.algorithms.optim import Trained, build_optimizer
from groupwise.config.algorithm import PPOCfg
from groupwise.errors import ConfigError


def small_network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "rmsprop"])
def test_parameters_end_to_end_train_like_single_ones(name, monkeypatch):
    ends, norms = [], []
    for limit in (optim.FLAT_LIMIT, 0):
        monkeypatch.setattr(optim, "FLAT_LIMIT", limit)
        network, x = small_network(), torch.linspace(-1, 1, 15).reshape(5, 3)
        trained = Trained(network.parameters())
        assert len(trained.tensors) == (1 if limit else 4)
        built = build_optimizer(PPOCfg(learning_rate=0.01, optimizer=name), trained)
        for _ in range(20):
            trained.zero_grad()
            (network(x) - 1).square().mean().backward()
            trained.gather_grad()
            norms.append(trained.clip_grad(0.5))
            built.step()
        ends.append(torch.cat([p.detach().flatten() for p in network.parameters()]))
    torch.testing.assert_close(*ends, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(norms[:20], norms[20:])
    assert norms[0] > 0.5


def test_gradients_of_parameters_and_of_the_vector_come_together():
    network = small_network()
    trained = Trained(network.parameters())
    trained.zero_grad()
    network(torch.ones(2, 3)).sum().backward()
    own = torch.cat([p.grad.flatten() for p in network.parameters()])
    assert own.abs().max() > 0
    trained.gather_grad()
    assert torch.equal(trained.tensors[0].grad, own)
    trained.zero_grad()
    trained.tensors[0].grad = torch.ones_like(own)
    network[2](torch.ones(2, 4)).sum().backward()  # leaves the first layer without a gradient
    trained.gather_grad()
    assert trained.tensors[0].grad[:16].tolist() == [1.0] * 16
    assert trained.tensors[0].grad[16:].tolist() == [3.0] * 5
    trained.zero_grad()
    trained.tensors[0].grad = torch.ones_like(own)
    network(torch.ones(2, 3)).sum().backward()
    trained.gather_grad()
    assert torch.equal(trained.tensors[0].grad, 1 + own)
    trained.zero_grad()
    trained.gather_grad()
    assert not trained.tensors[0].grad.any()


def test_gathered_gradients_are_views_that_clipping_reaches():
    """As an optimiser over the single parameters needs them."""
    network = small_network()
    trained = Trained(network.parameters())
    trained.zero_grad()
    network(torch.ones(2, 3)).sum().backward()
    trained.gather_grad()
    norm = trained.clip_grad(0.1)
    parts = torch.stack([p.grad.norm() for p in network.parameters()])
    assert norm > 0.1
    assert parts.norm().item() == pytest.approx(0.1, abs=1e-6)


def test_a_gradient_that_is_not_a_number_is_not_hidden_by_clipping():
    network = small_network()
    trained = Trained(network.parameters())
    trained.zero_grad()
    (network(torch.ones(2, 3)).sum() * math.nan).backward()
    trained.gather_grad()
    assert trained.clip_grad(0.5).isnan()
    assert trained.tensors[0].grad.isnan().all()


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "rmsprop"])
def test_a_loop_of_ones_own_trains(name, monkeypatch):
    """Zero, backward, step, as with any optimiser of torch."""
    ends = []
    for limit in (optim.FLAT_LIMIT, 0):
        monkeypatch.setattr(optim, "FLAT_LIMIT", limit)
        network, x = small_network(), torch.linspace(-1, 1, 15).reshape(5, 3)
        built = build_optimizer(PPOCfg(learning_rate=0.01, optimizer=name), Trained(network.parameters()))
        for _ in range(5):
            built.zero_grad()
            (network(x) - 1).square().mean().backward()
            built.step()
        ends.append(torch.cat([p.detach().flatten() for p in network.parameters()]))
    torch.testing.assert_close(*ends, atol=1e-6, rtol=1e-5)
    untrained = torch.cat([p.detach().flatten() for p in small_network().parameters()])
    assert (ends[0] - untrained).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_vectors_adam_is_the_libraries(name):
    torch.manual_seed(0)
    cfg = PPOCfg(learning_rate=0.1, optimizer={"name": name, "weight_decay": 0.1})
    vector, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    ours = build_optimizer(cfg, Trained([vector]))
    settings = {"lr": 0.1, "betas": cfg.optimizer.betas, "eps": cfg.optimizer.eps, "weight_decay": 0.1, "fused": True}
    theirs = (torch.optim.Adam if name == "adam" else torch.optim.AdamW)([other], **settings)
    for step in range(6):
        if step == 3:  # a reloaded one goes on
            saved, ours = ours.state_dict(), build_optimizer(cfg, Trained([vector]))
            ours.load_state_dict(saved)
            saved["state"][0]["exp_avg"].zero_()
        ours.param_groups[0]["params"][0].grad = torch.randn(3)
        other.grad = ours.param_groups[0]["params"][0].grad.clone()
        ours.step()
        theirs.step()
        assert torch.equal(vector.detach(), other.detach())
    for key, value in theirs.state_dict()["state"][0].items():
        assert torch.equal(ours.state_dict()["state"][0][key], value)


@pytest.mark.parametrize("stepped", [True, False])
def test_the_vectors_adam_and_the_librarys_read_each_others_state(stepped):
    """Runs kept by other versions go on, and the other way round."""
    torch.manual_seed(0)
    cfg = PPOCfg(learning_rate=0.1, optimizer="adam")
    first, second, third = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    theirs = torch.optim.Adam([first], lr=0.03, betas=(0.5, 0.7), eps=1e-3, fused=True)
    ours, again = build_optimizer(cfg, Trained([second])), torch.optim.Adam([third], fused=True)

    def step(optimizer, grad):
        vector = optimizer.param_groups[0]["params"][0]
        vector.grad = grad.clone()
        optimizer.step()
        return vector.detach().clone()

    if stepped:
        step(theirs, torch.tensor([1.0, 2.0, -3.0]))
    ours.load_state_dict(theirs.state_dict())
    saved = ours.state_dict()
    assert saved["param_groups"][0]["params"] == [0]
    assert bool(saved["state"]) is stepped
    again.load_state_dict(copy.deepcopy(saved))  # torch takes the tensors as they are
    with torch.no_grad():
        ours.param_groups[0]["params"][0].copy_(first)
        third.copy_(first)
    grad = torch.tensor([-1.0, 0.5, 2.0])
    expected = step(theirs, grad)
    assert torch.equal(step(ours, grad), expected)
    assert torch.equal(step(again, grad), expected)


def test_a_policy_converted_behind_the_optimisers_back_is_an_error():
    network = small_network()
    trained = Trained(network.parameters())
    network.double()
    with pytest.raises(ConfigError, match="moved or converted after"):
        trained.zero_grad()
    with pytest.raises(ConfigError, match="moved or converted after"):
        trained.put_grad(torch.zeros(sum(p.numel() for p in network.parameters())), add=False)


def test_parameters_of_several_types_stay_single():
    network = small_network()
    network[2].double()
    assert len(Trained(network.parameters()).tensors) == 4


def test_loading_weights_reaches_the_optimiser():
    network, other = small_network(), torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    trained = Trained(network.parameters())
    network.load_state_dict(other.state_dict())
    assert torch.equal(trained.tensors[0].detach(), torch.cat([p.detach().flatten() for p in other.parameters()]))
