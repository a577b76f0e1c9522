"""Settings and files that the pages name exist, and the table for users of Stable-Baselines3 has all of its arguments."""

import inspect
import re

import pytest
from scripts import ROOT, load

from groupwise.config.algorithm import BCCfg, GRPOCfg, PPOCfg
from groupwise.config.run import RunCfg, TextRunCfg

GENERATOR = load("docs/generate.py")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OF_THE_ALGORITHM = ("credit", "objective", "collection")
"""Pages leave out ``algorithm.`` before these."""
NO_SETTINGS = {"algorithm.backward", "algorithm.parameters", "policy.env_action", "policy.gif"}
"""Methods, attributes and files that look like settings."""


def exists(path: str) -> bool:
    """Whether a run has such a setting, or such a parameter of a choice: ``algorithm.credit.baseline.k``."""
    names = path.split(".")
    classes = [GRPOCfg, PPOCfg] if names[0] in OF_THE_ALGORITHM else [RunCfg, TextRunCfg]
    for name in names:
        fields = [cls.model_fields[name] for cls in classes if name in cls.model_fields]
        if not fields:
            return False
        classes = [cls for field in fields for cls in GENERATOR.classes_of(field.annotation)]
        if name == "algorithm":
            classes = [GRPOCfg, PPOCfg, BCCfg]
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_named_settings_exist(page):
    roots = "|".join(dict.fromkeys([*RunCfg.model_fields, *TextRunCfg.model_fields, *OF_THE_ALGORITHM]))
    named = set(re.findall(rf"`((?:{roots})\.[a-z_.]+)(?=[`=])", page.read_text(encoding="utf-8")))
    named = {path for path in named - NO_SETTINGS if "_cfg." not in path and ".cfg." not in path}  # EmbodiChain's
    assert {path for path in named if not exists(path)} == set()
    assert exists("algorithm.credit.baseline.gae_lambda")
    assert not exists("algorithm.credit.base_line")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "experiments" not in page.parts], ids=lambda page: page.stem
)
def test_named_files_exist(page):
    """Experiments may name files of earlier commits."""
    folders = [ROOT, *(ROOT / name for name in ("src/groupwise", "src/groupwise/config", "examples", "benchmarks"))]
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8")))
    assert {name for name in named if not any((folder / name).is_file() for folder in folders)} == set()


def test_the_reading_lists_name_functions_of_the_library():
    lists = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Contracts")[0]
    sources = "\n".join(
        (ROOT / "docs" / path).read_text() for path in set(re.findall(r"\]\((\.\./src/[\w/.]+)\)", lists))
    )
    known = {*re.findall(r"(?:def|class) (\w+)", sources), "GRPOCfg", "num_steps", "kl_coef"}
    named = re.findall(r"(?<!\[)`([\w.]+)`", lists)
    assert {name for name in named if "/" not in name and not known.issuperset(name.split("."))} == {
        "text"
    }  # a command


def test_every_argument_of_sb3s_ppo_has_a_row_with_its_default():
    sb3 = pytest.importorskip("stable_baselines3")
    page = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    page = page.partition("### Every argument of PPO")[2].partition("\n##")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in page.splitlines() if line.startswith("| `")]
    defaults = {}
    for names, values in rows:
        shown = re.findall("`([^`]*)`", values)
        defaults |= dict(zip(re.findall("`([^`]*)`", names), shown or [""] * 9, strict=False))
    parameters = inspect.signature(sb3.PPO).parameters.values()
    expected = {p.name: "" if p.default is p.empty else repr(p.default) for p in parameters if p.name[0] != "_"}
    assert {name: defaults.get(name) for name in expected} == expected
