"""What an episode of a robot arm costs: milliseconds per start, per step and per image.

One row of ``FetchPush-v4`` and of ``MetaWorld/push-v3`` in this process. ``reset``: a seeded reset; ``start``: a start
captured before, as the members of a group share it; ``step``: random actions; ``image``: one of 64 pixels, without and
with ``hide_arm``, and by ``env.render()`` of the package. Each figure is the median of the rounds, in CPU time.

    python benchmarks/robots.py
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["LP_NUM_THREADS"] = "1"
os.environ.setdefault("MUJOCO_GL", "egl")

import gymnasium
import mujoco

from groupwise.embodied.metaworld import MetaWorldEnv
from groupwise.envs.make import import_package
from groupwise.envs.snapshots import Snapshot, SnapshotAdapter, adapter_for

RESULT = Path(__file__).parent / "results" / "robots.json"
PIXELS = 64


def milliseconds(act: Callable[[], object], repeats: int, rounds: int) -> float:
    act()  # what happens once
    times = []
    for _ in range(rounds):
        before = time.process_time()
        for _ in range(repeats):
            act()
        times.append((time.process_time() - before) / repeats * 1000)
    return round(statistics.median(times), 3)


def simulation(env_id: str, rounds: int) -> dict[str, float]:
    """Costs without images."""
    import_package(env_id)
    env = gymnasium.make(env_id, max_episode_steps=10**9)
    env.action_space.seed(0)
    env.reset(seed=0)
    adapter = adapter_for(env) or SnapshotAdapter()
    state = adapter.capture(env)
    found = {
        "reset": milliseconds(lambda: env.reset(seed=1), 20, rounds),
        "start": milliseconds(lambda: begin(env, adapter, state), 100, rounds),
        "step": milliseconds(lambda: step(env), 100, rounds),
    }
    env.close()
    return found


def begin(env: gymnasium.Env, adapter: SnapshotAdapter, state: Snapshot) -> None:
    adapter.restore(env, state)
    if isinstance(env.unwrapped, MetaWorldEnv):
        assert len(env.unwrapped.state)  # it is loaded into the simulator when it is needed


def step(env: gymnasium.Env) -> None:
    if env.step(env.action_space.sample())[2]:
        env.reset()


def images(rounds: int) -> dict[str, float]:
    """Costs of one image of push-v3."""
    found = {}
    for view, hide_arm in (("corner2", False), ("corner2", True), ("gripperPOV", False)):
        env = MetaWorldEnv(["push-v3"], obs="image", views=[view], pixels=PIXELS, hide_arm=hide_arm)
        env.reset(seed=0)
        found[view + (", arm hidden" if hide_arm else "")] = milliseconds(env.image, 20, rounds)
        env.close()
    return found


def image_of_the_package(rounds: int) -> float:
    """As ``env.render()`` draws it, with shadows, reflections and anti-aliasing."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    sawyer = ALL_V3_ENVIRONMENTS["push-v3"](render_mode="rgb_array", camera_name="corner2", width=PIXELS, height=PIXELS)
    sawyer.seeded_rand_vec, sawyer._freeze_rand_vec, sawyer._set_task_called = True, False, True
    sawyer.reset()
    found = milliseconds(sawyer.render, 5, rounds)
    sawyer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    rounds = args.rounds
    result = {
        "machine": {"processor": platform.processor() or platform.machine(), "mujoco": mujoco.__version__},
        "milliseconds": {
            **{env_id: simulation(env_id, rounds) for env_id in ("FetchPush-v4", "MetaWorld/push-v3")},
            "image": images(rounds) | {"corner2, env.render()": image_of_the_package(rounds)},
        },
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
