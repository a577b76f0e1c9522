"""Run folders compared: what is read, what is refused, and how runs become methods."""

import json
from functools import partial
from pathlib import Path

import pytest
from run_folders import rewrite_metrics, write_run, write_seeds

import groupwise as gw
from groupwise.errors import ConfigError, DataError, RunFolderError


@pytest.fixture(autouse=True)
def _in_a_fresh_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def runs() -> list[Path]:
    return [write_seeds(Path("g"), (4.0, 8.0, 12.0)), write_seeds(Path("p"), (1.0, 2.0, 3.0), algorithm="ppo")]


def test_runs_that_differ_in_their_seed_are_one_method(runs):
    [found] = gw.compare(runs).environments
    assert found.environment == "CartPole-v1"
    assert [(m.method, m.seeds, m.scores) for m in found.methods] == [
        ("grpo", (0, 1, 2), (4.0, 8.0, 12.0)),
        ("ppo", (0, 1, 2), (1.0, 2.0, 3.0)),
    ]
    grpo = found.methods[0]
    assert (grpo.seconds, grpo.memory_mib) == (3.0, 100.0)  # medians of 2 3 4
    assert grpo.sources == ("g/seed_0", "g/seed_1", "g/seed_2")
    assert found.settings["algorithm.name"] == {"grpo": "grpo", "ppo": "ppo"}
    assert "algorithm.objective.trust_region.clip_low" not in found.settings
    assert found.improvements[0].probability.value == 1.0


def test_single_folders_patterns_and_overlaps_are_the_same_runs(runs):
    folders = sorted(Path().glob("[gp]/seed_*"))
    for given in (folders, ["g", "p/seed_*"], [*folders, "g", Path("g/seed_1").resolve()], "[gp]"):
        assert gw.compare(given).report() == gw.compare(runs).report()


def test_files_beside_the_runs_are_passed_over(runs):
    for name in ("seed_0.log", "seed_1.log", "settings.json"):
        Path("g", name).touch()
    for given in (sorted(Path("g").iterdir()), "g/*", "g"):
        assert gw.compare(given).environments[0].methods[0].seeds == (0, 1, 2)
    with pytest.raises(RunFolderError, match="no runs to compare"):
        gw.compare("g/settings.json")


def test_names_make_methods(runs):
    for seed, final in ((10, 6.0), (2, 5.0)):  # the order is that of the numbers
        write_run(Path(f"h/seed_{seed}"), (0.0, 0.0, 0.0, final), seed=seed)
    [found] = gw.compare({"new": ["g/seed_0", "g/seed_1"], "old": "h"}).environments
    assert [(m.method, m.scores) for m in found.methods] == [("new", (4.0, 8.0)), ("old", (5.0, 6.0))]
    assert found.settings == {}


def test_runs_are_compared_by_their_success(runs):
    """Each is as successful as a twentieth of its return."""
    with pytest.raises(RunFolderError, match="g/seed_0 holds no success rates"):
        gw.compare(runs, metric="success_rate")
    for path in Path().glob("[gp]/seed_*"):
        rewrite_metrics(path, lambda entry: entry | {"eval/success_rate": entry["eval/return_mean"] / 20})
    [found] = gw.compare(runs, metric="success_rate").environments
    assert [method.scores for method in found.methods] == [(0.2, 0.4, 0.6), (0.05, 0.1, 0.15)]
    assert (found.metric, found.score) == ("success_rate", "success rate")
    [by_return] = gw.compare(runs).environments
    assert by_return.methods[0].scores == (4.0, 8.0, 12.0)
    assert by_return.score == "return"


def test_an_evaluation_without_any_success_flag_is_one_of_rate_0(runs):
    """The last of each run, where others had the flag."""
    told = lambda entry: entry | ({"eval/success_rate": 0.5} if entry["iteration"] < 4 else {})  # noqa: E731
    for path in Path().glob("g/seed_*"):
        rewrite_metrics(path, told)
    [method] = gw.compare("g", metric="success_rate").environments[0].methods
    assert method.scores == (0.0, 0.0, 0.0)
    assert method.env_steps == 1000


@pytest.mark.parametrize("part", ["eval", "rollout"])
def test_a_run_that_never_succeeds_counts_if_others_tell_of_success(part, runs):
    """Also without evaluations, where the last rollout has no flag."""

    def change(told, entry):
        kept = {key: value for key, value in entry.items() if part == "eval" or not key.startswith("eval/")}
        return kept | ({f"{part}/success_rate": 0.5} if told and entry["iteration"] < 4 else {})

    for path in Path().glob("[gp]/seed_*"):
        rewrite_metrics(path, partial(change, path.parent.name == "g"))
    [found] = gw.compare(runs, metric="success_rate").environments
    assert [method.scores for method in found.methods] == [(0.0, 0.0, 0.0)] * 2
    assert {method.env_steps for method in found.methods} == {1000}
    assert found.methods[0].curve.iqm[0] == 0.5


def test_evaluations_that_do_not_count_are_left_out_and_such_runs_are_named():
    """Those up to iteration 2 had other settings."""
    write_seeds(Path("g"), (8.0, 8.0), provenance={"scores_from": 2})
    found = gw.compare("g")
    [method] = found.environments[0].methods
    assert method.curve.env_steps[0] == 750
    assert any("budget or other settings: g/seed_0, g/seed_1; a part" in note for note in found.notes)


def test_each_environment_is_a_table_of_its_own(runs):
    write_seeds(Path("a"), (-90.0, -80.0), env="Acrobot-v1")
    write_seeds(Path("b"), (-70.0, -60.0), env="Acrobot-v1", algorithm="ppo")
    found = gw.compare([*runs, "a", "b"], reference={"CartPole-v1": (0, 10), "Acrobot-v1": (-100, -50)})
    assert [one.environment for one in found.environments] == ["CartPole-v1", "Acrobot-v1"]
    assert [m.method for m in found.environments[1].methods] == ["grpo", "ppo"]
    assert found.overall is not None
    assert [m.mean for m in found.overall.methods] == pytest.approx([(0.8 + 0.3) / 2, (0.2 + 0.7) / 2])


def rewrite_settings(folder: str, **changed: object) -> None:
    """Change the settings of all runs in a folder; None takes a part away."""
    for path in Path(folder).glob("seed_*/config.json"):
        tree = json.loads(path.read_text()) | changed
        path.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


def test_environments_with_other_arguments_are_others():
    kinds = {"plain": {}, "moon": {"kwargs": {"g": 1.6}}, "short": {"max_episode_steps": 50}}
    for name, settings in kinds.items():
        write_seeds(Path(name), (1.0, 2.0), env="Pendulum-v1")
        rewrite_settings(name, env={"id": "Pendulum-v1", "kwargs": {}, "max_episode_steps": None} | settings)
    found = gw.compare(list(kinds))
    names = ["Pendulum-v1", "Pendulum-v1 g=1.6", "Pendulum-v1 max_episode_steps=50"]
    assert [one.environment for one in found.environments] == names


def test_arguments_that_end_alike_tell_environments_apart():
    kinds = {f"{seen}_{done}": (seen, done) for seen, done in [("kin", "disc"), ("grid", "disc"), ("kin", "cont")]}
    for name, (seen, done) in kinds.items():
        write_seeds(Path(name), (1.0, 2.0), env="Cfg-v0")
        config = {"observation": {"type": seen}, "action": {"type": done}}
        rewrite_settings(name, env={"id": "Cfg-v0", "kwargs": {"config": config}, "max_episode_steps": None})
    found = gw.compare(list(kinds))
    names = [
        f"Cfg-v0 env.kwargs.config.observation.type={a} env.kwargs.config.action.type={b}" for a, b in kinds.values()
    ]
    assert [one.environment for one in found.environments] == names
    assert [[m.seeds for m in one.methods] for one in found.environments] == [[(0, 1)]] * 3


def test_texts_are_compared_by_their_task():
    for name, model in {"small": "models/a", "large": "models/b"}.items():
        write_seeds(Path(name), (0.25, 0.5))
        rewrite_settings(name, env=None, policy=None, task={"data": "data/sums.jsonl"}, model={"path": model})
    [found] = gw.compare(["small", "large"]).environments
    assert (found.environment, found.unit) == ("sums", "tokens written")
    assert [m.method for m in found.methods] == ["grpo path=models/a", "grpo path=models/b"]


def test_a_run_without_evaluations_makes_all_be_compared_by_training(runs):
    write_seeds(Path("u"), (1.0, 2.0), evaluated=False, algorithm={"gamma": 0.5})
    found = gw.compare([*runs, "u"])
    assert found.environments[0].measure == "training"
    assert found.environments[0].methods[0].scores == (14.0, 18.0, 22.0)
    assert any("not every run was evaluated" in note for note in found.notes)
    assert gw.compare(runs).environments[0].measure == "evaluation"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("absent", "there is no run folder 'absent'; fix: "),
        ("empty", "empty is no run folder and holds none .*; fix: "),
        ("none_*", "no runs to compare; fix: "),
        ([], "no runs to compare; fix: "),
    ],
)
def test_paths_without_runs_are_named(given, message):
    Path("empty").mkdir()
    with pytest.raises(RunFolderError, match=message):
        gw.compare(given)


METRICS = "".join(f'{{"iteration": {n}, "env_steps": {250 * n}, "eval/return_mean": 1.0}}\n' for n in range(1, 5))
EARLY = json.dumps({"env_steps": 750, "stopped": "score: return 475 reached the threshold 475"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.json", None, "unfinished: still training, or killed, at step 1,000 of 1,000"),
        ("summary.json", '{"env_steps": 1000, "stopped": "failed"}', "unfinished: failed at step 1,000"),
        ("summary.json", '{"env_steps": 1000, "stopped": "interrupted"}', "unfinished: interrupted"),
        ("summary.json", EARLY, "stopped early at step 750 of 1,000 .score: return 475"),
        ("summary.json", "{", "summary.json is damaged"),
        ("metrics.jsonl", f'{METRICS}{{"iteration": 5, "env_steps": 1100}}\n', "resumed, and now at step 1,100"),
        ("metrics.jsonl", f'{{"iter\n{METRICS}', "metrics.jsonl, line 1 is damaged"),
        ("metrics.jsonl", METRICS.replace("1.0", "NaN"), "line 1 is damaged: eval/return_mean = nan"),
        ("config.json", '{"model_type": "llama"}', "config.json is damaged: algorithm"),
    ],
    ids=["killed", "failed", "interrupted", "early", "summary", "resumed", "metrics", "nan", "settings"],
)
def test_unfinished_and_damaged_runs_are_named_and_can_be_left_out(name, content, message, runs):
    path = Path("g/seed_2", name)
    path.write_text(content) if content else path.unlink()
    if content == EARLY:
        path.with_name("metrics.jsonl").write_text("".join(METRICS.splitlines(keepends=True)[:3]))
    with pytest.raises(RunFolderError, match=message) as caught:
        gw.compare(runs)
    assert "g/seed_2" in str(caught.value)
    assert "--finished-only" in str(caught.value)
    assert "seed_0" not in str(caught.value)
    found = gw.compare(runs, finished_only=True)
    assert found.environments[0].methods[0].seeds == (0, 1)
    [note] = [note for note in found.notes if note.startswith("left out: ")]
    assert "g/seed_2" in note


def test_all_unfinished_runs_are_named_at_once_and_cannot_all_be_left_out(runs):
    for path in Path("g").glob("*/summary.json"):
        path.unlink()
    with pytest.raises(RunFolderError, match=r"g/seed_0(.|\n)*g/seed_2"):
        gw.compare(runs)
    with pytest.raises(RunFolderError, match="no finished runs"):
        gw.compare("g", finished_only=True)


def test_unequal_budgets_and_copies_of_a_run_are_refused(runs):
    write_run(Path("long"), (1.0, 2.0), steps=(1000, 2000), total_steps=2000, seed=9)
    message = r"1,000 in g/seed_0, total_steps=2,000 in long.*train .* again with --total-steps 2000"
    with pytest.raises(ConfigError, match=message):
        gw.compare([*runs, "long"])
    write_run(Path("copy"), seed=1)
    with pytest.raises(DataError, match=r"seed 1 came more than once \(g/seed_1, copy\)"):
        gw.compare([*runs, "copy"])


def test_names_of_two_things_are_refused(runs):
    with pytest.raises(ConfigError, match=r"mine: g/seed_0 and p/seed_0 differ in algorithm\.name, .*a name for each"):
        gw.compare({"mine": ["g", "p"]})
    with pytest.raises(ConfigError, match="came as 'a' and as 'b'"):
        gw.compare({"a": "g", "b": "g/seed_0"})
    with pytest.raises(ConfigError, match="'ppo' names two methods"):
        gw.compare({"ppo": "g", None: "p"})
    [found] = gw.compare({"mine": "g", None: "p"}).environments
    assert [m.method for m in found.methods] == ["mine", "ppo"]


def test_weak_points_are_noted(runs):
    write_seeds(
        Path("i"), (1.0, 2.0), steps=(100, 400, 900, 1000), evaluation={"interval": 7}, algorithm={"gamma": 0.9}
    )
    assert [note for note in gw.compare([*runs, "i"]).notes if "fewer than 5 runs" not in note] == []
    given = {"given_in_python": ["env"]}
    more = {"evaluation": {"episodes": 3}, "env": "CartPole-v1", "provenance": given}
    write_seeds(Path("q"), (1.0, 2.0), algorithm={"gamma": 0.5}, **more)
    forked = {"forked_from": ["runs/first", "256"]}
    write_seeds(Path("f"), (1.0, 2.0), algorithm={"gamma": 0.4}, env="CartPole-v1", provenance=forked)
    notes = "\n".join(gw.compare([*runs, "q", "f"]).notes)
    assert "forked, or continued with another budget or other settings: f/seed_0, f/seed_1; a part" in notes
    assert "evaluated differently: evaluation.episodes" in notes
    assert "an environment given in Python" in notes


def test_settings_without_an_environment_are_damage(runs):
    path = Path("g/seed_1/config.json")
    tree = json.loads(path.read_text())
    del tree["env"]["id"]
    path.write_text(json.dumps(tree))
    with pytest.raises(RunFolderError, match="holds no settings of a run"):
        gw.compare(runs)
    [found] = gw.compare(runs, finished_only=True).environments
    assert found.methods[0].seeds == (0, 2)
