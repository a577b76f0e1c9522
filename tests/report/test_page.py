"""The page of a run: whole, self-contained, safe, and right about what it says."""

import hashlib
import json
import math
import os
import re
import shlex
import shutil
from html.parser import HTMLParser

import pyarrow.parquet
import pytest
from at_events import on
from run_folders import logged, rewrite_metrics, same_weights, write_run
from text_runs import copying, save_model
from text_runs import train as train_text

import groupwise as gw
from groupwise import cli
from groupwise.config import resolve, resolve_text
from groupwise.report import folder as groups
from groupwise.report import page as explorer
from groupwise.report.curve import small
from groupwise.report.folder import RunFolder
from groupwise.report.health import Goal
from groupwise.report.page import answer, settings_of, write_page
from groupwise.report.video import film
from groupwise.training import build as env_evaluator

QUIET = {"logging": {"progress": "none"}}
HOSTILE = "</script><img src=x onerror=alert(1)>"
VOID = {"meta", "img", "br", "input", "link"}


class Page(HTMLParser):
    """Tags and texts of a page; complains of elements that are not closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def page_of(path):
    text = write_page(path).read_text()
    return text, Page(text)


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def write_table(path, columns):
    pyarrow.parquet.write_table(pyarrow.table(columns, schema=groups.schema()), path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of GRPO, one of PPO, one of texts."""
    folder = tmp_path_factory.mktemp("pages")
    cartpole = {"total_steps": 1_000, "evaluation": {"interval": 400, "episodes": 3}}
    with pytest.MonkeyPatch.context() as patch:
        gw.train("CartPole-v1", gw.PPOCfg(num_steps=64), run_dir=folder / "ppo", **cartpole, **QUIET)
        patch.setattr(env_evaluator, "film", film)
        gw.train("CartPole-v1", gw.GRPOCfg(group_size=3), run_dir=folder / "grpo", **cartpole, **QUIET)
    train_text(copying(), save_model(folder / "model"), folder / "text")
    return folder


@pytest.mark.parametrize("name", ["grpo", "ppo", "text"])
def test_a_page_is_whole_and_needs_nothing_else(runs, name):
    text, page = page_of(runs / name)
    assert len(text) < 3_000_000
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for _, attributes in page.tags:
        for key in ("src", "href", "xlink:href"):
            assert attributes.get(key, "#").startswith(("#", "data:"))
    assert "url(http" not in text
    assert all(attributes.get("alt") for tag, attributes in page.tags if tag == "img")
    assert all(attributes.get("aria-label") for tag, attributes in page.tags if tag == "svg")
    links = {attributes["href"][1:] for tag, attributes in page.tags if tag == "a"}
    assert links == {"learned", "health", "groups", "settings"} < set(ids)
    words = " ".join(page.texts)
    for expected in ("Speed", "algorithm.learning_rate", "versions", "repeat", "torch"):
        assert expected.lower() in words.lower()
    assert ("Critic" in words) == (name == "ppo")
    assert ("data:image/gif" in text) == (name == "grpo")
    assert ("nearest states of other episodes (credit.baseline=knn)" in words) == (name == "grpo")  # CartPole's preset
    assert ("best and worst completion" in words) == (name == "text")
    assert ('<p class="completion">' in text) == (name == "text")


def test_settings_of_the_run_stand_apart(runs):
    config = RunFolder(runs / "ppo").read_config()
    cfg = resolve("CartPole-v1", {"name": "ppo", "ent_coef": 5.0})
    given, others = settings_of(cfg.model_dump(mode="json"))
    assert given == {"algorithm.ent_coef": "5.0 (default 0.0)"}
    assert others.keys() >= {"algorithm.gamma", "algorithm.num_epochs"}
    assert settings_of(config)[0].keys() >= {"total_steps"}
    of_texts, _ = settings_of(RunFolder(runs / "text").read_config())
    assert of_texts["task.data"].endswith(' (default "")')
    for lora in (None, {"r": 4}):  # another default learning rate
        usual = resolve_text("grpo", model={"path": "m", "lora": lora}).model_dump(mode="json")
        given, _ = settings_of(usual)
        assert {name for name in given if name.startswith(("algorithm.", "sampling."))} == set()
    unknown, _ = settings_of(config | {"algorithm": {"name": "mine", "seed": 1}})
    assert unknown["algorithm.name"] == "mine"


def test_the_explorer_has_the_steps_that_were_kept(runs):
    text, _ = page_of(runs / "grpo")
    shown = data_of(text)
    iteration, path = list(groups.kept_iterations(runs / "grpo/groups").items())[-1]
    kept = groups.read_groups(path)
    of_last = [group for group in shown if group["iteration"] == iteration]
    assert {group["group"] for group in of_last} == set(kept["group"])
    assert sum(member["length"] for group in of_last for member in group["members"]) == len(kept["step"])
    total = sum(member["return"] for group in of_last for member in group["members"])
    assert total == pytest.approx(sum(kept["reward"]))
    for group in shown:
        returns = [member["return"] for member in group["members"]]
        assert group["spread"] == pytest.approx(max(returns) - min(returns))


def test_long_episodes_and_many_groups_keep_the_page_small(tmp_path, monkeypatch):
    steps = 1_000
    columns = {
        name: values * steps
        for name, values in {
            "env_steps": [9], "group": [0], "start": ["7"], "member": [0], "observation": [[0.123456, 9.87654321]],
            "action": [[0.5]], "token": [None], "reward": [0.25], "reward_parts": [None], "log_prob": [-0.123456],
            "ratio": [1.0], "loss_mask": [True], "greedy": [False], "end": ["running"], "turn": [None], "messages": [None],
            "stop_reason": [None], "success": [None],
        }.items()
    } | {"step": list(range(steps)), "advantage": [step / 7 for step in range(steps)]}  # fmt: skip
    for iteration in range(1, 6):
        write_table(tmp_path / f"{iteration}.parquet", columns | {"iteration": [iteration] * steps})
    monkeypatch.setattr(explorer, "MAX_BYTES", 25_000)
    found = explorer.load_groups(tmp_path)
    assert 5 > len(found) >= 2
    assert len(explorer.to_json(found)) < 30_000
    assert {1, 5} <= {group["iteration"] for group in found}
    [member] = found[0]["members"]
    assert found[0]["stride"] == 5  # 1,000 steps in at most 240 cells
    assert member["return"] == pytest.approx(0.25 * steps)
    assert member["reward"] == [1.25]
    assert member["advantage"][1] == pytest.approx(1)  # steps 5 to 9


def test_texts_of_strangers_stay_texts(tmp_path, runs):
    run = shutil.copytree(runs / "text", tmp_path / "run")
    path = list(groups.kept_iterations(run / "groups").values())[-1]
    columns = groups.read_groups(path)
    count = len(columns["step"])
    write_table(path, columns | {"start": [HOSTILE] * count, "token": [HOSTILE] * count})
    config = json.loads((run / "config.json").read_text())
    config["task"]["data"] = config["provenance"]["command"] = config["algorithm"]["name"] = HOSTILE
    (run / "config.json").write_text(json.dumps(config))
    text, page = page_of(run)
    assert "<img src=x" not in text
    assert not any(tag == "img" for tag, _ in page.tags)
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert data_of(text)[0]["start"] == HOSTILE


def test_a_run_that_is_not_complete_has_a_page(runs, tmp_path):
    run = shutil.copytree(runs / "grpo", tmp_path / "run")
    (run / "summary.json").unlink()
    first = (run / "metrics.jsonl").read_text().splitlines()[0]
    (run / "metrics.jsonl").write_text(first + "\n")
    words = " ".join(page_of(run)[1].texts)
    assert "Killed after" in words
    assert "No groups yet" not in words
    shutil.rmtree(run / "groups")
    (run / "metrics.jsonl").unlink()
    words = " ".join(page_of(run)[1].texts)
    assert "No groups yet" in words
    assert "No iteration was logged" in words


@pytest.mark.parametrize("lacking", ["time/total_seconds", "eval/return_std", "eval/episodes", "env_steps"])
def test_metrics_that_lack_something_have_a_page(tmp_path, lacking):
    run = write_run(tmp_path / "run")
    rewrite_metrics(run, lambda entry: {name: value for name, value in entry.items() if name != lacking})
    text, _ = page_of(run)
    assert "in 4 iterations" in text
    assert ("The evaluated return went from 1 to 4, without an interval" in text) == lacking.startswith("eval/")
    assert "Learning curve" in text


ODD = [
    ("time/total_seconds", math.inf),
    ("eval/episodes", math.nan),
    ("eval/episodes", 1e308),
    ("eval/success_rate", 5),
]


@pytest.mark.parametrize("odd", [*ODD, ("reward", None), ("iteration", None)])
def test_values_that_no_run_writes_are_one_error_with_the_folder(runs, tmp_path, capsys, odd):
    name, value = odd
    path = shutil.copytree(runs / "grpo", tmp_path / "run")
    rewrite_metrics(path, lambda entry: entry | ({name: value} if "/" in name else {}))
    for file in (path / "groups").glob("*.parquet") if "/" not in name else ():
        steps = [step | {name: value} for step in pyarrow.parquet.read_table(file).to_pylist()]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(steps, schema=groups.schema()), file)
    for command in ("report", "doctor") if name in ("time/total_seconds", "eval/episodes") else ("report",):
        assert cli.main([command, str(path)]) == 2
        error = capsys.readouterr().err
        assert str(path) in error
        assert "fix: " in error


def test_names_that_are_no_utf8_and_files_that_are_no_groups_have_a_page(runs, tmp_path):
    path = shutil.copytree(runs / "grpo", tmp_path / os.fsdecode(b"\xffrun"))
    (path / "groups/1².parquet").write_bytes(b"")
    settings = json.loads((path / "config.json").read_text())
    settings["env"]["id"] = "\ud800x"
    (path / "config.json").write_text(json.dumps(settings))
    text = write_page(path).read_text()
    assert r"\ud800x" in text
    assert r"\udcffrun" in text


def test_a_page_says_how_it_ended_and_how_often_it_succeeded(tmp_path):
    run = write_run(tmp_path / "run")
    with RunFolder(run).locked():
        assert "Still training: 1,000 environment steps" in page_of(run)[0]
    assert "Ended by total_steps after 1,000" in page_of(run)[0]
    rewrite_metrics(run, lambda entry: entry | {"eval/success_rate": (entry["iteration"] - 1) / 4})
    assert ">success rate</text>" in page_of(run)[0]


def test_a_resumed_run_has_its_whole_time_limit_left(tmp_path):
    ppo = {"name": "ppo", "num_steps": 8, "num_epochs": 1}
    settings = {"num_envs": 2, "evaluation": {"episodes": 1}, "stop": {"time_limit": 100.0}, "speed": "off", **QUIET}
    run = gw.train("CartPole-v1", ppo, total_steps=16, run_dir=tmp_path / "run", **settings)
    assert 0 < run.metrics()[-1]["time/left_seconds"] < 100
    for folder in (run.path, run.path / "checkpoints/latest"):  # as if the first process had taken the limit
        name, key = ("metrics.jsonl", "time/total_seconds") if folder == run.path else ("state.json", "seconds")
        text = (folder / name).read_text()
        (folder / name).write_text(re.sub(rf'"{key}": [0-9.e-]+', f'"{key}": 100.0', text))
    manifest = run.path / "checkpoints/latest/manifest.json"
    digest = hashlib.sha256((manifest.parent / "state.json").read_bytes()).hexdigest()
    manifest.write_text(re.sub(r'("state.json": )"[0-9a-f]+"', rf'\1"{digest}"', manifest.read_text()))
    seen = []
    look = on(
        "iteration_end", lambda trainer, *_: seen.append(page_of(run.path)[0]) if trainer.iteration == 3 else None
    )
    again = gw.resume(run.path, total_steps=64, callbacks=[look])
    assert again.metrics()[-1]["time/total_seconds"] > 100
    assert "Still training: 32 environment steps" in seen[0]
    assert re.search(r"50 %, 1:\d\d left", seen[0])


def test_cloning_is_not_blamed_for_playing_no_episodes(tmp_path):
    run = write_run(tmp_path / "run")
    rewrite_metrics(run, lambda entry: {"iteration": entry["iteration"], "rollout/episodes": 0.0})
    assert "0 episodes ended in training" in page_of(run)[0]
    settings = json.loads((run / "config.json").read_text()) | {"algorithm": {"name": "bc"}}
    (run / "config.json").write_text(json.dumps(settings))
    text = page_of(run)[0]
    assert "episodes ended in training" not in text
    assert "Cloning has no groups." in text


def test_a_failed_run_says_so(tmp_path, capsys):
    class Breaks(gw.Callback):
        def on_iteration_end(self, trainer, rollout, metrics):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        gw.train("CartPole-v1", total_steps=500, run_dir=tmp_path / "run", callbacks=[Breaks()], **QUIET)
    words = " ".join(page_of(tmp_path / "run")[1].texts)
    assert "failed with an error" in words
    assert "An error ended it: RuntimeError: broken" in words
    assert cli.main(["doctor", str(tmp_path / "run")]) == 1
    assert "trouble  End of the run: An error ended it: RuntimeError: broken" in capsys.readouterr().out


@pytest.mark.parametrize("given", [False, True])
def test_a_killed_run_says_how_it_goes_on(runs, tmp_path, capsys, given):
    shutil.copytree(runs / "ppo", tmp_path / "run")
    (tmp_path / "run/summary.json").unlink()
    path = tmp_path / "run/config.json"
    config = json.loads(path.read_text())
    config["provenance"] |= {"plugins": ["mine.py"], "given_in_python": ["reward", "tool"] if given else []}
    path.write_text(json.dumps(config))
    again = f"groupwise resume {tmp_path}/run --plugin mine.py"
    if given:
        again = f"gw.resume('{tmp_path}/run', reward=..., tool=...)"
    words = " ".join(page_of(tmp_path / "run")[1].texts)
    assert words.count(again) == 2  # on the health of the run, and below its settings
    cli.main(["doctor", str(tmp_path / "run")])
    assert f"To continue it: {again}" in capsys.readouterr().out


def test_the_command_of_a_run_repeats_it_and_a_run_that_was_resumed_with_more_steps_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = {"evaluation": {"episodes": 1}, "num_envs": 4, **QUIET}
    path = gw.train("CartPole-v1", gw.PPOCfg(num_steps=32), total_steps=256, run_dir=tmp_path / "run", **short).path
    words = page_of(path)[1].texts
    assert cli.main([*shlex.split(words[words.index("repeat") + 1])[1:], "--run-dir", "again"]) == 0
    assert same_weights(path, tmp_path / "again")
    assert logged(path) == logged(tmp_path / "again")
    gw.resume(path, total_steps=384)
    gw.resume(path, total_iterations=4)
    words = page_of(path)[1].texts
    assert "repeat" not in words
    told = next(word for word in words if "Ended by total_iterations" in word)
    assert "resumed after 256 environment steps with total_steps=384 in place of total_steps=256." in told
    assert "resumed after 384 environment steps with total_iterations=4 in place of total_steps=384." in told


def test_a_run_that_was_stopped_before_it_was_extended_and_a_fork_say_so(tmp_path):
    resumed = {"step": "20", "cut": ", before its end,", "before": "total_steps=50", "after": "total_steps=1000; ls"}
    known = {"resumed": [resumed], "plugins": ["mine.py"]}
    words = page_of(write_run(tmp_path / "cut", provenance=known))[1].texts
    assert any("after 20 environment steps, before its end, with total_steps=1000; ls in" in word for word in words)
    known = {"plugins": ["mine; ls.py"], "given_in_python": []}
    words = page_of(write_run(tmp_path / "a run", provenance=known))[1].texts
    again = words[words.index("repeat") + 1]
    assert again.endswith("a run/config.json' --plugin 'mine; ls.py'")  # a stranger's text stays one word
    given = page_of(write_run(tmp_path / "given", provenance=known | {"given_in_python": ["env", "tool"]}))[1].texts
    assert "env and tool came from: gw.train(..., seed=0)" in " ".join(given)

    path = gw.train("CartPole-v1", "ppo", total_iterations=1, run_dir=tmp_path / "run", **QUIET).path
    fork = gw.fork(path, tmp_path / "fork", total_iterations=2)
    words = " ".join(page_of(fork)[1].texts)
    assert f"It is a fork of {path}, from step" in words
    assert " repeat " not in words


def test_the_command_writes_where_it_is_told(runs, tmp_path, capsys):
    out = tmp_path / "new/page.html"
    assert cli.main(["report", str(runs / "ppo"), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"written: {out}\n"
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    (tmp_path / "link").symlink_to(out)  # as /dev/stdout is one
    os.mkfifo(tmp_path / "pipe")
    for taken in (tmp_path, tmp_path / "pipe", tmp_path / "link"):
        capsys.readouterr()
        assert cli.main(["report", str(runs / "ppo"), "-o", str(taken)]) == 2
        assert (
            f"'{taken}' is no file that may be replaced; fix: a new name, such as page.html" in capsys.readouterr().err
        )
    assert (tmp_path / "link").is_symlink()


def evaluated(*scores, std=10.0, episodes=25.0, training=()):
    """Entries with evaluations of 25 episodes, whose intervals are 4.13 to each side."""
    entries = [{"env_steps": 1, "rollout/return_mean": score} for score in training]
    numbers = {"eval/return_std": std, "eval/episodes": episodes}
    return entries + [{"env_steps": 2, "eval/return_mean": score, **numbers} for score in scores]


@pytest.mark.parametrize(
    ("entries", "word", "text"),
    [
        ([], "Unknown", "No iteration was logged."),
        (evaluated(training=(1.0, 2.0)), "Unknown", "went from 1 to 2, and nothing was evaluated"),
        (evaluated(20, 100), "Yes", "rose from 20 to 100 (95 % interval 95.87 to 104.1, 25 episodes)."),
        (evaluated(100, 20), "No", "fell from 100 (95 % interval 95.87 to 104.1) to 20"),
        (evaluated(20, 100, 30), "No longer", "rose from 20 to 100 at step 2, then fell to 30"),
        (evaluated(20, 100, 90), "Yes", "rose from 20 to 90"),
        (evaluated(-1600, -1300, training=(-1250.0, -1350.0)), "No", "than the -1,250.0 of the first iteration"),
        (evaluated(20, 100, training=(22.0, 90.0)), "Yes", "rose from 20 to 100"),
        (evaluated(20, 100, episodes=1.0), "Unknown", "20 to 100, of one of the episodes, without an interval"),
        (evaluated(20, 24), "Not visibly", "no more than noise"),
        (evaluated(20, 28.2), "Not visibly", "no more than noise"),  # 24.13 against 24.07
        (evaluated(20, 28.3), "Yes", "rose from 20 to 28.3"),
        (evaluated(28.2, 20), "Not visibly", "no more than noise"),
        (evaluated(28.3, 20), "No", "fell from 28.3"),
        (evaluated(20, 100, 92), "Yes", "rose from 20 to 92"),
        (evaluated(90, 98.3, 90.1), "Not visibly", "was 90 first and 90.1 (95 % interval 85.97"),  # 94.17 against 94.23
        (evaluated(90, 98.3, 90), "No longer", "rose from 90 to 98.3"),
        (evaluated(500, 500, std=0.0, training=(22.0, 480.0)), "Yes", "from 22 in the first iteration"),
        (evaluated(500, 500, std=0.0, training=(500.0, 480.0)), "Not visibly", ""),
    ],
)
def test_the_answer_follows_from_evaluations_and_their_noise(entries, word, text):
    found = answer(entries, "return", "episodes")
    assert found.word == word
    assert text in found.text


def test_a_task_that_is_solved_or_not_yet_is_named_so(runs, tmp_path):
    """The interval of 25 episodes with a deviation of 10 is 4.13 to each side."""
    cartpole, pendulum = (
        Goal.from_config({"env": {"id": "CartPole-v1"}}),
        Goal.from_config({"env": {"id": "Pendulum-v1"}}),
    )
    assert (cartpole, pendulum) == (Goal(475.0, 500, 500), Goal(None, 200, 200))
    assert Goal.from_config({"env": {"id": "groupwise_no_module:Any-v0"}}) == Goal()  # not imported
    # the threshold is that of the registered task alone
    assert Goal.from_config({"env": {"id": "CartPole-v1", "max_episode_steps": 50}}) == Goal(None, 50, 50)
    for several, limit in (
        ({"action_repeat": 3}, 167),
        ({"action_chunk": 4, "num_action_steps": 2}, 250),
        ({"action_repeat": "x"}, None),
    ):
        assert Goal.from_config({"env": {"id": "CartPole-v1", **several}}) == Goal(475.0, limit, limit and 500)
    assert Goal.from_config({"env": {"id": "CartPole-v1", "max_episode_steps": 500}}) == Goal(475.0, 500, 500)
    assert Goal.from_config({"env": {"id": "CartPole-v1", "kwargs": {"sutton_barto_reward": True}}}) == Goal(
        None, 500, 500
    )
    entries = evaluated(20, 480, training=(22.0, 470.0))
    solved = answer(entries, "return", "episodes", cartpole)
    assert solved.word == "Solved"
    assert solved.text.startswith("The return was 22 in the first iteration and is 480 (95 % interval 475.9 to 484.1,")
    assert "at least 475 (reward_threshold in Gymnasium)" in solved.text
    early = answer(evaluated(20, 479), "return", "episodes", cartpole)  # 474.87
    assert early.word == "Yes, but not solved"
    assert "rose from 20 to 479" in early.text
    assert early.text.endswith("at least 475 (reward_threshold in Gymnasium).")
    copied = [
        entry | {"eval/pass_at_1": share} for entry, share in zip(evaluated(0.1, 0.5, std=0.1), (0, 0.18), strict=True)
    ]
    half = answer(copied, "reward", "prompts")
    assert half.word == "Yes, but not solved"
    assert half.text.endswith("18 % of the evaluated completions are right.")
    run = shutil.copytree(runs / "grpo", tmp_path / "run")
    assert 'class="good">Solved' not in page_of(run)[0]
    rewrite_metrics(
        run, lambda entry: entry | {"eval/return_mean": 500.0, "eval/return_std": 0.0, "eval/episodes": 3.0}
    )
    assert '<strong class="good">Solved.</strong>' in page_of(run)[0]


def test_a_line_has_its_lowest_and_its_highest_value():
    drawn = small([([1, 2, 3], [0.25, 1370.0, float("nan")]), ([1], [2.5])], "return")
    assert re.findall(r">([^<>\s]+)</text>", drawn) == ["1.37k", "0.25"]
    assert re.findall(r'points="([^"]+)"', drawn) == ["56.0,45.0 216.0,5.0", "56.0,44.9"]
    assert "</text>" not in small([([1], [float("nan")])], "nothing finite")
    steps = [*range(10_000)]
    (line,) = re.findall(r'points="([^"]+)"', small([(steps, [float(step) for step in steps])], "long"))
    assert 400 < len(line.split()) <= 501
    assert line.startswith("56.0,45.0 ")
    assert line.endswith(" 216.0,5.0")
    for value in (0.0, 0.1, 500.0, -1e9):  # a metric that stays the same
        assert "25.0 136.0,25.0 216.0,25.0" in small([([1, 2, 3], [value] * 3)], "constant")
