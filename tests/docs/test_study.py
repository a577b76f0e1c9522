"""What the study compares: settings that differ where they should, and nothing besides; and what its report makes of cells."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[2] / "benchmarks" / "study"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    names = ("plan", "run", "cell", "tune", "report")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


def test_every_method_is_tuned_by_as_many_different_settings_and_the_preset_is_one_of_them(study):
    tune = study["tune"]
    for method in tune.TUNED_METHODS:
        tried = tune.candidates(method)
        assert tried[0] == {}
        assert len(tried) == tune.DRAWN + 1
        assert len({tuple(tune._resolved(method, factors)) for factors in tried}) == len(tried)


def test_larger_groups_do_not_make_larger_iterations(study):
    cell, plan = study["cell"], study["plan"]
    for task in plan.TASKS:
        before, after = (cell.settings(task, "step_mask", {"group_size": factor}) for factor in (1, 2))
        assert after.algorithm.group_size == 2 * before.algorithm.group_size
        assert after.env.num_envs % after.algorithm.group_size == 0
        steps = [cfg.env.num_envs * cfg.algorithm.num_steps for cfg in (before, after)]
        assert steps[0] == steps[1], task.env


def test_methods_without_a_critic_differ_in_credit_and_collection_only(study):
    cell, plan = study["cell"], study["plan"]
    for task in plan.TASKS:
        dumps = []
        for method in set(plan.OURS) - set(plan.REMEDIES):
            dump = cell.settings(task, method, {}).model_dump()
            dump["algorithm"].pop("credit")
            dump["algorithm"].pop("collection")
            dumps.append(json.dumps(dump, default=str, sort_keys=True))
        assert len(set(dumps)) == 1, task.env


def test_near_states_reach_as_far_as_ppo(study):
    cell, plan = study["cell"], study["plan"]
    for task in plan.TASKS:
        near, ppo = (cell.settings(task, method, {}).algorithm for method in ("near_states", "ppo"))
        assert (near.gamma, near.credit.gae_lambda) == (ppo.gamma, ppo.gae_lambda), task.env
        before, after = (cell.settings(task, "near_states", {"one_minus_lambda": n}).algorithm.credit for n in (1, 2))
        assert 1 - after.gae_lambda == pytest.approx(2 * (1 - before.gae_lambda))


def test_tuning_seeds_are_no_seeds_of_the_study(study):
    run, tune, plan = study["run"], study["tune"], study["plan"]
    planned = run.cells([task.env for task in plan.TASKS], list(plan.METHODS))
    assert not {cell.seed for cell in planned} & set(tune.SEEDS)
    assert len(planned) == sum(task.seeds * len(task.methods) for task in plan.TASKS)


def test_the_winner_is_the_best_mean_of_those_on_all_seeds(study):
    tune = study["tune"]
    scores = {0: [0.5], 1: [0.9, 0.1, 0.2], 2: [0.8, 0.7, 0.6], 3: [0.7]}
    trials = [{"method": "ppo", "setting": number, "score": s} for number, found in scores.items() for s in found]
    assert tune.ranked(trials, "ppo")[0] == 2
    assert tune.ranked([t for t in trials if t["setting"] in (0, 3)], "ppo") == [3, 0]


def made(study, folder, method, seed, final, digest="a"):
    path = folder / "CartPole-v1" / method / f"{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    cell = {"env": "CartPole-v1", "method": method, "seed": seed, "steps": [100, 200], "returns": [10.0, 20.0]}
    cell |= {"final": final, "env_steps": 200, "cpu_seconds": 3.0, "memory_mib": 250, "settings": digest}
    path.write_text(json.dumps(cell))


def test_the_report_compares_what_runs_ended_with(study, tmp_path, monkeypatch):
    report = study["report"]
    monkeypatch.setattr(report, "TASKS", [replace(study["plan"].TASKS[0], seeds=5)])
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "TABLES", tmp_path / "study.md")
    monkeypatch.setattr(report, "PLOT", tmp_path / "study.png")
    for number, method in enumerate(study["plan"].METHODS):
        for seed in range(5):
            made(study, tmp_path, method, seed, 100.0 * number + seed)
    report.main()
    text = (tmp_path / "study.md").read_text()
    assert (tmp_path / "study.png").stat().st_size > 10_000
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in text.splitlines() if line.startswith("| ")}
    assert rows["outcome"][1].startswith("2.000 [")  # of the final returns 0 to 4, not of the 20 on the way
    assert rows["outcome"][4] == "0.00 [0.00, 0.00]"
    assert rows["PPO of SB3"][4] == "1.00 [1.00, 1.00]"
    assert rows["CartPole-v1"][1].startswith("602.0 [")
    assert rows["CartPole-v1"][2].startswith("702.0 [")


def test_methods_that_are_not_complete_are_left_out(study, tmp_path, monkeypatch):
    report = study["report"]
    monkeypatch.setattr(report, "TASKS", [replace(study["plan"].TASKS[0], seeds=2)])
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    made(study, tmp_path, "outcome", 0, 1.0)
    for method in ("near_states", "ppo"):
        for seed in range(2):
            made(study, tmp_path, method, seed, 1.0)
    comparison = report.compared()
    assert [m.method for m in comparison.environments[0].methods] == ["near states", "PPO"]
    assert "| CartPole-v1 | not complete | 1.000 | 1.000 | not complete |" in report.summary(comparison)
    (tmp_path / "CartPole-v1" / "ppo" / "1.json").unlink()
    assert report.complete(report.TASKS[0]) == ["near_states"]


def test_three_runs_have_no_intervals_and_mixed_settings_are_refused(study, tmp_path, monkeypatch):
    report, plan = study["report"], study["plan"]
    monkeypatch.setattr(report, "TASKS", [replace(plan.TASKS[0], seeds=3)])
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for number, method in enumerate(plan.METHODS):
        for seed in range(3):
            made(study, tmp_path, method, seed, 100.0 * number + seed)
    comparison = report.compared()
    (found,) = comparison.environments
    assert "[" not in report.of_environment(found) + report.summary(comparison)
    assert all(m.curve.low is None and m.iqm.interval is None for m in found.methods)
    assert any("fewer than 5 runs of each method" in note for note in comparison.notes)
    made(study, tmp_path, "ppo", 2, 1.0, digest="b")
    with pytest.raises(SystemExit, match="CartPole-v1, ppo: cells of several settings"):
        report.compared()
