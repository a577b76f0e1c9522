"""Recording experts: what is kept, what is executed, and what is stored."""

import json
import shlex
from itertools import count
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import toy_robots
from toy_robots import STEP, along_the_longer_axis, straight

import groupwise as gw
from groupwise import cli
from groupwise.embodied.demos import record_demos
from groupwise.embodied.experts import EXPERTS, register_expert
from groupwise.embodied.lerobot import read_demos

pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.contrib
toy_robots.register()
REACHING = toy_robots.Reaching.observation_space
INSIDE = 0.95
"""Actions below it are not clipped, even with the noise of these tests."""


def noise_of(folder):
    """What the environment received beyond the stored actions, at steps whose next one is stored."""
    found = read_demos(folder, REACHING)
    point = found.obs.numpy()[:, :2]
    follows = found.episode[1:] == found.episode[:-1]
    executed = (point[1:] - point[:-1])[follows] / STEP
    stored = found.action[:-1][follows]
    inside = np.abs(stored) < INSIDE
    return (executed - stored)[inside]


def test_stored_actions_are_the_expert_s_at_what_it_saw(tmp_path):
    record_demos("ToyReaching-v0", straight, episodes=10, noise=0.5, out=tmp_path / "x")
    found = read_demos(tmp_path / "x", REACHING)
    expected = np.stack([straight(obs) for obs in found.obs.numpy()])
    np.testing.assert_allclose(found.action, expected, atol=1e-6)


def test_noise_has_the_deviation_that_was_asked_for(tmp_path):
    def slow(obs):
        return straight(obs) / 4

    record_demos("ToyReaching-v0", slow, episodes=60, noise=0.1, out=tmp_path / "x", keep_failures=True)
    noise = noise_of(tmp_path / "x")
    assert len(noise) > 500
    assert noise.std() == pytest.approx(0.1, rel=0.1), "half of the range is 1"
    record_demos("ToyReaching-v0", straight, episodes=10, noise=0.0, out=tmp_path / "y")
    np.testing.assert_allclose(noise_of(tmp_path / "y"), 0, atol=1e-5)
    assert abs(noise.mean()) < 0.02


def test_discrete_noise_is_a_random_action(tmp_path):
    record_demos("ToyTurning-v0", along_the_longer_axis, episodes=5, noise=1.0, out=tmp_path / "x", keep_failures=True)
    found = read_demos(tmp_path / "x", REACHING)
    assert found.action[:, 0].tolist() == [along_the_longer_axis(obs) for obs in found.obs.numpy()]
    moves = np.diff(found.obs.numpy()[:, :2], axis=0)[found.episode[1:] == found.episode[:-1]]
    stays = (np.abs(moves) < 1e-6).all(axis=1).mean()
    assert 0.1 < stays < 0.35, "one of five random actions stays, and the expert never does"


def test_only_successes_are_kept(tmp_path):
    def sometimes(obs):
        return straight(obs) if obs[2] > 0 else np.zeros(2)

    found = record_demos("ToyReaching-v0", sometimes, episodes=8, noise=0.0, out=tmp_path / "x")
    assert found.episodes == 8
    assert found.attempts > 8
    obs = read_demos(tmp_path / "x", REACHING).obs.numpy()
    assert (obs[:, 2] > 0).all()
    settings = {"episodes": 8, "noise": 0.0, "keep_failures": True}
    everything = record_demos("ToyReaching-v0", sometimes, out=tmp_path / "y", **settings)
    assert everything.attempts == 8
    assert (read_demos(tmp_path / "y", REACHING).obs.numpy()[:, 2] < 0).any()
    silent = record_demos("Pendulum-v1", lambda obs: [0.0], episodes=2, out=tmp_path / "z")
    assert (silent.episodes, silent.attempts, silent.steps) == (2, 2, 400), "it says nothing of success"


@pytest.mark.parametrize("successes", [[2, 4, 6], [0, 1, 5], []])
def test_an_episode_without_a_flag_failed_if_another_has_one(successes, tmp_path, monkeypatch):
    class AtSuccess(gymnasium.Env):
        """Shows the number of the attempt, and gives its flag only at success."""

        observation_space = gymnasium.spaces.Box(-1, 99, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)
        attempt = -1

        def reset(self, *, seed=None, options=None):
            self.attempt += 1
            return np.float32([self.attempt]), {}

        def step(self, action):
            flag = {"is_success": True} if self.attempt in successes else {}
            return np.float32([self.attempt]), 0.0, True, False, flag

    space = AtSuccess.observation_space
    record_demos(AtSuccess, lambda obs: 0, episodes=7, keep_failures=True, out=tmp_path / "x")
    assert read_demos(tmp_path / "x", space).obs[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    stored = pq.read_table(tmp_path / "x/data/chunk-000/file-000.parquet").to_pydict().get("next.success", [])
    assert stored == [attempt in successes for attempt in range(7) if successes]
    record_demos(AtSuccess, lambda obs: 0, episodes=3, out=tmp_path / "y")
    assert read_demos(tmp_path / "y", space).obs[:, 0].tolist() == (successes or [0, 1, 2])
    monkeypatch.setattr("groupwise.embodied.demos._MOST_HELD", 0)  # of a long recording, only so much waits for a flag
    record_demos(AtSuccess, lambda obs: 0, episodes=3, out=tmp_path / "z")
    kept = successes if 0 in successes else [0, 1, 2]
    assert read_demos(tmp_path / "z", space).obs[:, 0].tolist() == kept


def test_the_same_seed_records_the_same(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        record_demos("ToyReaching-v0", straight, episodes=3, seed=seed, out=tmp_path / name)
    data = [(tmp_path / name / "data/chunk-000/file-000.parquet").read_bytes() for name in "abc"]
    assert data[0] == data[1]
    assert data[0] != data[2]


def test_images_and_instructions_are_kept(tmp_path):
    record_demos("ToySeeing-v0", straight, episodes=12, out=tmp_path / "x")
    found = read_demos(tmp_path / "x", toy_robots.Seeing.observation_space)
    env = toy_robots.Seeing()
    for obs, image, text in zip(*(found.obs[key].numpy() for key in ("proprio", "image", "instruction")), strict=True):
        env.point, env.goal = obs[:2], obs[2:]
        np.testing.assert_array_equal(text, env.look()["instruction"])
        np.testing.assert_array_equal(image[0], env.look()["image"][0])
    assert len({bytes(text) for text in found.obs["instruction"].numpy()}) == 2


class Told(gymnasium.Env):
    """Three steps, whose observations have the given instructions."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, space, told):
        x = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        self.observation_space, self.told = gymnasium.spaces.Dict(instruction=space, x=x), told

    def look(self):
        return {"instruction": self.told[self.steps], "x": np.zeros(1, np.float32)}

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.look(), {}

    def step(self, action):
        self.steps += 1
        return self.look(), 1.0, self.steps == 3, False, {}


@pytest.mark.parametrize(
    ("space", "told"),
    [
        (gymnasium.spaces.Box(0, 1, (3,), np.int64), np.eye(4, 3, dtype=np.int64)),
        (gymnasium.spaces.Box(0, 9, (2,), np.float32), np.arange(8, dtype=np.float32).reshape(4, 2)),
        (gymnasium.spaces.Box(0, 255, (2, 2), np.uint8), np.arange(200, 216, dtype=np.uint8).reshape(4, 2, 2)),
        (gymnasium.spaces.Box(0, 255, (4, 4, 3), np.uint8), np.arange(192, dtype=np.uint8).reshape(4, 4, 4, 3)),
        (gymnasium.spaces.Discrete(4), np.arange(4)),
        (gymnasium.spaces.MultiDiscrete([4, 4], dtype=np.uint8), np.arange(8, dtype=np.uint8).reshape(4, 2) // 2),
    ],
)
def test_an_entry_called_instruction_that_is_no_text_is_kept_at_each_step(space, told, tmp_path):
    record_demos(lambda: Told(space, told), lambda obs: 0, episodes=1, out=tmp_path / "x")
    found = read_demos(tmp_path / "x", Told(space, told).observation_space).obs["instruction"]
    np.testing.assert_array_equal(found.numpy(), told[:3])


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        (
            [b"open", b"open", b"shut"],
            "'instruction' changes within an episode, from b'open' to b'shut'.*fix: one inst",
        ),
        ([b"\xff"] * 3, "'instruction' is not UTF-8 .*0xff.*fix: text.encode"),
    ],
)
def test_an_instruction_is_one_text_for_each_episode(texts, named, tmp_path):
    told = [np.frombuffer(text.ljust(6, b"\0"), np.uint8) for text in [*texts, texts[0]]]
    with pytest.raises(gw.errors.DataError, match=named):
        record_demos(
            lambda: Told(gymnasium.spaces.Box(0, 255, (6,), np.uint8), told), lambda obs: 0, out=tmp_path / "x"
        )


def test_a_callable_and_settings(tmp_path):
    cfg = gw.EnvCfg(id="ToyReaching-v0", max_episode_steps=2)
    found = record_demos(cfg, straight, episodes=4, out=tmp_path / "x", keep_failures=True)
    assert found.steps <= 8
    record_demos(lambda: gymnasium.make("ToyReaching-v0"), straight, episodes=2, out=tmp_path / "steps")
    record_demos(gw.EnvCfg(id="ToyReaching-v0", action_chunk=3), straight, episodes=2, out=tmp_path / "chunks")
    chunks, steps = (read_demos(tmp_path / name, REACHING) for name in ("chunks", "steps"))
    np.testing.assert_array_equal(chunks.action, steps.action)


def test_an_expert_s_actions_are_repeated(tmp_path, capsys, monkeypatch):
    def slow(obs):
        return straight(obs) / 4

    record_demos(gw.EnvCfg(id="ToyReaching-v0", action_repeat=3), slow, episodes=4, noise=0.0, out=tmp_path / "x")
    moved = noise_of(tmp_path / "x")  # two steps more than the action
    found = read_demos(tmp_path / "x", REACHING)
    same = found.episode[1:] == found.episode[:-1]
    assert same.sum() >= 4
    np.testing.assert_allclose(moved, 2 * found.action[:-1][same].ravel(), atol=1e-5)
    info = json.loads((tmp_path / "x/meta/info.json").read_text())
    assert (info["fps"], info["action_repeat"]) == (7, 3)  # 20 steps a second
    record_demos(lambda: gymnasium.make("ToyReaching-v0"), straight, episodes=1, out=tmp_path / "unknown")
    assert "action_repeat" not in json.loads((tmp_path / "unknown/meta/info.json").read_text())
    assert read_demos(tmp_path / "unknown", REACHING).action_repeat is None

    monkeypatch.setitem(EXPERTS, "ToyReaching", lambda env, info: straight)
    assert cli.main(["demos", "ToyReaching-v0", "--env.action-repeat", "2", "--out", str(tmp_path / "y")]) == 0
    again = capsys.readouterr().out.splitlines()[-1].removeprefix("Next:  ")
    assert again.startswith("groupwise train ToyReaching-v0 --env.action-repeat 2 --algorithm bc")
    clone = [*shlex.split(again)[1:], "--total-steps", "64", "--evaluation.episodes", "1", "--run-dir"]
    assert cli.main([*clone, str(tmp_path / "clone")]) == 0
    assert cli.main([*clone, str(tmp_path / "other"), "--env.action-repeat", "3"]) == 2
    refused = "was recorded with env.action_repeat=2, but this run has 3; fix: the same in both"
    assert refused in capsys.readouterr().err
    train = ["train", "ToyReaching-v0", "--algorithm", "bc", "--run-dir", str(tmp_path / "other")]
    assert cli.main([*train, "--env.action-repeat", "3"]) == 2
    assert capsys.readouterr().err.endswith("fix: groupwise demos ToyReaching-v0 --env.action-repeat 3\n")


class Cards(gymnasium.Env):
    """Each of 3 cards may be played once, the first one whenever it is the expert's turn; the text has no fixed shape."""

    observation_space = gymnasium.spaces.Dict(
        x=gymnasium.spaces.Box(0, 3, (1,), np.float32),
        action_mask=gymnasium.spaces.MultiBinary(3),
        mission=gymnasium.spaces.Text(9),
    )
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = np.ones(3, np.int8)
        return self.look(), {}

    def look(self):
        return {
            "x": self.left.sum(keepdims=True).astype(np.float32),
            "action_mask": self.left.copy(),
            "mission": "play",
        }

    def step(self, action):
        assert self.left[action], f"card {action} was played before"
        self.left[action] = 0
        return self.look(), 1.0, bool(self.left.sum() == 1), False, {}


def test_noise_obeys_masks_and_what_has_no_fixed_shape_is_not_recorded(tmp_path):
    missions = []

    def expert(obs):
        missions.append(obs["mission"])
        return obs["action_mask"].argmax()

    record_demos(Cards, expert, episodes=20, noise=0.9, out=tmp_path / "x")
    space = gymnasium.spaces.Dict({key: Cards.observation_space[key] for key in ("x", "action_mask")})
    found = read_demos(tmp_path / "x", space)
    assert sorted(found.obs.keys()) == ["action_mask", "x"]
    assert set(missions) == {"play"}
    second = found.obs["x"][:, 0] == 2
    assert 0.2 < (found.obs["action_mask"][second][:, 0] == 1).float().mean() < 0.8  # the first card was not played


class TwoHands(gymnasium.Env):
    """An action for each hand."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Dict({"left": observation_space, "right": observation_space})

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, True, False, {"is_success": True}


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_actions_of_a_discrete_space_are_numbers_that_may_be_keys(noise, tmp_path):
    demos = record_demos(
        "FrozenLake-v1", lambda obs: 2, episodes=2, noise=noise, keep_failures=True, out=tmp_path / "x"
    )
    assert demos.episodes == 2


@pytest.mark.parametrize(
    ("env", "expert", "settings", "error", "named"),
    [
        ("CartPole-v1", None, {}, gw.errors.ConfigError, "no expert is known for 'CartPole-v1'.*expert="),
        ("ToyReaching-v0", lambda obs: np.zeros(3), {}, gw.errors.DataError, r"shape \[3\], expected \[2\]"),
        (
            "CartPole-v1",
            lambda obs: 0.7,
            {},
            gw.errors.DataError,
            "the expert's action has dtype float64, expected int64",
        ),
        ("CartPole-v1", lambda obs: 2, {}, gw.errors.DataError, "the expert's action holds 2, expected 0 to 1"),
        ("ToyReaching-v0", lambda obs: -straight(obs), {"episodes": 2}, gw.errors.DataError, "in [01] of 40 episodes"),
        ("ToyReaching-v0", straight, {"episodes": 0}, gw.errors.ConfigError, "episodes = 0"),
        ("ToyReaching-v0", straight, {"noise": -0.1}, gw.errors.ConfigError, "noise = -0.1"),
        ("ToyReaching-v0", straight, {"noise": np.nan}, gw.errors.ConfigError, "noise = nan"),
        (TwoHands, straight, {}, gw.errors.UnsupportedSpaceError, r"the actions are Dict\(.* holds one vector; fix"),
    ],
)
def test_mistakes_are_named(env, expert, settings, error, named, tmp_path):
    with pytest.raises(error, match=named):
        record_demos(env, expert, out=tmp_path / "x", **settings)


def test_a_folder_that_is_taken_is_refused_and_left_as_it_is(tmp_path):
    kept = record_demos("ToyReaching-v0", straight, episodes=1, out=tmp_path / "x").path
    before = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    with pytest.raises(gw.errors.ConfigError, match=r"the folder '.*x' is taken"):
        record_demos("ToyReaching-v0", straight, episodes=2, out=kept)
    assert {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(gw.errors.ConfigError, match="is taken"):
        record_demos("ToyReaching-v0", straight, out=tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert record_demos("ToyReaching-v0", straight, episodes=1, out=tmp_path / "empty").episodes == 1


@pytest.mark.parametrize("end", [ValueError, KeyboardInterrupt])
def test_a_recording_that_does_not_end_leaves_the_folder_free(end, tmp_path):
    steps = count()

    def stopping(obs):
        if next(steps) == 60:
            raise end
        return straight(obs)

    settings = {"episodes": 20, "out": tmp_path / "x"}
    with pytest.raises(end):
        record_demos("ToyReaching-v0", stopping, **settings)
    with pytest.raises(gw.errors.DataError, match="fix: less noise"):
        record_demos("ToyReaching-v0", lambda obs: straight(obs) if next(steps) < 120 else -straight(obs), **settings)
    assert record_demos("ToyReaching-v0", straight, **settings).episodes == 20
    assert {path.name for path in (tmp_path / "x").iterdir()} == {"data", "meta"}


def test_an_environment_that_is_drawn_less_than_once_a_second(tmp_path):
    class Slow(toy_robots.Reaching):
        metadata = {"render_modes": [], "render_fps": 0.5}

    record_demos(Slow, straight, episodes=1, out=tmp_path / "x")
    assert json.loads((tmp_path / "x/meta/info.json").read_text())["fps"] == 1


def test_the_command_records_a_registered_expert(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(EXPERTS, "ToyReaching", None)  # restored after the test
    register_expert("ToyReaching")(lambda env, info: straight)
    monkeypatch.chdir(tmp_path)
    words = ["--episodes", "3", "--noise", "0.2", "--env.max-episode-steps", "20"]
    assert cli.main(["demos", "ToyReaching-v0", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Recorded 3 episodes (")
    again = (
        "groupwise train ToyReaching-v0 --env.max-episode-steps 20 --algorithm bc --algorithm.data demos/ToyReaching-v0"
    )
    assert again in out
    assert len(set(read_demos(tmp_path / "demos/ToyReaching-v0", REACHING).episode)) == 3
    clone = [*shlex.split(again)[1:], "--run-dir", "clone", "--total-steps", "200", "--env.kwargs", "{}"]
    assert cli.main([*clone, "--evaluation.episodes", "1"]) == 0
    following = capsys.readouterr().out.splitlines()[-1]
    assert following == "Next:  groupwise train ToyReaching-v0 --env.max-episode-steps 20 --policy.init-from clone"
    goes_on = ["--run-dir", "next", "--total-iterations", "1", "--evaluation.episodes", "1"]
    assert cli.main([*shlex.split(following)[2:], *goes_on]) == 0
    Path("run.json").write_text(json.dumps({"env": {"id": "ToyReaching-v0", "max_episode_steps": 20}, "seed": 5}))
    assert cli.main(["demos", "run.json", "--episodes", "1", "--out", "of_file"]) == 0
    assert again.replace("demos/ToyReaching-v0", "of_file") in capsys.readouterr().out
    assert cli.main(["demos", "ToyReaching-v0", "--help"]) == 0
    assert "--keep-failures" in capsys.readouterr().out
    assert cli.main(["demos", "CartPole-v1"]) == 2
    assert (
        "no expert is known for 'CartPole-v1'; fix: --plugin FILE.py with @register_expert(" in capsys.readouterr().err
    )
    assert cli.main(["demos"]) == 2
    assert capsys.readouterr().err.endswith("an expert; fix: groupwise demos FetchPush-v4 (see --help)\n")


def test_an_expert_of_the_user_s_stays_when_built_in_ones_register(monkeypatch):
    monkeypatch.setitem(EXPERTS, "Toy", straight)

    def maker(env, info):
        raise AssertionError

    maker.__module__ = "groupwise.embodied.toy"
    register_expert("Toy")(maker)
    assert EXPERTS["Toy"] is straight
