"""The watch that all libraries' benchmark workers share: what it notes of a run, and what the tables make of that."""

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture
def load(monkeypatch):
    """A module of the peers by name; they import each other as scripts do."""
    monkeypatch.syspath_prepend(str(PEERS))

    def load(name):
        spec = importlib.util.spec_from_file_location(name, PEERS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def watched(load, monkeypatch, capsys, scores, *, env, budget, iteration=6_000):
    """What is printed of a run whose evaluations come to ``scores``, and how many iterations it took."""
    worker = load("worker")
    args = argparse.Namespace(task="first_pass", settings="own", env=env, threads="1", seed=0, steps=budget)
    watch, left = worker.Watch(args), iter(scores)

    def evaluate(self, act):
        self._evaluating = self._evaluating.plus(worker.Clocks(1_000.0, 500.0))  # as if it had taken so long
        return next(left)

    monkeypatch.setattr(worker.Watch, "_greedy_return", evaluate)
    monkeypatch.setenv(worker.STARTED, str(time.time() - 5_000))
    iterations = 1
    while not watch.iteration(iterations * iteration, [], None):
        iterations += 1
    watch.finish()
    return json.loads(capsys.readouterr().out), iterations


def test_a_run_ends_at_its_score_and_evaluations_do_not_count(load, monkeypatch, capsys):
    run, iterations = watched(load, monkeypatch, capsys, [-500.0, -99.0], env="Acrobot-v1", budget=60_000)
    assert (run["reached"], run["env_steps"], run["return"], iterations) == (True, 12_000, -99.0, 2)
    assert run["evaluating"] == 2_000
    assert run["seconds"] == pytest.approx(3_000, abs=60)
    assert run["cpu_seconds"] == pytest.approx(time.process_time() - 1_000, abs=60)
    assert "further" not in run


def test_a_run_goes_on_to_the_further_score_and_keeps_its_first_pass(load, monkeypatch, capsys):
    scores = [-900.0, -190.0, -205.0, -159.0]
    run, _ = watched(load, monkeypatch, capsys, scores, env="Pendulum-v1", budget=60_000)
    assert (run["env_steps"], run["further"]["env_steps"]) == (12_000, 24_000)
    assert run["seconds"] > run["further"]["seconds"]  # of evaluations that seemed longer than the run


def test_a_run_that_never_passes_ends_with_its_budget_and_is_looked_at_there(load, monkeypatch, capsys):
    scores = [-900.0, -800.0, -700.0]  # at 6,000, 12,000 and 15,000 steps
    run, _ = watched(load, monkeypatch, capsys, scores, env="Pendulum-v1", budget=15_000, iteration=3_000)
    assert (run["reached"], run["env_steps"], run["return"]) == (False, 15_000, -700.0)
    assert run["further"] == {"score": -160}


def test_tables_can_be_of_the_processors_seconds(load):
    tables = load("run")
    fast = {"library": "groupwise-ppo", "variant": "a", "seed": 1, "reached": True, "env_steps": 100, "memory_mib": 1.0}
    fast |= {"seconds": 30.0, "cpu_seconds": 2.0, "steps_per_second": 10.0, "steps_per_cpu_second": 90.0}
    fast["further"] = {"score": -160, "seconds": 31.0, "cpu_seconds": 3.0}
    slow = fast | {"library": "sb3", "cpu_seconds": 8.0, "steps_per_cpu_second": 30.0, "further": {"score": -160}}
    runs = [tables.by_processor(run) for run in (fast, slow)]
    assert "| groupwise-ppo | 2.0 | 2.0 to 2.0 | 0.25 (0.25 to 0.25) |" in tables.table("pendulum_score", runs)
    rates = tables.rates("pendulum_score", runs)
    assert "| groupwise-ppo | 90 (90 to 90) | 3.00 (3.00 to 3.00) | 100 (100 to 100) | -160: 3.0, 1 of 1 |" in rates
    assert "| -160: inf, 0 of 1 |" in rates
