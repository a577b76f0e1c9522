"""``groupwise play``: episodes in a window, or as a video."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image

import groupwise as gw
from groupwise import cli, config
from groupwise.errors import ConfigError, EnvError
from groupwise.report import video
from groupwise.report.folder import RunFolder
from groupwise.report.video import NoPictureError, NoWindowError, Reel, play_episodes
from groupwise.run import play

FFMPEG = f"""#!{sys.executable}
import json, sys
png = sys.stdin.buffer.read()
open(sys.argv[-1], "wb").write(json.dumps([sys.argv[1:-1], png.count(b"IHDR")]).encode())
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> gw.Run:
    env = gw.EnvCfg(id="CartPole-v1", num_envs=2, max_episode_steps=40)
    small = {"total_steps": 32, "evaluation": {"episodes": 1}, "run_dir": tmp_path_factory.mktemp("play") / "run"}
    return gw.train(env, gw.PPOCfg(num_steps=16, num_epochs=1), **small)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # without ffmpeg
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch):
    """SDL draws windows into memory."""
    monkeypatch.setattr(video, "has_display", lambda: True)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder on the ``PATH``, with an ffmpeg that writes its arguments and the number of its pictures."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ffmpeg").write_text(FFMPEG)
    (tmp_path / "bin" / "ffmpeg").chmod(0o755)
    return tmp_path / "bin"


def test_without_a_display_the_episodes_of_eval_become_a_video(run: gw.Run, capsys):
    found = gw.evaluate(run, 3)
    shown = run.path / "play.gif"
    assert cli.main(["play", str(run.path)]) == 0
    printed = capsys.readouterr()
    returns = ", ".join(f"{one:.6g}" for one in found.returns)
    assert printed.out == f"return_mean={found.return_mean:.6g} returns=[{returns}] episodes=3\nvideo: {shown}\n"
    assert printed.err == "no window: no display answers (DISPLAY is None); a video is written\n"
    with Image.open(shown) as image:  # every fifth step, and the ends
        assert 3 <= image.n_frames <= sum(found.lengths) // 5 + 6
        assert image.size == (300, 200)
    assert "SDL_VIDEODRIVER" in os.environ


def test_a_window_writes_nothing(run: gw.Run, capsys, display, tmp_path: Path):
    assert cli.main(["play", str(run.path), "--episodes", "2", "--sampled", "--seed", "3"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    torch.rand(1)  # samples depend on the seed alone
    first = play(run.path, 2, deterministic=False, seed=3)
    one, other = first[0].returns
    assert printed.out == f"return_mean={(one + other) / 2:.6g} returns=[{one:.6g}, {other:.6g}] episodes=2\n"
    assert first[1] is None
    assert play(run.path, 2, deterministic=False, seed=4)[0] != first[0]


def test_closing_the_window_ends_it(run: gw.Run, capsys, display, monkeypatch: pytest.MonkeyPatch):
    import pygame

    step = gymnasium.envs.classic_control.CartPoleEnv.step
    asked = []

    def step_and_close(self, action):
        asked.append(pygame.event.post(pygame.event.Event(pygame.QUIT)))
        return step(self, action)

    monkeypatch.setattr(gymnasium.envs.classic_control.CartPoleEnv, "step", step_and_close)
    assert cli.main(["play", str(run.path), "--episodes", "9"]) == 130
    assert capsys.readouterr().err == "groupwise: the window was closed\n"
    assert asked == [True]


def test_a_window_that_fails_becomes_a_video(run: gw.Run, capsys, display, monkeypatch: pytest.MonkeyPatch):
    def render(self):
        if self.render_mode == "human":
            raise RuntimeError("no screen")
        return np.zeros((20, 30, 3), np.uint8)

    monkeypatch.setattr(gymnasium.envs.classic_control.CartPoleEnv, "render", render)
    assert cli.main(["play", str(run.path), "--episodes", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("no window: rendering CartPole-v1 failed (RuntimeError: no screen); fix: ")
    assert printed.out.endswith(f"video: {run.path / 'play.gif'}\n")


def test_mp4_has_every_step_at_the_speed_of_the_environment(run: gw.Run, programs: Path):
    found, written = play(run.path, 2)
    assert written == run.path / "play.mp4"
    words, pictures = json.loads(written.read_text())
    assert pictures == sum(found.lengths) + 2  # each episode begins with one more
    assert words[words.index("-framerate") + 1] == "50"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no room >&2\nexit 3", "no room"),
        ("printf 'kein Speicherplatz f\\374r' >&2\nexit 1", "kein Speicherplatz f\ufffdr"),
        ("exit 0", "it wrote none"),
        ("exec /bin/sleep 60", "it took longer than 0.5 s"),
    ],
)
def test_an_ffmpeg_that_fails_says_why(
    script: str, message: str, run: gw.Run, programs: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(video, "SECONDS_OF_FFMPEG", 0.5 if "sleep" in script else 60.0)
    (programs / "ffmpeg").write_text(f"#!/bin/sh\n{script}\n")
    with pytest.raises(EnvError, match=rf"ffmpeg could not write the video: {message}; fix: "):
        play(run.path, 1, output="a.mp4")
    assert not Path("a.mp4").exists()


def test_no_program_of_the_run_folder_is_run(run: gw.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "theirs"
    shutil.copytree(run.path, folder)
    (folder / "ffmpeg").write_text(FFMPEG)
    (folder / "ffmpeg").chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", "")  # the working folder
    assert play(folder, 1)[1] == folder / "play.gif"


def test_a_strangers_limit_of_steps_does_not_hold(run: gw.Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(video, "MAX_PLAYED", 5)
    assert play(run.path, 1)[0].lengths == (5,)


def test_a_signal_ends_drawing(tmp_path: Path):
    draw = "from groupwise.report.video import no_display\nimport os, signal\nwith no_display():\n    "
    code = draw + "import pygame; pygame.display.init()\n    os.kill(os.getpid(), signal.SIGTERM)\n    print('alive')"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "alive" in done.stdout) == (-15, False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.avi", "expected a name ending with"),
        ("no/a.gif", "in an existing folder"),
        ("a.mp4", "ffmpeg is not on the PATH"),
    ],
)
def test_videos_that_cannot_be_written_are_refused_first(run: gw.Run, name: str, message: str, monkeypatch):
    monkeypatch.setattr(gw.Run, "load", None)
    with pytest.raises(ConfigError, match=f"--output {name}: .*{message}"):
        play(run.path, output=name)


def test_a_run_on_texts_names_what_shows_it(tmp_path: Path, capsys):
    task = {"data": "prompts.jsonl", "rewards": [{"name": "exact"}]}
    settings = config.resolve_text(task=task, model={"path": "m"}).model_dump(mode="json")
    RunFolder.create(settings, tmp_path / "run", name="x", here=tmp_path)
    assert cli.main(["play", "run"]) == 2
    assert "run is a run on prompts, which has no pictures; fix: groupwise sample or eval" in capsys.readouterr().err


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    gymnasium.register("Blind-v0", entry_point=Blind)
    gymnasium.register("Drawn-v0", entry_point=Drawn)


class Blind(gymnasium.Env):
    """Draws a text only."""

    metadata = {"render_modes": ["ansi"]}
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    render_mode = None

    def __init__(self, **kwargs) -> None:
        pass


class Drawn(Blind):
    """Draws arrays only; Gymnasium makes a window of them."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 1.0, True, False, {"is_success": True}

    def render(self):
        return np.zeros((21, 31, 3), np.uint8)


def test_an_environment_that_cannot_be_drawn_names_its_render_modes(run: gw.Run, display, registered):
    with pytest.raises(NoWindowError, match=r"^no window: .*Blind.*metadata\['render_modes'\] are \['ansi'\]"):
        perform(run, "Blind-v0", None)
    with pytest.raises(NoPictureError, match=r"^no video: .*Blind.*metadata\['render_modes'\] are \['ansi'\]"):
        perform(run, "Blind-v0", Reel(Path("a.gif")))
    with pytest.raises(NoPictureError, match="batched environment, which does not render"):
        play_episodes(run.policy, gw.EnvCfg(), lambda num_envs: None, True, 0, 1, Reel(Path("a.gif")))


def test_an_environment_with_a_window_only_has_that(run: gw.Run, display, registered, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(Drawn.metadata, "render_modes", ["human"])
    assert perform(run, "Drawn-v0", None) == [(1.0, 1, True)]
    with pytest.raises(NoPictureError, match="does not render to arrays"):
        perform(run, "Drawn-v0", Reel(Path("a.gif")))


@pytest.mark.filterwarnings("ignore:.*'human' rendering for an environment that doesn't natively support it")
@pytest.mark.parametrize("reel", [None, Reel(Path("a.gif"))], ids=["window", "video"])
def test_an_environment_that_draws_arrays_has_both(run: gw.Run, display, registered, reel: Reel | None):
    assert perform(run, "Drawn-v0", reel) == [(1.0, 1, True)]
    assert reel is None or len(reel.frames) == 2


def test_an_environment_that_cannot_be_reset_is_closed(run: gw.Run, registered, monkeypatch: pytest.MonkeyPatch):
    closed = []
    monkeypatch.setattr(Drawn, "reset", lambda self, *, seed=None, options=None: 1 / 0)
    monkeypatch.setattr(Drawn, "close", lambda self: closed.append(self))
    with pytest.raises(EnvError, match="division by zero"):
        perform(run, "Drawn-v0", Reel(Path("a.gif")))
    assert len(closed) == 2  # the first one, made to read its render modes, too


def perform(run: gw.Run, env_id: str, reel: Reel | None):
    return play_episodes(run.policy, gw.EnvCfg(id=env_id), None, True, 0, 1, reel)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is a display")
def test_a_display_is_one_that_answers(monkeypatch: pytest.MonkeyPatch):
    for name in (":77", "unix:77.0", "nonsense", ":", "127.0.0.1:59000"):
        monkeypatch.setenv("DISPLAY", name)
        assert not video.has_display()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("DISPLAY", f"127.0.0.1:{server.getsockname()[1] - 6000}.0")
        assert video.has_display()
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert video.has_display()
