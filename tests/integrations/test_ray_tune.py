"""Ray Tune over runs of a few iterations."""

import pytest
from small_populations import PPO

import groupwise as gw

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
OPTIONS = {"num_envs": 4, "total_steps": 256, "evaluation": {"interval": 64, "episodes": 2}}


@pytest.fixture
def tune(ray):
    """Ray Tune on one core of this machine."""
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield pytest.importorskip("ray.tune")
    ray.shutdown()


def test_population_based_training_of_ray_tune_trains_on_from_checkpoints_of_other_trials(tune, tmp_path):
    from ray.tune.schedulers import PopulationBasedTraining

    from groupwise.integrations.ray_tune import trainable

    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"algorithm.learning_rate": tune.loguniform(1e-4, 1e-1)},
        quantile_fraction=0.5,
        synch=True,
    )
    results = tune.Tuner(
        trainable("CartPole-v1", PPO, **OPTIONS),
        param_space={"algorithm.learning_rate": tune.grid_search([1e-3, 1e-2])},
        tune_config=tune.TuneConfig(metric="score", mode="max", scheduler=scheduler),
        run_config=tune.RunConfig(storage_path=str(tmp_path), name="pbt", verbose=0),
    ).fit()
    assert not results.errors
    assert all(result.metrics["env_steps"] == 256 for result in results)
    assert all(list(result.metrics_dataframe["env_steps"].unique()) == [64, 128, 192, 256] for result in results)
    runs = [gw.Run.load(path.parent) for path in tmp_path.glob("pbt/*/run-*/config.json")]
    assert len(runs) > 2  # a trial began again from the checkpoint of the other
    assert {run.metrics()[0]["env_steps"] for run in runs} == {64}
    assert len({run.cfg.algorithm.learning_rate for run in runs}) > 2
