"""Means of an update's metrics: over the elements of each step by their shares, over the steps that were taken."""

import gc
import weakref

import pytest
import torch
from small_updates import build, make_rollout, parameters

from groupwise.algorithms import step_metrics
from groupwise.algorithms.loss import DIAGNOSTICS, diagnostics
from groupwise.algorithms.step_metrics import StepMetrics
from groupwise.config.algorithm import ObjectiveCfg
from groupwise.functional.reduce import local

CPU = torch.device("cpu")


def metrics_of(*names, all_sum=local):
    return StepMetrics(names, ObjectiveCfg(), CPU, all_sum)


def note(said, *metrics, share, ratio=None, old_log_prob=None):
    """A micro-batch, given as plain numbers."""
    metrics = tuple(torch.tensor(values) for values in metrics)
    share, shown = torch.tensor(share), torch.zeros(1) if ratio is None else torch.tensor(ratio)
    old = torch.zeros_like(shown) if old_log_prob is None else torch.tensor(old_log_prob)
    said.note(metrics, None if ratio is None else shown, old + shown.log(), {"share": share, "old_log_prob": old})


def end(said, norm=0.0):
    said.end_step(torch.tensor(norm))


def numbers(means):
    return {name: pytest.approx(value.item(), abs=1e-6) for name, value in means.items()}


def two_steps(said):
    # step one: 1/4 * 2 + 1/4 * 4 + 1/2 * 10 = 6.5 and 1/4 * 1 + 0 + 1/2 * 3 = 1.75; step two: 8 and -1
    note(said, [2.0, 4.0], [1.0, 0.0], share=[0.25, 0.25])
    note(said, [10.0], [3.0], share=[0.5])
    end(said, 3.0)
    note(said, [8.0], [-1.0], share=[1.0])
    end(said, 5.0)


def test_means_by_hand():
    said = metrics_of("a", "b")
    two_steps(said)
    assert said.steps == 2
    means = said.means()
    assert numbers(means) == {"a": 7.25, "b": 0.375, "grad_norm": 4.0}
    assert all(value.shape == () for value in means.values())


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 4])
def test_folding_in_between_changes_nothing(monkeypatch, kept):
    monkeypatch.setattr(step_metrics, "KEPT", kept)
    said = metrics_of("a", "b")
    two_steps(said)
    two_steps(said)
    assert numbers(said.means()) == {"a": 7.25, "b": 0.375, "grad_norm": 4.0}


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(step_metrics, "KEPT", 10)
    said, alive = metrics_of("a"), []
    for _ in range(30):
        values = torch.ones(4)
        alive.append(weakref.ref(values.untyped_storage()))
        said.note((values,), None, values, {"share": torch.full((4,), 0.25)})
        del values
        end(said)
    # 3 * 4 elements are more than 10
    assert sum(storage() is not None for storage in alive) < 3
    assert numbers(said.means())["a"] == 1.0


def test_a_step_that_is_not_taken_does_not_count():
    said = metrics_of("a", "b")
    two_steps(said)
    note(said, [100.0], [100.0], share=[1.0])
    assert numbers(said.means()) == {"a": 7.25, "b": 0.375, "grad_norm": 4.0}
    assert said.steps == 2


def test_an_update_without_steps_has_means_of_0():
    assert numbers(metrics_of("a").means()) == {"a": 0.0, "grad_norm": 0.0}
    said = metrics_of("a")
    note(said, [5.0], share=[1.0])
    assert numbers(said.means()) == {"a": 0.0, "grad_norm": 0.0}


def test_without_metrics_there_is_the_norm():
    said = metrics_of()
    note(said, share=[1.0])
    assert said.of_step() == {}
    end(said, 2.0)
    assert numbers(said.means()) == {"grad_norm": 2.0}


def test_the_step_under_way_by_hand():
    said = metrics_of("a", "b")
    two_steps(said)
    note(said, [2.0, 4.0], [1.0, 0.0], share=[0.25, 0.25])
    note(said, [10.0], [3.0], share=[0.5])
    assert numbers(said.of_step()) == {"a": 6.5, "b": 1.75}
    assert numbers(said.of_step()) == {"a": 6.5, "b": 1.75}  # looking changes nothing
    end(said, 4.0)
    assert numbers(said.means()) == {"a": 7.0, "b": pytest.approx((2 * 0.375 + 1.75) / 3), "grad_norm": 4.0}


def test_diagnostics_by_hand():
    # clip range 0.8 to 1.2; approx_kl is ratio - 1 - log ratio: 1 - log 2 at 2, log 2 - 1/2 at 1/2
    said = metrics_of("a", *DIAGNOSTICS)
    note(said, [3.0, 5.0], share=[0.5, 0.25], ratio=[2.0, 1.0], old_log_prob=[-1.0, -7.0])
    note(said, [7.0], share=[0.25], ratio=[0.5], old_log_prob=[-2.0])
    expected = {
        "a": 4.5,
        "approx_kl": 0.5 * 0.306853 + 0.25 * 0.193147,
        "clip_fraction": 0.75,
        "clip_fraction_low": 0.25,
        "clip_fraction_high": 0.5,
    }
    assert numbers(said.of_step()) == pytest.approx(expected, abs=1e-5)
    end(said)
    assert numbers(said.means()) == pytest.approx(expected | {"grad_norm": 0.0}, abs=1e-5)


def test_rows_are_noted_like_transitions():
    said = metrics_of("a")
    said.note((torch.tensor([[1.0, 2.0], [3.0, 0.0]]),), None, torch.zeros(2, 2), {"share": torch.full((2, 2), 0.25)})
    end(said)
    assert numbers(said.means())["a"] == 1.5


def of_rank(steps, all_sum):
    """Means of a rank, given what it notes of each step; nothing where it has no share."""
    said = metrics_of("a", *DIAGNOSTICS, all_sum=all_sum)
    followed = []
    for micro_batches in steps:
        for values, ratio, share in micro_batches:
            note(said, values, share=share, ratio=ratio)
        followed.append(said.of_step()["a"])
        end(said, 1.0)
    return torch.stack([*followed, *said.means().values()])


def test_two_ranks_have_the_means_of_their_union(two_ranks):
    first, second = ([1.0], [2.0], [0.25]), ([5.0, 3.0], [1.0, 0.5], [0.5, 0.25])
    third = ([7.0], [1.5], [1.0])
    union = of_rank([[first, second], [third]], local)
    assert union[:2].tolist() == [3.5, 7.0]
    assert union[2].item() == 5.25
    for here, there in [([[first], [third]], [[second], []]), ([[second], []], [[first], [third]])]:
        torch.testing.assert_close(two_ranks(of_rank, (here,), (there,)), union)
    alone = [[first, second], [third]], [[], []]
    for here, there in [alone, alone[::-1]]:
        torch.testing.assert_close(two_ranks(of_rank, (here,), (there,)), union)


def test_sums_over_ranks_do_not_depend_on_what_a_rank_has(monkeypatch):
    """One rank that adds up more often than the others would wait for them for ever."""
    monkeypatch.setattr(step_metrics, "KEPT", 2)
    calls = []

    def all_sum(tensor):
        calls.append(tensor.shape)
        return tensor

    for rounds in (0, 1, 4):
        said = metrics_of("a", all_sum=all_sum)
        for _ in range(4):
            for _ in range(rounds):
                note(said, [1.0, 2.0], share=[0.5, 0.5])
            end(said)
        said.means()
    assert calls == [(1,)] * 3


class InGraph:
    """Lives as long as the graph that it is a hook of."""

    def __call__(self, grad):
        return grad


def test_no_graph_is_kept_alive():
    said, seen = metrics_of("a", *DIAGNOSTICS), []
    parameter = torch.nn.Parameter(torch.zeros(3))
    gc.disable()
    try:
        inner = parameter * 2
        inner.register_hook(held := InGraph())
        weakref.finalize(held, seen.append, "freed")
        del held
        values = inner.exp()
        said.note((values,), values, values, {"share": torch.ones(3), "old_log_prob": torch.zeros(3)})
        del inner, values
        assert seen
    finally:
        gc.enable()
    end(said)
    assert not any(value.requires_grad for value in said.means().values())


SETTINGS = {
    "minibatches": {"num_epochs": 3, "minibatch_size": 30},
    "micro-batches": {"num_epochs": 2, "minibatch_size": 40, "micro_batch_size": 7},
    "one minibatch": {"num_epochs": 4},
    "followed": {"num_epochs": 2, "minibatch_size": 30, "target_kl": 100.0},
    "ended": {"num_epochs": 9, "minibatch_size": 30, "target_kl": 0.005},
    "episodes": {"minibatch_size": 30, "objective": {"aggregation": "seq_mean_token_mean"}},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_an_updates_metrics_are_those_of_its_steps_one_by_one(monkeypatch, kind, settings):
    """Each element is looked at by itself, when it is scored; nothing is put off."""
    algorithm = build(kind, **SETTINGS[settings], learning_rate=2.0, max_grad_norm=0.5)
    terms, step, names = algorithm.terms, algorithm.optimizer.step, algorithm.metric_names
    steps, running, norms = [], [], []

    def watched_terms(batch, evaluation):
        found = terms(batch, evaluation)
        objective = algorithm.cfg.objective
        more = diagnostics(objective, found.ratio, evaluation.log_prob.detach(), batch["old_log_prob"])
        for i, counts in enumerate(batch["loss_mask"]):
            assert counts
            running.append([float(values[i].detach()) for values in (*found.metrics, *more)])
        return found

    def watched_step():
        steps.append(torch.tensor(running, dtype=torch.float64).mean(dim=0))
        running.clear()
        step()

    clip = algorithm.trained.clip_grad
    monkeypatch.setattr(algorithm.trained, "clip_grad", lambda limit: norms.append(clip(limit)) or norms[-1])
    monkeypatch.setattr(algorithm, "terms", watched_terms)
    monkeypatch.setattr(algorithm.optimizer, "step", watched_step)
    found = algorithm.update(make_rollout(algorithm.policy))
    assert found["train/optimizer_steps"] == len(steps) > 0
    assert bool(running) is (settings == "ended")  # the last step was measured and not taken
    expected = torch.stack(steps).mean(dim=0).tolist()
    assert len(expected) == len(names)
    for name, value in zip(names, expected, strict=True):
        assert found[f"train/{name}"].item() == pytest.approx(value, abs=1e-5), name
    assert found["train/grad_norm"].item() == pytest.approx(float(torch.stack(norms).mean()), abs=1e-6)
    assert settings in ("episodes", "ended") or found["train/clip_fraction"] > 0


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_following_single_steps_changes_neither_metrics_nor_parameters(kind):
    ends = []
    for followed in ({}, {"target_kl": 1e9}):
        algorithm = build(kind, num_epochs=3, minibatch_size=30, **followed)
        metrics = algorithm.update(make_rollout(algorithm.policy))
        ends.append((parameters(algorithm), metrics))
    (one, first), (other, second) = ends
    assert torch.equal(one, other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_step_that_is_marked_as_not_taken_counts_nowhere():
    said, other = metrics_of("a", "b"), metrics_of("a", "b")
    two_steps(other)
    note(said, [2.0, 4.0], [1.0, 0.0], share=[0.25, 0.25])
    note(said, [10.0], [3.0], share=[0.5])
    said.end_step(torch.tensor(3.0), torch.ones(()))
    note(said, [100.0], [100.0], share=[1.0])
    said.end_step(torch.tensor(50.0), torch.zeros(()))
    note(said, [8.0], [-1.0], share=[1.0])
    said.end_step(torch.tensor(5.0), torch.ones(()))
    assert numbers(said.means()) == numbers(other.means())
    assert (float(said.taken()), float(other.taken())) == (2, 2)


def test_sums_count_as_what_they_are_of():
    said, other = metrics_of("a", "b"), metrics_of("a", "b")
    two_steps(other)
    for sums in ([1.5, 0.25], [5.0, 1.5]):
        said.note_sums(torch.tensor(sums))
    assert said.of_step() == {"a": 6.5, "b": 1.75}
    said.end_step(torch.tensor(3.0), torch.ones(()))
    said.note_sums(torch.tensor([100.0, 100.0]))
    said.end_step(torch.tensor(50.0), torch.zeros(()))
    said.note_sums(torch.tensor([8.0, -1.0]))
    said.end_step(torch.tensor(5.0), torch.ones(()))
    assert numbers(said.means()) == numbers(other.means())
