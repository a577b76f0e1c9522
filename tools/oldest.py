"""Prints the oldest versions of the library's own dependencies as constraints for pip; torch's builds are large, so the tested one."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]

if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for dependency in project["dependencies"]:
        name, oldest = re.match(r"([\w-]+).*?>=([\d.]+)", dependency).groups()
        if name != "torch":
            print(f"{name}=={oldest}")
    print(*re.findall("^torch==.*", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
