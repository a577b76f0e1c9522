import pytest
import torch
from tiny_models import FAMILIES, tiny_model

from groupwise.algorithms.grpo import GRPO
from groupwise.config.algorithm import GRPOCfg
from groupwise.config.policy import LoRACfg
from groupwise.data.rollout import transition_view
from groupwise.errors import ConfigError
from groupwise.text.load import with_adapters
from groupwise.text.policy import AdaptersOff, CausalLM
from groupwise.text.rollout import TextRow, text_rollout

ROWS = [TextRow([5, 6, 7], [8 + i, 9], [-3.0, -3.0], float(i), False, i // 2) for i in range(4)]


def adapted(family="llama", **settings):
    return CausalLM(with_adapters(tiny_model(family), LoRACfg(r=2)), **settings)


def batch():
    return dict(transition_view(text_rollout(ROWS)).items())


def move(policy):
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_its_adapters_the_policy_is_its_own_reference(family):
    policy, plain = adapted(family), CausalLM(tiny_model(family))
    reference = policy.make_reference()
    start = policy.evaluate(batch()).log_prob
    assert torch.equal(reference.evaluate(batch()).log_prob, start)
    move(policy)
    moved = policy.evaluate(batch()).log_prob
    assert not torch.allclose(moved, start)
    scores = reference.evaluate(batch())
    assert torch.equal(scores.log_prob, start)
    torch.testing.assert_close(scores.log_prob, plain.evaluate(batch()).log_prob)
    assert not scores.log_prob.requires_grad
    assert torch.equal(policy.evaluate(batch()).log_prob, moved)  # on again
    assert all(p.requires_grad == ("lora" in name) for name, p in policy.named_parameters())


def test_the_reference_has_nothing_of_its_own():
    policy = adapted()
    reference = policy.make_reference()
    assert isinstance(reference, AdaptersOff)
    assert not list(reference.parameters())
    assert not reference.state_dict()
    reference.load_state_dict({})
    assert reference.device == policy.device
    assert not reference.refreshable
    for call in (reference.act, reference.predict):
        with pytest.raises(TypeError, match=r"generation\.complete"):
            call(torch.zeros(1, dtype=torch.long))


def test_adapters_that_change_something_are_part_of_the_reference():
    policy = adapted()
    move(policy)
    start = policy.evaluate(batch()).log_prob
    reference = policy.make_reference()
    move(policy)
    assert torch.equal(reference.evaluate(batch()).log_prob, start)
    assert reference.refreshable
    assert list(reference.state_dict()) == list(policy.state_dict())


@pytest.mark.parametrize("make", [adapted, lambda: CausalLM(tiny_model())], ids=["adapters", "weights"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_to_the_reference_is_exactly_zero_at_first(make, estimator):
    cfg = GRPOCfg(
        kl_coef=0.1, kl_estimator=estimator, num_epochs=1, minibatch_size=None, max_grad_norm=None, learning_rate=0.05
    )
    algorithm = GRPO(cfg, make())
    assert algorithm.update(text_rollout(ROWS))["train/kl"] == 0
    assert algorithm.update(text_rollout(ROWS))["train/kl"] != 0


def test_only_adapters_move():
    policy = adapted()
    before = {name: p.clone() for name, p in policy.named_parameters()}
    GRPO(GRPOCfg(learning_rate=0.05, kl_coef=0.1), policy).update(text_rollout(ROWS))
    moved = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)


def test_a_reference_without_weights_cannot_be_renewed():
    cfg = GRPOCfg(kl_coef=0.1, ref_model_sync_steps=2)
    with pytest.raises(ConfigError, match="ref_model_sync_steps=2 needs a reference with weights of its own"):
        GRPO(cfg, adapted())
    GRPO(cfg, CausalLM(tiny_model()))
    GRPO(cfg.model_copy(update={"kl_coef": 0.0}), adapted())
