import pytest
import torch

from groupwise.algorithms.optim import Schedule, build_optimizer, schedule_factor
from groupwise.config.algorithm import AdaptiveKLCfg, LinearCfg, PPOCfg


@pytest.mark.parametrize(
    ("cfg", "progress", "expected"),
    [
        ({"name": "none"}, 0.7, 1.0),
        ({"name": "linear"}, 0.25, 0.75),
        ({"name": "linear", "final": 0.2}, 0.5, 0.6),
        ({"name": "linear", "final": 0.2}, 1.0, 0.2),
        ({"name": "cosine"}, 0.5, 0.5),
        # (1 + cos(pi / 3)) / 2 = .75
        ({"name": "cosine"}, 1 / 3, 0.75),
        ({"name": "cosine", "final": 0.1}, 1.0, 0.1),
        ({"name": "step", "decay": 0.5, "interval": 0.25}, 0.24, 1.0),
        ({"name": "step", "decay": 0.5, "interval": 0.25}, 0.75, 0.125),
        ({"name": "step", "decay": 0.1, "interval": 0.1}, 0.3, 1e-3),
        ({"name": "exponential", "decay": 0.25, "interval": 0.5}, 0.25, 0.5),
        ({"name": "exponential", "decay": 0.25, "interval": 0.5}, 1.0, 0.0625),
    ],
)
def test_schedule_factor(cfg, progress, expected):
    assert schedule_factor(PPOCfg(schedule=cfg).schedule, progress) == pytest.approx(expected)


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def test_schedule_sets_the_rate_of_the_optimiser():
    sgd = optimizer()
    schedule = Schedule(LinearCfg(), sgd, 0.4)
    schedule.set_progress(0.75)
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.1)
    assert schedule.rate == pytest.approx(0.1)


def test_adaptive_kl_moves_the_rate_against_the_kl_within_bounds():
    sgd = optimizer()
    cfg = AdaptiveKLCfg(desired_kl=0.01, min_factor=0.5, max_factor=2.0)
    schedule = Schedule(cfg, sgd, 0.3)
    schedule.adapt({"approx_kl": torch.tensor(0.0201)})
    assert schedule.rate == pytest.approx(0.2)
    schedule.adapt({"approx_kl": torch.tensor(0.01)})
    schedule.adapt({"approx_kl": torch.tensor(0.0)})
    schedule.set_progress(0.9)
    assert schedule.rate == pytest.approx(0.2)
    schedule.adapt({"approx_kl": torch.tensor(0.0049)})
    assert schedule.rate == pytest.approx(0.3)
    for _ in range(9):
        schedule.adapt({"approx_kl": torch.tensor(0.001)})
    assert schedule.rate == pytest.approx(0.6)
    for _ in range(9):
        schedule.adapt({"approx_kl": torch.tensor(1.0)})
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.15)


def test_schedule_goes_on_from_its_state():
    first, second = optimizer(), optimizer()
    schedule = Schedule(AdaptiveKLCfg(), first, 0.3)
    schedule.adapt({"approx_kl": torch.tensor(1.0)})
    resumed = Schedule(AdaptiveKLCfg(), second, 0.3)
    resumed.load_state_dict(schedule.state_dict())
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"] == pytest.approx(0.2)


# gradient g = 2 at parameter p = 1, rate .1, weight decay .5
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # the first Adam step is rate * sign, but for eps
        ("adam", 0.9),
        # decoupled: p (1 - .1 * .5) = .95, then the same step
        ("adamw", 0.85),
        ("sgd", 0.8),
        # mean square (1 - .99) * 2 ** 2 = .04, root .2: 1 - .1 * 2 / .2
        ("rmsprop", 0.0),
    ],
)
def test_optimisers(name, expected):
    parameter = torch.nn.Parameter(torch.ones(1))
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    own = {"sgd": {}, "adamw": {"eps": 1e-9, "weight_decay": 0.5}}.get(name, {"eps": 1e-9})
    cfg = PPOCfg(learning_rate=0.1, optimizer={"name": name} | own)
    built = build_optimizer(cfg, [parameter])
    (2.0 * parameter * frozen).sum().backward()
    built.step()
    assert parameter.item() == pytest.approx(expected, abs=1e-5)
    assert frozen.item() == 1.0
