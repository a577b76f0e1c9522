import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from groupwise.algorithms.base import Schedule, build_optimizer, schedule_factor
from groupwise.config.algorithm import AdaptiveKLCfg, PPOCfg
from groupwise.config.run import RunCfg
from groupwise.errors import ConfigError


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


@pytest.mark.parametrize(
    ("cfg", "done", "expected"),
    [
        # of 1,000: up to 200, then down over 800
        ({"name": "linear", "warmup": 0.2}, 0, 0.0),
        ({"name": "linear", "warmup": 0.2}, 50, 0.25),
        ({"name": "linear", "warmup": 0.2}, 200, 1.0),
        ({"name": "linear", "warmup": 0.2}, 400, 0.75),
        ({"name": "linear", "warmup": 200}, 50, 0.25),
        ({"name": "linear", "warmup": 200}, 400, 0.75),
        ({"name": "linear", "warmup": 0.2, "final": 0.5}, 1000, 0.5),
        ({"name": "linear", "warmup": 0.5, "final": 1.0}, 250, 0.5),
        ({"name": "linear", "warmup": 0.5, "final": 1.0}, 900, 1.0),
        # half of what follows the warm-up: (1 + cos(pi / 2)) / 2; a third of it: (1 + cos(pi / 3)) / 2
        ({"name": "cosine", "warmup": 0.1}, 100, 1.0),
        ({"name": "cosine", "warmup": 0.1}, 550, 0.5),
        ({"name": "cosine", "warmup": 0.1, "final": 0.2}, 400, 0.2 + 0.8 * 0.75),
    ],
)
def test_warm_up_by_hand(cfg, done, expected):
    assert schedule_factor(PPOCfg(schedule=cfg).schedule, done / 1000, 1000) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "theirs"), [("cosine", get_cosine_schedule_with_warmup), ("linear", get_linear_schedule_with_warmup)]
)
def test_warm_up_is_that_of_transformers(name, theirs):
    sgd = optimizer()
    scheduler = theirs(sgd, num_warmup_steps=7, num_training_steps=40)
    schedule = PPOCfg(schedule={"name": name, "warmup": 7}).schedule
    for step in range(41):
        assert schedule_factor(schedule, step / 40, 40) == pytest.approx(sgd.param_groups[0]["lr"], abs=1e-12)
        sgd.step()
        scheduler.step()


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_every_update_of_a_warm_up_has_a_rate(name):
    # 4 of 10 iterations: quarters of the rate
    schedule = PPOCfg(schedule={"name": name, "warmup": 4}).schedule
    rates = [schedule_factor(schedule, done / 10, 10, 1 / 10) for done in range(5)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    # an update that goes beyond the warm-up, which is a fifth of training
    schedule = PPOCfg(schedule={"name": name, "warmup": 0.2}).schedule
    assert schedule_factor(schedule, 0.15, 1, 0.3) == 1


def test_a_warm_up_that_never_ends_is_refused():
    schedule = PPOCfg(schedule={"name": "cosine", "warmup": 40}).schedule
    with pytest.raises(ConfigError, match="warmup=40 is all of a budget of 40; fix: less"):
        schedule_factor(schedule, 0.5, 40)
    with pytest.raises(ConfigError, match=r"warmup=40 is not less than total_iterations=30; fix: .* fewer iterations"):
        RunCfg(algorithm=PPOCfg(schedule=schedule), total_iterations=30)


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def test_adaptive_kl_moves_the_rate_against_the_kl_within_bounds():
    sgd = optimizer()
    cfg = AdaptiveKLCfg(desired_kl=0.01, min_factor=0.5, max_factor=2.0)
    schedule = Schedule(cfg, sgd, 0.3)
    schedule.adapt({"approx_kl": torch.tensor(0.0201)})
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.2)
    schedule.adapt({"approx_kl": torch.tensor(0.01)})
    schedule.adapt({"approx_kl": torch.tensor(0.0)})
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.2)
    schedule.adapt({"approx_kl": torch.tensor(0.0049)})
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.3)
    for _ in range(9):
        schedule.adapt({"approx_kl": torch.tensor(0.001)})
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.6)
    for _ in range(9):
        schedule.adapt({"approx_kl": torch.tensor(1.0)})
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.15)


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
