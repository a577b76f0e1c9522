"""Environment steps per second of whole training on CartPole in torch, beside rsl_rl and PPO in JAX.

Settings are those of ``benchmarks/torch_envs.py``: eight minibatches, one epoch. ``off`` is the reference, ``auto`` the fast paths.
"""

import os
import runpy
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch_envs
from shared import CUDA, DEVICE, NO_EVALUATION, TINY, case, chosen, control_cfg, reset_peak, wait

import groupwise as gw
from groupwise.envs.torch_env import TorchCartPole

STEPS = {1024: 64, 4096: 32, 16_384: 32} if not TINY else {64: 8, 128: 8}
"""Steps of each environment in an iteration, by the number of environments."""
MIDDLE = 4096 if not TINY else 128
WARM_UP = 4 if CUDA else 2
torch_envs.SECONDS = 1.0 if not TINY else 0.1
BUDGET = 10**12 if not TINY else 10**5  # on a CPU, updates of longer runs are compiled
PEERS = Path(torch_envs.__file__).parent / "peers"

CASES: dict[str, tuple[str, int, str]] = {
    f"{kind}, {count} environments, {speed}": (kind, count, speed)
    for kind, counts in {"ppo": list(STEPS), "grpo": [MIDDLE]}.items()
    for count in counts
    for speed in ("auto", "off")
    if not TINY or count == MIDDLE
}


def train(kind: str, num_envs: int, speed: str) -> dict[str, Any]:
    """Rate of training, the shares of its halves, and the mean return that it reached."""
    own = {"learning_rate": 4e-3, "gae_lambda": 0.9} if kind == "ppo" else {"learning_rate": 6e-3}
    steps = STEPS[num_envs]
    cfg = control_cfg(kind, steps, num_envs * steps // 8, num_epochs=1, gamma=0.99, **own)
    clock = torch_envs.Clock(WARM_UP, wait)
    with tempfile.TemporaryDirectory() as folder:
        run = gw.train(
            TorchCartPole,
            cfg,
            num_envs=num_envs,
            device=DEVICE,
            speed=speed,
            total_steps=BUDGET,
            run_dir=f"{folder}/run",
            callbacks=[clock.callback(gw.Callback)],
            **NO_EVALUATION,
        )
    return clock.found | {"return": round(run.summary["training_return_mean"], 1)}


def rsl_rl() -> dict[str, Any]:
    """Rate of rsl_rl's PPO on the same environment."""
    sys.path.insert(0, str(PEERS))
    import rsl_rl_ppo

    torch.manual_seed(0)
    env = TorchCartPole(MIDDLE, device=DEVICE)
    settings = torch_envs.PPO | {"num_steps": STEPS[MIDDLE], "num_minibatches": 8}
    rows = rsl_rl_ppo.pushed_by_sign(env)
    found: dict[str, Any] = rsl_rl_ppo.train(rows, settings, warm_up=WARM_UP, seconds=torch_envs.SECONDS)
    return found


def jax() -> dict[str, Any]:
    """Rate of PPO in JAX, whole iterations compiled into one scan."""
    sys.path.insert(0, str(PEERS))
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if not CUDA:
        os.environ["JAX_PLATFORMS"] = "cpu"
    import settings

    count, steps, at_once = MIDDLE, STEPS[MIDDLE], 8 if not TINY else 2
    settings.SETTINGS["fast"] = settings.Settings(count, steps, 1, count * steps // 8, 4e-3, annealed=False)
    argv, sys.argv = sys.argv, ["jax_ppo.py", "--task", "rate", "--settings", "fast", "--threads", "default"]
    ours = runpy.run_path(str(PEERS / "jax_ppo.py"), run_name="peer")
    sys.argv = argv
    import jax

    begin = time.perf_counter()
    state = jax.jit(ours["init"])(jax.random.key(0))
    train = jax.jit(partial(jax.lax.scan, ours["iteration"], length=at_once)).lower(state, None).compile()
    compiled = time.perf_counter() - begin
    state, out = train(state, None)
    jax.block_until_ready(out)
    begin, calls = time.perf_counter(), 0
    while time.perf_counter() - begin < torch_envs.SECONDS or not calls:
        state, out = train(state, None)
        jax.block_until_ready(out)
        calls += 1
    rate = calls * at_once * count * steps / (time.perf_counter() - begin)
    return {"steps_per_second": round(rate), "compile_s": round(compiled, 1), "on": str(jax.devices()[0])}


def main() -> None:
    peers = {"rsl_rl": rsl_rl, "jax": jax}
    for name in chosen([*CASES, *peers]) if len(sys.argv) > 1 else list(CASES):
        shown = f"{name}, {MIDDLE} environments" if name in peers else name
        with case(shown) as found:
            reset_peak()
            found |= peers[name]() if name in peers else train(*CASES[name])


if __name__ == "__main__":
    main()
