"""Populations of a stranger, damaged ones, and those of a killed search: refused by one clear error, or continued."""

import json
import shutil

import pytest
from small_populations import SEARCH, after_first_round, everything, evolve, in_this_process, state

import groupwise as gw
from groupwise import cli
from groupwise.config import resolve
from groupwise.config.evolution import EvolutionCfg
from groupwise.evolution.population import Member, Population

NAMES = ["../../mine", "/tmp/mine", "r0-0/../../../mine", ".", "", "r0-0\n", "best", "wandb", 3, None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return evolve(tmp_path_factory.mktemp("whole") / "population")


@pytest.fixture
def folder(whole, tmp_path):
    return after_first_round(shutil.copytree(whole.path, tmp_path / "population"))


def change(folder, change):
    tree = json.loads(state(folder))
    change(tree)
    (folder / "population.json").write_text(json.dumps(tree))


def refused(folder, why, capsys):
    """One line, and nothing is written."""
    before = everything(folder.parent)
    assert cli.main(["resume", str(folder)]) == 2
    found = capsys.readouterr().err
    assert why in found
    assert found.count("; fix: ") == 1
    assert everything(folder.parent) == before


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_members_have_plain_names(folder, name, capsys):
    def rename(tree):
        tree["members"][0]["name"] = tree["active"][0] = name

    change(folder, rename)
    refused(folder, "name", capsys)


@pytest.mark.parametrize(
    "place", ["members", "members/r0-0", "members/r0-0/metrics.jsonl", "members/r1-0", "members.log", "best", "x"]
)
def test_links_out_of_a_population_are_refused(folder, tmp_path, place, capsys):
    mine, link = tmp_path / "mine", folder / place
    if link.exists():
        shutil.move(link, mine)
    else:
        mine.mkdir()
    link.symlink_to(mine)
    refused(folder, f"{link} is a link that leads out of it", capsys)


def test_links_inside_of_a_population_are_not_written_through(folder):
    (folder / "mine").write_text("mine")
    (folder / "members.log").unlink(missing_ok=True)
    (folder / "members.log").symlink_to("mine")
    (folder / "population.json").rename(folder / "state")
    (folder / "population.json").symlink_to("state")
    with pytest.raises(gw.errors.RunFolderError, match="it is a link, and links are not followed"):
        Population.load(folder)
    (folder / "state").rename(folder / "population.json")
    with pytest.raises(gw.errors.RunFolderError, match=r"members.log cannot be written .*; fix: "):
        Population.resume(folder, workers=1)
    assert (folder / "mine").read_text() == "mine"


def test_links_of_trackers_may_lead_out_and_are_not_followed(folder):
    for member in (folder / "members").iterdir():
        (member / "wandb").mkdir()
        (member / "wandb" / "debug.log").symlink_to("/dev/zero")
    with in_this_process():
        found = Population.resume(folder)
    found.members = {"r0-0": found.members["r0-0"]}
    found.round = 1
    found.write_best()
    assert (folder / "best/wandb/debug.log").is_symlink()


def entry(tree, name="r0-0"):
    return next(member for member in tree["members"] if member["name"] == name)


DAMAGES = {
    "unknown active": lambda tree: tree["active"].append("r0-9"),
    "active twice": lambda tree: tree["active"].append(tree["active"][0]),
    "none active": lambda tree: tree.update(active=[]),
    "unknown parent": lambda tree: tree["members"][-1].update(parent="r0-9"),
    "its own parent": lambda tree: tree["members"][-1].update(parent=tree["members"][-1]["name"]),
    "no parent": lambda tree: tree["members"][-1].update(parent=None),
    "member twice": lambda tree: tree["members"].append(entry(tree)),
    "no status": lambda tree: entry(tree)["results"]["0"].pop("status"),
    "another status": lambda tree: entry(tree)["results"]["0"].update(status="great"),
    "no mean": lambda tree: entry(tree)["results"]["0"].update(mean=None),
    "mean": lambda tree: entry(tree)["results"]["0"].update(mean="much"),
    "infinite mean": lambda tree: entry(tree)["results"]["0"].update(mean=float("inf")),
    "interval": lambda tree: entry(tree)["results"]["0"].update(ci95=[1.0]),
    "steps": lambda tree: entry(tree)["results"]["0"].update(env_steps=-1),
    "round of a result": lambda tree: entry(tree).update(results={"first": entry(tree)["results"]["0"]}),
    "results missing": lambda tree: [member.update(results={}) for member in tree["members"]],
    "results of later": lambda tree: entry(tree)["results"].update({"1": entry(tree)["results"]["0"]}),
    "round": lambda tree: tree.update(round="1"),
    "negative round": lambda tree: tree.update(round=-1),
    "late round": lambda tree: tree.update(round=3),
    "format": lambda tree: tree.update(format=2),
    "hooked": lambda tree: tree.update(hooked="no"),
    "a key more": lambda tree: entry(tree).update(path="/tmp"),
    "members": lambda tree: tree.update(members={}),
    "member": lambda tree: tree["members"].append("r0-7"),
    "settings": lambda tree: entry(tree).update(settings=[]),
    "setting missing": lambda tree: entry(tree)["settings"].pop("algorithm.learning_rate"),
    "setting of another kind": lambda tree: entry(tree)["settings"].update({"algorithm.learning_rate": "x"}),
    "setting out of bounds": lambda tree: entry(tree)["settings"].update({"algorithm.num_epochs": 3}),
    "unknown setting": lambda tree: entry(tree)["settings"].update(run_dir="/tmp"),
    "search": lambda tree: tree["search"].update(search={"no.such": [1, 2]}),
    "search of no setting": lambda tree: tree.update(search=[]),
    "run": lambda tree: tree["run"].update(algorithm="none"),
    "run of no settings": lambda tree: tree.update(run=None),
    "no search": lambda tree: tree.pop("search"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_population_is_one_clear_error(folder, damage, capsys):
    change(folder, damage)
    refused(folder, "is no population, or population.json is damaged: ", capsys)


@pytest.mark.parametrize("text", ["", "[]", "{", "7", "[" * 10**5, '{"a": 1, "a": 2}'], ids=len)
def test_a_file_that_is_no_state_is_one_clear_error(folder, text, capsys):
    (folder / "population.json").write_text(text)
    refused(folder, "population.json is damaged: ", capsys)


def test_a_finished_population_without_its_best_member_is_one_clear_error(whole, tmp_path):
    path = shutil.copytree(whole.path, tmp_path / "population")
    shutil.rmtree(path / "members" / whole.best().name)
    (path / ".best").mkdir()  # it was being replaced
    with pytest.raises(gw.errors.RunFolderError, match=r"cannot be copied: .*; fix: restore it"):
        Population.resume(path, workers=1)
    assert (path / "best" / "config.json").is_file()


@pytest.mark.parametrize("place", ["mkdir", "write"])
def test_a_search_that_was_killed_before_it_was_saved_begins_again(tmp_path, whole, place, monkeypatch):
    path = tmp_path / "population"

    def kill(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("groupwise.evolution.population.files." + {"mkdir": "write", "write": "os.replace"}[place], kill)
        if place == "write":  # a kill leaves what an exception would remove
            patch.setattr("pathlib.Path.unlink", lambda path, **how: None)
        with pytest.raises(KeyboardInterrupt):
            evolve(path)
    left = [file.name for file in path.iterdir()]
    assert len(left) == (place == "write")
    assert state(evolve(path).path) == state(whole.path)
    assert not [name for name in left if (path / name).exists()]


def test_a_search_of_many_members_and_rounds_is_read_again(tmp_path):
    """100 members for 60 rounds, all of them new in each round: more than two million bytes."""
    cfg = EvolutionCfg(search=SEARCH, population=100, rounds=60, round_steps=128)
    base = resolve("CartPole-v1", "ppo")
    found = Population(tmp_path, cfg, base)
    for born in range(60):
        for place in range(100):
            name, parent = f"r{born}-{place}", None if born == 0 else f"r{born - 1}-{place}"
            settings = {"algorithm.learning_rate": 0.0012345678901234567, "algorithm.num_epochs": 1}
            result = {"round": born, "status": "ok", "env_steps": 128, "mean": 12.345678901234567, "ci95": [1.5, 2.5]}
            member = {"name": name, "parent": parent, "born": born, "settings": settings, "results": {born: result}}
            found.members[name] = Member.model_validate(member)
    found.goes_on, found.round = [f"r59-{place}" for place in range(100)], 60
    found.save()
    assert (tmp_path / "population.json").stat().st_size > 2_000_000
    again = Population.load(tmp_path)
    assert again.members == found.members
    assert again.best().born == 59


def test_a_search_that_could_not_be_read_again_is_refused_before_it_starts(tmp_path, monkeypatch):
    with pytest.raises(gw.errors.ConfigError, match=r"population=1,000 and rounds=1,000: up to 22,000,000 values"):
        evolve(tmp_path / "p", population=1000, rounds=1000)
    assert not (tmp_path / "p").exists()
    monkeypatch.setattr("groupwise.evolution.population.MAX_POPULATION", 100)
    with pytest.raises(gw.errors.ConfigError, match=r"population.json cannot be read again: it has .* bytes"):
        evolve(tmp_path / "p")
    assert not (tmp_path / "p/population.json").exists()
