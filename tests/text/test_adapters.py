import pytest
import torch
from peft.tuners.lora import LoraLayer
from text_updates import batch_of
from tiny_models import FAMILIES, moved, tiny_model

from groupwise.algorithms.grpo import GRPO
from groupwise.config.algorithm import GRPOCfg
from groupwise.config.policy import LoRACfg, ModelCfg
from groupwise.errors import ConfigError
from groupwise.text.collector import TextRow, text_rollout
from groupwise.text.load import with_adapters
from groupwise.text.policy import CausalLM

ROWS = [TextRow([5, 6, 7], [8 + i, 9], [-3.0, -3.0], float(i), False, i // 2) for i in range(4)]


def adapted(family="llama", **settings):
    return CausalLM(with_adapters(tiny_model(family), LoRACfg(r=2)), **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_its_adapters_the_policy_is_its_own_reference(family):
    policy, plain = adapted(family), CausalLM(tiny_model(family))
    reference = policy.make_reference()
    start = policy.evaluate(batch_of(ROWS)).log_prob
    assert torch.equal(reference.evaluate(batch_of(ROWS)).log_prob, start)
    changed = moved(policy, 0.1).evaluate(batch_of(ROWS)).log_prob
    assert not torch.allclose(changed, start)
    scores = reference.evaluate(batch_of(ROWS))
    assert torch.equal(scores.log_prob, start)
    torch.testing.assert_close(scores.log_prob, plain.evaluate(batch_of(ROWS)).log_prob)
    assert not scores.log_prob.requires_grad
    assert torch.equal(policy.evaluate(batch_of(ROWS)).log_prob, changed)  # on again
    assert all(p.requires_grad == ("lora" in name) for name, p in policy.named_parameters())


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"rslora": True}, 32 / 2**0.5),
        ({"dora": True}, 16),
        ({"init": "gaussian"}, 16),
        ({"init": "orthogonal"}, 16),
    ],
    ids=str,
)
def test_kinds_of_adapters_begin_as_the_model_and_are_trained(settings, scale):
    policy = CausalLM(with_adapters(tiny_model(), LoRACfg(r=2, **settings)))
    start = policy.evaluate(batch_of(ROWS)).log_prob
    torch.testing.assert_close(start, CausalLM(tiny_model()).evaluate(batch_of(ROWS)).log_prob, rtol=1e-4, atol=1e-4)
    [scaling] = {part.scaling["default"] for part in policy.modules() if isinstance(part, LoraLayer)}
    assert scaling == pytest.approx(scale)
    trained = {name: parameter.dtype for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert any("lora_magnitude_vector" in name for name in trained) == ("dora" in settings)
    assert {*trained.values()} == {torch.float32}
    GRPO(GRPOCfg(num_epochs=1, minibatch_size=None, learning_rate=0.05), policy).update(text_rollout(ROWS))
    assert not torch.allclose(policy.evaluate(batch_of(ROWS)).log_prob, start, atol=1e-3)


def test_first_weights_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"init='orthogonal' needs an even rank, got r=3; fix: r=4"):
        LoRACfg(r=3, init="orthogonal")
    with pytest.raises(ConfigError, match=r"lora\.init='orthogonal' is not for quantised weights; fix: "):
        ModelCfg(path="x", quantization="nf4", lora={"init": "orthogonal"})
    with pytest.raises(ConfigError, match=r"lora\.dora=True is not for quantization='int8'; fix: "):
        ModelCfg(path="x", quantization="int8", lora={"dora": True})
    ModelCfg(path="x", quantization="nf4", lora={"dora": True})
    with pytest.raises(ConfigError, match=r"unknown key 'use_dora'; did you mean 'dora'\?"):
        LoRACfg(use_dora=True)


def test_the_reference_shares_all_but_the_adapters():
    policy = moved(adapted(), 0.1)  # it has what they have changed already
    reference = policy.make_reference()
    for own, other in zip(policy.parameters(), reference.parameters(), strict=True):
        assert (own is other) == (not own.requires_grad)
    assert not any(p.requires_grad for p in reference.parameters())
    assert reference.device == policy.device
    prompt = [[5, 6, 7]]
    before = reference.act(prompt, deterministic=True).log_prob
    moved(policy, 0.1)
    assert torch.equal(reference.act(prompt, deterministic=True).log_prob, before)
    assert not torch.equal(policy.act(prompt, deterministic=True).log_prob, before)


@pytest.mark.parametrize("make", [adapted, lambda: CausalLM(tiny_model())], ids=["adapters", "weights"])
def test_the_kl_to_the_reference_is_exactly_zero_at_first(make):
    cfg = GRPOCfg(kl_coef=0.1, num_epochs=1, minibatch_size=None, max_grad_norm=None, learning_rate=0.05)
    algorithm = GRPO(cfg, make())
    assert algorithm.update(text_rollout(ROWS))["train/kl"] == 0
    assert algorithm.update(text_rollout(ROWS))["train/kl"] != 0


SYNC = GRPOCfg(kl_coef=0.1, sync_ref_model={"steps": 2}, num_epochs=1, minibatch_size=None, learning_rate=0.05)


def test_after_its_interval_the_reference_is_the_policy():
    algorithm = GRPO(SYNC, adapted())
    copies = [p.clone() for p in algorithm.reference.parameters()]
    distances = []
    for _ in range(5):
        distances.append(algorithm.update(text_rollout(ROWS))["train/kl"])
        if len(distances) == 1:  # the optimiser leaves the copies alone
            assert all(torch.equal(a, b) for a, b in zip(copies, algorithm.reference.parameters(), strict=True))
    assert [distance == 0 for distance in distances] == [True, False, True, False, True]
