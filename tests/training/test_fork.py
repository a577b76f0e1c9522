"""Runs that begin at a checkpoint of another one, with other settings."""

import json
import os
import shutil

import pytest
from at_events import on
from run_folders import logged, rewrite_metrics, same_weights, weights

import groupwise as gw
from groupwise import cli
from groupwise import system as files
from groupwise.report.folder import RunFolder
from groupwise.report.health import diagnose
from groupwise.report.page import answer_of
from groupwise.training.checkpoint import load_checkpoint

PPO = {"name": "ppo", "num_steps": 16, "num_epochs": 2, "minibatch_size": 64}
GRPO = {"name": "grpo", "num_steps": 16, "group_size": 2}
TINY = {
    "num_envs": 4, "evaluation": {"interval": 64, "episodes": 2}, "checkpoint_interval": 64, "logging": {"progress": "none"},
}  # fmt: skip


@pytest.fixture(scope="module", params=[PPO], ids=["ppo"])
def run(request, tmp_path_factory):
    """A run of a few iterations, each of which is evaluated and saved."""
    return gw.train("CartPole-v1", request.param, total_steps=320, run_dir=tmp_path_factory.mktemp("run"), **TINY)


grouped = pytest.mark.parametrize("run", [GRPO], ids=["grpo"], indirect=True)
both = pytest.mark.parametrize("run", [PPO, GRPO], ids=["ppo", "grpo"], indirect=True)


def best_of(run):
    return load_checkpoint(RunFolder(run.path).best).policy


@pytest.mark.parametrize("how", ["fork", "config.json"])
@pytest.mark.parametrize("change", [{"max_episode_steps": 5}, {"num_random_noops": 3}, {"kwargs": {"g": 1.0}}])
def test_episodes_under_way_are_not_those_of_other_environments(how, change, tmp_path):
    run = gw.train("Pendulum-v1", PPO, total_iterations=2, run_dir=tmp_path / "run", **TINY)
    if how == "fork":
        path = gw.fork(run.path, tmp_path / "new", env=change, total_iterations=16)
    else:
        path, settings = run.path, json.loads((run.path / "config.json").read_text())
        (run.path / "config.json").write_text(json.dumps(settings | {"env": settings["env"] | change}))
    made = []

    class Look(gw.Callback):
        def on_training_start(self, trainer):
            made.extend([trainer.collector._obs, *trainer.collector.env._rows.envs])

    again = gw.resume(path, total_iterations=16, callbacks=[Look()])
    assert made[0] is None
    assert all(env.unwrapped.g == change.get("kwargs", {}).get("g", 10.0) for env in made[1:])
    if "max_episode_steps" in change:
        assert again.metrics()[-1]["rollout/length_mean"] == 5
    # the same settings go on with their episodes
    made.clear()
    gw.resume(again.path, total_iterations=17, callbacks=[Look()])
    assert made[0] is not None


def test_episodes_go_on_where_only_their_supervision_changes(tmp_path):
    run = gw.train("Pendulum-v1", PPO, total_iterations=2, run_dir=tmp_path / "run", **TINY)
    seen = []
    look = on("training_start", lambda trainer: seen.append(trainer.collector._obs))
    gw.resume(gw.fork(run.path, tmp_path / "new", env={"timeout": 99.0}, total_iterations=3), callbacks=[look])
    assert seen[0] is not None


def test_groups_in_torch_begin_anew_in_other_environments(tmp_path):
    env = gw.EnvCfg(id="CartPole-v1", vectorization="torch")
    cfg = GRPO | {"collection": {"partial_groups": "truncate"}}
    run = gw.train(env, cfg, total_iterations=2, run_dir=tmp_path / "run", **TINY)
    again = gw.resume(gw.fork(run.path, tmp_path / "new", env={"max_episode_steps": 5}, total_iterations=8))
    assert again.metrics()[-1]["rollout/length_mean"] < 8  # some episodes are of the run before


def test_torch_environments_take_longer_rollouts(tmp_path):
    env = gw.EnvCfg(id="CartPole-v1", vectorization="torch")
    run = gw.train(env, PPO, total_iterations=2, run_dir=tmp_path / "run", **TINY)
    again = gw.resume(gw.fork(run.path, tmp_path / "new", total_iterations=4, algorithm={"num_steps": 33}))
    assert again.metrics()[-1]["env_steps"] - again.metrics()[-2]["env_steps"] == 4 * 33


@both
def test_a_fork_without_changes_is_the_run_itself(run, tmp_path):
    steps = load_checkpoint(RunFolder(run.path).checkpoints / "latest.1").state["env_steps"]
    again = gw.resume(gw.fork(run.path, tmp_path / "again", checkpoint=steps))
    assert same_weights(again.path, run.path)
    assert logged(again) == logged(run)
    assert again.summary["env_steps"] == run.summary["env_steps"]


def test_changed_settings_hold_from_there_on(run, tmp_path):
    before = (run.path / "config.json").read_bytes(), weights(run.path)
    forked = gw.fork(run.path, tmp_path / "new", algorithm={"learning_rate": 1e-5}, total_steps=600, seed=3)
    assert RunFolder(forked).read_metrics() == run.metrics()
    again = gw.resume(forked)
    assert again.cfg.algorithm.num_steps == 16
    rates = [entry["train/learning_rate"] for entry in again.metrics()]
    assert rates[: len(run.metrics())] == [entry["train/learning_rate"] for entry in run.metrics()]
    assert len(rates) > len(run.metrics())
    assert all(0 < rate <= 1e-5 for rate in rates[len(run.metrics()) :])
    assert not same_weights(again.path, run.path)
    assert before[0] == (run.path / "config.json").read_bytes()
    assert same_weights(before[1], run.path)


@grouped
def test_a_fork_takes_a_preset_and_no_reference_from_nowhere(run, tmp_path):
    gw.fork(run.path, tmp_path / "new", preset="rloo", total_steps=600)
    assert RunFolder(tmp_path / "new").read_config()["algorithm"]["credit"]["baseline"]["name"] == "leave_one_out"
    words = ["--fork", str(tmp_path / "newer"), "--preset", "rloo", "--total-steps", "600"]
    assert cli.main(["resume", str(run.path), *words]) == 0
    one, other = (RunFolder(tmp_path / name).read_config()["algorithm"] for name in ("new", "newer"))
    assert one == other
    with pytest.raises(gw.errors.ConfigError, match=r"algorithm\.kl_coef cannot change from 0\.0 to 0\.1"):
        gw.fork(run.path, tmp_path / "kl", algorithm={"kl_coef": 0.1})
    gw.train("CartPole-v1", GRPO | {"kl_coef": 0.1}, total_steps=64, run_dir=tmp_path / "kl", **TINY)
    with pytest.raises(gw.errors.ConfigError, match=r"best has no reference for algorithm\.kl_coef; fix: "):
        gw.fork(tmp_path / "kl", tmp_path / "best", checkpoint="best")
    gw.fork(tmp_path / "kl", tmp_path / "best", total_steps=600)


@both
def test_a_fork_of_the_best_takes_its_weights_and_its_score(run, tmp_path):
    forked = gw.fork(run.path, tmp_path / "best", checkpoint="best", total_steps=600, algorithm={"learning_rate": 1e-9})
    assert same_weights(forked, best_of(run))
    again = gw.resume(forked)
    reached = run.summary["best_env_steps"]
    assert [entry["env_steps"] for entry in again.metrics() if entry["env_steps"] <= reached] == [
        entry["env_steps"] for entry in run.metrics() if entry["env_steps"] <= reached
    ]
    assert again.metrics()[-1]["env_steps"] >= 600
    seconds = [entry["time/total_seconds"] for entry in again.metrics()]
    assert seconds == sorted(seconds)  # the time goes on, too
    # a rate of 1e-9 changes no action, so nothing is better than the best, which stays
    assert same_weights(best_of(again), best_of(run))
    assert again.summary["best_env_steps"] == reached


def test_a_best_by_another_score_is_not_of_the_fork(run, tmp_path):
    forked = gw.fork(run.path, tmp_path / "sampled", evaluation={"deterministic": False}, total_steps=600)
    assert not (forked / "checkpoints/best").exists()
    forked = gw.fork(run.path, tmp_path / "more", evaluation={"episodes": 3}, total_steps=600)
    assert (forked / "checkpoints/best").exists()


def test_a_best_of_later_is_not_of_the_fork(run, tmp_path):
    folder = RunFolder(run.path)
    best, first = (load_checkpoint(folder.checkpoints / name).state["env_steps"] for name in ("best", "latest.2"))
    forked = gw.fork(run.path, tmp_path / "new", checkpoint=first)
    assert (forked / "checkpoints/best").exists() == (best <= first)
    assert (gw.resume(forked).path / "checkpoints/best").exists()


def test_the_best_of_a_fork_is_one_that_it_holds(tmp_path):
    """The best evaluation of the run is of later than one fork, and of other settings than the other."""
    run = gw.train("CartPole-v1", PPO, total_steps=320, run_dir=tmp_path / "run", **TINY)
    folder = RunFolder(run.path)
    fields = {"first": {"checkpoint": 192}, "short": {"env": {"max_episode_steps": 5}, "total_steps": 600}}
    files.remove(folder.best)
    shutil.copytree(folder.latest, folder.best)  # as if the last evaluation were the best one
    rewrite_metrics(
        run.path, lambda entry: entry | {"eval/return_mean": 400.0 + entry["env_steps"], "eval/return_std": 1.0}
    )
    for name, changed in fields.items():
        forked = gw.resume(gw.fork(run.path, tmp_path / name, **changed))
        best = load_checkpoint(RunFolder(forked.path).best).state
        assert forked.summary["best_env_steps"] == best["env_steps"]
        assert forked.summary["best_return_mean"] == best["return_mean"] < 400
        assert forked.metrics()[0]["eval/return_mean"] > 400, "the metrics are copied as they are"
        assert "fell" not in answer_of(RunFolder(forked.path)).text
        assert not [found for found in diagnose(RunFolder(forked.path)) if "The policy got worse" in found.advice]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"env": {"num_envs": 8}},
            r"env\.num_envs cannot change from 4 to 8: .*fix: a new run with policy\.init_from=",
        ),
        ({"policy": {"init_from": "elsewhere"}}, r"policy\.init_from cannot change from None to 'elsewhere'"),
        ({"policy": {"hidden_sizes": [8]}}, r"policy\.hidden_sizes cannot change from .*: .*a new run$"),
        ({"env": {"id": "Acrobot-v1"}}, r"env\.id cannot change from 'CartPole-v1' to 'Acrobot-v1'"),
        ({"algorithm": {"optimizer": "sgd"}}, r"algorithm\.optimizer.* cannot change"),
        ({"algorithm": {"gama": 0.9}}, "unknown key 'gama'; did you mean 'gamma'"),
        ({"algorithm": "bc"}, "settings of algorithm .* do not fit 'bc'; fix: keep .*, or leave them out"),
        ({}, r"total_steps = 320, but .*latest has \d+ steps already; fix: a larger total_steps"),
        ({"checkpoint": 5}, r"checkpoint=5: .* has \d+, \d+, \d+; fix: "),
        ({"preset": "rloo"}, "preset 'rloo' sets the credit of grpo"),
    ],
)
def test_what_cannot_change_is_named_and_leaves_no_folder(run, tmp_path, changed, message):
    with pytest.raises(gw.errors.ConfigError, match=message):
        gw.fork(run.path, tmp_path / "new", **changed)
    assert not (tmp_path / "new").exists()
    with pytest.raises(gw.errors.RunFolderError, match="is taken"):
        gw.fork(run.path, run.path, total_steps=600)


def test_the_command_line_forks(run, tmp_path, capsys):
    new = tmp_path / "new"
    words = ["--from", "best", "--fork", str(new), "--algorithm.learning-rate", "1e-4", "--total-steps", "600"]
    assert cli.main(["resume", str(run.path), *words]) == 0
    cfg = json.loads((new / "config.json").read_text())
    assert (cfg["algorithm"]["learning_rate"], cfg["total_steps"]) == (1e-4, 600)
    assert f"resuming from step {run.summary['best_env_steps']:,} of 600" in capsys.readouterr().err
    for more, message in (
        (["--from", "best"], "--from would overwrite what was trained since; fix: --fork NEW_DIR, too"),
        (["--algorithm.gamma", "0.9"], "--algorithm.gamma makes another run of it; fix: --fork NEW_DIR, too"),
        (["--form", "best"], "unknown option --form"),
        (["--fork", str(tmp_path / "x"), "--from", "bets"], "expected a whole number"),
        (["--fork", str(tmp_path / "x"), "--from", "12,345"], "checkpoint=12345: "),
        (["--fork", str(tmp_path / "x"), "--run-dir", "y"], f"run_dir = 'y', but the fork goes to {tmp_path / 'x'}"),
        (["--fork", str(tmp_path / "x"), "--total-steps", "999", "--env.kwargs", '{"a": 1}'], "cannot be made"),
    ):
        assert cli.main(["resume", str(run.path), *more]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "x").exists()


def test_the_settings_of_a_fork_lack_its_first_weights_and_say_so(run, tmp_path, caplog):
    gw.fork(run.path, tmp_path / "fork", total_steps=400)
    config, said = str(tmp_path / "fork" / "config.json"), f"to repeat it: groupwise resume {run.path} --fork NEW_DIR"
    for name, more in {"own": ["--policy.init-from", str(run.path)], "other": []}.items():
        words = ["train", config, "--total-steps", "64", "--run-dir", str(tmp_path / name)]
        assert cli.main([*words, *more]) == 0
        assert (said in caplog.text) == (name == "other")
    caplog.clear()
    assert cli.main(["resume", str(tmp_path / "fork"), "--fork", str(tmp_path / "again"), "--total-steps", "384"]) == 0
    assert "to repeat it" not in caplog.text


def test_a_fork_that_cannot_be_written_leaves_no_folder(run, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.copytree", lambda *paths, **how: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        gw.fork(run.path, tmp_path / "new", total_steps=600)
    assert not (tmp_path / "new").exists()


def test_a_fork_of_a_checkpoint_with_a_link_to_nowhere_is_one_clear_error(run, tmp_path):
    path = shutil.copytree(run.path, tmp_path / "old")
    (path / "checkpoints/best/algorithm.safetensors").unlink()
    (path / "checkpoints/best/algorithm.safetensors").symlink_to(path / "nowhere")
    with pytest.raises(gw.errors.CheckpointError, match=r"old cannot be copied: .*; fix: restore it"):
        gw.fork(path, tmp_path / "new", total_steps=600)
    assert not (tmp_path / "new").exists()


def test_a_fork_takes_the_files_of_the_checkpoint_alone(run, tmp_path):
    """Others may be a stranger's, of any kind and size."""
    path = shutil.copytree(run.path, tmp_path / "run")
    for name in ("latest", "best"):
        os.mkfifo(path / "checkpoints" / name / "pipe")
        (path / "checkpoints" / name / "folder").mkdir()
    forked = gw.fork(path, tmp_path / "new", total_steps=600)
    for name in ("latest", "best"):
        assert sorted(file.name for file in (forked / "checkpoints" / name).iterdir()) == [
            "algorithm.safetensors",
            "manifest.json",
            "policy.safetensors",
            "state.json",
        ]


def test_a_fork_names_the_plugins_of_its_run(run, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(run.path, path)
    config = json.loads((path / "config.json").read_text())
    config["provenance"]["plugins"] = ["mine.py"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(gw.errors.ConfigError, match=r"unknown key 'gama'.*with --plugin mine\.py; fix: add --plugin"):
        gw.fork(path, tmp_path / "new", algorithm={"gama": 1})
    forked = gw.fork(path, tmp_path / "new", env={"kwargs": {"a": 1}}, total_steps=600)
    with pytest.raises(gw.errors.ConfigError, match=r"cannot be made.*new was trained with --plugin mine\.py"):
        gw.resume(forked)


def test_settings_given_to_resume_point_to_a_fork(run):
    for given in ({"algorithm": {"gamma": 0.9}}, {"env": "CartPole-v1"}, {"policy": {"hidden_sizes": [8]}}):
        with pytest.raises(gw.errors.ConfigError, match=rf"fix: .*gw\.fork\(run, .*, {next(iter(given))}="):
            gw.resume(run.path, **given)
    with pytest.raises(gw.errors.ConfigError, match=r"^reward: .* would not use it; fix: leave it out$"):
        gw.evaluate(run.path, reward=len)
    with pytest.raises(gw.errors.ConfigError, match=r"is a run on an environment, .*; fix: gw\.Run\.load"):
        gw.LanguageAgent.load(run.path)


def test_a_fork_begins_at_the_checkpoint_before_a_damaged_one(run, tmp_path, caplog):
    path = tmp_path / "copy"
    shutil.copytree(run.path, path)
    with (path / "checkpoints" / "latest" / "policy.safetensors").open("r+b") as file:
        file.write(b"damaged")
    forked = gw.fork(path, tmp_path / "new", total_steps=400)
    assert "latest.1 instead" in caplog.text
    before = load_checkpoint(RunFolder(run.path).checkpoints / "latest.1")
    assert same_weights(load_checkpoint(RunFolder(forked).latest).policy, before.policy)
    assert gw.resume(forked).summary["env_steps"] >= 400


def test_speed_may_change(run, tmp_path):
    assert gw.resume(gw.fork(run.path, tmp_path / "new", speed="off", total_steps=400)).summary["env_steps"] >= 400


def test_a_checkpoint_that_is_asked_for_is_no_other(run, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(run.path, path)
    with (path / "checkpoints" / "latest" / "policy.safetensors").open("r+b") as file:
        file.write(b"damaged")
    with pytest.raises(gw.errors.CheckpointError, match=r"latest/policy\.safetensors is damaged"):
        gw.fork(path, tmp_path / "new", checkpoint=run.summary["env_steps"], total_steps=400)
    shutil.rmtree(path / "checkpoints" / "latest")
    with (path / "checkpoints" / "latest.1" / "policy.safetensors").open("r+b") as file:
        file.write(b"damaged")
    forked = gw.fork(path, tmp_path / "new", total_steps=400)
    before = load_checkpoint(RunFolder(run.path).checkpoints / "latest.2")
    assert same_weights(load_checkpoint(RunFolder(forked).latest).policy, before.policy)
