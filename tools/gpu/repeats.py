"""The same seed twice, and a run that is killed and resumed: equal to the last bit.

A run is killed by SIGKILL in the middle of an iteration, in a process of its own.
"""

import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from shared import DEVICE, NO_EVALUATION, TINY, case, chosen, control_cfg, largest_difference, weights

CASES = ("ppo torch", "grpo torch", "ppo gymnasium", "grpo gymnasium", "grpo text", "ppo text")
ITERATIONS, KILLED = (12, 7) if not TINY else (3, 3)
"""Length of a run, and the iteration in which it is killed."""


def run(name: str, folder: Path, *, kill: bool = False, iterations: int = ITERATIONS) -> Any:
    """The trained run; with ``kill`` the process does not come back."""
    import groupwise as gw

    class Kill(gw.Callback):
        def on_rollout_end(self, trainer: Any, rollout: Any) -> None:
            if trainer.iteration + 1 == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)

    kind, where = name.split()
    settings = {"device": DEVICE, "total_iterations": iterations, "run_dir": folder, "seed": 3}
    settings |= {"callbacks": [Kill()] if kill else [], "checkpoint_interval": 1}
    if where == "text":
        return run_text(kind, settings)
    num_envs, num_steps = (64, 32) if not TINY else (16, 16)
    settings |= NO_EVALUATION | {"num_envs": num_envs}
    if where == "torch":
        cfg = control_cfg(kind, num_steps, 512, num_epochs=2, learning_rate=1e-3)
        return gw.train(env_of(name), cfg, **settings)
    cfg = (
        gw.PPOCfg(num_steps=num_steps, num_epochs=2, minibatch_size=512) if kind == "ppo" else gw.GRPOCfg(num_epochs=2)
    )
    return gw.train("CartPole-v1", cfg, **settings)


def env_of(name: str) -> Any:
    """The environment that is given in Python, if any."""
    from groupwise.envs.torch_env import TorchCartPole

    return TorchCartPole if name.endswith("torch") else None


def run_text(kind: str, settings: dict[str, Any]) -> Any:
    import text_copy

    import groupwise as gw

    folder = Path(settings["run_dir"])
    model = folder.with_name(f"{folder.name}-model")
    text_copy.make_model(model, 0)
    cfg: Any = gw.PPOCfg(num_epochs=2, minibatch_size=150)
    if kind == "grpo":
        cfg = gw.GRPOCfg(group_size=8, num_epochs=2, minibatch_size=150, learning_rate=3e-3)
    task = gw.TextTask(prompts(), reward=text_copy.share_copied)
    settings |= {"evaluation": {"interval": 10**12}, "logging": {"progress": "none"}}
    more = {"model": str(model), "num_prompts": 8 if kind == "grpo" else 32, "sampling": {"max_new_tokens": 5}}
    return gw.train(task, cfg, **settings | more)


def prompts() -> list[str]:
    return [f"{number}" for number in range(111, 171) if "0" not in str(number)]


def given(name: str) -> dict[str, Any]:
    """The Python objects that a resumed run is given again."""
    if name.endswith("text"):
        import text_copy

        return {"reward": text_copy.share_copied, "data": prompts()}
    return {"env": env_of(name)} if name.endswith("torch") else {}


def without_pictures() -> None:
    """Let runs end without films, which take longer than the runs."""
    from groupwise.training import build

    build.film = build.film_group = lambda *args, **options: None


def killed(name: str, folder: str) -> None:
    """Train in this process until it is killed."""
    without_pictures()
    torch.set_num_threads(1)
    run(name, Path(folder), kill=True)


def compare(found: dict[str, Any], name: str, folder: Path) -> None:
    import groupwise as gw
    from groupwise.training.checkpoint import saved_counts

    process = multiprocessing.get_context("forkserver").Process(target=killed, args=(name, f"{folder}/killed"))
    process.start()  # beside the whole runs
    first = run(name, folder / "first")
    second = run(name, folder / "second")
    process.join()
    found["resumed_from"] = saved_counts(folder / "killed" / "checkpoints" / "latest")["iterations"]
    resumed = gw.resume(folder / "killed", **given(name))
    state = weights(first.policy)
    norms = [[metrics["train/grad_norm"] for metrics in one.metrics()] for one in (first, second, resumed)]
    found["killed_by"] = -(process.exitcode or 0)
    found["twice"] = largest_difference(weights(second.policy), state)
    found["resumed"] = largest_difference(weights(resumed.policy), state)
    found["same_metrics"] = norms[0] == norms[1] == norms[2]
    found["iterations"], found["norm"] = len(norms[0]), norms[0][-1]
    found["ok"] = (
        found["killed_by"] == signal.SIGKILL
        and 0 < found["resumed_from"] < KILLED  # a thread writes checkpoints: the newest may not be there yet
        and found["twice"] == found["resumed"] == 0
        and found["same_metrics"]
        and len(norms[0]) == ITERATIONS
        and norms[0][0] > 0
    )


def main() -> None:
    # processes are forked from one that has imported the library, and never from one that uses a GPU
    multiprocessing.get_context("forkserver").set_forkserver_preload(["repeats", "groupwise.run", "text_copy"])
    torch.set_num_threads(1)
    without_pictures()
    for name in chosen(CASES if not TINY else CASES[1:4:2] + CASES[4:5]):
        with case(name) as found, tempfile.TemporaryDirectory() as folder:
            compare(found, name, Path(folder))


if __name__ == "__main__":
    main()
