import pytest

from groupwise.collectors.vector import Episode, pool_metrics


def episodes(count):
    return [Episode(1.0, 1, True)] * count


def of_task(task, *successes):
    return [Episode(1.0, 1, True, success, task) for success in successes]


def test_counts_are_summed_extremes_kept_and_means_weighted_by_episodes():
    names = [
        f"rollout/{name}"
        for name in ("episodes", "length_max", "length_min", "return_mean", "unscorable", "starts_apart")
    ]
    first, second = (3.0, 9.0, 2.0, 10.0), (1.0, 5.0, 1.0, 2.0, 2.0, 1.0)
    pooled = (4.0, 9.0, 1.0, 8.0, 2.0, 1.0)
    ranks = [(episodes(3), dict(zip(names, first, strict=False))), (episodes(1), dict(zip(names, second, strict=True)))]
    assert pool_metrics(ranks) == dict(zip(names, pooled, strict=True))


def test_ranks_without_episodes_count_as_one_of_them():
    assert pool_metrics([([], {"rollout/idle_fraction": 0.1}), ([], {"rollout/idle_fraction": 0.3})]) == {
        "rollout/idle_fraction": pytest.approx(0.2)
    }


@pytest.mark.parametrize("name", ["wasted_steps", "filtered_steps", "idle_fraction"])
def test_shares_of_steps_are_those_of_all_steps(name):
    # 6 of 262 steps, in many short episodes, and none of 320
    shares = [
        {f"rollout/{name}": share, "rollout/env_steps": steps} for share, steps in ((6 / 262, 262.0), (0.0, 320.0))
    ]
    pooled = pool_metrics([(episodes(64), shares[0]), (episodes(8), shares[1])])
    assert pooled[f"rollout/{name}"] == pytest.approx(6 / 582)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-300])
def test_one_rank_keeps_its_numbers_exactly(value):
    assert pool_metrics([(episodes(7), {"rollout/return_mean": value})]) == {"rollout/return_mean": value}


def test_the_success_of_a_task_is_that_of_its_episodes_on_all_ranks():
    # left: 1 of 1 and 0 of 3; right: on the second rank alone, where one episode does not say and counts as failed
    ranks = [(of_task("left", True), {}), (of_task("left", False, False, False) + of_task("right", True, None), {})]
    assert pool_metrics(ranks) == {"rollout/success_rate/left": 0.25, "rollout/success_rate/right": 0.5}


def test_a_single_task_has_no_rate_of_its_own():
    assert pool_metrics([(of_task("left", True), {}), (of_task("left", False), {})]) == {}
    assert pool_metrics([(of_task("left", True) + of_task(None, False) + of_task("", True), {})]) == {}
