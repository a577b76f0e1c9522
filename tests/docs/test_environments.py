"""The table of environments says what its data say, and a handful of rows say what plain Gymnasium does."""

import json
import pickle

import ale_py
import gymnasium
import minigrid
import numpy as np
import pytest
from scripts import ROOT, load

gymnasium.register_envs(ale_py)
gymnasium.register_envs(minigrid)


SCRIPT = load("docs/check_envs.py")
DATA = json.loads(SCRIPT.DATA.read_text(encoding="utf-8"))
FOUND = DATA["found"]


def test_page_is_current_and_every_environment_of_the_list_was_checked():
    assert SCRIPT.PAGE.read_text(encoding="utf-8") == SCRIPT.page(DATA), "run: python docs/check_envs.py --page"
    assert list(FOUND) == [name for family in SCRIPT.FAMILIES.values() for name in family]
    assert len(FOUND) >= 45
    assert not [name for name, report in FOUND.items() if not report["training"]["value"]], "none is refused"
    distinct = len({name.partition(" (")[0] for name in FOUND})
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"](docs/generated/environments.md) in {distinct} environments" in " ".join(readme.split())
    starts = (ROOT / "docs" / "starts.md").read_text("utf-8")
    assert f"the result for {distinct} environments" in " ".join(starts.split())


def test_step_limits_are_those_of_the_environment_and_every_finding_has_a_value_or_a_reason():
    for name, report in FOUND.items():
        made = SCRIPT.checked(name)
        spec = gymnasium.spec(made) if isinstance(made, str) else gymnasium.spec(name.partition(" (")[0])
        assert report["max_episode_steps"]["value"] == spec.max_episode_steps, name
        findings = [report[kind] for kind in ("training", "max_episode_steps", "noise_varies")]
        assert all((finding["value"] is None) == bool(finding["reason"]) for finding in findings), name


@pytest.mark.parametrize("family", ["MuJoCo", "Atari", "Classic control"])
def test_families_start_by_the_mode_that_knows_them(family):
    for name in SCRIPT.FAMILIES[family]:
        mode = "native" if name == "CartPole-v1" else "seed" if family == "Classic control" else "snapshot"
        assert FOUND[name]["training"]["value"]["start_mode"] == mode, name


KNOWN = {
    "CartPole-v1": (True, False),
    "Pendulum-v1": (True, False),
    "FrozenLake-v1": (False, True),
    "CliffWalking-v1": (False, False),
    "CliffWalkingSlippery-v1": (False, True),
    "Taxi-v4": (True, False),
    "Hopper-v5": (True, False),
    "MiniGrid-Empty-5x5-v0 (ImgObsWrapper)": (False, False),
    "MiniGrid-Dynamic-Obstacles-5x5-v0 (ImgObsWrapper)": (True, True),
    "MiniGrid-DoorKey-5x5-v0 (ImgObsWrapper)": (True, False),
    "ALE/Breakout-v5": (False, True),
    "ALE/Pong-v5": (False, True),
}


@pytest.mark.parametrize(("name", "known"), KNOWN.items())
def test_randomness_is_what_plain_gymnasium_shows(name, known):
    made = SCRIPT.checked(name)
    env = gymnasium.make(made) if isinstance(made, str) else made()
    starts = {pickle.dumps(env.reset(seed=seed)[0]) for seed in range(3 if "ALE" in name else 12)}
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(40)]
    paths = set()
    for noise_seed in range(2):
        if "ALE" in name:
            env.reset(seed=noise_seed)  # loads the game with another generator for sticky actions
        else:
            env.reset(seed=0)
            env.unwrapped.np_random = np.random.default_rng(noise_seed)
        path = []
        for action in actions:
            obs, reward, terminated, truncated, _ = env.step(action)
            path.append((np.asarray(obs).tobytes(), reward, terminated))
            if terminated or truncated:
                break
        paths.add(tuple(path))
    assert (len(starts) > 1, len(paths) > 1) == known
    report = FOUND[name]
    assert (report["start_varies"]["value"], report["noise_varies"]["value"]) == known
