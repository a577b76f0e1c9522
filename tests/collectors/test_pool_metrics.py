import pytest

from groupwise.collectors.base import pool_metrics


def test_counts_are_summed_extremes_kept_and_means_weighted_by_episodes():
    first = {"rollout/episodes": 3.0, "rollout/length_max": 9.0, "rollout/length_min": 2.0, "rollout/return_mean": 10.0}
    second = {
        "rollout/episodes": 1.0,
        "rollout/length_max": 5.0,
        "rollout/length_min": 1.0,
        "rollout/return_mean": 2.0,
        "rollout/unscorable": 2.0,
        "rollout/length_mean": 4.0,
    }
    assert pool_metrics([(3, first), (1, second)]) == {
        "rollout/episodes": 4.0,
        "rollout/length_max": 9.0,
        "rollout/length_min": 1.0,
        "rollout/return_mean": 8.0,
        "rollout/unscorable": 2.0,
        "rollout/length_mean": 4.0,
    }


def test_ranks_without_episodes_count_as_one_of_them():
    assert pool_metrics([(0, {"rollout/idle_fraction": 0.1}), (0, {"rollout/idle_fraction": 0.3})]) == {
        "rollout/idle_fraction": pytest.approx(0.2)
    }


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-300])
def test_one_rank_keeps_its_numbers_exactly(value: float):
    assert pool_metrics([(7, {"rollout/return_mean": value})]) == {"rollout/return_mean": value}
