"""Running out of memory is found out at the start."""

import pytest
import torch
from text_runs import copying, save_model, train
from tiny_models import tiny_model

import groupwise as gw
from groupwise.algorithms.configs import GRPOCfg
from groupwise.algorithms.grpo import GRPO
from groupwise.policies.causal_lm import CausalLM
from groupwise.policies.configs import SamplingCfg
from groupwise.training.memory import naming, rehearse


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9")]
)
def test_errors_about_memory_name_what_to_lower(error):
    with pytest.raises(gw.GroupwiseError, match="out of memory; fix: lower this, or that"), naming("this, or that"):
        raise error


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match=r"^shape$"), naming("this"):
        raise RuntimeError("shape")


@pytest.mark.parametrize(("micro_batch_size", "rows"), [(None, 12), (60, 5), (12, 1)])
def test_the_largest_micro_batch_is_tried_and_nothing_changes(micro_batch_size, rows, monkeypatch):
    policy = CausalLM(tiny_model())
    algorithm = GRPO(GRPOCfg(group_size=4, micro_batch_size=micro_batch_size), policy)
    before, seen = [p.clone() for p in policy.parameters()], []
    evaluate = policy.evaluate
    monkeypatch.setattr(policy, "evaluate", lambda batch: seen.append(batch["valid"]) or evaluate(batch))
    rehearse(algorithm, longest_prompt=3, sampling=SamplingCfg(max_new_tokens=10), num_rows=12, group_size=4)
    # 3 + 10 tokens make 12 transitions, of which the model writes 10 and 2 are read before: 12 a row
    # some siblings first: does the model share their prompt?
    assert [len(valid) for valid in seen] == [2 if rows == 1 else 4, rows]
    assert seen[1].shape[1] == 12
    assert policy.shares_beginnings
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert not algorithm.optimizer.state
    assert all(p.grad is None or not p.grad.any() for p in policy.parameters())


def test_a_model_that_cannot_share_counts_each_prompt(monkeypatch):
    policy, seen = CausalLM(tiny_model()), []
    algorithm = GRPO(GRPOCfg(group_size=4, micro_batch_size=60), policy)
    hidden = policy._hidden_shared
    monkeypatch.setattr(policy, "_hidden_shared", lambda *args: hidden(*args) + 1)
    evaluate = policy.evaluate
    monkeypatch.setattr(policy, "evaluate", lambda batch: seen.append(len(batch["valid"])) or evaluate(batch))
    with pytest.warns(gw.SlowPathWarning):
        rehearse(algorithm, longest_prompt=11, sampling=SamplingCfg(max_new_tokens=5), num_rows=12, group_size=4)
    # 10 tokens before the 5 that are written: 4 rows of 15 are 60; were the prompts shared, 2 of them and 8 rows were 60
    assert not policy.shares_beginnings
    assert seen == [4, 4]


@pytest.mark.parametrize(
    ("sampling", "turns", "context", "width"),
    [({"top_k": 3}, None, None, 12), ({"min_new_tokens": 2}, None, None, 12), ({}, 2, None, 22), ({}, 2, 20, 19)],
)
def test_a_rehearsal_has_what_the_rollouts_will_have(sampling, turns, context, width, monkeypatch):
    cfg = SamplingCfg(max_new_tokens=10, **sampling)
    policy, seen = CausalLM(tiny_model(), cfg), []
    algorithm = GRPO(GRPOCfg(group_size=4), policy)
    evaluate = policy.evaluate
    monkeypatch.setattr(policy, "evaluate", lambda batch: seen.append(batch["valid"]) or evaluate(batch))
    rehearse(algorithm, longest_prompt=3, sampling=cfg, num_rows=2, group_size=2, num_turns=turns, context=context)
    assert [valid.shape[1] for valid in seen] == [width] * 2


def test_a_run_that_does_not_fit_ends_before_it_begins(tmp_path, monkeypatch):
    def full(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CausalLM, "evaluate", full)
    with pytest.raises(gw.GroupwiseError, match=r"lower algorithm\.micro_batch_size, or sampling\.max_new_tokens"):
        train(copying(), save_model(tmp_path / "model"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
