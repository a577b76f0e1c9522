import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch

import groupwise as gw
from groupwise.envs.make import make_env
from groupwise.errors import EnvError, UnknownNameError

pytest.importorskip("metaworld")
pytestmark = pytest.mark.contrib

from metaworld.env_dict import ALL_V3_ENVIRONMENTS  # noqa: E402

from groupwise.embodied.metaworld import (  # noqa: E402
    INSTRUCTIONS,
    MetaWorldEnv,
    Renderer,
    expert,
    instruction_bytes,
    touches,
)

MOVES_THE_MODEL = ["push-v3", "door-open-v3", "door-lock-v3", "basketball-v3"]
"""Starts of the last three move bodies or sites of the model."""


@pytest.fixture
def make():
    made = []

    def make_one(*tasks, **settings):
        made.append(MetaWorldEnv(tasks, **settings))
        return made[-1]

    yield make_one
    for env in made:
        env.close()


def actions(seed: int, number: int = 30) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (number, 4)).astype(np.float32)


def play(env: MetaWorldEnv, moves: np.ndarray) -> list:
    return [(step[0].tolist(), *step[1:4]) for step in map(env.step, moves)]


@pytest.mark.parametrize("task", MOVES_THE_MODEL)
def test_the_seed_alone_decides_the_start(make, task):
    env, used = make(task), make(task)
    for seed in range(3):
        used.reset(seed=seed)
        play(used, actions(seed, 5 + 10 * seed))
    first, again = env.reset(seed=7)[0], used.reset(seed=7)[0]
    assert np.array_equal(first, again)
    assert play(env, actions(1)) == play(used, actions(1))
    starts = {tuple(env.reset(seed=seed)[0]) for seed in range(5)}
    assert len(starts) == 5
    if task == "push-v3":
        found = np.array(list(starts))
        puck, goal = found[:, 4:6], found[:, 36:38]
        assert min(puck.std(0).min(), goal.std(0).min()) > 0.01
        assert np.linalg.norm(puck - goal, axis=1).min() >= 0.15 - 1e-6  # so the package draws them


@pytest.mark.parametrize("task", [*MOVES_THE_MODEL, "drawer-open-v3"])
def test_rows_that_share_a_simulator_do_not_notice_and_captured_states_go_on_bit_for_bit(make, task):
    env, other = make(task, "reach-v3", reward="dense"), make(task, "reach-v3", reward="dense")
    seed = next(seed for seed in range(20) if env.reset(seed=seed)[1]["task"] == task)
    play(env, actions(0, 10))
    state, image = env.clone_state(), env.image()
    expected = play(env, actions(1))
    other.reset(seed=seed + 1)
    for restored in (other, env):
        restored.restore_state(state)
        assert np.array_equal(restored.image(), image)
        assert play(restored, actions(1)) == expected
    env.restore_state(state)
    in_turns = []
    for mine, theirs in zip(actions(1), actions(9), strict=True):
        in_turns += play(env, mine[None])
        other.step(theirs)
    assert in_turns == expected


@pytest.mark.slow
@pytest.mark.parametrize("task", INSTRUCTIONS)
def test_every_task_can_be_captured(make, task):
    env, other = make(task, reward="dense"), make(task, reward="dense")
    env.reset(seed=0)
    other.reset(seed=1)
    state = env.clone_state()
    expected = play(env, actions(1))
    other.restore_state(state)
    assert play(other, actions(1)) == expected


def rewards_of_expert(env: MetaWorldEnv, task: str, seed: int) -> list[float]:
    """Rewards up to the success, which ends the episode."""
    act = expert(task)
    env.reset(seed=seed)
    rewards, terminated = [], False
    while not terminated and len(rewards) < 100:
        _, reward, terminated, truncated, info = env.step(act(env.state))
        rewards.append(reward)
        assert info == {"task": task, "success": terminated}
        assert not truncated
    assert terminated
    return rewards


def test_success_ends_the_episode_and_is_the_reward_or_costs_none(make):
    for task in ("reach-v3", "button-press-topdown-v3", "push-v3"):
        *before, last = rewards_of_expert(make(task), task, 0)
        assert (last, any(before)) == (1.0, False)
    rewards = rewards_of_expert(make("push-v3", reward="dense"), "push-v3", 0)
    assert -1.0 <= min(rewards) < max(rewards[:-1]) < 0.0 == rewards[-1]


def test_episodes_are_truncated_after_100_steps():
    env = make_env(gw.EnvCfg(id="MetaWorld/reach-v3", num_envs=2))
    env.reset(seed=0)
    ends = [bool(env.step(torch.zeros(2, 4)).truncated.any()) for _ in range(100)]
    assert ends == [False] * 99 + [True]
    assert env.max_episode_steps == 100
    env.close()


# --- images ---


def test_an_image_observation_is_views_proprioception_and_instruction(make):
    env = make("door-open-v3", obs="image", pixels=32)
    obs, _ = env.reset(seed=0)
    assert {name: (part.dtype.name, part.shape) for name, part in obs.items()} == {
        "image": ("uint8", (2, 32, 32, 3)),
        "proprio": ("float32", (4,)),
        "instruction": ("uint8", (64,)),
    }
    assert env.observation_space.contains(obs)
    assert bytes(obs["instruction"]).rstrip(b"\0").decode() == "open the door"
    np.testing.assert_allclose(obs["proprio"], env.state[:4], rtol=1e-6)
    assert obs["image"][0].std() > 10
    assert obs["image"][1].std() > 10


def test_pictures_stand_upright_and_show_the_puck(make):
    """The table is brown and below the grey background."""
    env = make("push-v3", obs="image", views=["corner2"])
    picture = env.reset(seed=0)[0]["image"][0].astype(float)
    brown = picture[..., 0] - picture[..., 2]
    assert brown[40:, 16:48].mean() > brown[:16, 32:].mean() + 20
    green = []
    for seed in range(6):
        picture = env.reset(seed=seed)[0]["image"][0].astype(int)
        is_green = (picture[..., 1] > 120) & (picture[..., 0] < 100) & (picture[..., 2] < 100)
        assert is_green.any()
        green.append((np.argwhere(is_green).mean(0), env.state[36]))
    columns, x = np.array([where[1] for where, _ in green]), np.array([x for _, x in green])
    assert abs(np.corrcoef(columns, x)[0, 1]) > 0.8  # it is where the state says


def test_images_are_drawn_when_asked_for(make):
    env, moves = make("reach-v3", obs="image"), actions(0, 10)
    start = env.reset(seed=0)[0]
    env.draws = False
    skipped = [env.step(move)[0] for move in moves][-1]
    assert np.array_equal(skipped["image"], start["image"])
    assert not np.array_equal(skipped["proprio"], start["proprio"])
    drawn = env.image()
    env.draws = True
    env.reset(seed=0)
    assert np.array_equal([env.step(move)[0] for move in moves][-1]["image"], drawn)
    assert not np.array_equal(drawn, start["image"])


def test_the_fingers_touch_what_the_package_says():
    sawyer = ALL_V3_ENVIRONMENTS["pick-place-v3"]()
    sawyer._freeze_rand_vec, sawyer.seeded_rand_vec, sawyer._set_task_called = False, True, True
    sawyer.seed(0)
    obs, act, seen = sawyer.reset()[0], expert("pick-place-v3"), Counter()
    for _ in range(80):
        obs = sawyer.step(act(obs))[0]
        touched = sawyer.touching_main_object
        assert touches(sawyer, sawyer._get_id_main_object()) == touched
        seen[touched] += 1
    assert seen[False] > 10
    assert seen[True] > 10
    sawyer.close()


def test_the_arm_can_be_hidden_and_the_hand_stays(make):
    settings = {"obs": "image", "views": ["corner2"]}
    shown, hidden = (make("reach-v3", hide_arm=hide, **settings).reset(seed=0)[0]["image"][0] for hide in (False, True))
    red, cyan = (
        [int(((image @ weights) > 60).sum()) for image in (shown.astype(int), hidden.astype(int))]
        for weights in (np.array([1, -1, -1]), np.array([-2, 1, 1]))
    )
    assert red[1] < red[0] / 4
    assert cyan[0] == cyan[1] > 0


def test_rows_of_a_task_draw_with_one_renderer_and_a_video_changes_no_observation(make, monkeypatch):
    made, original = [], Renderer.__init__
    monkeypatch.setattr(Renderer, "__init__", lambda self, *args: (made.append(self), original(self, *args))[1])
    rows = [make("reach-v3", obs="image", render_mode="rgb_array") for _ in range(3)]
    images = [env.reset(seed=seed)[0]["image"] for seed, env in enumerate(rows)]
    assert len(made) == 1
    rows[0].close()
    assert rows[1].render().shape == (400, 400, 3)
    assert np.array_equal(rows[1].image(), images[1])


def test_a_missing_renderer_says_what_to_install(make, monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setitem(sys.modules, "mujoco.egl", None)
    env = make("push-v3", obs="image")
    with pytest.raises(EnvError, match=r"no images.*'egl'.*fix: apt-get install libegl1 .*env\.kwargs\.obs='state'"):
        env.reset(seed=0)
    make("push-v3").reset(seed=0)


def test_nothing_is_printed_at_exit_with_renderers_left_open():
    code = (
        "from groupwise.embodied.metaworld import MetaWorldEnv\n"
        "envs = [MetaWorldEnv([task], obs='image') for task in ('push-v3', 'reach-v3')]\n"
        "for env in envs: env.reset(seed=0)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


# --- several tasks ---


def test_the_start_seed_picks_the_task(make):
    tasks = ("push-v3", "reach-v3", "door-open-v3")
    env, other = make(*tasks), make(*tasks)
    found = Counter()
    for seed in range(60):
        obs, info = env.reset(seed=seed)
        again, _ = other.reset(seed=seed)
        assert np.array_equal(obs, again)
        assert obs[39:].tolist() == [float(task == info["task"]) for task in tasks]
        assert env.step(np.zeros(4, np.float32))[4]["task"] == info["task"]
        found[info["task"]] += 1
    assert set(found) == set(tasks)
    assert min(found.values()) >= 10


def test_groups_share_a_start_with_several_tasks_and_images():
    kwargs = {"tasks": ["push-v3", "door-lock-v3"], "obs": "image", "pixels": 16}
    env = make_env(gw.EnvCfg(id="MetaWorld/multi", kwargs=kwargs, num_envs=6), grouped=True)
    assert env.start_report.start_mode == "snapshot"
    assert env.start_report.start_varies
    obs = env.start(np.ones(6, bool), np.arange(6) // 2, np.arange(6))
    for name in ("image", "proprio", "instruction"):
        assert torch.equal(obs[name][::2], obs[name][1::2])
    assert len(obs["instruction"].unique(dim=0)) == 2
    env.close()


@pytest.mark.slow
def test_the_default_policy_trains_on_states(tmp_path):
    kwargs = {"tasks": ["reach-v3", "drawer-close-v3"]}
    env = gw.EnvCfg(id="MetaWorld/multi", kwargs=kwargs, vectorization="sync", num_envs=2)
    cfg = gw.GRPOCfg(group_size=2, num_steps=16)
    run = gw.train(env, cfg, total_steps=200, run_dir=tmp_path / "run", evaluation={"episodes": 2})
    assert run.summary["env_steps"] >= 200
    assert all(math.isfinite(row["train/policy_loss"]) for row in run.metrics() if "train/policy_loss" in row)


# --- names ---


def test_there_is_an_instruction_for_each_of_the_50_tasks():
    assert set(INSTRUCTIONS) == set(ALL_V3_ENVIRONMENTS)
    encoded = [instruction_bytes(text) for text in INSTRUCTIONS.values()]
    assert {len(code) for code in encoded} == {64}
    assert [bytes(code).rstrip(b"\0").decode() for code in encoded] == list(dict.fromkeys(INSTRUCTIONS.values()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": []}, r"tasks is \[\].*fix: env.kwargs.tasks="),
        ({"tasks": "push-v3"}, "tasks is 'push-v3'"),
        ({"tasks": ["push-v3", "push-v3"]}, "none twice"),
        ({"tasks": ["push-v2"]}, "unknown task of Meta-World 'push-v2': did you mean 'push-v3'"),
        ({"obs": "pixels"}, "obs is 'pixels', expected one of"),
        ({"reward": "sparse"}, "reward is 'sparse', expected one of"),
        ({"views": ["corner9"]}, r"views=\['corner9'\], expected some of topview, corner,"),
        ({"views": []}, r"views=\[\]"),
        ({"pixels": 0}, "pixels is 0, expected at least 1"),
    ],
)
def test_wrong_arguments_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MetaWorldEnv(**{"tasks": ["push-v3"]} | settings)
    with pytest.raises(UnknownNameError, match="'reach-v9': did you mean 'reach-v3'"):
        expert("reach-v9")
