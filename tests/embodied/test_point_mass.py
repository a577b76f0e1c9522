"""EmbodiChain's PointMassEnv, from its wheel: what PPO and GRPO do with a real simulator of others."""

import importlib.util
from pathlib import Path

import pytest

import groupwise as gw

pytestmark = pytest.mark.contrib


@pytest.fixture(scope="module")
def point_mass():
    """Its file is loaded by itself, since the package around it needs a simulator that PyPI does not have."""
    embodichain = pytest.importorskip("embodichain")
    path = Path(embodichain.__file__).parents[1] / "embodichain_tasks" / "classic_control" / "point_mass.py"
    spec = importlib.util.spec_from_file_location("point_mass", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PointMassEnv


def test_groups_start_by_seeded_resets_of_single_rows(point_mass):
    sim = gw.from_torch_sim(point_mass(8))
    assert sim.row_option == "env_ids"
    assert sim.observation_space.shape == (14,)
    assert sim.as_group_env().start_report.start_mode == "seed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        gw.PPOCfg(num_steps=32, minibatch_size=512, num_epochs=6, learning_rate=1e-3),
        gw.GRPOCfg(num_steps=64, group_size=8, minibatch_size=1024, num_epochs=4, learning_rate=1e-3),
    ],
    ids=["ppo", "grpo"],
)
def test_the_distance_to_the_goal_shrinks(point_mass, algorithm, tmp_path):
    run = gw.train(
        gw.from_torch_sim(point_mass(64, success_bonus=50.0)),
        algorithm,
        total_steps=200_000,
        seed=3,
        run_dir=tmp_path / "run",
        policy={"normalize_obs": True},
    )
    returns = [entry["rollout/return_mean"] for entry in run.metrics() if "rollout/return_mean" in entry]
    assert returns[-1] > returns[0] + 20
