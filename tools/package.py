"""Proves the package: builds the sdist and from it the wheel, installs the wheel in a fresh environment outside the
checkout, and runs what users run first.

    make package
    python tools/package.py --out dist      # keeps what was built

Dependencies are resolved by pip, without this project's constraints.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("build==1.3.0", "twine==6.2.0")
EXTRAS = "text,view"
MOST_SECONDS = 600
"""Limit of each step."""
STEPS = (
    ("groupwise", "--help"),
    ("groupwise", "train", "CartPole-v1", "--total-steps", "2000", "--run-dir", "run", "--speed", "off"),
    ("groupwise", "eval", "run", "--episodes", "2"),
    ("groupwise", "report", "run"),
    ("groupwise", "list"),
    ("groupwise", "doctor"),
    ("python", "-P", "{sdist}/examples/text_copy.py", "--total-steps", "128", "--run-dir", "text"),
    ("groupwise", "report", "text"),
)
"""Commands of a user, in order, in an empty folder."""


def variables() -> dict[str, str]:
    """The environment's variables, without those that would let another Python's packages in."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """The command's output.

    Raises:
        SystemExit: it failed; with its output.
    """
    env = variables()
    if path is not None:
        env["PATH"] = os.pathsep.join((str(path), env["PATH"]))
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def environment(folder: Path, *packages: str) -> Path:
    """A fresh environment with these packages; the folder of its programs."""
    run(sys.executable, "-P", "-m", "venv", folder, cwd=folder.parent)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    run(programs / "python", "-P", "-m", "pip", "install", "--quiet", "--no-compile", *packages, cwd=folder.parent)
    return programs


FOLDERS = ("src/groupwise", "tests", "docs", "benchmarks", "examples", "tools")
"""Folders whose files the sdist has."""
LEFT_OUT = ("__pycache__", "_build")


def files() -> set[str]:
    """Paths of the files in ``FOLDERS``, but for what tools wrote there."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    inside = (path.relative_to(ROOT) for path in paths)
    return {path.as_posix() for path in inside if not set(LEFT_OUT) & {*path.parts}}


def check_contents(wheel: Path, sdist: Path) -> None:
    """Refuse a wheel without a file of ``src``, and an sdist without a file of ``FOLDERS``.

    Raises:
        SystemExit: with the names of what is missing.
    """
    expected = files()
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    package = {name.removeprefix("src/") for name in expected if name.startswith("src/groupwise/")}
    with tarfile.open(sdist) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    for kind, missing in (("wheel", package - inside), ("sdist", expected - shipped)):
        if missing:
            raise SystemExit(f"the {kind} lacks {', '.join(sorted(missing)[:10])}; fix: package-data, or MANIFEST.in")


def check_view(programs: Path, folder: Path) -> None:
    """Start ``groupwise view`` and read its page."""
    command = [str(programs / "groupwise"), "view", "run"]
    server = subprocess.Popen(command, cwd=folder, env=variables(), stdout=subprocess.PIPE, text=True)
    limit = threading.Timer(MOST_SECONDS, server.kill)
    limit.start()
    try:
        assert server.stdout is not None
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
        with urllib.request.urlopen(address, timeout=60) as page:  # noqa: S310 (the server that was just started)
            assert b"CartPole-v1" in page.read()
    finally:
        limit.cancel()
        server.terminate()
        server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="keep the wheel and the sdist here")
    args = parser.parse_args()
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - began:6.0f} s  {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="groupwise-package-") as name:
        scratch = Path(name)
        programs = environment(scratch / "tools", *TOOLS)
        # without --wheel, build makes the wheel from the sdist
        run(programs / "python", "-P", "-m", "build", "--outdir", scratch / "dist", ROOT, cwd=scratch)
        (wheel,), (sdist,) = (scratch / "dist").glob("*.whl"), (scratch / "dist").glob("*.tar.gz")
        say(f"built {wheel.name} ({wheel.stat().st_size:,} bytes) and {sdist.name} ({sdist.stat().st_size:,} bytes)")
        check_contents(wheel, sdist)
        run(programs / "python", "-P", "-m", "twine", "check", "--strict", wheel, sdist, cwd=scratch)
        say("every file is in them, and twine has no complaint")
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch / "sdist", filter="data")
        (source,) = (scratch / "sdist").iterdir()
        programs = environment(scratch / "env", f"{wheel}[{EXTRAS}]")
        say(f"installed {wheel.name}")
        folder = scratch / "user"
        folder.mkdir()
        for step in STEPS:
            run(*(word.format(sdist=source) for word in step), cwd=folder, path=programs)
            say(f"  {' '.join(step)}")
        check_view(programs, folder)
        say("  groupwise view run")
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            for built in (wheel, sdist):
                shutil.copy(built, args.out)


if __name__ == "__main__":
    main()
