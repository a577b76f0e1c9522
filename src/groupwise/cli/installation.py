"""Checks of the installation, for ``groupwise doctor``."""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

from groupwise.errors import EnvError, GroupwiseError, installing
from groupwise.report.health import Finding
from groupwise.report.page import answer, write_page
from groupwise.report.video import draw_one_frame
from groupwise.run import train
from groupwise.system import num_cpus

SECONDS = 10.0
"""Of the training."""
_FOR_DEVELOPERS = ("dev", "docs")


def check() -> Iterator[Finding]:
    """Findings on everything that a run needs; the last ones take some seconds."""
    yield device()
    yield threads()
    yield packages()
    yield extras()
    yield folder(Path("runs"))
    yield folder(Path(tempfile.gettempdir()))
    yield rendering("CartPole-v1")
    if not missing(Requirement("gymnasium[mujoco]")):
        yield rendering("InvertedPendulum-v5")
    yield training(SECONDS)


def device() -> Finding:
    """The torch build and the GPU."""
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    text = f"Python {platform.python_version()}, torch {torch.__version__} ({build})"
    made = Finding("Device", (), "good", f"{text}, on the CPU.")
    if torch.cuda.is_available():
        try:
            torch.ones(1, device="cuda").add(1).item()
        except RuntimeError as error:
            broken = f"{text}, but the GPU does not compute: {str(error).splitlines()[0]}"
            return made._replace(verdict="bad", text=broken, advice="A torch build for this GPU: pytorch.org.")
        return made._replace(text=f"{text}, on {torch.cuda.get_device_name()} with device='cuda'.")
    if shutil.which("nvidia-smi") is None:
        return made
    return made._replace(
        verdict="look",
        text=f"{text} finds no GPU, but an NVIDIA driver is installed.",
        advice="A torch build with CUDA that fits the driver: pytorch.org.",
    )


def threads() -> Finding:
    """Torch must not use more threads than there are processors, nor share these with other programs."""
    cpus, used = num_cpus(), torch.get_num_threads()
    text = f"{used} threads of torch on {cpus} processors."
    made = Finding("Threads", (), "good", text)
    if used > cpus:
        return made._replace(verdict="look", advice=f"OMP_NUM_THREADS={cpus}.")
    load = 0.0 if sys.platform == "win32" else os.getloadavg()[0]
    if load > cpus + 1:
        text = f"{text} Other programs keep these busy: the load is {load:.1f}."
        return made._replace(verdict="look", text=text, advice="End them, or training is slow.")
    return made


def packages() -> Finding:
    """What every run needs."""
    found = [text for requirement in _requirements("") for text in missing(requirement)]
    if found:
        return Finding("Packages", (), "bad", f"{'; '.join(found)}.", "pip install -e . in the checkout.")
    return Finding("Packages", (), "good", "All required ones are there.")


def extras() -> Finding:
    """Extras that are there, and those that are there in part or in another version."""
    names = sorted({name for text in requires("groupwise") or () for name in _extras_of(text)})
    lacking = {name: [text for one in _requirements(name) for text in missing(one)] for name in names}
    broken = {name: [text for text in texts if "expected" in text] for name, texts in lacking.items()}
    there = ", ".join(name for name in names if not lacking[name]) or "none"
    absent = ", ".join(name for name in names if lacking[name] and not broken[name]) or "none"
    text = f"there: {there}; not complete: {absent}."
    if not any(broken.values()):
        return Finding("Extras", (), "good", text)
    wrong = "; ".join(f"of {name}, {' and '.join(texts)}" for name, texts in broken.items() if texts)
    advice = "; ".join(installing(name) for name, texts in broken.items() if texts)
    return Finding("Extras", (), "look", f"{text} Wrong versions: {wrong}.", f"{advice}.")


def folder(path: Path) -> Finding:
    """A folder in which runs write."""
    place = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.is_dir())
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
    except OSError as error:
        return Finding(f"Folder {path}", (), "bad", f"It cannot be written: {error}.", "Another --run-dir, or rights.")
    free = shutil.disk_usage(place).free / 2**30
    made = Finding(f"Folder {path}", (), "good", f"It can be written; {free:,.1f} GiB are free.")
    return made if free >= 1 else made._replace(verdict="look", advice="Make room: checkpoints need some.")


def rendering(env_id: str) -> Finding:
    """Videos are drawn without a display."""
    title = f"Pictures of {env_id}"
    try:
        draw_one_frame(env_id)
    except EnvError as error:
        text, _, fix = str(error).partition("; fix: ")
        return Finding(title, (), "look", f"{text}.", f"{fix}.")
    return Finding(title, (), "good", "They are drawn.")


def training(seconds: float) -> Finding:
    """Whether CartPole is learned, and a page is written about it."""
    title = f"Training for {seconds:g} seconds"
    with tempfile.TemporaryDirectory() as place:
        try:
            run = train(
                total_steps=100_000,
                speed="off",
                run_dir=Path(place, "run"),
                stop={"time_limit": seconds},
                logging={"progress": "none"},
            )
            write_page(run.path)
        except (GroupwiseError, OSError, RuntimeError, ImportError) as error:
            return Finding(title, (), "bad", f"It failed: {error}.", "groupwise --debug train CartPole-v1 shows where.")
        metrics = run.metrics()
    steps, iterations = metrics[-1]["env_steps"], len(metrics)
    learned = answer(metrics, "return", "episodes")
    text = f"{steps / metrics[-1]['time/total_seconds']:,.0f} steps per second on CartPole-v1. {learned.text}"
    made = Finding(title, (), "good", text)
    if learned.word == "Yes":
        return made
    return made._replace(verdict="look", advice=f"{iterations} iterations may be too few: groupwise train CartPole-v1.")


def missing(requirement: Requirement) -> list[str]:
    """What is not installed, or in another version, of a requirement and its own extras."""
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return [f"{requirement.name} is not installed"]
    wrong = not requirement.specifier.contains(found, prereleases=True)
    own = [f"{requirement.name} is {found}, expected {requirement.specifier}"] if wrong else []
    inner = map(Requirement, requires(requirement.name) or ()) if requirement.extras else ()
    return own + [
        text
        for wanted in inner
        if wanted.marker and any(_applies(wanted, extra) for extra in requirement.extras)
        for text in missing(wanted)
    ]


def _requirements(extra: str) -> list[Requirement]:
    """Those of an extra of groupwise; of no extra, those of every run."""
    wanted = map(Requirement, requires("groupwise") or ())
    return [one for one in wanted if (_applies(one, extra) if extra else one.marker is None)]


def _applies(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _extras_of(requirement: str) -> list[str]:
    extra = requirement.partition('extra == "')[2].removesuffix('"')
    return [extra] if extra and extra not in _FOR_DEVELOPERS else []
