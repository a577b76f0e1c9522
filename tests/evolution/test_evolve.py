"""Populations on CartPole, with budgets of a few hundred steps."""

import gc
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import gymnasium
import pytest
import text_runs
import torch
from forked import Script
from run_folders import same_weights
from small_populations import (
    PPO,
    SMALL,
    TINY,
    after_first_round,
    check_same,
    everything,
    evolve,
    in_this_process,
    state,
)

import groupwise as gw
from groupwise import cli, plugins
from groupwise.config.evolution import LaunchCfg
from groupwise.evolution.population import AddNoise, Member, Population, Round, answered, fitted, possible
from groupwise.plugins import pickled
from groupwise.report.folder import RunFolder
from groupwise.run import read_settings
from groupwise.training.checkpoint import load_checkpoint
from groupwise.training.trainer import Trainer

SCRIPT = """
import sys
from small_populations import evolve
evolve(sys.argv[1], workers=2)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted search in this process."""
    return evolve(tmp_path_factory.mktemp("whole") / "population")


def test_a_search_leaves_runs_and_a_state(whole):
    found = Population.load(whole.path)
    assert found.round == 2
    assert {member.parent for member in found.members.values() if member.born == 1} <= {f"r0-{n}" for n in range(3)}
    assert len(found.goes_on) == 3
    rows = list(found.rows())
    assert [row["round"] for row in rows] == [0] * 3 + [1] * 3
    assert all(1e-4 <= row["algorithm.learning_rate"] <= 1e-1 for row in rows)
    best = found.best()
    assert (rows[3]["member"], rows[3]["mean"]) == (best.name, max(row["mean"] for row in rows[3:]))
    run = gw.Run.load(whole.path / "best")
    assert run.cfg.algorithm.learning_rate == best.settings["algorithm.learning_rate"]
    assert run.summary["env_steps"] == 256
    assert gw.evaluate(run, 1).episodes == 1
    assert gw.compare(whole.path / "members", finished_only=True).environments[0].environment == "CartPole-v1"


def test_values_that_are_not_possible_together_are_drawn_again(tmp_path):
    """Of four combinations of these settings one is not possible."""
    search = {
        "algorithm.credit.returns": ["outcome", "return_to_go"],
        "algorithm.credit.normalize": ["none", "episodes"],
    }
    grpo = {
        "name": "grpo",
        "num_steps": 16,
        "num_epochs": 1,
        "group_size": 2,
        "credit": {"returns": "outcome", "baseline": "mean"},
    }
    found = evolve(tmp_path / "p", algorithm=grpo, search=search, population=4, rounds=4, weight_noise=0.0)
    pairs = {tuple(member.settings.values()) for member in found.members.values()}
    assert len(pairs) == 3
    assert ("return_to_go", "episodes") not in pairs
    assert found.round == 4
    with pytest.raises(gw.errors.ConfigError, match="is not possible: "):
        possible(found.base, lambda: {"algorithm.learning_rate": -1.0})


def test_members_differ_in_the_searched_settings_and_the_seed_only(whole):
    first, second = (json.loads((whole.folder(f"r0-{n}") / "config.json").read_text()) for n in (0, 1))
    assert first["seed"] != second["seed"]
    for cfg, name in ((first, "r0-0"), (second, "r0-1")):
        for path, value in whole.members[name].settings.items():
            assert cfg["algorithm"].pop(path.removeprefix("algorithm.")) == value
        del cfg["seed"], cfg["provenance"]
    assert first == second


@pytest.mark.skipif(sys.platform != "linux", reason="workers end with their parent at once")
def test_a_killed_search_goes_on_as_if_nothing_happened(whole, tmp_path):
    """It is killed when clones are running in processes."""
    path = tmp_path / "killed"
    script = Script(SCRIPT, path)
    while not list(path.glob("members/r1-*/metrics.jsonl")):
        time.sleep(0.01)
        assert script.processes[0].is_alive(), script.errors(0)
    script.kill()
    assert not (path / "best").exists()
    Population.resume(path, workers=2)
    check_same(path, whole.path)


def test_resume_leaves_a_finished_search_as_it_is(whole, capsys):
    before = state(whole.path)
    assert cli.main(["resume", str(whole.path)]) == 0
    assert state(whole.path) == before
    assert f"groupwise eval {whole.path}/best" in capsys.readouterr().out


def test_resume_keeps_a_best_run_that_was_trained_further_and_replaces_one_that_is_lost(whole, tmp_path):
    path = shutil.copytree(whole.path, tmp_path / "population")
    gw.resume(path / "best", total_steps=384)
    for lost, steps in ((False, 384), (True, 256)):
        if lost:
            (path / "best" / "config.json").unlink()
        Population.resume(path)
        assert gw.Run.load(path / "best").summary["env_steps"] == steps


def test_a_best_run_is_not_replaced_while_a_process_trains_in_it(whole, tmp_path):
    path = shutil.copytree(whole.path, tmp_path / "population")
    with RunFolder(path / "best").locked():
        Population.resume(path)
        before = everything(path / "best")
        with pytest.raises(gw.errors.RunFolderError, match=r"a process trains in .*best; fix: wait"):
            Population.load(path).write_best()
        assert everything(path / "best") == before


@pytest.mark.parametrize(("progress", "shown"), [("auto", ["round 1/1", "round 2/2"]), ("none", [])])
def test_a_quiet_search_shows_no_rounds(tmp_path, capsys, progress, shown):
    found = evolve(tmp_path / "p", logging={"progress": progress}, rounds=1)
    tree = json.loads(state(found.path))
    tree["search"]["rounds"] = 2
    (found.path / "population.json").write_text(json.dumps(tree))
    with in_this_process():
        Population.resume(found.path, progress=progress)
    assert [line.partition("   ")[0] for line in capsys.readouterr().out.splitlines()] == shown


def test_a_member_that_diverges_is_replaced_and_named_and_where_all_do_the_search_ends(tmp_path, caplog):
    search = {"algorithm.vf_coef": [0.5, 3e38]}
    found = evolve(tmp_path / "p", search=search, population=4, selection="truncation", seed=1)
    lost = {name for name, member in found.members.items() if member.results[member.born].status == "diverged"}
    first = {name for name in lost if found.members[name].born == 0}
    assert 0 < len(first) < 4
    assert len(found.goes_on) == 4
    assert not first & set(found.goes_on)
    assert all(found.members[name].parent not in lost for name in found.goes_on)
    assert all(f"{name} diverged in round 1" in caplog.text for name in first)
    assert found.best().name not in lost
    with pytest.raises(gw.errors.DivergedError, match="all members in round 1"):
        evolve(tmp_path / "q", search={"algorithm.vf_coef": [2e38, 3e38]}, population=2)


def test_a_policy_whose_actions_are_not_finite_diverged(tmp_path):
    """One step of an update makes the weights too large, and the next rollout is the first to see it."""
    cfg = gw.PPOCfg(num_steps=64, num_epochs=1, minibatch_size=256)
    settings = {"population": 3, "rounds": 2, "round_steps": 512, "episodes": 2, "workers": 1, "num_envs": 4}
    search = {"algorithm.learning_rate": [3e-4, 100.0]}
    found = gw.evolve("Pendulum-v1", cfg, search=search, run_dir=tmp_path / "p", **settings)
    lost = [member for member in found.members.values() if member.results[member.born].status == "diverged"]
    assert {member.settings["algorithm.learning_rate"] for member in lost} == {100.0}
    assert "although its observation is finite" in lost[0].results[0].reason


def crashing(folder, times):
    """Makes CartPole in a process that dies, so many times in all."""

    def make(**options):
        import gymnasium

        for number in range(times):
            try:
                (folder / str(number)).touch(exist_ok=False)
            except FileExistsError:
                continue
            os._exit(7)
        return gymnasium.make("CartPole-v1", **options)

    return make


def test_a_member_that_crashes_three_times_ends_the_search_and_fewer_times_change_nothing(tmp_path, caplog):
    for times in (2, 3):
        (tmp_path / str(times)).mkdir()
    two, three = (crashing(tmp_path / str(times), times) for times in (2, 3))
    small = SMALL | {"population": 2, "round_steps": 64, "workers": 1}
    with pytest.raises(gw.errors.MemberError, match=r"r0-0 failed 3 times in round 1: .* exit code 7"):
        gw.evolve(three, PPO, run_dir=tmp_path / "three/p", **small)
    assert len(list(tmp_path.glob("three/p/members/*/checkpoints/latest"))) == 1  # the other is saved
    with in_this_process():
        found = Population.resume(tmp_path / "three/p", env=three)
    caplog.clear()
    other = gw.evolve(two, PPO, run_dir=tmp_path / "two/p", **small)
    assert "r0-0 failed (time 2): its process ended with exit code 7" in caplog.text
    check_same(other.path, found.path)


def test_an_error_in_training_is_named_and_logged(tmp_path):
    def make(**options):
        raise RuntimeError("no such robot")

    with pytest.raises(gw.errors.MemberError, match="no such robot"):
        gw.evolve(make, PPO, run_dir=tmp_path / "p", workers=1, **SMALL | {"population": 2})
    assert "Traceback" in (tmp_path / "p/members.log").read_text()


def test_a_search_without_its_python_objects_says_how_it_is_resumed(tmp_path):
    def make(**options):
        return gymnasium.make("CartPole-v1", **options)

    path = evolve(tmp_path / "p", env=make, population=2, round_steps=64).path
    Population.resume(path)  # nothing is left to train
    before = everything(after_first_round(path))
    message = re.escape(f"{path} was given env in Python; fix: ") + rf".*Population\.resume\('{path}', env=\.\.\.\)"
    with pytest.raises(gw.errors.ConfigError, match=message):
        Population.resume(path)
    with pytest.raises(gw.errors.ConfigError, match=r"^reward: .* would not use it; fix: leave it out$"):
        Population.resume(path, env=make, reward=len)
    assert everything(path) == before
    with in_this_process():
        assert Population.resume(path, env=make).round == 2


def test_an_interrupted_search_says_how_far_it_came_and_how_it_goes_on(tmp_path, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    def terminate(*args):
        os.kill(os.getpid(), signal.SIGTERM)  # as a cluster does
        return []

    path = tmp_path / "q"
    call = rf"Population\.resume\('{tmp_path}/p', env=\.\.\., on_mutation=\.\.\.\)$"
    with pytest.raises(KeyboardInterrupt, match=f"interrupted after 0 of 1 rounds; continue with: .*{call}"):
        evolve(tmp_path / "p", env=interrupt, on_mutation=interrupt, rounds=1)
    monkeypatch.setattr("groupwise.evolution.population.play_all", terminate)
    words = ["--search", '{"algorithm.gamma": [0.9, 0.99]}', "--round-steps", "1e4", "--run-dir", str(path)]
    assert cli.main(["evolve", "CartPole-v1", *words]) == 130
    assert cli.main(["resume", str(path)]) == 130
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2:] == [f"groupwise: interrupted after 0 of 10 rounds; continue with: groupwise resume {path}"] * 2


def test_on_mutation_sees_each_clone_and_may_change_it(tmp_path):
    seen = []

    def hook(name, before, after):
        seen.append(name)
        return {**after, "algorithm.num_epochs": 2}

    small = {"population": 2, "round_steps": 64}
    found = evolve(tmp_path / "p", on_mutation=hook, **small)
    assert seen == ["r1-1"]
    assert found.members["r1-1"].settings["algorithm.num_epochs"] == 2
    with pytest.raises(gw.errors.ConfigError, match="was started with on_mutation"):
        Population.resume(tmp_path / "p")
    for wrong in ({"algorithm.num_epochs": 7}, {"algorithm.gamma": 0.9}):
        with pytest.raises(gw.errors.ConfigError, match=f"on_mutation gave {next(iter(wrong))} = "):
            evolve(tmp_path / next(iter(wrong)), on_mutation=lambda name, old, new, w=wrong: new | w, **small)


def test_halving_ends_with_one_member_and_groups_can_change_size(tmp_path):
    algorithm, search = {"name": "grpo", "num_steps": 16, "group_size": 2}, {"algorithm.group_size": [2, 4]}
    options = {**TINY, "search": search, "population": 2, "rounds": 2, "round_steps": 256, "selection": "halving"}
    found = evolve(tmp_path / "p", algorithm=algorithm, fitness="lower_bound", **options)
    assert len(found.goes_on) == 1
    assert found.best().name == found.goes_on[0]


GROUPS = {"name": "grpo", "num_steps": 8, "group_size": 2, "num_epochs": 1}
RATES = {"search": {"algorithm.learning_rate": [1e-3, 2e-3, 4e-3, 8e-3]}, "population": 2}
PENDULUM = {"env": "Pendulum-v1", "max_episode_steps": 20, "algorithm": GROUPS, **RATES}
"""An iteration is four episodes, 80 steps."""


def test_members_that_are_ahead_of_a_round_wait_for_the_next(tmp_path):
    """Round 2 needs an iteration that takes it from step 80 to step 160, beyond round 3."""
    found = evolve(tmp_path / "p", **PENDULUM, rounds=4, round_steps=45)
    rows = [*found.rows()]
    assert [row["env_steps"] for row in rows] == [80, 80, 160, 160, 160, 160, 240, 240]
    assert {row["member"] for row in rows[4:6]} == {row["member"] for row in rows[6:]}  # nothing was known to select by
    clone = next(member for member in found.active() if member.born == 2)
    assert clone.results[2].mean == found.members[clone.parent].results[1].mean  # no noise yet
    assert load_checkpoint(found.folder(clone.name) / "checkpoints/latest").state["callbacks"]["AddNoise"]["added"]


def test_members_may_use_up_all_steps_before_the_last_round_but_not_in_the_first(tmp_path):
    found = evolve(tmp_path / "p", **PENDULUM, rounds=3, round_steps=50)
    assert [row["env_steps"] for row in found.rows()] == [80, 80, 160, 160, 160, 160]
    summary = gw.Run.load(found.path / "best").summary
    assert (summary["stopped"], summary["env_steps"]) == ("total_steps", 160)
    with pytest.raises(gw.errors.ConfigError, match="round_steps = 40: an iteration takes about 80 steps"):
        evolve(tmp_path / "q", **PENDULUM, round_steps=40)


def test_the_command_takes_files_and_settings_of_train(tmp_path, monkeypatch, capsys):
    seen = {}

    def stand_in(cfg, base, **options):
        seen.update(cfg=cfg, base=base, **options)
        found = Population(tmp_path / "p", cfg, base)
        result = {"round": 0, "status": "ok", "mean": 3.0, "env_steps": 9}
        member = {"name": "r0-0", "parent": None, "born": 0, "settings": {"algorithm.gamma": 0.9}}
        found.members["r0-0"] = Member.model_validate(member | {"results": {0: result}})
        found.round = 1
        return found

    monkeypatch.setattr("groupwise.evolution.population.evolve_from_config", stand_in)
    (tmp_path / "search.yaml").write_text("algorithm.learning_rate: {min: 1e-5, max: 1e-2, log: true}\n")
    words = ["--search", str(tmp_path / "search.yaml"), "--population", "4", "--rounds", "5", "--round-steps", "1e3"]
    words += [
        "--selection",
        '{"name": "tournament", "size": 3}',
        "--mutation",
        '{"name": "grow_shrink", "grow": 2}',
        "--workers",
        "2",
    ]
    words += ["--launcher", "ray", "--gpus", "0.25"]
    assert cli.main(["evolve", "CartPole-v1", *words, "--seed", "3", "--algorithm.gamma", "0.5"]) == 0
    assert seen["cfg"].search["algorithm.learning_rate"].max == 1e-2
    assert (seen["cfg"].population, seen["cfg"].rounds, seen["cfg"].round_steps) == (4, 5, 1000)
    assert (seen["cfg"].selection.size, seen["cfg"].mutation.grow) == (3, 2)
    assert seen["launch"] == LaunchCfg(workers=2, launcher="ray", gpus=0.25)
    assert (seen["base"].seed, seen["base"].algorithm.gamma) == (3, 0.5)
    out = capsys.readouterr().out
    assert "best of 1 members is r0-0, mean 3" in out
    assert "algorithm.gamma: 0.9" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--search is missing"),
        (["--search", "nowhere.json"], "nowhere.json"),
        (["--search", '{"algorithm.gamma": [0.9, 0.99]}', "--total-steps", "5"], "--rounds times --round-steps"),
        (["--search", '{"algorithm": ["ppo", "grpo"]}'], "search: algorithm cannot change in the middle of a run"),
        (["--search", '{"algorithm.gama": [0.9, 0.99]}'], "did you mean 'algorithm.gamma'"),
        (["--search", '{"algorithm.gamma": [0.9, 0.99]}', "--roundz", "5"], "--rounds"),
    ],
)
def test_the_command_explains_mistakes(words, message, capsys):
    assert cli.main(["evolve", "CartPole-v1", *words]) == 2
    assert message in capsys.readouterr().err


def test_bounds_of_a_setting_that_is_off_give_whole_numbers_where_it_takes_no_others():
    base = gw.RunCfg(algorithm=gw.PPOCfg())
    assert (base.env.max_episode_steps, base.algorithm.target_kl) == (None, None)
    assert fitted(base, "env.max_episode_steps", 32.88) == 33
    assert fitted(base, "algorithm.target_kl", 0.015) == 0.015
    assert fitted(base, "algorithm.target_kl", -0.5) == -0.5  # impossible as it is


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search": {"algorithm.lerning_rate": [1e-3, 1e-2]}}, "no setting 'algorithm.lerning_rate'; did you mean"),
        ({"search": {"policy.hidden_sizes": [1, 2]}}, "policy.hidden_sizes cannot change in the middle"),
        ({"search": {"seed": [1, 2]}}, "seed cannot change"),
        ({"algorithm": "grpo", "search": {"algorithm.kl_coef": [0, 0.1]}}, r"algorithm\.kl_coef = 0 cannot change"),
        ({"search": {"algorithm.learning_rate": [-1.0, 1e-2]}}, r"algorithm.learning_rate = -1.0 is not possible"),
        ({"search": {"algorithm.num_epochs": {"min": 1, "max": 4.6}}}, r"num_epochs = 4\.6 is no whole number; fix: 5"),
        ({"total_steps": 100}, "rounds times round_steps"),
        ({"stop": {"threshold": 400}}, "ends after its rounds"),
        ({"round_steps": 63}, "an iteration takes about 64 steps"),
        ({"search": {"algorithm.num_steps": [8, 1024]}}, r"an iteration takes about [\d,]+ steps"),
        ({"search": {"algorithm.num_steps": {"min": 8, "max": 1024}}}, r"an iteration takes about [\d,]+ steps"),
        ({"search": {"env.action_chunk": [1, 2]}}, r"env\.action_chunk cannot change"),
        ({"population": 1}, "population"),
        ({"gpus": 0.5}, "gpus is for launcher='ray'"),
        ({"selection": "tornament"}, "did you mean 'tournament'"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_starts(options, message, tmp_path):
    with pytest.raises(gw.errors.ConfigError, match=message):
        evolve(tmp_path / "p", **options)
    assert not (tmp_path / "p").exists()


def test_settings_that_change_what_a_score_means_are_named(tmp_path, caplog):
    search = {"env.max_episode_steps": [20, 500], "algorithm.learning_rate": [1e-3, 1e-2]}
    (tmp_path / "taken").write_text("")
    with pytest.raises(gw.errors.RunFolderError):
        evolve(tmp_path, search=search)
    assert [r.message for r in caplog.records if "what a score means" in r.message] == [
        "search: env.max_episode_steps may change what a score means, and each member is scored with its own settings"
    ]


def test_a_taken_folder_and_a_missing_one_are_refused(whole, tmp_path):
    with pytest.raises(gw.errors.RunFolderError, match="is taken"):
        evolve(whole.path)
    with pytest.raises(gw.errors.RunFolderError, match="is no population"):
        Population.resume(tmp_path)


def test_noise_changes_a_tenth_of_the_weights_once():
    layer = torch.nn.Linear(100, 100)
    before = layer.weight.detach().clone()
    noise = AddNoise(0.1, seed=3)
    trainer = SimpleNamespace(algorithm=SimpleNamespace(policy=layer), is_done=lambda: True)
    noise.on_training_start(trainer)  # the weights would not be saved
    assert torch.equal(layer.weight, before)
    trainer.is_done = lambda: False
    noise.on_training_start(trainer)
    changed = layer.weight != before
    assert 0.08 < float(changed.float().mean()) < 0.12
    deviation = float((layer.weight.detach() - before)[changed].std() / before.std())
    assert 0.09 < deviation < 0.11
    after = layer.weight.detach().clone()
    for seed in (3, 4):  # 4: a clone of the clone
        again = AddNoise(0.1, seed=seed)
        again.load_state_dict(noise.state_dict())
        again.on_training_start(trainer)
        assert torch.equal(layer.weight, after) == (seed == 3)


def test_each_member_begins_with_the_policy_that_was_given(tmp_path):
    env = gymnasium.make("CartPole-v1")
    policy = gw.ActorCritic(env.observation_space, env.action_space)
    cfg, given = read_settings("CartPole-v1", PPO, policy, None, {"num_envs": 4}, {"total_steps": 128})
    payload = pickled(given)
    one, other = (answered(pickled(Round(0, tmp_path / name, cfg, 128, 2, 0)), payload, ()) for name in "ab")
    assert one == other
    assert same_weights(tmp_path / "a", tmp_path / "b")


def test_a_round_leaves_nothing_of_its_run_in_memory(tmp_path):
    cfg, given = read_settings("CartPole-v1", PPO, None, None, {"num_envs": 4}, {"total_steps": 64})
    gc.collect()
    before = {id(thing) for thing in of_runs()}  # fixtures of other tests hold policies
    gc.disable()
    try:
        answered(pickled(Round(0, tmp_path / "run", cfg, 64, 2, 0)), pickled(given), ())
        assert not [thing for thing in of_runs() if id(thing) not in before]
    finally:
        gc.enable()


def of_runs():
    return [thing for thing in gc.get_objects() if type(thing) in (gw.ActorCritic, Trainer)]


def test_language_models_evolve(tmp_path):
    def reward(completions, **columns):
        return [text.count("1") / 8 for text in completions]

    model = str(text_runs.save_model(tmp_path / "model"))
    task = gw.TextTask(["1", "2", "12", "21"], reward=reward, eval_data=["11", "22"])
    search = {"algorithm.learning_rate": {"min": 1e-4, "max": 1e-2, "log": True}, "algorithm.group_size": [2, 4]}
    size = {"population": 2, "rounds": 2, "round_steps": 60, "episodes": 2, "num_prompts": 2}
    options = {
        "evaluation": {"interval": 10_000},
        "model": model,
        "sampling": {"max_new_tokens": 6},
        "run_dir": tmp_path / "population",
    }
    population = gw.evolve(task, {"group_size": 4}, search=search, **size, **options)
    assert all(row["status"] == "ok" and 0 <= row["mean"] <= 1 for row in population.rows())
    assert len(gw.sample(population.path / "best", "1")) == 1


def test_members_have_what_a_plugin_registers(tmp_path, registry, monkeypatch):
    monkeypatch.setattr("groupwise.plugins._loaded", [])
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import groupwise as gw\n"
        "from groupwise.algorithms.ppo import PPO\n"
        "class MineCfg(gw.PPOCfg):\n"
        "    name: str = 'mine'\n"
        "gw.register_algorithm(MineCfg)(type('Mine', (PPO,), {}))\n"
        "gw.register_policy('wide')(type('Wide', (gw.ActorCritic,), {}))\n"
    )
    plugins.load([plugin])
    algorithm = {"name": "mine", "num_steps": 16, "num_epochs": 1}
    found = evolve(tmp_path / "p", 1, "CartPole-v1", algorithm, policy="wide", population=2, rounds=1, round_steps=64)
    assert [row["status"] for row in found.rows()] == ["ok", "ok"]


def test_workers_that_were_killed_while_idle_are_started_again(tmp_path, caplog):
    killed = []

    def hook(name, before, after):
        for process in multiprocessing.active_children():
            if process.name == "groupwise member":
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                killed.append(process.pid)
        return after

    found = evolve(tmp_path / "p", on_mutation=hook, population=2, round_steps=64, workers=2)
    assert len(killed) == 2
    assert found.round == found.cfg.rounds
    assert "failed" not in caplog.text
