"""What a user meets when a server, a rank, a node or a link fails: the message, the seconds, and what is lost.

    python benchmarks/faults.py                 # writes results/faults.json

Every fault hits real processes in the middle of a run. The server is that of the tests. Runs that end are resumed and compared,
bit for bit, with one that had no fault. The cut link needs network namespaces (root), Ray its extra.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import torch

import groupwise as gw
from groupwise.report.folder import RunFolder
from groupwise.serving import HttpClient, free_port, is_healthy
from groupwise.training.checkpoint import load_checkpoint

HERE = Path(__file__)
SUPPORT = HERE.parents[1] / "tests" / "support"
RESULTS = HERE.parent / "results" / "faults.json"
ITERATIONS, FAULT_AT = 16, 5
DDP_TIMEOUT = 20.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TWO_RANKS = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SUPPORT}:{os.environ.get('PYTHONPATH', '')}"}


class Slow(gw.Callback):
    """Leaves time for a fault, and names the process."""

    def __init__(self, folder: Path) -> None:
        self.pid = folder.with_name(f"{folder.name}.{os.environ.get('RANK', '0')}")

    def on_rollout_end(self, trainer: Any, rollout: Any) -> None:
        """Take the time."""
        self.pid.write_text(str(os.getpid()))
        time.sleep(0.3)


def train(kind: str, folder: Path, generation: dict[str, Any]) -> None:
    """Train or resume one run, in this process."""
    from text_runs import SETTINGS, numbers, share_copied

    torch.set_num_threads(1)
    callbacks = [Slow(folder)]
    data = numbers()[:60]
    given = {} if kind == "control" else {"reward": share_copied, "data": data}
    if (folder / "checkpoints").exists():
        gw.resume(folder, callbacks=callbacks, allow_programs=True, **given)
        return
    common: dict[str, Any] = {
        "run_dir": folder,
        "callbacks": callbacks,
        "total_iterations": ITERATIONS,
        "ddp_timeout": DDP_TIMEOUT,
        "logging": {"progress": "none"},
    }
    if kind == "control":
        cfg = gw.GRPOCfg(group_size=4, num_epochs=1, minibatch_size=64)  # it has no running episodes, which ranks lose
        gw.train("CartPole-v1", cfg, num_envs=4, evaluation={"episodes": 2}, checkpoint_interval=384, **common)
        return
    settings = {name: value for name, value in SETTINGS.items() if name != "total_steps"} | common
    settings |= {"generation": generation} if generation else {"engine": "fsdp"}
    cfg = gw.GRPOCfg(group_size=4, learning_rate=1e-3)
    gw.train(gw.TextTask(data, reward=share_copied), cfg, model=str(folder.with_name("model")), **settings)


def finished(folder: Path) -> int:
    """Iterations in the metrics."""
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for(condition: Callable[[], Any], seconds: float = 240.0) -> Any:
    """What the condition gives, as soon as it gives something."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > until:
            raise TimeoutError("the benchmark waits in vain")
        time.sleep(0.02)
    return found


def worker(kind: str, folder: Path, generation: dict[str, Any] | None = None) -> list[str]:
    """Words of a command that trains."""
    return [str(HERE), "--train", kind, str(folder), json.dumps(generation or {})]


def start(words: Sequence[str], log: Path, **env: str) -> subprocess.Popen[str]:
    """Begin a command whose errors go to a file."""
    with log.open("w") as file:
        return subprocess.Popen(words, stderr=file, stdout=file, text=True, env=ENVIRONMENT | env, cwd=log.parent)


def errors(log: Path) -> list[str]:
    """Lines that name what went wrong, shortened and without what differs by run."""
    lines = re.findall(
        r"^(?:\[rank\d\]: *)?((?:\w+\.)*\w*Error: .*|.*(?:trying again|weights again|Signal 9).*)",
        log.read_text(),
        re.M,
    )
    return list(dict.fromkeys(line.strip()[:300] for line in lines))


def weights_equal(one: Path, other: Path) -> bool:
    """Whether the last checkpoints have the same policy."""
    first, second = (load_checkpoint(RunFolder(folder).latest).policy for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], value) for name, value in second.items())


def saved(folder: Path) -> int:
    """The iteration of the last checkpoint."""
    return int(load_checkpoint(RunFolder(folder).latest).state["iteration"])


def measure(
    commands: Sequence[tuple[Sequence[str], dict[str, str]]],
    folder: Path,
    whole: Path | None,
    fault: Callable[[], None],
    again: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Begin a run, make the fault, and see what comes of it; then resume a run that has ended."""
    logs = [folder.with_name(f"{folder.name}.{number}.log") for number in range(len(commands))]
    running = [start(words, log, **env) for (words, env), log in zip(commands, logs, strict=True)]
    try:
        wait_for(lambda: finished(folder) >= FAULT_AT or any(p.poll() is not None for p in running))
        before, begun = finished(folder), time.monotonic()
        fault()
        # an iteration whose answer had come may still end
        wait_for(lambda: finished(folder) >= before + 2 or all(p.poll() is not None for p in running))
        result: dict[str, Any] = {"seconds": round(time.monotonic() - begun, 1)}
        codes = [p.wait() for p in running]
    finally:
        for process in running:
            process.kill()
    ended = any(codes)
    result |= {"then": "ends" if ended else "goes on", "codes": codes, "says": [errors(log)[:6] for log in logs]}
    if ended:
        result["iterations_lost"] = finished(folder) - saved(folder)
        again()
        resumed = [
            start(words, log.with_suffix(".again"), **env) for (words, env), log in zip(commands, logs, strict=True)
        ]
        result["resumed"] = [process.wait(240) for process in resumed]
    result["iterations"] = finished(folder)
    if whole is not None:
        result["equal_bit_for_bit"] = weights_equal(folder, whole)
    return result


class Server:
    """The double in a process of its own."""

    def __init__(self, model: Path) -> None:
        self.port = free_port()
        self.words = [sys.executable, str(SUPPORT / "vllm_double.py"), "--model", str(model), "--port", str(self.port)]
        self.client = HttpClient(f"http://127.0.0.1:{self.port}", timeout=5, retries=0)
        self.start()

    def start(self) -> None:
        """Begin it, and wait until it answers."""
        self.process = subprocess.Popen(self.words, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
        wait_for(lambda: is_healthy(self.client.url))

    def kill(self) -> None:
        """As a crash."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Killed, and another one at once."""
        self.kill()
        self.start()

    def pause(self, seconds: float) -> None:
        """It does nothing for a time, and keeps its connections."""
        self.process.send_signal(signal.SIGSTOP)
        if seconds:
            time.sleep(seconds)
            self.process.send_signal(signal.SIGCONT)

    def wrong_version(self, log: Path) -> None:
        """As if another run gave it weights, until the run has noticed: most such weights come before those of its next iteration."""
        while "gets the weights again" not in log.read_text():
            self.client.call("/update_weight_version", {"new_version": "of-another-run"})


def served(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Faults of a server."""
    server = Server(root / "model")
    python = root / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {SUPPORT / "vllm_double.py"} "$@"\n')
    python.chmod(0o755)
    url = {"name": "server", "urls": [server.client.url]}
    subprocess.run([sys.executable, *worker("text", root / "served", url)], env=ENVIRONMENT, check=True)

    def own_server() -> None:
        """Kill what serves this model, save the server above."""
        killed = False
        for words in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has just ended
                command = words.read_bytes()
                if b"/vllm_double.py" in command and bytes(root) in command:
                    pid = int(words.parent.name)
                    if pid != server.process.pid:
                        os.kill(pid, signal.SIGKILL)
                        killed = True
        assert killed, "no server of the run's own was found"

    cases: dict[str, tuple[dict[str, Any], Callable[[], None], Callable[[], None]]] = {
        "server killed": (url, server.kill, server.start),
        "server killed and started again": (url | {"retries": 20}, server.restart, server.start),
        "server paused 8 s": (url, lambda: server.pause(8), server.start),
        "server paused for ever": (url, lambda: server.pause(0), server.restart),
        "server with weights of another run": (url, lambda: server.wrong_version(root / "foreign.0.log"), server.start),
        "the run's own server killed": ({"name": "server", "python": str(python)}, own_server, lambda: None),
    }
    try:
        for name, (generation, fault, again) in cases.items():
            folder = root / ("foreign" if "weights" in name else re.sub(r"\W", "_", name))
            command = [sys.executable, *worker("text", folder, generation)]
            yield name, measure([(command, {})], folder, root / "served", fault, again)
    finally:
        server.kill()


def ranks(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A rank of two that is killed."""
    for kind, name in (("control", "rank killed, control"), ("text", "rank killed, text, fsdp")):
        whole, folder = root / f"{kind}_whole", root / f"{kind}_rank"
        subprocess.run([*TWO_RANKS, *worker(kind, whole)], env=ENVIRONMENT, check=True, capture_output=True)
        kill = partial(kill_rank, folder.with_name(f"{folder.name}.1"))
        yield name, measure([([*TWO_RANKS, *worker(kind, folder)], {})], folder, whole, kill)


def kill_rank(pid: Path) -> None:
    """End the process that the file names."""
    os.kill(int(pid.read_text()), signal.SIGKILL)


def ip(*words: str) -> None:
    """The command of that name."""
    subprocess.run(["ip", *words], check=True)  # noqa: S607


@contextmanager
def two_nodes() -> Iterator[list[str]]:
    """Names of two namespaces with a cable between them."""
    names = [f"gwf{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for number, name in enumerate(names, 1):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "addr", "add", f"10.214.0.{number}/24", "dev", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", name, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def link(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A network that is cut: packets are lost, and nobody is told."""
    name = "link cut between two nodes"
    with two_nodes() as nodes:
        folder, whole, commands = root / "link", root / "link_whole", {}
        for place in (folder, whole):
            job = ["--nproc-per-node=1", "--master-addr=10.214.0.1", "--master-port=29517", *worker("control", place)]
            commands[place] = [
                (
                    ["ip", "netns", "exec", node, *TORCHRUN, "--nnodes=2", f"--node-rank={rank}", *job],
                    {"GLOO_SOCKET_IFNAME": node},
                )
                for rank, node in enumerate(nodes)
            ]
        running = [start(words, root / f"whole.{n}.log", **env) for n, (words, env) in enumerate(commands[whole])]
        assert [process.wait(240) for process in running] == [0, 0]
        cable = partial(ip, "-n", nodes[1], "link", "set", nodes[1])
        yield name, measure(commands[folder], folder, whole, lambda: cable("down"), lambda: cable("up"))


def waiting_cartpole(folder: Path) -> Callable[..., Any]:
    """Makes CartPole that waits at its fifth step while there is the file ``hold``, and names its node and process."""

    def make(**options: Any) -> Any:
        import ray

        class Waiting(gymnasium.Wrapper[Any, Any, Any, Any]):
            count = 0

            def step(self, action: Any) -> Any:
                self.count += 1
                while self.count >= 5 and (folder / "hold").exists():
                    (folder / f"{ray.get_runtime_context().get_node_id()}-{os.getpid()}").touch()
                    time.sleep(0.02)
                return self.env.step(action)

        return Waiting(gymnasium.make("CartPole-v1", **options))

    return make


def population(folder: Path, lost: str) -> None:
    """Search by Ray on two nodes, lose one or a worker in the second round, and print what came of it."""
    import ray
    from ray.cluster_utils import Cluster
    from run_folders import same_weights
    from small_populations import PPO, SMALL

    held = folder / "held"
    held.mkdir(parents=True)

    make = waiting_cartpole(held)
    gw.evolve(make, PPO, run_dir=folder / "whole", on_mutation=lambda *_: None, **SMALL)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    begun: list[float] = []

    def fault() -> None:
        waiting = lambda: [path.name.split("-") for path in held.glob("*-*")]  # noqa: E731
        wait_for(lambda: len({node for node, _ in waiting()}) == 2)
        begun.append(time.monotonic())
        if lost == "node":
            cluster.remove_node(second, allow_graceful=False)
        else:
            os.kill(int(waiting()[0][1]), signal.SIGKILL)
        (held / "hold").unlink()

    thread = threading.Thread(target=fault, daemon=True)
    thread.start()
    hold = lambda *_: (held / "hold").touch()  # noqa: E731
    gw.evolve(make, PPO, run_dir=folder / "ray", launcher="ray", on_mutation=hold, **SMALL)
    seconds = round(time.monotonic() - begun[0], 1)
    state = [(folder / name / "population.json").read_text() for name in ("whole", "ray")]
    equal = state[0] == state[1] and same_weights(folder / "whole" / "best", folder / "ray" / "best")
    (folder / "result").write_text(
        json.dumps({"seconds_to_the_end": seconds, "then": "goes on", "equal_bit_for_bit": equal})
    )
    ray.shutdown()
    cluster.shutdown()


def ray_cluster(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Nodes and workers of Ray, in a process of its own: Ray takes over signals."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_USAGE_STATS_ENABLED": "0"}
    for lost in ("node", "worker"):
        folder = root / f"ray_{lost}"
        log = root / f"ray_{lost}.log"
        code = start([sys.executable, str(HERE), "--train", "ray", str(folder), json.dumps(lost)], log, **token).wait(
            400
        )
        if code:
            print(log.read_text()[-3000:])
        yield (
            f"Ray {lost} killed",
            {"code": code, "says": errors(log)[:4]} | json.loads((folder / "result").read_text()),
        )


FAULTS = {"server": served, "rank": ranks, "link": link, "ray": ray_cluster}


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(FAULTS), help="one kind of faults")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(SUPPORT))
    if options.train:
        kind, folder, generation = options.train
        (population if kind == "ray" else partial(train, kind))(Path(folder), json.loads(generation))
        return
    from text_runs import save_model

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    root = Path(tempfile.mkdtemp())
    try:
        save_model(root / "model")
        for kind in [options.only] if options.only else FAULTS:
            for name, found in FAULTS[kind](root):
                results[name] = found
                print(name, json.dumps(found, indent=1), flush=True)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
