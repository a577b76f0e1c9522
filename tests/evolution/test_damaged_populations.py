"""Populations of a stranger, damaged ones, and those of a killed search: refused by one clear error, or continued."""

import json
import shutil

import pytest
from small_populations import evolve, in_this_process, state

import groupwise as gw
from groupwise import cli
from groupwise.evolution.population import Population

NAMES = ["../../mine", "/tmp/mine", "r0-0/../../../mine", ".", "", "r0-0\n", "best", "wandb", 3, None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return evolve(tmp_path_factory.mktemp("whole") / "population")


@pytest.fixture
def folder(whole, tmp_path):
    """A copy after its first round: its clones begin when it is resumed."""
    path = shutil.copytree(whole.path, tmp_path / "population")
    shutil.rmtree(path / "best")
    tree = json.loads(state(path))
    tree["round"] = 1
    for member in tree["members"]:
        member["results"].pop("1", None)
        if member["born"] == 1:
            shutil.rmtree(path / "members" / member["name"])
    for member in (path / "members").iterdir():
        (member / "evolution.jsonl").write_text((member / "evolution.jsonl").read_text().splitlines()[0] + "\n")
    (path / "population.json").write_text(json.dumps(tree))
    return path


def change(folder, change):
    tree = json.loads(state(folder))
    change(tree)
    (folder / "population.json").write_text(json.dumps(tree))


def everything(path):
    return sorted((str(file), file.lstat().st_mtime_ns) for file in path.rglob("*"))


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
    "place", ["members", "members/r0-0", "members/r0-0/evolution.jsonl", "members/r1-0", "members.log", "best", "x"]
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
