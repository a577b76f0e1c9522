"""Verdicts on metrics: what healthy runs show is good, what sick ones show is not."""

import numpy as np
import pytest

from groupwise.report.health import RULES, dominance, examine, ratios, scale
from groupwise.report.health import group_spread as spread

HEALTHY = {
    "rollout/zero_variance_groups": 0.1,
    "rollout/reward_std": 0.4,
    "rollout/return_mean": 20.0,
    "rollout/length_mean": 20.0,
    "rollout/episodes": 32.0,
    "rollout/success_rate": 0.5,
    "rollout/sampler_kl": 1e-8,
    "rollout/ended_by_eos": 0.95,
    "rollout/ended_by_stop": 0.0,
    "completions/clipped_ratio": 0.05,
    "train/approx_kl": 0.01,
    "train/optimizer_steps": 20.0,
    "train/clip_fraction": 0.2,
    "train/clip_fraction_low": 0.1,
    "train/clip_fraction_high": 0.1,
    "train/grad_norm": 0.3,
    "train/explained_variance": 0.8,
    "eval/return_mean": 21.0,
    "eval/return_std": 1.0,
    "eval/episodes": 20.0,
    "time/collect_seconds": 3.0,
    "time/update_seconds": 1.0,
    "time/steps_per_second": 1000.0,
}


def entries(count=20, **changes):
    """Entries of a run, each changed number given as a function of the share of training that is done."""
    shares = [number / (count - 1) for number in range(count)]
    return [
        HEALTHY
        | {"env_steps": number, "iteration": number, "rollout/return_mean": 20 + 0.25 * (number % 2)}
        | {"train/entropy": 0.6 - 0.1 * shares[number]}
        | {key: change(share) for key, change in changes.items()}
        for number, share in enumerate(shares)
    ]


def at(key, change):
    return entries(**{key: change})


def verdicts(found):
    return {finding.title: finding.verdict for finding in found}


def test_a_healthy_run_is_good_in_every_respect():
    found = verdicts(examine(entries()))
    assert len(found) == len(RULES)
    assert set(found.values()) == {"good"}


def test_rules_without_their_metrics_are_silent():
    assert examine([]) == []
    assert [finding.title for finding in examine([{"env_steps": 1, "rollout/length_mean": 3.0}])] == [
        "Length of episodes"
    ]


@pytest.mark.parametrize(
    ("key", "change", "title", "verdict"),
    [
        ("rollout/zero_variance_groups", lambda share: 1.0, "Groups without signal", "bad"),
        ("rollout/zero_variance_groups", lambda share: 0.6, "Groups without signal", "look"),
        ("rollout/reward_std", lambda share: 0.0, "Spread of rewards", "bad"),
        ("rollout/return_mean", lambda share: -200.0, "Return", "bad"),
        ("rollout/episodes", lambda share: 0.0, "Ends of episodes", "bad"),
        ("eval/cut_episodes", lambda share: 20.0, "Ends of episodes", "look"),
        ("rollout/length_mean", lambda share: 20 + 40 * share, "Length of completions", "look"),
        ("rollout/length_mean", lambda share: 20 / (1 + 4 * share), "Length of completions", "look"),
        ("train/approx_kl", lambda share: 0.1, "KL of an update", "look"),
        ("train/approx_kl", lambda share: 0.5, "KL of an update", "bad"),
        ("train/approx_kl", lambda share: 1e-7, "KL of an update", "look"),
        ("train/approx_kl", lambda share: 40.0 * (share == 0), "KL of an update", "bad"),
        ("train/clip_fraction", lambda share: 0.5, "Clipped steps", "look"),
        ("train/entropy", lambda share: 0.69 * (1 - share) ** 4, "Entropy", "bad"),
        ("train/entropy", lambda share: 0.69, "Entropy", "look"),
        ("train/grad_norm", lambda share: 0.0, "Gradient norm", "bad"),
        ("train/skipped_steps", lambda share: 1.0, "Gradient norm", "bad"),
        ("train/explained_variance", lambda share: -0.2, "Critic", "look"),
        ("rollout/sampler_kl", lambda share: 0.05, "Sampler against trainer", "look"),
        ("rollout/sampler_kl", lambda share: 0.5, "Sampler against trainer", "bad"),
        ("completions/clipped_ratio", lambda share: 0.3, "Length of completions", "look"),
        ("completions/clipped_ratio", lambda share: 0.9, "Length of completions", "bad"),
        ("rollout/success_rate", lambda share: 0.0, "Success", "bad"),
        ("rollout/return_mean", lambda share: 100 * share, "Evaluation against training", "look"),
        ("eval/return_mean", lambda share: 20 + 50 * (share < 0.5), "Last against best", "look"),
    ],
)
def test_a_sick_number_is_found_and_says_what_to_do(key, change, title, verdict):
    found = examine(at(key, change))
    assert verdicts(found)[title] == verdict
    assert found[0].verdict == max((finding.verdict for finding in found), key=["good", "look", "bad"].index)
    assert all(bool(finding.advice) == (finding.verdict != "good") for finding in found)


def test_what_a_solved_task_shows_is_no_trouble():
    solved = entries(
        **{
            "rollout/return_mean": lambda share: 500 * share,
            "eval/return_mean": lambda share: 500.0 * (share > 0.3),
            "rollout/zero_variance_groups": lambda share: float(share > 0.5),
            "train/entropy": lambda share: 0.69 * (1 - share) ** 4,
        }
    )
    found = verdicts(examine(solved))
    assert found["Groups without signal"] == found["Entropy"] == found["Last against best"] == "good"


def test_equal_groups_below_the_highest_return_are_no_solved_task():
    fell = entries(
        **{
            "rollout/return_mean": lambda share: 500 * (share if share < 0.5 else 0.5),
            "rollout/zero_variance_groups": lambda share: float(share > 0.5),
        }
    )
    fell[10]["rollout/return_mean"] = 300.0
    assert verdicts(examine(fell))["Groups without signal"] == "look"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"rollout/return_mean": lambda share: 0.0}, "Return"),
        ({"train/approx_kl": lambda share: 17 * (share < 0.1)}, "KL of an update"),
    ],
)
def test_a_cause_goes_before_the_groups_without_signal_that_follow_from_it(changes, cause):
    found = examine(entries(**{"rollout/zero_variance_groups": lambda share: 0.95} | changes))
    bad = [finding for finding in found if finding.verdict == "bad"]
    assert [finding.title for finding in bad[:2]] == [cause, "Groups without signal"]
    assert bad[1].advice == f"This follows from: {cause}."


def test_an_entropy_that_is_gone_after_the_first_iterations_is_found():
    found = examine(at("train/entropy", lambda share: 0.69 if share == 0 else 0.004))
    assert verdicts(found)["Entropy"] == "bad"


@pytest.mark.parametrize(("greedy", "verdict"), [(25.0, "good"), (250.0, "look")])
def test_an_entropy_that_stays_is_found_where_only_the_greedy_policy_does_well(greedy, verdict):
    rising = {"rollout/return_mean": lambda share: 20 + 10 * share, "eval/return_mean": lambda share: greedy}
    assert verdicts(examine(entries(**{"train/entropy": lambda share: 0.69} | rising)))["Entropy"] == verdict


def test_a_policy_that_never_learned_did_not_get_worse():
    falling = {"eval/return_mean": lambda share: 60.0 * (1 - share)}
    assert verdicts(examine(entries(**falling)))["Last against best"] == "look"
    still = falling | {"train/grad_norm": lambda share: 0.0}
    assert verdicts(examine(entries(**still)))["Last against best"] == "good"


def test_a_task_of_which_every_attempt_succeeds_is_no_constant_return():
    always = entries(**{"rollout/return_mean": lambda share: 1.0, "rollout/success_rate": lambda share: 1.0})
    assert verdicts(examine(always))["Return"] == "good"


def test_updates_without_a_step_say_nothing_of_the_policy():
    """They log zeros: groups without signal are found, and no collapse of the entropy."""
    idle = {key: (lambda share: 0.0) for key in ("train/entropy", "train/approx_kl", "train/optimizer_steps")}
    half = [*entries(10), *entries(10, **{"rollout/return_mean": lambda share: 21.0} | idle)]
    found = {finding.title: finding for finding in examine(half)}
    assert found["Entropy"].text == "From 0.6 at first to 0.506 nats per step."
    assert found["KL of an update"].verdict == found["Entropy"].verdict == "good"
    assert "Entropy" not in verdicts(examine(entries(**idle)))


def test_the_time_is_split_by_what_it_was_spent_on():
    spent = {"advantage": 0.4, "evaluate": 12.0, "save": 4.0}
    found = examine(entries(4, **{f"time/{part}_seconds": (lambda share, s=s: s) for part, s in spent.items()}))
    [speed] = [finding for finding in found if finding.title == "Speed"]
    assert speed.text.endswith("2 % in advantages, 3 % in updates, 60 % in evaluations, 20 % in saving.")


def test_one_optimiser_step_has_no_kl():
    found = examine(entries(**{"train/optimizer_steps": lambda share: 1.0, "train/approx_kl": lambda share: 0.0}))
    assert verdicts(found)["KL of an update"] == "good"


def test_a_fall_within_the_noise_is_none():
    noisy = {"eval/return_mean": lambda share: 20 + 5 * (share < 0.5), "eval/return_std": lambda share: 20.0}
    assert verdicts(examine(entries(**noisy)))["Last against best"] == "good"


def test_observations_of_wild_scale_are_found_but_no_indices():
    wild = np.array([[0.5, -3_000.5], [0.1, 2_000.5]])
    assert scale(wild, normalized=False).verdict == "look"
    assert "Number 1 " in scale(wild, normalized=False).text
    assert scale(wild, normalized=True).verdict == "good"
    assert scale(wild / 1_000, normalized=False).verdict == "good"
    assert scale(np.array([[499.0], [123.0]]), normalized=False).verdict == "good"


def test_the_spread_of_returns_within_groups():
    """Returns 1 and 3 in one group, 4 and 4 in the other: standard deviations 1 and 0."""
    columns = {"group": [0, 0, 0, 1, 1], "member": [0, 1, 1, 0, 1], "reward": [1.0, 1.0, 2.0, 4.0, 4.0]}
    assert spread(columns).verdict == "good"
    assert spread(columns).text.endswith("kept last: 0.5.")
    equal = {name: values[3:] for name, values in columns.items()}
    assert spread(equal).verdict == "look"
    assert "nothing to compare" in spread(equal).text


def test_a_reward_beside_a_far_larger_one_is_found_but_none_that_is_learned():
    parts = np.array([[0.0, 0.0], [100.0, 1.0], [50.0, 1.0]])
    found = dominance(parts, ["style", "right"])
    assert (found.verdict, "style dominates: right hardly counts" in found.text) == ("look", True)
    assert dominance(parts / [50, 1], ["style", "right"]).verdict == "good"
    assert dominance(np.array([[0.0, 1.0], [9.0, 1.0]]), ["style", "right"]).verdict == "good"


def test_ratios_far_from_one_are_found():
    assert ratios([1.0] * 100).verdict == "good"
    assert ratios([0.9, 1.1] * 50 + [5.0]).verdict == "good"
    assert ratios([1.0] * 90 + [5.0] * 10).verdict == "look"
    assert "90 % of the ratios are from 0.900 to 1.100" in ratios([0.9, 1.1] * 50).text
