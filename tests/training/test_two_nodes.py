"""Two machines train one policy. Network namespaces stand for them, where the system lets these be made."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import groupwise as gw

ADDRESSES = ("10.213.0.1", "10.213.0.2")


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def nodes():
    """Two namespaces with a cable between them, each with the name of its end."""
    names = [f"gw{os.getpid()}{side}" for side in "ab"]
    made = [shutil.which("ip") and ip("netns", "add", name).returncode == 0 for name in names]
    try:
        if not all(made) or ip("link", "add", names[0], "type", "veth", "peer", "name", names[1]).returncode:
            pytest.skip("this system allows no network namespaces")
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            for link in ("lo", name):
                assert ip("-n", name, "link", "set", link, "up").returncode == 0
        yield names
    finally:
        for name, exists in zip(names, made, strict=True):
            if exists:
                ip("netns", "del", name)


def run_on(nodes, folder, *command):
    """Run a command by torchrun on both nodes, a process each."""
    running = []
    for rank, node in enumerate(nodes):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={rank}"]
        torchrun += ["--nproc-per-node=1", f"--master-addr={ADDRESSES[0]}", "--master-port=29511"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": node, "OMP_NUM_THREADS": "1"}
        line = ["ip", "netns", "exec", node, *torchrun, *map(str, command)]
        running.append(subprocess.Popen(line, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)[-3000:]


@pytest.mark.slow
def test_two_nodes_train_one_policy(nodes, tmp_path: Path):
    command = ["-m", "groupwise", "train", "CartPole-v1", "--algorithm", "ppo", "--total-steps", "256"]
    options = ["--env.num-envs", "4", "--algorithm.num-steps", "16", "--run-dir", "run", "--logging.progress", "none"]
    run_on(nodes, tmp_path, *command, *options)
    assert [entry["env_steps"] for entry in gw.Run.load(tmp_path / "run").metrics()] == [128, 256]
