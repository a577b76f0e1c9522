"""One rank in a process group of its own, beside a run without one; and a second rank on a machine with one GPU.

On a GPU the group is NCCL's. Runs are the same up to the rounding of sums over ranks, which do not happen in a single process.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from repeats import without_pictures
from shared import DEVICE, NO_EVALUATION, TINY, case, chosen, control_cfg, weights

CASES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "grpo": {},
    "text, ddp": {},
    "text, fsdp": {"engine": "fsdp"},
    "text, fsdp, on the host": {"engine": "fsdp", "cpu_offload": True},
    "text, fsdp, resumed": {"engine": "fsdp"},
    "text, fsdp, bfloat16, lora, kl": {"engine": "fsdp", "kl_coef": 0.01, "lora": {"r": 4}, "precision": "bfloat16"},
}
if TINY:
    CASES = {name: CASES[name] for name in ("grpo", "text, ddp", "text, fsdp, resumed")}
SECOND = "second rank, one GPU"
ITERATIONS = 3


def train(name: str, folder: Path, **options: Any) -> Any:
    """A run of a few iterations."""
    import groupwise as gw

    settings: dict[str, Any] = {"device": DEVICE, "total_iterations": ITERATIONS, "run_dir": folder}
    if not name.startswith("text"):
        from groupwise.envs.torch_env import TorchCartPole

        cfg = control_cfg(name, 32, 512, num_epochs=2)
        policy = {"normalize_obs": True, "normalize_reward": name == "ppo"}
        return gw.train(TorchCartPole, cfg, num_envs=32, policy=policy, **settings, **NO_EVALUATION)
    import text_copy
    from repeats import prompts

    model = folder.with_name(f"{folder.name}-model")
    text_copy.make_model(model, 0)
    how = {"path": str(model), "lora": options.pop("lora", None), "precision": options.pop("precision", "float32")}
    cfg = gw.GRPOCfg(group_size=8, learning_rate=3e-3, minibatch_size=300, kl_coef=options.pop("kl_coef", 0.0))
    task = gw.TextTask(prompts(), reward=text_copy.share_copied)
    settings |= {"num_prompts": 8, "sampling": {"max_new_tokens": 5}, "logging": {"progress": "none"}}
    run = gw.train(task, cfg, model=how, evaluation={"interval": 10**12}, **settings, **options)
    if name.endswith("resumed"):
        given = {"data": prompts(), "reward": text_copy.share_copied}
        dist_again(options.get("cpu_offload", False))
        run = gw.resume(folder, total_iterations=ITERATIONS + 2, **given)
    return run


ALONE = False
"""Whether runs have no process group."""


def dist_again(cpu_offload: bool) -> None:
    """A new process group of this process alone, or none where runs have none."""
    from groupwise.engines import backend_of

    if dist.is_initialized():  # a run leaves a group that it did not open as it is
        dist.destroy_process_group()
    if not ALONE:
        dist.init_process_group(backend_of(DEVICE, cpu_offload), store=dist.HashStore(), rank=0, world_size=1)


def compare(found: dict[str, Any], name: str, folder: Path) -> None:
    global ALONE
    options = CASES[name]
    ALONE = True
    dist_again(False)
    alone = train(name, folder / "alone", **options)
    ALONE = False
    dist_again(options.get("cpu_offload", False))
    grouped = train(name, folder / "grouped", **options)
    engine = grouped.algorithm.engine
    ours, theirs = weights(grouped.policy), weights(alone.policy)
    distance = sum(float((ours[key].double() - theirs[key].double()).square().sum()) for key in theirs) ** 0.5
    size = sum(float(theirs[key].double().square().sum()) for key in theirs) ** 0.5
    found |= {"engine": type(engine).__name__, "difference": distance / size}
    found["norms"] = [[round(m["train/grad_norm"], 6) for m in run.metrics()] for run in (grouped, alone)]
    wanted = "ShardedEngine" if options.get("engine") == "fsdp" else "DistributedEngine"
    limit = 0.1 if "bfloat16" in name else 1e-4
    found["ok"] = found["engine"] == wanted and found["difference"] < limit and found["norms"][0][0] > 0


def second_rank(found: dict[str, Any], folder: Path) -> None:
    """What a second rank says where torch sees one GPU, or none: one line, without waiting for the first."""
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}
    torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599", "CUDA_VISIBLE_DEVICES": "0"}
    command = [sys.executable, "-P", "-m", "groupwise", "train", "CartPole-v1", "--device", "cuda"]
    done = subprocess.run(
        [*command, "--run-dir", str(folder / "run")],
        env=os.environ | torchrun,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = done.stderr.splitlines()
    found |= {"exit_code": done.returncode, "lines": lines[-5:]}
    found["ok"] = done.returncode != 0 and len(lines) == 1 and "GPU" in lines[0] and "fix:" in lines[0]


def main() -> None:
    torch.set_num_threads(1)
    without_pictures()
    for name in chosen([*CASES, SECOND]):
        with case(name) as found, tempfile.TemporaryDirectory() as folder:
            if name == SECOND:
                second_rank(found, Path(folder))
            else:
                compare(found, name, Path(folder))


if __name__ == "__main__":
    main()
