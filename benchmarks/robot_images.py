"""What an episode costs that a VLA policy plays from images: GRPO on Meta-World, beside a plain loop of Gymnasium and torch.

An episode is 20 decisions of 5 steps, and a decision reads one image of 64 pixels from each camera. The new VLA policy of
1.2 million weights never succeeds, so no episode ends early. Groups of 8 share their start; one epoch, minibatches of 320
decisions. In turns, each a new process whose first iteration is not timed:

- ``ranks``: groupwise under torchrun, two ranks with 32 environments each in their own process, a torch thread each;
- ``workers``: groupwise with 64 environments in worker processes and one policy;
- ``plain``: Gymnasium's AsyncVectorEnv of 8 environments and a loop in torch, with the same network and the same loss.
  Pictures are those of ``mujoco.Renderer``, as ``env.render()`` makes them; a group shares its start by seed;
- ``plain, small pictures``: the same with groupwise's renderer.

CPU seconds are those of all processes, and say more than wall seconds on a shared machine. Half of them, on two cores, is the
least that an episode can take. The shares are those of rank 0 of ``ranks``.

    python benchmarks/robot_images.py
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ["LP_NUM_THREADS"] = "1"
os.environ.setdefault("MUJOCO_GL", "egl")

import gymnasium as gym
import mujoco
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from tensordict import TensorDict

import groupwise as gw
from groupwise.embodied import metaworld as rendering
from groupwise.embodied.metaworld import INSTRUCTIONS, MetaWorldEnv, instruction_bytes
from groupwise.embodied.vla import VLAPolicy

RESULT = Path(__file__).parent / "results" / "robot_images.json"
TASK, PIXELS, GROUP, CHUNK, DECISIONS, MINIBATCH = "button-press-topdown-v3", 64, 8, 5, 20, 320
MEMBERS = 64
PLAIN_MEMBERS = 8
TIMED = 1
"""Iterations."""
SETTINGS = {
    "two views": {},
    "one view": {"views": ["corner2"]},
    "one view, arm hidden": {"views": ["corner2"], "hide_arm": True},
}
SIDES = ("ranks", "workers", "plain", "plain, small pictures")
BOUNDS = gym.spaces.Box(-1, 1, (CHUNK, 4), np.float32)


# --- groupwise ---


class Clock(gw.Callback):
    """Times all iterations but the first, and where this process spends its time."""

    def __init__(self, members: int) -> None:
        self.members = members
        self.cpu: dict[str, float] = {}
        self.running: list[str] = []
        self.since = 0.0
        self.result: dict[str, Any] = {}
        self.count(MetaWorldEnv, "reset", "simulation")
        self.count(MetaWorldEnv, "step", "simulation")
        self.count(MetaWorldEnv, "image", "rendering")
        self.count(VLAPolicy, "act", "acting")
        self.count(gw.GRPO, "update", "update")

    def count(self, owner: type, method: str, share: str) -> None:
        """Add the CPU time of a method, without that of counted methods inside, to a share."""
        original = getattr(owner, method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self.running.append(share)
            try:
                return original(*args, **kwargs)
            finally:
                self.switch()
                self.running.pop()

        setattr(owner, method, counted)

    def switch(self) -> None:
        now, share = time.process_time(), self.running[-1] if self.running else "other"
        self.cpu[share] = self.cpu.get(share, 0.0) + now - self.since
        self.since = now

    def on_iteration_end(self, trainer, rollout, metrics) -> None:
        if trainer.iteration == 1:
            self.begin = time.perf_counter(), cpu_seconds()
            self.cpu, self.since = {}, time.process_time()
            return
        self.switch()
        self.result = per_episode(self.begin, self.members * (trainer.iteration - 1), trainer.engine.world_size)
        mine = self.members * (trainer.iteration - 1) / trainer.engine.world_size
        self.result["shares"] = {share: round(seconds / mine, 4) for share, seconds in sorted(self.cpu.items())}


def train(side: str, settings: dict[str, Any], members: int = MEMBERS) -> dict[str, Any]:
    clock = Clock(members)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    kwargs = {"obs": "image", "reward": "dense", "pixels": PIXELS, **settings}
    gw.train(
        gw.EnvCfg(
            id=f"MetaWorld/{TASK}",
            kwargs=kwargs,
            action_chunk=CHUNK,
            num_envs=members // ranks,
            vectorization="async" if side == "workers" else "sync",
        ),
        gw.GRPOCfg(group_size=GROUP, num_steps=DECISIONS, num_epochs=1, minibatch_size=MINIBATCH, micro_batch_size=32),
        policy=gw.config.VLACfg(),
        total_steps=(1 + TIMED) * members * DECISIONS * CHUNK,
        evaluation={"interval": 10**9, "episodes": 1},
        callbacks=[clock],
        run_dir=os.environ.get("RUN_DIR"),
    )
    return clock.result


# --- the plain loop ---


class PlainEnv(gym.Env):
    """The package's environment with pictures, a chunk of actions a step."""

    def __init__(self, views: tuple[str, ...], small: bool) -> None:
        self.sawyer = ALL_V3_ENVIRONMENTS[TASK]()
        self.sawyer._freeze_rand_vec, self.sawyer.seeded_rand_vec, self.sawyer._set_task_called = False, True, True
        self.views, self.small = views, small
        self.renderer: Any = None
        self.action_space = BOUNDS
        self.observation_space = gym.spaces.Dict(
            image=gym.spaces.Box(0, 255, (len(views), PIXELS, PIXELS, 3), np.uint8),
            proprio=gym.spaces.Box(-np.inf, np.inf, (4,), np.float32),
            instruction=gym.spaces.Box(0, 255, (64,), np.uint8),
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.sawyer.seed(seed)
        state, _ = self.sawyer.reset()
        return self.observed(state), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for single in action:
            state, reward, _, _, _ = self.sawyer.step(single)
            total += reward / 10 - 1
        return self.observed(state), total, False, False, {}

    def observed(self, state: np.ndarray) -> dict[str, np.ndarray]:
        if self.renderer is None:
            kind = rendering.Renderer if self.small else mujoco.Renderer
            self.renderer = kind(self.sawyer.model, *[PIXELS] * (1 if self.small else 2))
        return {
            "image": np.stack([self.picture(view) for view in self.views]),
            "proprio": state[:4].astype(np.float32),
            "instruction": instruction_bytes(INSTRUCTIONS[TASK]),
        }

    def picture(self, view: str) -> np.ndarray:
        if self.small:
            return self.renderer.render(self.sawyer.data, view, hide_arm=False)
        self.renderer.update_scene(self.sawyer.data, view)
        return self.renderer.render()


def plain_loop(side: str, settings: dict[str, Any]) -> dict[str, Any]:
    views = tuple(settings.get("views", ("corner2", "gripperPOV")))
    make = lambda: PlainEnv(views, side != "plain")  # noqa: E731
    env = AsyncVectorEnv([make] * PLAIN_MEMBERS, autoreset_mode=AutoresetMode.DISABLED)
    policy = VLAPolicy(env.single_observation_space, BOUNDS, actor_only=True)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    plain_iteration(env, policy, optimizer, decisions=2)
    begin = time.perf_counter(), cpu_seconds()
    plain_iteration(env, policy, optimizer, DECISIONS)
    result = per_episode(begin, PLAIN_MEMBERS)
    env.close()
    return result


def plain_iteration(env: AsyncVectorEnv, policy: VLAPolicy, optimizer: torch.optim.Optimizer, decisions: int) -> None:
    """GRPO: collect an episode in every environment, then take one step for every minibatch."""
    obs, _ = env.reset(seed=[row // GROUP for row in range(PLAIN_MEMBERS)])
    seen, actions, log_probs, rewards = [], [], [], []
    for _ in range(decisions):
        tensors = TensorDict({key: torch.from_numpy(value.copy()) for key, value in obs.items()}, [PLAIN_MEMBERS])
        act = policy.act(tensors)
        obs, reward, _, _, _ = env.step(policy.env_action(act.action).numpy())
        for kept, new in zip(
            (seen, actions, log_probs, rewards),
            (tensors, act.action, act.log_prob, torch.from_numpy(reward)),
            strict=True,
        ):
            kept.append(new)
    returns = torch.stack(rewards).sum(0).view(-1, GROUP).float()
    scaled = (returns - returns.mean(1, keepdim=True)) / (returns.std(1, keepdim=True) + 1e-6)
    advantage = scaled.flatten().repeat(decisions)
    batch = {"obs": torch.cat(seen), "action": torch.cat(actions)}
    old = torch.cat(log_probs)
    for chosen in torch.randperm(len(old)).split(MINIBATCH):
        ratio = (policy.evaluate({key: value[chosen] for key, value in batch.items()}).log_prob - old[chosen]).exp()
        weight = advantage[chosen].unsqueeze(1)
        loss = -torch.min(ratio * weight, ratio.clamp(0.8, 1.2) * weight).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()


# --- measuring ---


def cpu_seconds() -> float:
    """Of this process and its workers."""
    ticks = 0
    for process in multiprocessing.active_children():
        ticks += sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def per_episode(begin: tuple[float, float], episodes: int, processes: int = 1) -> dict[str, Any]:
    """Seconds per episode; CPU seconds if the other processes do the same."""
    wall, cpu = time.perf_counter() - begin[0], (cpu_seconds() - begin[1]) * processes
    return {"seconds": round(wall / episodes, 4), "cpu_seconds": round(cpu / episodes, 4)}


def measure(side: str, name: str, script: str = __file__) -> dict[str, Any]:
    """One side in a new process, or for ``ranks`` in two."""
    command = [sys.executable, script, "--side", side, "--setting", name]
    if side.startswith("ranks"):
        command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"RUN_DIR": f"{folder}/run", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def summary(rounds: list[dict[str, dict[str, dict[str, Any]]]]) -> dict[str, Any]:
    """Medians over the rounds, and of the plain loops the ratio to ``ranks`` in the same round."""
    out: dict[str, Any] = {}
    for name, sides in rounds[0].items():
        out[name] = {}
        for side in sides:
            runs = [each[name][side] for each in rounds]
            out[name][side] = {
                key: round(statistics.median(run[key] for run in runs), 4) for key in ("seconds", "cpu_seconds")
            }
            for key in ("seconds", "cpu_seconds"):
                ratios = [each[name][side][key] / each[name]["ranks"][key] for each in rounds]
                out[name][side][f"{key}, ratio to ranks"] = round(statistics.median(ratios), 2)
        shares = [each[name]["ranks"]["shares"] for each in rounds]
        out[name]["shares, CPU seconds"] = {
            key: round(statistics.median(each[key] for each in shares), 4) for key in shares[0]
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--setting", choices=SETTINGS)
    parser.add_argument("--smallest", action="store_true", help="of --side and --setting, in this process: one group")
    args = parser.parse_args()
    if args.side:
        side = (
            plain_loop if args.side.startswith("plain") else partial(train, members=GROUP if args.smallest else MEMBERS)
        )
        found = side(args.side, SETTINGS[args.setting])
        if os.environ.get("RANK", "0") == "0":
            print("RESULT", json.dumps(found), flush=True)
        return
    rounds: list[Any] = []
    for _ in range(args.rounds):
        rounds.append({})
        for name in SETTINGS:
            sides = ("ranks",) if "hidden" in name else SIDES
            rounds[-1][name] = {side: measure(side, name) for side in sides}
            print(name, json.dumps(rounds[-1][name]), flush=True)
        machine = {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        }
        result = {"machine": machine, "per episode": summary(rounds), "rounds": rounds}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["per episode"], indent=1))


if __name__ == "__main__":
    main()
