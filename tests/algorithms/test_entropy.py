import pytest
import torch

from groupwise.algorithms.configs import GRPOCfg, ObjectiveCfg
from groupwise.algorithms.entropy import EntropyControl
from groupwise.algorithms.objective_configs import EntropyCfg

ADAPTIVE = {"control": "adaptive", "target": 0.5, "step": 0.1, "max_coef": 0.25}


def entropy_control(ent_coef=0.0, **entropy):
    cfg = GRPOCfg(ent_coef=ent_coef, objective=ObjectiveCfg(entropy=EntropyCfg(**entropy)))
    return EntropyControl(cfg, torch.device("cpu"))


def test_the_bonus_rises_while_the_entropy_is_low_and_is_off_while_it_is_high():
    control = entropy_control(ent_coef=0.1, **ADAPTIVE)
    one = torch.ones(1)
    trace = [control.loss(one).item()]
    for entropy in (0.4, 0.5, 0.6, 0.3, 0.2, 0.9, 0.9, 0.9, 0.1):
        control.adapt(torch.tensor(entropy))
        trace.append(round(control.loss(one).item(), 6) + 0.0)
    # coefficients .1 .2 .25 (greatest) .15 .25 .25 .15 .05 0 (least) .1, no bonus after entropies above .5
    assert trace == pytest.approx([-0.1, -0.2, -0.25, 0.0, -0.25, -0.25, 0.0, 0.0, 0.0, -0.1])


def test_a_constant_bonus_never_moves():
    control = entropy_control(ent_coef=0.3)
    control.adapt(torch.tensor(0.0))
    assert control.loss(torch.tensor(2.0)).item() == pytest.approx(-0.6)
    assert control.enabled
    assert not entropy_control().enabled


def test_a_saved_control_goes_on_where_it_was():
    one, two = (entropy_control(ent_coef=0.1, **ADAPTIVE) for _ in range(2))
    for entropy in (0.4, 0.9):
        one.adapt(torch.tensor(entropy))
    two.load_state_dict(one.state_dict())
    assert two.loss(torch.ones(1)).item() == 0.0
    for control in (one, two):
        control.adapt(torch.tensor(0.1))
    assert one.state_dict() == two.state_dict()
    assert two.loss(torch.ones(1)).item() == pytest.approx(-0.2)
