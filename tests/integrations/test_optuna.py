"""Optuna over runs of a few iterations."""

import gymnasium
import pytest
from small_populations import PPO, same_weights

import groupwise as gw

optuna = pytest.importorskip("optuna")

from groupwise.integrations.optuna import optimize  # noqa: E402 (where it is installed)

OPTIONS = {"num_envs": 4, "total_steps": 256, "evaluation": {"interval": 64, "episodes": 2}}


class PrunesTheSecond(optuna.pruners.BasePruner):
    """Prunes trial 1 at its first report."""

    def prune(self, study, trial):
        return trial.number == 1


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def study():
    return optuna.create_study(
        direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0), pruner=PrunesTheSecond()
    )


def test_each_trial_is_a_run_with_the_proposed_settings_and_its_evaluations(tmp_path):
    found = study()
    search = {"algorithm.learning_rate": {"min": 1e-4, "max": 1e-1, "log": True}, "algorithm.num_epochs": [1, 2]}
    search["algorithm.minibatch_size"] = {"min": 16, "max": 64}
    optimize(found, "CartPole-v1", PPO, search=search, trials=3, run_dir=tmp_path, **OPTIONS)
    assert [trial.state.name for trial in found.trials] == ["COMPLETE", "PRUNED", "COMPLETE"]
    for trial in found.trials:
        run = gw.Run.load(tmp_path / f"trial-{trial.number}")
        for path, value in trial.params.items():
            assert getattr(run.cfg.algorithm, path.removeprefix("algorithm.")) == value
        evaluations = {e["env_steps"]: e["eval/return_mean"] for e in run.metrics() if "eval/return_mean" in e}
        assert trial.intermediate_values == evaluations
        assert list(evaluations) == [64, 128, 192, 256][: 1 if trial.number == 1 else None]
        assert trial.state.name == "PRUNED" or trial.value == evaluations[256]
    assert found.best_trial.number in (0, 2)


def test_a_policy_of_ones_own_begins_anew_in_each_trial(tmp_path):
    env = gymnasium.make("CartPole-v1")
    options = OPTIONS | {"policy": gw.ActorCritic(env.observation_space, env.action_space)}
    found = optuna.create_study(direction="maximize")
    for _ in range(2):
        found.enqueue_trial({"algorithm.gamma": 0.9})
    optimize(found, "CartPole-v1", PPO, search={"algorithm.gamma": [0.9] * 2}, trials=2, run_dir=tmp_path, **options)
    assert same_weights(tmp_path / "trial-0", tmp_path / "trial-1")


def test_a_run_that_diverges_fails_and_the_others_go_on(tmp_path):
    found = study()
    found.enqueue_trial({"algorithm.vf_coef": 3e38})
    optimize(found, algorithm=PPO, search={"algorithm.vf_coef": [0.5, 3e38]}, trials=1, run_dir=tmp_path, **OPTIONS)
    assert [trial.state.name for trial in found.trials] == ["FAIL"]


def test_what_is_no_setting_is_refused_before_a_trial(tmp_path):
    found = study()
    with pytest.raises(gw.errors.ConfigError, match=r"did you mean 'algorithm\.gamma'"):
        optimize(found, algorithm=PPO, search={"algorithm.gama": [0.9, 1.0]}, trials=1, run_dir=tmp_path)
    assert not found.trials


def test_a_study_that_minimises_is_refused(tmp_path):
    with pytest.raises(gw.errors.ConfigError, match="fix: create_study"):
        optimize(optuna.create_study(), search={"algorithm.num_epochs": [1, 2]}, trials=1, run_dir=tmp_path)
