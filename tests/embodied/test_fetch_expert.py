"""The controllers for the Fetch tasks solve them."""

import pytest

from groupwise.embodied.demos import record_demos
from groupwise.embodied.lerobot import read_demos

pytest.importorskip("gymnasium_robotics")
pytest.importorskip("groupwise.embodied.fetch")
pytest.importorskip("pyarrow")
pytestmark = [pytest.mark.contrib, pytest.mark.slow]


@pytest.mark.parametrize(
    ("task", "most_attempts"), [("FetchReach-v4", 10), ("FetchPush-v4", 14), ("FetchPickAndPlace-v4", 12)]
)
def test_the_expert_succeeds(task, most_attempts, tmp_path):
    found = record_demos(task, episodes=10, out=tmp_path / "demos")
    assert found.attempts <= most_attempts
    assert found.steps == 500, "the tasks go on after success"


def test_goals_are_columns_of_their_own(tmp_path):
    gymnasium = pytest.importorskip("gymnasium")
    record_demos("FetchReach-v4", episodes=1, out=tmp_path / "demos")
    space = gymnasium.make("FetchReach-v4").observation_space
    obs = read_demos(tmp_path / "demos", space).obs
    shapes = {"achieved_goal": (50, 3), "desired_goal": (50, 3), "observation": (50, 10)}
    assert {name: leaf.shape for name, leaf in obs.items()} == shapes
