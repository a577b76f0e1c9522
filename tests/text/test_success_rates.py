"""Success rates of text environments: by name, as the score of an evaluation, and where training stops."""

import json

import pytest
from text_games import Guess
from text_runs import train

import groupwise as gw
from groupwise.config.run import TextRunCfg
from groupwise.errors import EnvError

ONE = {"max_new_tokens": 2, "stop": tuple("0123456789 ")}


class Named(Guess):
    """Each turn wins ``easy``, and none ``hard``; the rewards are the other way round."""

    def reset(self, *, seed=None, options=None):
        self.won = options["environment"] == "easy"
        super().reset(seed=seed)
        return "0", {}

    def step(self, text):
        return "1", 1.0 - self.won, True, False, {"success": self.won}


ROWS = [{"environment": name} for name in ("easy", "hard", "easy", "hard", "hard")]


def test_success_is_told_by_the_name_of_the_environment(model, tmp_path):
    task = gw.TextTask(ROWS, env=Named, eval_data=ROWS)
    run = train(task, model, tmp_path / "run", sampling=ONE, evaluation={"interval": 50})
    last = run.metrics()[-1]
    assert (last["eval/success_rate/easy"], last["eval/success_rate/hard"]) == (1.0, 0.0)
    assert last["eval/success_rate"] == pytest.approx(0.4)
    assert (last["rollout/success_rate/easy"], last["rollout/success_rate/hard"]) == (1.0, 0.0)
    report = gw.evaluate(run, completions_per_prompt=8).report()
    json.dumps(report)
    # Wilson's interval of 2 of 2 prompts, not of 16 completions: 1 / (1 + 3.841459 / 2)
    assert report["success_by_task"]["easy"]["success_ci95"][0] == pytest.approx(0.342380, abs=2e-6)
    assert {name: found["episodes"] for name, found in report["success_by_task"].items()} == {"easy": 2, "hard": 3}


def test_one_name_is_no_list(model, tmp_path):
    task = gw.TextTask(ROWS[:1], env=Named, eval_data=ROWS[:1])
    run = train(task, model, tmp_path / "run", sampling=ONE)
    assert [name for name in run.metrics()[-1] if name.startswith("eval/success_rate")] == ["eval/success_rate"]


def test_the_success_rate_chooses_the_best_and_stops(model, tmp_path):
    class Later(Guess):
        """The reward falls from evaluation to evaluation, while success comes."""

        evaluations = 0

        def step(self, text):
            won = self.evaluations >= 2
            return "1", -float(self.evaluations), True, False, {"success": won}

    class Count(gw.Callback):
        def on_iteration_end(self, trainer, rollout, metrics):
            Later.evaluations += 1

    settings = {
        "evaluation": {"interval": 1, "metric": "success_rate", "deterministic": False},
        "sampling": ONE,
        "callbacks": [Count()],
    }
    task = gw.TextTask(env=Later, eval_size=8)
    run = train(
        task, model, tmp_path / "run", total_steps=None, total_iterations=9, stop={"threshold": 1.0}, **settings
    )
    assert run.summary["stopped"].startswith("score")
    assert run.summary["iterations"] < 9
    assert run.summary["best_success_rate"] == 1.0
    assert run.summary["best_env_steps"] == run.summary["env_steps"]


def test_a_success_rate_that_is_not_told_or_not_possible_is_refused(model, tmp_path):
    class Silent(Guess):
        def step(self, text):
            return *super().step(text)[:4], {}

    settings = {"sampling": ONE, "evaluation": {"metric": "success_rate", "deterministic": False}}
    with pytest.raises(
        EnvError, match=r"no success rate: none of 8 episodes .* of a text environment info\[.success.\]"
    ):
        train(gw.TextTask(env=Silent, eval_size=8), model, tmp_path / "run", **settings)
    with pytest.raises(
        ValueError, match=r"evaluation\.metric='success_rate' needs episodes; fix: task.env, or metric='return'"
    ):
        TextRunCfg(evaluation={"metric": "success_rate"})
    with pytest.raises(ValueError, match=r"stop\.threshold=2 is no success rate; fix: more than 0 and at most 1"):
        TextRunCfg(task={"env": "x"}, evaluation={"metric": "success_rate"}, stop={"threshold": 2})


def test_a_model_whose_turns_are_all_cut_has_won_nothing(model, tmp_path):
    settings = {"sampling": {"max_new_tokens": 1}, "evaluation": {"metric": "success_rate"}}
    run = train(gw.TextTask(env=Guess, eval_size=2), model, tmp_path / "run", total_steps=20, **settings)
    assert run.summary["success_rate"] == 0.0
