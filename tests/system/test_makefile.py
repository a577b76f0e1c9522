"""The check of Python's version in the Makefile, with scripts in place of Python."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
[ "$1" = --version ] && echo "Python 3.{minor}.1" && exit
exec {python} -c "import sys; sys.version_info = (3, {minor}, 1, 'final', 0); $2"
"""


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def make(*words):
    command = ["make", "-s", "-C", ROOT, *words]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})


@pytest.mark.parametrize("minor", [10, 15])
@pytest.mark.parametrize("exists", [False, True])
def test_another_python_is_refused_before_anything_is_made(tmp_path, minor, exists):
    venv, python = tmp_path / "venv", tmp_path / "other"
    program(venv / "bin/python" if exists else python, PYTHON.format(minor=minor, python=sys.executable))
    found = make("demo", f"VENV={venv}", f"PYTHON={python}")
    named = venv / "bin/python" if exists else python
    assert found.returncode == 2
    wanted = (
        f"make: {named} is Python 3.{minor}.1, expected Python 3.11 to 3.14; fix: make clean demo PYTHON=python3.12\n"
    )
    assert found.stderr.startswith(wanted)
    assert venv.exists() == exists


@pytest.mark.parametrize("minor", [11, 14])
def test_a_supported_python_goes_on(tmp_path, minor):
    program(tmp_path / "bin/python", PYTHON.format(minor=minor, python=sys.executable))
    program(tmp_path / "bin/groupwise", '#!/bin/sh\necho "$@"\n')
    (tmp_path / ".core").touch()
    found = make("demo", f"VENV={tmp_path}")
    assert (found.stdout, found.stderr) == ("train CartPole-v1\n", "")


def test_the_versions_are_those_of_the_package():
    supported = re.search(r"\((3, \d+)\) <= sys.version_info\[:2\] <= \((3, \d+)\)", (ROOT / "Makefile").read_text())
    low, high = (int(version.partition(", ")[2]) for version in supported.groups())
    assert f'requires-python = ">=3.{low},<3.{high + 1}"' in (ROOT / "pyproject.toml").read_text()
