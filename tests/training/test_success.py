"""Success as a number to steer by: evaluation, best checkpoint, stop, resume, and what a run reports."""

import dataclasses
import json
from functools import partial

import gymnasium
import pytest
import torch
from at_events import interrupt_after
from gymnasium.envs.registration import EnvSpec
from run_folders import logged
from scripted_envs import FakePolicy
from success_envs import Touch, TouchEither

import groupwise as gw
from groupwise.cli.train import print_run
from groupwise.config.run import EnvCfg
from groupwise.envs.make import make_env
from groupwise.errors import EnvError
from groupwise.policies.base import Action
from groupwise.report.folder import scores_of
from groupwise.run import play
from groupwise.training.callbacks import Evaluate
from groupwise.training.checkpoint import Identity, load_checkpoint
from groupwise.training.evaluation import EvaluationResult, evaluate_policy

HERE = Identity("Touch", "observations", "actions")
SMALL = {"num_envs": 4, "max_episode_steps": 3, "total_steps": 240, "logging": {"progress": "none"}}


def evaluation(*successes, returns=0.0):
    flags = None if None in successes else tuple(bool(success) for success in successes)
    return EvaluationResult((returns,) * len(successes), (3,) * len(successes), successes=flags)


def train(run_dir, algorithm=None, key="is_success", **settings):
    algorithm = algorithm or gw.GRPOCfg(group_size=2, num_steps=9)
    settings = SMALL | {"evaluation": {"episodes": 10}} | settings
    return gw.train(partial(Touch, key), algorithm, run_dir=run_dir, **settings)


def test_interval_by_hand():
    # Wilson with z = 1.959964, z^2 = 3.841459, for 8 of 10: centre (0.8 + 0.192073) / 1.384146 = 0.716740,
    # half sqrt(0.8 * 0.2 / 10 + 3.841459 / 400) * 1.959964 / 1.384146 = 0.160036 * 1.416009 = 0.226613
    result = evaluation(*[True] * 8, *[False] * 2)
    assert result.success_rate == 0.8
    assert result.success_ci95 == pytest.approx((0.490162, 0.943318), abs=1e-5)
    # of 10 of 10 the lower end is 1 / (1 + z^2 / 10)
    assert evaluation(*[True] * 10).success_ci95 == pytest.approx((1 / 1.3841459, 1.0))
    assert "success_rate=0.8 ci95=[0.490162, 0.943318] episodes=10" in result.line()
    assert result.report()["success_ci95"] == result.success_ci95
    assert result.report()["successes"] == [True] * 8 + [False] * 2
    assert result.metrics()["eval/success_rate"] == 0.8


def test_without_a_flag_there_is_no_word_of_success():
    result = evaluation(None, None)
    assert (result.success_rate, result.success_ci95) == (None, None)
    assert "success" not in result.line() + json.dumps(result.report()) + json.dumps(result.metrics())
    with pytest.raises(EnvError, match=r"none of 2 episodes ended with a success flag; fix: info\['is_success'\]"):
        result.score("success_rate")


@pytest.mark.parametrize("num_envs", [1, 4])
def test_evaluation_counts_the_last_step_of_each_episode(num_envs):
    policy = FakePolicy()
    env = make_env(EnvCfg(vectorization="sync"), grouped=True, num_envs=num_envs, env=Touch, verify=False)

    def act(obs, *args):
        """Acts as a policy that touches the goal at the last step in every third episode."""
        touch = (torch.arange(len(obs)) % 3 == 0) & (obs[:, 0] == 2)
        return Action(touch.long(), torch.zeros(len(obs)))

    policy.act = act
    result = evaluate_policy(policy, env, episodes=10, seed=0)
    assert result.successes == tuple(episode % 3 == 0 for episode in range(10))
    assert result.lengths == (3,) * 10


def test_an_evaluation_cut_before_the_end_does_not_know(parts):
    env = make_env(EnvCfg(vectorization="sync"), grouped=True, num_envs=2, env=Touch, verify=False)
    assert evaluate_policy(parts.policy(), env, episodes=2, seed=0, max_steps=2).successes is None


def test_the_best_checkpoint_is_the_one_with_the_highest_rate(parts, tmp_path):
    results = [
        evaluation(False, True, returns=9.0),
        evaluation(True, True, returns=1.0),
        evaluation(True, True, returns=2.0),
    ]
    for metric, state in {"success_rate": (2, 20, "success_rate", 1.0), "return": (1, 10, "return_mean", 9.0)}.items():
        queue = iter(results)
        evaluate = Evaluate(lambda queue=queue: next(queue), 10, tmp_path / metric, HERE, metric)
        parts.trainer(evaluate, total_steps=30).train()
        best = load_checkpoint(tmp_path / metric, HERE)
        iteration, env_steps, name, score = state
        assert best.state["iteration"] == iteration
        assert (best.state["env_steps"], best.state[name]) == (env_steps, score)
        assert best.policy["count"] == iteration


@pytest.mark.parametrize("threshold", [0.0, 1.5, 95.0])
def test_a_threshold_that_is_no_rate_is_refused(threshold):
    settings = {"evaluation": {"metric": "success_rate"}, "stop": {"threshold": threshold}}
    with pytest.raises(gw.errors.ConfigError, match=rf"stop.threshold={threshold:g} is no success rate.*fix: "):
        gw.RunCfg(**settings)
    assert gw.RunCfg(stop=settings["stop"]).stop.threshold == threshold


def test_a_rate_that_is_asked_for_and_never_told_is_an_error(tmp_path):
    with pytest.raises(EnvError, match="ended with a success flag; fix"):
        train(tmp_path / "run", key=None, evaluation={"metric": "success_rate"})
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"] == "failed"


@pytest.mark.parametrize(
    "algorithm", [gw.GRPOCfg(group_size=2, num_steps=9), gw.PPOCfg(num_steps=9)], ids=["grpo", "ppo"]
)
def test_a_run_reports_success(algorithm, tmp_path, capsys):
    run = train(tmp_path / "run", algorithm, evaluation={"episodes": 10, "metric": "success_rate", "interval": 60})
    lines = run.metrics()
    rates = [line["eval/success_rate"] for line in lines if "eval/success_rate" in line]
    summary = run.summary
    assert summary["success_rate"] == rates[-1]
    assert summary["best_success_rate"] == max(rates)
    assert summary["training_success_rate"] == lines[-1]["rollout/success_rate"]
    low, high = summary["success_ci95"]
    assert 0 <= low <= summary["success_rate"] <= high <= 1
    result = gw.evaluate(run, episodes=7)
    assert result.success_rate == sum(result.successes) / 7
    print_run(run)
    printed = f"success {100 * rates[-1]:.0f} % (95 % interval {100 * low:.0f} to {100 * high:.0f}). Best"
    assert printed in capsys.readouterr().out


def test_an_evaluation_without_any_flag_counts_as_failed_if_another_one_has_flags(tmp_path, capsys):
    """The goal is told where it is reached, which costs return: the best evaluation never saw it, or the last one."""
    numbers = {"eval/return_std": 1.0, "eval/episodes": 5.0}
    best = {"iteration": 1, "env_steps": 10, "eval/return_mean": 9.0} | numbers
    won = {"iteration": 2, "env_steps": 20, "eval/return_mean": 2.0, "eval/success_rate": 0.2} | numbers
    found = scores_of([best, won])
    assert (found["success_rate"], found["best_success_rate"], found["best_env_steps"]) == (0.2, 0.0, 10)
    run = train(tmp_path / "run")
    capsys.readouterr()
    print_run(dataclasses.replace(run, summary=run.summary | found))
    assert "success 20 % (95 % interval 4 to 62). Best 9.000, success 0 %, at" in capsys.readouterr().out
    found = scores_of([won, best])
    assert (found["success_rate"], found["best_success_rate"]) == (0.0, 0.0)
    assert "success_rate" not in scores_of([best])
    trained = [
        {"iteration": 1, "rollout/return_mean": 1.0, "rollout/success_rate": 0.5},
        {"iteration": 2, "rollout/return_mean": 0.0},
    ]
    assert scores_of(trained)["training_success_rate"] == 0.0


@pytest.mark.parametrize(("flags", "told"), [((None, True), (False, True)), ((None, None), None)])
def test_episodes_that_are_played_count_as_those_of_evaluations(flags, told, tmp_path, monkeypatch):
    run = train(tmp_path / "run")
    played = [(1.0, 3, flag) for flag in flags]
    monkeypatch.setattr("groupwise.run.play_episodes", lambda *settings: played)
    found, _ = play(run.path, 2, env=partial(Touch, "is_success"))
    assert found.successes == told


def test_success_of_each_task_by_hand():
    tasks = ("push", "open", "push", "push", "")
    result = EvaluationResult((0.0,) * 5, (3,) * 5, successes=(True, True, False, True, False), tasks=tasks)
    assert list(result.success_by_task) == ["open", "push"]
    push = result.success_by_task["push"]
    assert (push.success_rate, push.episodes) == (2 / 3, 3)
    # Wilson for 2 of 3: centre (0.666667 + 0.640243) / 2.280486 = 0.573084,
    # half sqrt(0.222222 / 3 + 3.841459 / 36) * 1.959964 / 2.280486 = 0.425198 * 0.859450 = 0.365436
    assert push.success_ci95 == pytest.approx((0.207648, 0.938520), abs=1e-4)
    assert result.metrics()["eval/success_rate/push"] == 2 / 3
    assert result.metrics()["eval/success_rate"] == 0.6
    assert result.report()["success_by_task"]["open"]["success_rate"] == 1.0
    assert result.report()["tasks"] == list(tasks)


def test_a_single_task_has_no_twin_metrics():
    for tasks in (("push", "push"), ("push", ""), ("", ""), None):
        result = EvaluationResult((0.0, 1.0), (3, 3), successes=(True, False), tasks=tasks)
        assert result.success_by_task == {}
        assert "task" not in json.dumps([result.report(), result.metrics()])


@pytest.mark.parametrize(
    ("algorithm", "vectorization"),
    [
        (gw.PPOCfg(num_steps=9), "sync"),
        pytest.param(gw.GRPOCfg(group_size=2, num_steps=9), "async", marks=pytest.mark.slow),
    ],
)
def test_a_run_reports_the_success_of_each_task(algorithm, vectorization, tmp_path, monkeypatch):
    spec = EnvSpec("TouchEither-v0", TouchEither, disable_env_checker=True)
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    env = gw.EnvCfg(id="TouchEither-v0", vectorization=vectorization)
    run = gw.train(env, algorithm, run_dir=tmp_path / "run", **SMALL, evaluation={"episodes": 10})
    last = run.metrics()[-1]
    for kind in ("rollout", "eval"):
        names = [name for name in last if name.startswith(f"{kind}/success_rate/")]
        assert names == [f"{kind}/success_rate/left", f"{kind}/success_rate/right"]
        assert min(last[name] for name in names) <= last[f"{kind}/success_rate"] <= max(last[name] for name in names)
    result = gw.evaluate(run, episodes=7)
    parts = result.success_by_task.values()
    assert sum(part.episodes for part in parts) == 7
    assert sum(part.success_rate * part.episodes for part in parts) == pytest.approx(sum(result.successes))
    assert result.tasks == gw.evaluate(run, episodes=7).tasks


def test_training_on_success_learns_to_touch(tmp_path):
    settings = {
        "total_steps": 6000,
        "stop": {"threshold": 1.0},
        "evaluation": {"episodes": 10, "interval": 300, "metric": "success_rate"},
    }
    algorithm = gw.GRPOCfg(group_size=8, num_steps=48, learning_rate=1e-2)
    run = train(tmp_path / "run", algorithm, **settings)
    assert run.summary["stopped"].startswith("score: success_rate 1")
    assert run.summary["success_rate"] == 1.0


@pytest.mark.slow
def test_a_resumed_run_logs_the_same_success(tmp_path):
    algorithm = gw.PPOCfg(num_steps=7)
    settings = {"evaluation": {"episodes": 4, "metric": "success_rate", "interval": 50}, "checkpoint_interval": 1}
    whole = train(tmp_path / "whole", algorithm, **settings)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "halves", algorithm, callbacks=[interrupt_after(3)], **settings)
    again = gw.resume(tmp_path / "halves", env=partial(Touch, "is_success"))
    assert logged(again.path) == logged(whole.path)
    assert any("rollout/success_rate" in line for line in logged(whole.path)[3:])
    first, second = (load_checkpoint(path / "checkpoints" / "best").state for path in (whole.path, again.path))
    assert first | {"seconds": 0} == second | {"seconds": 0}
