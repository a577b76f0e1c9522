"""Programs that a config or a run folder names: a stranger may have written it, so they start only where the user says so."""

import json

import pytest
from text_runs import copying, train, write_settings

import groupwise as gw
from groupwise import cli
from groupwise.config.evolution import EvolutionCfg
from groupwise.evolution.population import Member, Population

SEARCH = {"algorithm.learning_rate": {"min": 1e-4, "max": 1e-2}}
FIX = "fix: if you trust it, add --allow-programs (in Python allow_programs=True)"


@pytest.fixture
def program(tmp_path):
    """Writes the file ``ran`` next to it, and ends."""
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\necho started $0 $* >> {tmp_path}/ran\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """A finished run of files."""
    folder = tmp_path_factory.mktemp("trained")
    assert cli.main(["train", write_settings(folder, model), "--run-dir", f"{folder}/run", "--total-steps", "32"]) == 0
    return folder / "run"


@pytest.fixture
def stranger(trained, program, tmp_path):
    """A file of settings, a run and a population that name the program."""
    generation = {"name": "server", "python": str(program), "timeout": 5.0}
    tree = json.loads((trained / "config.json").read_text()) | {"generation": generation}
    (tmp_path / "text.json").write_text(json.dumps({key: tree[key] for key in tree if key != "provenance"}))
    gw.fork(trained, tmp_path / "run", total_steps=64)
    (tmp_path / "run" / "config.json").write_text(json.dumps(tree | {"total_steps": 64}))
    base = gw.load_config(tmp_path / "text.json", allow_programs=True)
    search = EvolutionCfg(search=SEARCH, population=2, rounds=1, round_steps=32)
    rate = {"algorithm.learning_rate": 1e-3}
    members = {n: Member(name=n, parent=None, born=0, settings=rate) for n in ("r0-0", "r0-1")}
    (tmp_path / "population" / "members").mkdir(parents=True)
    Population(tmp_path / "population", search, base, members, [*members]).save()
    return tmp_path


REFUSED = {
    "train": "train text.json --run-dir new",
    "seeds": "train text.json --run-dir new --seeds 0-1",
    "evolve": "evolve text.json --run-dir new --population 2 --rounds 1 --round-steps 32 --search {search}",
    "resume": "resume run",
    "fork": "resume run --fork new --total-steps 128",
    "population": "resume population --workers 1",
    "other arguments": "train text.json --run-dir new --generation.args=--eager --generation.timeout 3",
}


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_a_program_of_a_file_does_not_run(stranger, words, monkeypatch, capsys):
    monkeypatch.chdir(stranger)
    words = [json.dumps(SEARCH) if word == "{search}" else word for word in words.split()]
    assert cli.main(words) == 2
    found = capsys.readouterr().err
    assert f'names a program to run (generation.python = "{stranger}/program"' in found
    assert FIX in found
    assert not (stranger / "ran").exists()
    assert not (stranger / "new").exists()


@pytest.mark.parametrize("words", ["eval run --episodes 2", "plan text.json", "config text.json", "sample run 123"])
def test_commands_that_start_none_need_no_leave(stranger, words, monkeypatch):
    monkeypatch.chdir(stranger)
    assert cli.main(words.split()) == 0
    assert not (stranger / "ran").exists()


@pytest.mark.parametrize(
    "words",
    [
        "train text.json --run-dir new --allow-programs",
        "train text.json --run-dir new --generation.python ./program",
        "resume run --allow-programs",
        "resume run --fork new --total-steps 128 --generation.python ./program",
        "resume population --workers 1 --allow-programs",
    ],
)
def test_a_program_that_the_user_allows_or_names_runs(stranger, words, monkeypatch, capfd):
    monkeypatch.chdir(stranger)
    monkeypatch.setattr("groupwise.evolution.population.MAX_CRASHES", 1)
    assert cli.main(words.split()) == 2
    assert "names a program" not in capfd.readouterr().err
    assert "started" in (stranger / "ran").read_text()


@pytest.mark.parametrize("where", ["member", "search"])
def test_a_program_among_the_settings_of_a_population_does_not_run(stranger, where):
    path = stranger / "population/population.json"
    tree = json.loads(path.read_text())
    program = tree["run"]["generation"].pop("python")
    tree["run"]["generation"]["urls"] = ["http://127.0.0.1:1"]
    for name, table in {"member": tree["members"][0]["settings"], "search": tree["search"]["search"]}.items():
        if name == where:
            table["generation.python"] = program if where == "member" else [program, program]
            table["generation.urls"] = None if where == "member" else [None, "x"]
    path.write_text(json.dumps(tree))
    with pytest.raises(gw.errors.RunFolderError, match=r"population\.json is damaged: .*generation\.python"):
        Population.resume(stranger / "population", workers=1)
    assert not (stranger / "ran").exists()


def test_in_python_an_argument_of_the_call_allows_it(stranger, model):
    file, run = stranger / "text.json", stranger / "run"
    for call in (gw.load_config, gw.resume, gw.evolution.population.Population.resume):
        path = {gw.load_config: file, gw.resume: run}.get(call, stranger / "population")
        with pytest.raises(gw.errors.ConfigError, match=r"names a program to run .*allow_programs=True"):
            call(path)
    assert not (stranger / "ran").exists()
    named = {"name": "server", "python": str(stranger / "program"), "args": ["--eager"]}
    with pytest.raises(gw.errors.ServerError, match="the server ended with exit code 0"):
        train(copying(), model, stranger / "mine", generation=named)  # an argument of this call
    with pytest.raises(gw.errors.ServerError, match="the server ended with exit code 0"):
        gw.resume(run, allow_programs=True)
    assert (stranger / "ran").read_text().count("started") == 2


def test_arguments_of_a_file_are_no_less_a_program(stranger, monkeypatch, capsys):
    """vLLM imports what some of its arguments name."""
    monkeypatch.chdir(stranger)
    tree = json.loads((stranger / "text.json").read_text())
    tree["generation"]["args"] = ["--middleware", "evil.Middleware"]
    (stranger / "text.json").write_text(json.dumps(tree))
    assert cli.main(["train", "text.json", "--run-dir", "new", "--generation.python", "./program"]) == 2
    assert 'generation.args = ["--middleware", "evil.Middleware"]' in capsys.readouterr().err
    assert not (stranger / "ran").exists()


def test_a_member_with_a_program_that_the_search_does_not_have_is_refused(stranger, trained):
    from groupwise.evolution.population import Round, play
    from groupwise.training.build import UserObjects

    base = gw.load_config(trained / "config.json")
    with pytest.raises(gw.errors.ConfigError, match="names a program"):
        play(Round(0, stranger / "run", base, 64, 2, 0), UserObjects())
    assert not (stranger / "ran").exists()
