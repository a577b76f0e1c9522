import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image

from groupwise.config.run import EnvCfg
from groupwise.errors import EnvError
from groupwise.policies.actor_critic import ActorCritic
from groupwise.policies.recurrent import RecurrentActorCritic
from groupwise.report import curve, video
from groupwise.report.curve import plot_curve
from groupwise.report.folder import mean_ci95, scores_of, wilson_95
from groupwise.report.video import NoPictureError, film, rendering_env

pytestmark = pytest.mark.usefixtures("pictures")

TRAINING = {"env_steps": 10, "rollout/return_mean": 3.0}
EVALUATION = {"env_steps": 20, "eval/return_mean": 4.0, "eval/return_std": 1.0, "eval/episodes": 5.0}


@pytest.mark.parametrize(
    "metrics",
    [[], [TRAINING], [EVALUATION], [TRAINING, EVALUATION, TRAINING | EVALUATION | {"env_steps": 2_000_000}]],
    ids=["nothing", "training", "evaluation", "both"],
)
def test_a_curve_is_written_and_shows_its_points(metrics: list[dict[str, Any]], tmp_path: Path):
    plot_curve(metrics, tmp_path / "curve.svg", "CartPole-v1 <a>, grpo, seed 0", "steps", "return")
    svg = ElementTree.parse(tmp_path / "curve.svg").getroot()
    assert svg.tag.endswith("}svg")
    assert "CartPole-v1 <a>, grpo, seed 0" in "".join(svg.itertext())
    evaluated = sum("eval/return_mean" in entry for entry in metrics)
    assert len(svg.findall(f".//*[@fill='{curve.EVALUATION}'][@cx]")) == evaluated


def test_points_of_a_curve_by_hand():
    # steps 0 to 20 are 586 pixels from 88 on, returns 3 to 4 are 296 pixels from 330 up
    metrics = [TRAINING, EVALUATION | {"eval/return_std": 0.0}]
    svg = curve.curve_svg(metrics, "", "steps", "return")
    assert re.findall(r'<circle cx="([0-9.]+)" cy="([0-9.]+)"', svg) == [("381.0", "330.0"), ("674.0", "34.0")]
    assert svg.count("<g ") == 1
    metrics[1]["eval/success_rate"] = 0.5
    assert curve.curve_svg(metrics, "", "steps", "return").count("<g ") == 2


def test_intervals_of_shares_hold_them():
    # Wilson's lower end of 3 of 4, z^2 = 3.841459: (0.75 + 0.480182 - 1.959964 sqrt(0.75 * 0.25 / 4 + 3.841459 / 64))
    # / 1.960365 = (1.230182 - 1.959964 * 0.326952) / 1.960365 = 0.300642
    assert wilson_95(0.75, 4)[0] == pytest.approx(0.300642, abs=2e-6)
    for count in range(1, 200):
        for successes in (0, 1, count):
            low, high = wilson_95(successes / count, count)
            assert 0 <= low <= successes / count <= high <= 1


def test_the_best_evaluation_is_that_of_the_metric():
    fixed = {"iteration": 1, "time/total_seconds": 1.0}
    first = fixed | EVALUATION | {"eval/success_rate": 0.4, "eval/return_mean": 9.0}
    last = fixed | EVALUATION | {"eval/success_rate": 0.6, "env_steps": 30, "rollout/success_rate": 0.1}
    by_return, by_success = scores_of([first, last]), scores_of([first, last], "success_rate")
    assert [found["best_env_steps"] for found in (by_return, by_success)] == [20, 30]
    assert [found["best_success_rate"] for found in (by_return, by_success)] == [0.4, 0.6]
    assert (by_return["success_rate"], by_return["training_success_rate"]) == (0.6, 0.1)
    assert not any("success" in name for name in scores_of([fixed | TRAINING | EVALUATION]))


def test_interval_of_a_mean_by_the_table():
    # Student's t at 97.5 %: 12.7062 (1 degree of freedom), 2.0930 (19)
    for mean, std, count, t in ((0.0, 2.0, 2, 12.7062), (100.0, 10.0, 20, 2.0930)):
        half = t * std / count**0.5
        assert mean_ci95(mean, std, count) == pytest.approx((mean - half, mean + half), rel=1e-4)
    assert mean_ci95(1.0, 0.0, 1) is None


@pytest.mark.parametrize(
    ("low", "high"),
    [(-200.09999999999997, -200.09999999999994), (5e-324, 1e-323), (-1e308, 1e308), (0.0, 0.0), (3.0, 3.0 + 2**-50)],
)
def test_scores_that_differ_by_rounding_or_are_extreme_have_a_curve(low, high):
    metrics = [{"env_steps": step, "rollout/return_mean": score} for step, score in ((1, low), (2, high))]
    assert "nan" not in curve.curve_svg(metrics, "", "steps", "return")


def test_a_single_episode_has_no_interval_in_the_summary_and_still_a_curve():
    single = EVALUATION | {"iteration": 1, "eval/return_std": 0.0, "eval/episodes": 1.0}
    assert scores_of([single])["ci95"] is None
    two = scores_of([single | {"eval/return_std": 2.0, "eval/episodes": 2.0}])
    assert two["ci95"] == pytest.approx([4 - 17.9693, 4 + 17.9693], abs=1e-3)  # 12.7062 * 2 / sqrt(2)
    assert "nan" not in curve.curve_svg([single], "one episode", "steps", "return")


class Corridor(gymnasium.Env):
    """Lasts 40 steps and draws the number of the step as a grey level."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = "rgb_array", width: int = 800) -> None:
        self.render_mode = render_mode
        self.width = width

    def reset(self, **kwargs: Any) -> Any:
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps == 40, False, {}

    def render(self) -> Any:
        return np.full((100, self.width, 3), 5 * self.steps, np.uint8)


class FatalError(Exception):
    """Of a library in C, derived from no usual error."""


class OpenGLMissing(Corridor):
    """Its second failure hides nothing."""

    def render(self) -> Any:
        raise FatalError("an OpenGL platform library\nhas not been loaded")

    def close(self) -> None:
        raise FatalError("nothing to free")


class NoDevice(Corridor):
    def __init__(self) -> None:
        raise FatalError("no device")


def policy_for(env: gymnasium.Env) -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic(env.observation_space, env.action_space, actor_only=True)


def levels_and_delays(path: Path) -> tuple[list[int], list[int]]:
    """Grey level of each frame, and the milliseconds that it stays."""
    levels, delays = [], []
    with Image.open(path) as image:
        for index in range(image.n_frames):
            image.seek(index)
            image.load()
            levels.append(image.convert("L").getpixel((0, 0)))
            delays.append(image.info["duration"])
    return levels, delays


@pytest.mark.parametrize("name", ["policy.gif", "policy.webp"])
def test_video_plays_the_whole_episode_at_its_speed(name: str, tmp_path: Path):
    env = Corridor()
    film(policy_for(env), EnvCfg(), lambda: env, tmp_path / name, seed=0)
    with Image.open(tmp_path / name) as image:
        assert image.size == (400, 50)  # halved from 800 x 100
    levels, delays = levels_and_delays(tmp_path / name)
    assert delays == [100] * 40 + [1000]  # 10 frames a second, then the end of the episode
    assert levels == pytest.approx([5 * i for i in range(41)], abs=3)  # WebP loses some


def test_a_limit_of_steps_holds_for_a_callable_too(tmp_path: Path):
    film(policy_for(Corridor()), EnvCfg(max_episode_steps=5), Corridor, tmp_path / "policy.gif", seed=0)
    assert len(levels_and_delays(tmp_path / "policy.gif")[0]) == 6


def test_a_recurrent_policy_is_filmed(tmp_path: Path):
    policy = RecurrentActorCritic(Corridor.observation_space, Corridor.action_space, actor_only=True)
    film(policy, EnvCfg(), Corridor, tmp_path / "policy.gif", seed=0)
    assert len(levels_and_delays(tmp_path / "policy.gif")[0]) == 41


@pytest.mark.parametrize(("fps", "most", "every", "delay"), [(50, 100, 5, 100), (10, 12, 4, 400)])
def test_fast_environments_and_long_episodes_show_fewer_steps_at_the_same_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fps: int, most: int, every: int, delay: int
):
    monkeypatch.setitem(Corridor.metadata, "render_fps", fps)
    monkeypatch.setattr(video, "MAX_FRAMES", most)
    film(policy_for(Corridor()), EnvCfg(), Corridor, tmp_path / "policy.gif", seed=0)
    levels, delays = levels_and_delays(tmp_path / "policy.gif")
    assert levels == [*range(0, 200, 5 * every), 200]  # of the 40 steps, and the end
    assert delays == [delay] * (40 // every) + [1000]


def test_frames_of_many_colours_keep_them(tmp_path: Path):
    class Rainbow(Corridor):
        def render(self) -> Any:
            ramp = np.arange(self.width * 100).reshape(100, self.width) % 256
            return np.roll(np.stack([ramp, 255 - ramp, 0 * ramp + 6 * self.steps], -1), self.steps, 1).astype(np.uint8)

    film(policy_for(Corridor()), EnvCfg(), lambda: Rainbow(width=300), tmp_path / "policy.gif", seed=0)
    env = Rainbow(width=300)
    with Image.open(tmp_path / "policy.gif") as image:
        for env.steps in (0, 20, 40):
            image.seek(env.steps)
            error = np.abs(np.asarray(image.convert("RGB")).astype(int) - env.render())
            assert error.mean() < 8


def test_cartpole_is_drawn_without_a_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    env = gymnasium.make("CartPole-v1")
    film(policy_for(env), EnvCfg(id="CartPole-v1"), None, tmp_path / "policy.gif", seed=0)
    with Image.open(tmp_path / "policy.gif") as image:
        assert image.n_frames > 2  # of about ten steps, at 10 frames a second
    assert "SDL_VIDEODRIVER" not in os.environ


@pytest.mark.slow
def test_mujoco_is_drawn_without_a_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    env = gymnasium.make("InvertedPendulum-v5")
    for attempt in range(2):
        film(policy_for(env), EnvCfg(id="InvertedPendulum-v5"), None, tmp_path / f"{attempt}.gif", seed=0)
    assert "MUJOCO_GL" not in os.environ


class TakesNoArguments(gymnasium.Env):
    """What a user writes who never draws."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)


def test_an_environment_without_pictures_says_so():
    with pytest.raises(NoPictureError, match=r"does not render to arrays .*; fix: .*render_mode='rgb_array'"):
        rendering_env(EnvCfg(kwargs={"render_mode": None}), Corridor)
    gymnasium.register("TakesNoArguments-v0", entry_point=TakesNoArguments)
    with pytest.raises(NoPictureError, match="does not render to arrays"):
        rendering_env(EnvCfg(id="TakesNoArguments-v0"), None)


@pytest.mark.parametrize(
    ("frame", "named"),
    [
        (np.zeros((8, 8, 1), np.uint8), r"uint8 \[8, 8, 1\]"),
        (np.zeros((8, 8, 3)), r"float64 \[8, 8, 3\]"),
        (np.zeros(8, np.uint8), r"uint8 \[8\]"),
        (None, "a NoneType"),
        ([np.zeros((8, 8, 3), np.uint8)], "a list"),
    ],
    ids=["one channel", "floats", "a row", "none", "list"],
)
def test_a_frame_that_is_no_picture_says_what_it_is(tmp_path: Path, frame: Any, named: str):
    class Frame(Corridor):
        def render(self) -> Any:
            return frame

    expected = rf"no video: render\(\) of Frame returned {named}, expected a picture; fix: return uint8 \[H, W, 3\]$"
    with pytest.raises(EnvError, match=expected):
        film(policy_for(Corridor()), EnvCfg(), Frame, tmp_path / "policy.gif", seed=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (OpenGLMissing, "FatalError: an OpenGL platform library has not been loaded"),
        (NoDevice, "FatalError: no device"),
    ],
)
def test_whatever_a_renderer_raises_is_one_error_of_ours(tmp_path: Path, broken: type[Corridor], reason: str):
    with pytest.raises(EnvError, match=r"^no video: rendering .* failed \(.*\); fix: install what") as caught:
        film(policy_for(Corridor()), EnvCfg(), broken, tmp_path / "policy.gif", seed=0)
    assert reason in str(caught.value)
    assert not isinstance(caught.value, NoPictureError)
    assert list(tmp_path.iterdir()) == []
