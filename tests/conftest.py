"""Settings that every test shares."""

import gc
import os
import signal
import sys
from inspect import isfunction
from pathlib import Path

import pytest
import torch
from devices import moving
from forked import preload, without_pictures
from hypothesis import HealthCheck, settings
from shapes import check_first_calls
from two_ranks import in_two_threads

from groupwise.config.base import Choice
from groupwise.report.curve import plot_curve
from groupwise.report.video import film, film_group

torch.set_num_threads(1)
os.environ["SDL_VIDEODRIVER"] = "dummy"  # of processes, too
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # as after activation
os.environ["GIT_DIR"] = os.devnull  # runs record the state of their repository, which would be this large one

# nohup and background jobs of some shells ignore these, and what a test starts would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# compile and import times would trip a deadline on a busy machine; the seed is fixed so that a red run repeats
settings.register_profile("groupwise", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("torture", deadline=None, max_examples=1000, suppress_health_check=list(HealthCheck))
settings.load_profile("groupwise")


HERE = Path(__file__).parent
KINDS = {"text", "speed", "contrib"}
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
SLOW = {
    "algorithms/test_devices.py",
    "docs/test_benchmark_scripts.py",
    "docs/test_fenced_blocks.py",
    "engines/test_distributed.py",
    "evolution/test_damaged_populations.py",
    "evolution/test_evolve.py",
    "examples/test_examples.py",
    "examples/test_mujoco_warp.py",
    "examples/test_notebooks.py",
    "report/test_lock.py",
    "report/test_sick_runs.py",
    "system/test_emulated_device.py",
    "text/test_asynchronous.py",
    "text/test_cloning.py",
    "text/test_gem.py",
    "text/test_isolated.py",
    "text/test_openenv.py",
    "text/test_played_episodes.py",
    "text/test_sandbox.py",
    "text/test_served.py",
    "text/test_skyrl.py",
    "text/test_textarena.py",
    "text/test_tool_env.py",
    "text/test_toolsets.py",
    "training/test_steps_profile_videos.py",
    "training/test_torch_runs.py",
    "training/test_two_processes.py",
}
"""Files that take long, of what other tests look at too."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark each test by its folder: text, speed, contrib, or core; and slow, if its file is. Files with slow ones are first."""
    for item in items:
        path = item.path.relative_to(HERE)
        kind = path.parts[0] if path.parts[0] in KINDS else "core"
        if kind != "contrib" or path.name != "test_smoke.py":
            item.add_marker(kind)
        if path.as_posix() in SLOW:
            item.add_marker("slow")
        if item.get_closest_marker("gpu") and "cuda" not in DEVICES:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # a process gets a file at a time


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported here is never garbage: looking through all of it would be most of each collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(700, 10, 100)  # what is imported later is looked through less often
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Before the fixtures of a module, whose runs are checked like its tests."""
    check_first_calls()


@pytest.fixture(autouse=True, scope="session")
def few_pictures():
    """``pictures`` is for tests that look at them."""
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_power_cut():
    """Files are not written through to the disk: what outlives a kill is what was written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def preloaded():
    """What processes of tests import is imported once, where they are forked from."""
    preload()


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.setattr("groupwise.training.build.film", film)
    monkeypatch.setattr("groupwise.training.build.film_group", film_group)
    monkeypatch.setattr("groupwise.run.plot_curve", plot_curve)


@pytest.fixture(scope="session")
def ray():
    """Ray with token authentication, which it reads when it is imported. It takes over signals: ``make test-ray``."""
    if "GROUPWISE_RAY" not in os.environ:
        pytest.skip("run by make test-ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield pytest.importorskip("ray")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.gpu] * (name == "cuda")) for name in DEVICES]
)
def device(request):
    """The CPU, and the GPU where there is one: the same numbers on both."""
    return torch.device(request.param)


@pytest.fixture(scope="module")
def computed_there(request, device):
    """Functions on tensors that the module imports compute on ``device``: what they get and give is moved."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in [*vars(request.module).items()] if device.type == "cuda" else []:
            if isfunction(value) and value.__module__.startswith(
                ("groupwise.functional.", "groupwise.text.vocabulary")
            ):
                patch.setattr(request.module, name, moving(value, device))
        yield


@pytest.fixture
def registry():
    """Registrations of a test do not outlive it."""
    families = [family for family in _subclasses(Choice) if "known" in vars(family)]
    before = [(family, set(family.known)) for family in families]
    yield
    for family, names in before:
        for name in set(family.known) - names:
            del family.known[name]


def _subclasses(parent):
    for child in parent.__subclasses__():
        yield child
        yield from _subclasses(child)


@pytest.fixture(scope="session")
def two_ranks():
    """What a function returns on rank ``here``, each of whose sums is met by one of rank ``there``."""

    def run(function, here, there):
        return in_two_threads(lambda engine: function(*(here, there)[engine.rank], engine.sum))[0]

    return run
