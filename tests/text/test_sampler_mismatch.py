"""Sampler against trainer at an update's start."""

import pytest
import torch
from tiny_models import tiny_model

from groupwise.algorithms.grpo import GRPO
from groupwise.config.algorithm import GRPOCfg
from groupwise.config.policy import SamplingCfg
from groupwise.text.collector import TextRow, text_rollout
from groupwise.text.generation import complete
from groupwise.text.policy import CausalLM


class Counting(CausalLM):
    calls = 0

    def evaluate(self, batch):
        self.calls += 1
        return super().evaluate(batch)


def rows_of(policy, off_by=0.0):
    completions = complete(policy, [[5, 6, 7], [9]], torch.arange(8).view(2, 4))
    return [
        TextRow([5, 6, 7] if g == 0 else [9], c.tokens, [p + off_by for p in c.log_probs], c.tokens[0] % 5, True, g)
        for g, group in enumerate(completions)
        for c in group
    ]


def updated(rows, **settings):
    policy = Counting(tiny_model(), SamplingCfg(max_new_tokens=6))
    cfg = {"group_size": 4, "num_epochs": 1, "minibatch_size": None, "optimizer": {"name": "sgd"}, "learning_rate": 0.1}
    metrics = GRPO(GRPOCfg(**cfg | {"objective": {"old_log_prob": "recomputed"}} | settings), policy).update(
        text_rollout(rows)
    )
    return policy, metrics


@pytest.mark.parametrize("micro_batch_size", [None, 12])
def test_an_update_tells_a_sampler_that_is_another_policy(micro_batch_size):
    rows = rows_of(CausalLM(tiny_model(), SamplingCfg(max_new_tokens=6)))
    assert updated(rows, micro_batch_size=micro_batch_size)[1]["rollout/sampler_kl"].item() < 1e-10
    shifted = [row._replace(log_probs=[p + 0.1 for p in row.log_probs]) for row in rows]
    _, metrics = updated(shifted, micro_batch_size=micro_batch_size, num_epochs=3)
    # only the first step's forward passes are compared: in the others the policy has changed
    assert metrics["rollout/sampler_kl"].item() == pytest.approx(0.004837, abs=1e-5)


def test_where_probabilities_are_taken_as_sampled_the_first_step_is_compared():
    rows = rows_of(CausalLM(tiny_model(), SamplingCfg(max_new_tokens=6)))
    found = {name: kl for name, kl in updated(rows, objective={})[1].items() if name.startswith("rollout/sampler_kl")}
    assert list(found) == ["rollout/sampler_kl"]
    assert found["rollout/sampler_kl"].item() < 1e-10


def test_a_single_pass_needs_no_forward_of_its_own_for_the_old_probabilities():
    rows = rows_of(CausalLM(tiny_model(), SamplingCfg(max_new_tokens=6)), off_by=-0.5)
    once, _ = updated(rows)
    twice, _ = updated(rows, minibatch_size=20)
    assert (once.calls, twice.calls) == (1, 1 + 2)
    # the ratio is 1 there, whatever the sampler said: as if it had been asked beforehand
    policy = CausalLM(tiny_model())
    scored = policy.evaluate(text_rollout(rows)[:, :-1].to_dict()).log_prob
    rollout = text_rollout(rows)
    rollout["sample_log_prob"][:, :-1] = scored.detach()
    GRPO(
        GRPOCfg(group_size=4, num_epochs=1, minibatch_size=None, optimizer={"name": "sgd"}, learning_rate=0.1), policy
    ).update(rollout)
    for ours, theirs in zip(once.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
