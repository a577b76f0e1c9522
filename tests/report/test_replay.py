"""Frames of a group's members: drawn where the replay is what was recorded, refused where it is not."""

import json
from base64 import b64decode
from io import BytesIO

import gymnasium
import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

import groupwise as gw
from groupwise.errors import RunFolderError
from groupwise.report import video as replay
from groupwise.report.folder import kept_iterations, read_frames, read_groups, schema
from groupwise.report.page import load_groups
from groupwise.report.video import film_group
from groupwise.training import build as env_evaluator

SHORT = {
    "num_envs": 3, "max_episode_steps": 12, "total_iterations": 1, "total_steps": None, "evaluation": {"episodes": 1},
    "logging": {"progress": "none"},
}  # fmt: skip
GROUPS_OF_THREE = {"group_size": 3, "num_steps": 4}


@pytest.fixture(scope="module", autouse=True)
def frames():
    """Runs here end with frames, and without a video."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env_evaluator, "film_group", film_group)
        patch.setattr(env_evaluator, "film", lambda *args, **options: None)
        yield


def train(folder, env, **settings):
    algorithm = GROUPS_OF_THREE | settings.pop("algorithm", {})
    return gw.train(env, {"name": "grpo", **algorithm}, run_dir=folder / "run", **SHORT | settings)


class Dot(gymnasium.Env):
    """Walks on a line; what it renders shows where it is. Its steps may be random."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    noise = 0.0
    width = 1

    def __init__(self):
        self.render_mode = "rgb_array"
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (self.width,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(0, 1)
        return self.look(), {}

    def step(self, action):
        self.place += float(action[0]) + self.noise * self.np_random.normal()
        return self.look(), self.place, False, False, {}

    def look(self):
        return np.full(self.width, self.place, np.float32)

    def render(self):
        picture = np.zeros((50, 400, 3), np.uint8)
        picture[:, int(200 + 15 * self.place) % 400] = 255
        return picture


class Windy(Dot):
    noise = 1.0


class Wide(Dot):
    width = 65


class Blind(Dot):
    def __init__(self):
        super().__init__()
        self.render_mode = None


@pytest.fixture(scope="module")
def dots(tmp_path_factory):
    return train(tmp_path_factory.mktemp("dots"), Dot)


def picture_of(frames):
    with Image.open(BytesIO(b64decode(frames.picture))) as image:
        image.load()
        return np.asarray(image.convert("L")).astype(int)


def test_frames_show_where_the_members_were(dots):
    frames = read_frames(dots.path / "frames.json")
    columns = read_groups(kept_iterations(dots.path / "groups")[1])
    assert frames.problem == ""
    assert (frames.width, frames.height) == (134, 17)  # a third of 400 x 50
    assert list(frames.members) == ["0", "1", "2"]
    assert set(columns["group"]) == {frames.group}
    picture = picture_of(frames)
    places = [obs[0] for obs in columns["observation"]]
    where = dict(zip(zip(columns["member"], columns["step"], strict=True), places, strict=True))
    for row, (member, steps) in enumerate(frames.members.items()):
        assert steps == list(range(12))
        for column, step in enumerate(steps[:-1]):
            tile = picture[row * 17 : row * 17 + 17, column * 134 : column * 134 + 134]
            assert tile.sum(axis=0).argmax() == pytest.approx((200 + 15 * where[int(member), step]) / 3, abs=2)


@pytest.mark.parametrize(("last", "expected"), [(0.5, 1), (1.0, 2), (2.0, 2)])
def test_the_group_that_differs_most_in_all_of_training_is_drawn(dots, tmp_path, last, expected):
    columns = read_groups(kept_iterations(dots.path / "groups")[1])
    later = {"iteration": [2] * len(columns["step"]), "reward": [last * reward for reward in columns["reward"]]}
    for number, values in enumerate((columns, columns | later), start=1):
        pyarrow.parquet.write_table(pyarrow.table(values, schema=schema()), tmp_path / f"{number:06}.parquet")
    film_group(dots.policy, gw.EnvCfg(id="given"), Dot, tmp_path, tmp_path / "frames.json")
    frames = read_frames(tmp_path / "frames.json")
    assert frames.iteration == load_groups(tmp_path)[0]["iteration"] == expected  # the first one of the page
    assert frames.picture


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        (Windy, "replaying member 0 of Windy from its seed and actions gave a different state at step 1"),
        (Wide, "more than 64 numbers are not kept"),
    ],
)
def test_a_replay_that_cannot_be_checked_or_goes_elsewhere_is_refused(env, problem, tmp_path):
    run = train(tmp_path, env)
    frames = read_frames(run.path / "frames.json")
    assert problem in frames.problem
    assert (frames.picture, frames.members) == ("", {})
    text = run.report().read_text()
    assert problem in text
    assert 'id="frames"' not in text


@pytest.mark.slow
@pytest.mark.parametrize("env", [Blind, "CartPole-v1"])
def test_without_groups_or_renderer_there_are_no_frames(env, tmp_path):
    run = train(tmp_path, env) if env is Blind else gw.train(env, "ppo", run_dir=tmp_path / "run", **SHORT)
    assert not (run.path / "frames.json").exists()
    assert 'id="frames"' not in run.report().read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "settings", "squashes"),
    [
        ("CartPole-v1", {"num_random_noops": 5}, False),
        ("Pendulum-v1", {}, True),
        ("Pendulum-v1", {"action_chunk": 2}, False),
    ],
)
def test_starts_actions_and_chunks_are_those_of_training(env, settings, squashes, tmp_path):
    cfg = gw.EnvCfg(id=env, num_envs=3, max_episode_steps=12, **settings)
    own = {"num_envs": None, "max_episode_steps": None, "policy": {"squash_output": squashes}}
    frames = read_frames(train(tmp_path, cfg, **own).path / "frames.json")
    assert frames.problem == ""
    assert len(frames.members) == 3


def test_training_does_not_depend_on_it(dots, tmp_path, monkeypatch):
    monkeypatch.setattr(env_evaluator, "film_group", lambda *args: None)
    other = train(tmp_path, Dot)
    for name, parameter in dots.policy.state_dict().items():
        assert parameter.equal(other.policy.state_dict()[name])


def test_number_and_size_are_bounded(dots, tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "MAX_MEMBERS", 2)
    monkeypatch.setattr(replay, "MAX_REPLAY_FRAMES", 10)
    film_group(dots.policy, gw.EnvCfg(id="given"), Dot, dots.path / "groups", tmp_path / "frames.json")
    frames = read_frames(tmp_path / "frames.json")
    assert len(frames.members) == 2
    assert all(len(steps) <= 5 and steps[-1] == 11 for steps in frames.members.values())


def test_frames_are_compressed_until_they_fit(monkeypatch):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 160, 3), dtype=np.uint8))
    fine = len(replay.sheet([[noise] * 4]))
    monkeypatch.setattr(replay, "MAX_BYTES", fine // 2)
    assert len(replay.sheet([[noise] * 4])) <= fine // 2
    monkeypatch.setattr(replay, "MAX_BYTES", 100)
    with pytest.raises(replay.NoFramesError, match="more than 100 bytes"):
        replay.sheet([[noise] * 4])


def test_frames_of_strangers_are_checked(dots, tmp_path):
    kept = json.loads((dots.path / "frames.json").read_text())
    for wrong in ({"picture": '"><script>'}, {"width": 10**9}, {"members": {"0": ["x"]}}):
        (tmp_path / "frames.json").write_text(json.dumps(kept | wrong))
        with pytest.raises(RunFolderError, match=r"frames\.json is damaged"):
            read_frames(tmp_path / "frames.json")
