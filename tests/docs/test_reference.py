"""Pages that are made from the code are up to date, and the documentation builds without warnings."""

import re
from pathlib import Path

import pytest
from forked import run_script
from scripts import ROOT, load

import groupwise as gw
from groupwise import config
from groupwise.config.base import Choice
from groupwise.config.load import objective_presets
from groupwise.config.run import RunCfg


@pytest.mark.parametrize("name", ["settings.md", "presets.md", "defaults.md"])
def test_generated_page_is_current(name: str):
    pages = {path.name: text for path, text in load("docs/generate.py").pages().items()}
    found = (ROOT / "docs" / "generated" / name).read_text(encoding="utf-8")
    assert found == pages[name], "run: python docs/generate.py"


def test_every_config_class_and_field_is_described():
    page = (ROOT / "docs" / "generated" / "settings.md").read_text(encoding="utf-8")
    for name, value in vars(config).items():
        if name.endswith("Cfg") and not issubclass(value, Choice):
            section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
            fields = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
            assert fields, name
    for name in RunCfg.model_fields:
        assert f"| `{name}` |" in page
    assert not re.search(r"\|\s*\|$", page, re.MULTILINE), "a setting without a description"


def test_api_page_names_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    missing = [name for name in gw.__all__ if name != "__version__" and not re.search(rf"\b{name}\b", page)]
    assert not missing


def test_the_readme_counts_the_presets_and_its_links_lead_somewhere():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{len(objective_presets())} presets" in readme
    targets = [target for target in re.findall(r"\]\(([^)#]+)", readme) if "://" not in target]
    assert targets
    assert not [target for target in targets if not (ROOT / target).exists()]


BUILD = """
import sys, warnings
warnings.simplefilter("default")
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_documentation_builds_without_warnings(tmp_path: Path):
    run_script(BUILD, "-W", "-q", "-b", "dummy", "-d", tmp_path / "doctrees", ROOT / "docs", tmp_path / "out")
