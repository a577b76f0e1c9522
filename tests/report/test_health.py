"""Verdicts on metrics: what healthy runs show is good, what sick ones show is not."""

import pytest

from groupwise.report.health import RULES, Goal, Metrics, examine, examine_groups

HEALTHY = {
    "rollout/zero_variance_groups": 0.1, "rollout/reward_std": 0.4, "rollout/return_mean": 20.0,
    "rollout/length_mean": 20.0, "rollout/episodes": 32.0, "rollout/success_rate": 0.5, "rollout/sampler_kl": 1e-8,
    "rollout/ended_by_eos": 0.95, "rollout/ended_by_stop": 0.0, "completions/clipped_ratio": 0.05,
    "train/approx_kl": 0.01, "train/optimizer_steps": 20.0, "train/clip_fraction": 0.2, "train/clip_fraction_low": 0.1,
    "train/clip_fraction_high": 0.1, "train/grad_norm": 0.3, "train/explained_variance": 0.8,
    "eval/return_mean": 21.0, "eval/return_std": 1.0, "eval/episodes": 20.0,
    "time/collect_seconds": 3.0, "time/update_seconds": 1.0, "time/steps_per_second": 1000.0,
}  # fmt: skip


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


def verdicts(found):
    return {finding.title: finding.verdict for finding in found}


def test_a_healthy_run_is_good_in_every_respect():
    found = verdicts(examine(entries()))
    assert len(found) == len(RULES)
    assert set(found.values()) == {"good"}


def test_rules_without_their_metrics_are_silent():
    assert examine([]) == []
    assert list(verdicts(examine([{"env_steps": 1, "rollout/length_mean": 3.0}]))) == ["Length"]


@pytest.mark.parametrize(
    ("key", "change", "title", "verdict"),
    [
        ("rollout/zero_variance_groups", lambda share: 1.0, "Groups without signal", "bad"),
        ("rollout/zero_variance_groups", lambda share: 0.6, "Groups without signal", "look"),
        ("rollout/reward_std", lambda share: 0.0, "Spread of rewards", "bad"),
        ("rollout/return_mean", lambda share: -200.0, "Return", "bad"),
        ("rollout/episodes", lambda share: 0.0, "Ends of episodes", "bad"),
        ("eval/cut_episodes", lambda share: 20.0, "Ends of episodes", "look"),
        ("rollout/length_mean", lambda share: 20 + 40 * share, "Length", "look"),
        ("rollout/length_mean", lambda share: 20 / (1 + 4 * share), "Length", "look"),
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
        ("completions/clipped_ratio", lambda share: 0.3, "Cut completions", "look"),
        ("completions/clipped_ratio", lambda share: 0.9, "Cut completions", "bad"),
        ("rollout/success_rate", lambda share: 0.0, "Success", "bad"),
        ("rollout/return_mean", lambda share: 100 * share, "Evaluation against training", "look"),
        ("eval/return_mean", lambda share: 20 + 50 * (share < 0.5), "Last against best", "look"),
    ],
)
def test_a_sick_number_is_found_and_says_what_to_do(key, change, title, verdict):
    found = examine(entries(**{key: change}))
    assert verdicts(found)[title] == verdict
    assert found[0].verdict == max((finding.verdict for finding in found), key=["good", "look", "bad"].index)
    assert all(bool(finding.advice) == (finding.verdict != "good") for finding in found)


SOLVED = {
    "rollout/return_mean": lambda share: 500 * share,
    "eval/return_mean": lambda share: 500.0 * (share > 0.3),
    "rollout/zero_variance_groups": lambda share: float(share > 0.5),
    "train/entropy": lambda share: 0.69 * (1 - share) ** 4,
}
ALWAYS = {"rollout/return_mean": lambda share: 1.0, "rollout/success_rate": lambda share: 1.0}
RISING = {"rollout/return_mean": lambda share: 20 + 10 * share, "train/entropy": lambda share: 0.69}
FALLING = {"eval/return_mean": lambda share: 60.0 * (1 - share)}
NOISY = {"eval/return_mean": lambda share: 20 + 5 * (share < 0.5), "eval/return_std": lambda share: 20.0}
ONE_STEP = {"train/optimizer_steps": lambda share: 1.0, "train/approx_kl": lambda share: 0.0}


@pytest.mark.parametrize(
    ("changes", "title", "verdict"),
    [
        *((SOLVED, title, "good") for title in ("Groups without signal", "Entropy", "Last against best")),
        (SOLVED | {"rollout/return_mean": lambda share: 500 * min(share, 0.3)}, "Groups without signal", "good"),
        (SOLVED | {"rollout/return_mean": lambda s: 300 if s == 0.5 else 250 * s}, "Groups without signal", "look"),
        ({"train/entropy": lambda share: 0.69 if share == 0 else 0.004}, "Entropy", "bad"),
        (RISING | {"eval/return_mean": lambda share: 25.0}, "Entropy", "good"),
        (RISING | {"eval/return_mean": lambda share: 250.0}, "Entropy", "look"),  # only the greedy policy does well
        (FALLING, "Last against best", "look"),
        (FALLING | {"train/grad_norm": lambda share: 0.0}, "Last against best", "good"),  # it never learned
        (NOISY, "Last against best", "good"),
        (ALWAYS, "Return", "good"),
        (ONE_STEP, "KL of an update", "good"),
    ],
)
def test_a_verdict_looks_at_several_metrics(changes, title, verdict):
    assert verdicts(examine(entries(21, **changes)))[title] == verdict


def played(*means, std=0.0, length=200.0, **more):
    """Entries with evaluations of 25 episodes: of a deviation of 10, the interval is 4.13 to each side."""
    numbers = {"eval/return_std": std, "eval/episodes": 25.0, "eval/length_mean": length} | more
    return [{"rollout/return_mean": 20.0}, *({"eval/return_mean": mean, **numbers} for mean in means)]


@pytest.mark.parametrize(
    ("entries", "goal", "is_solved"),
    [
        (played(479.2, std=10.0), Goal(475.0), True),  # from 475.07
        (played(479.1, std=10.0), Goal(475.0), False),  # from 474.97
        (played(500.0, **{"eval/episodes": 1.0}), Goal(475.0), False),  # no interval
        (played(-90.0), Goal(-110.0), True),
        (played(200.0), Goal(None, 200), True),
        (played(200.0), Goal(None, None), False),  # endless: longer episodes would have a higher return
        (played(200.0, length=199.0), Goal(None, 200), False),
        (played(200.0, std=1.0), Goal(None, 200), False),
        (played(200.0), Goal(475.0, 200), False),
        (played(250.0, 200.0), Goal(None, 200), False),  # it was better before
        (played(20.0), Goal(None, 200), False),  # it never changed
        ([{"rollout/return_mean": -210.0}, *played(-200.0)[1:]], Goal(None, 200), False),  # alive, but all steps cost
        (played(50.0, std=9.0, **{"eval/success_rate": 1.0}), Goal(), True),
        (played(50.0, std=9.0, **{"eval/pass_at_1": 0.99}), Goal(), False),
        ([*played(90.0, **{"eval/success_rate": 1.0}), *played(200.0)], Goal(None, 200), False),  # none had the flag
        ([], Goal(475.0), False),
    ],
)
def test_a_task_is_solved_at_its_threshold_or_where_nothing_is_left_to_gain(entries, goal, is_solved):
    assert Metrics(entries, goal).solved == is_solved


def test_nothing_is_wrong_with_what_a_solved_task_leaves_to_compare():
    same = {"rollout/return_mean": lambda share: 500.0, "rollout/zero_variance_groups": lambda share: 1.0}
    idle = {"rollout/reward_std": lambda share: 0.0, "train/grad_norm": lambda share: 0.0}
    top = same | idle | {"eval/return_mean": lambda share: 500.0, "train/explained_variance": lambda share: 0.0}
    assert verdicts(examine(entries(**top)))["Groups without signal"] == "bad"
    found = examine(entries(**top), goal=Goal(475.0))
    assert set(verdicts(found).values()) == {"good"}
    [groups] = [finding for finding in found if finding.title == "Groups without signal"]
    assert groups.text == "Members of 100 % of the groups did equally well. The task is solved."
    broken = examine(entries(**top | {"train/skipped_steps": lambda share: 1.0}), goal=Goal(475.0))
    assert verdicts(broken)["Gradient norm"] == "bad"


@pytest.mark.parametrize(("last", "verdict"), [(92.0, "good"), (91.0, "look")])
def test_a_policy_got_worse_where_both_intervals_say_so(last, verdict):
    """Deviations of 10 in 25 episodes: the best one begins at 95.87, the last ends at 96.13 or 95.13."""
    noise = {"eval/return_std": lambda share: 10.0, "eval/episodes": lambda share: 25.0}
    fell = {
        "rollout/return_mean": lambda share: 90.0 + 5 * share,
        "eval/return_mean": lambda s: last if s == 1 else 100.0,
    }
    assert verdicts(examine(entries(**noise, **fell)))["Last against best"] == verdict


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
    assert speed.text.endswith("collect 15 %, advantage 2 %, update 3 %, evaluate 60 %, save 20 %.")


def on_groups(task=None, last=(), policy=None, **columns):
    """The finding on one file of kept groups, of one step per member unless columns say otherwise."""
    count = len(next(iter(columns.values())))
    empty = {name: [None] * count for name in ("observation", "reward_parts")}
    known = empty | {"group": [0] * count, "member": list(range(count))} | columns
    config = {"policy": policy or {}} | ({"task": task} if task else {})
    [found] = examine_groups(config, [known], last)
    return found


@pytest.mark.parametrize(
    ("observations", "normalized", "verdict"),
    [
        ([[0.5, -3_000.5], [0.1, 2_000.5]], False, "look"),
        ([[0.5, -3_000.5], [0.1, 2_000.5]], True, "good"),
        ([[0.0005, -3.0005], [0.0001, 2.0005]], False, "good"),
        ([[499.0], [123.0]], False, "good"),  # indices
    ],
)
def test_observations_of_wild_scale_are_found_but_no_indices(observations, normalized, verdict):
    found = on_groups(policy={"normalize_obs": normalized}, observation=observations)
    assert found.verdict == verdict
    assert "Number 1 " in found.text or len(observations[0]) == 1


@pytest.mark.parametrize(
    ("parts", "weights", "verdict"),
    [
        ([[0.0, 0.0], [100.0, 1.0], [50.0, 1.0]], [1, 1], "look"),
        ([[0.0, 0.0], [100.0, 1.0], [50.0, 1.0]], [0.02, 1], "good"),
        ([[0.0, 1.0], [9.0, 1.0]], [1, 1], "good"),  # it does not vary: learned, or never paid
    ],
)
def test_a_reward_beside_a_far_larger_one_is_found_but_none_that_is_learned(parts, weights, verdict):
    task = {"rewards": [{"weight": weight} for weight in weights]}
    found = on_groups(task, [{"reward/style_mean": 1.0, "reward/right_mean": 1.0}], reward_parts=parts)
    assert found.verdict == verdict
    assert ("style dominates, right hardly counts" in found.advice) == (verdict == "look")


@pytest.mark.parametrize("last", [[{"reward/environment_mean": 1.0, "reward/style_mean": 1.0}], [{}]])
def test_the_reward_of_a_text_environment_is_compared_too(last):
    found = on_groups({"rewards": [{"weight": 0.5}]}, last, reward_parts=[[0.0, 0.0], [3.0, 100.0]])
    assert f"environment 3, {'style' if last[0] else 'reward 1'} 50." in found.text


def test_a_run_shorter_than_its_first_episodes_has_no_trouble_with_their_ends():
    short = Goal.from_config({"env": {"id": "Pendulum-v1", "num_envs": 4}})
    assert short == Goal(None, 200, 800)
    cut = {"rollout/episodes": lambda share: 0.0}
    assert verdicts(examine(entries(10, **cut), goal=short))["Ends of episodes"] == "good"
    long = cut | {"env_steps": lambda share: 801 * share}
    assert verdicts(examine(entries(10, **long), goal=short))["Ends of episodes"] == "bad"
    cut |= {"eval/cut_episodes": lambda share: 20.0}
    assert verdicts(examine(entries(10, **cut), goal=short))["Ends of episodes"] == "bad"


def test_cuts_of_earlier_evaluations_are_past():
    """An evaluation that cuts nothing logs no number of them."""
    earlier = [entry | {"eval/cut_episodes": 20.0} for entry in entries(10)]
    assert verdicts(examine([*earlier, *entries(10)]))["Ends of episodes"] == "good"
    assert verdicts(examine([*entries(10), *earlier]))["Ends of episodes"] == "look"


@pytest.mark.parametrize(
    ("deterministic", "advice"), [(True, "evaluation.deterministic=false"), (False, "more starts, or more data")]
)
def test_random_actions_are_no_advice_where_evaluations_have_them(deterministic, advice):
    goal = Goal.from_config({"env": {"id": "CartPole-v1"}, "evaluation": {"deterministic": deterministic}})
    found = examine(entries(**{"rollout/return_mean": lambda share: 100 * share}), goal=goal)
    [against] = [finding for finding in found if finding.title == "Evaluation against training"]
    assert advice in against.advice


def test_one_iteration_does_not_say_whether_evaluations_need_random_actions():
    higher = {"rollout/return_mean": lambda share: 25.0}
    assert verdicts(examine(entries(2, **higher)[:1]))["Evaluation against training"] == "good"
