"""Prove the library on a GPU: equality, memory, process groups and speed, in at most eight minutes. Linux.

    python tools/gpu.py                          # what `make gpu` runs
    DEV=cpu TINY=1 python tools/gpu.py           # a dry run of all of it on a CPU
    python tools/gpu.py repeats memory           # these parts alone
    SECONDS=300 python tools/gpu.py              # in less time

Timings are first, alone on the machine; checks follow, four at once. Each part is a process with a limit. Parts that time does
not allow, or whose packages are missing, are skipped and listed. Results are written as they come to ``gpu_<card>.json``, in the
folder that the variable ``OUT`` names, or in ``benchmarks/results``.
"""

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DEVICE = os.environ.get("DEV", "cuda")
TINY = os.environ.get("TINY") == "1"
SECONDS = float(os.environ.get("SECONDS", "470"))
"""Time for everything."""
FOR_CHECKS = 0.4 * SECONDS if not TINY else 0.0
"""Seconds that timings leave for checks."""
AT_ONCE = 4 if not TINY else 2
LEAST = 10.0
"""Seconds below which no part is started."""
CORE = ("torch", "tensordict", "gymnasium", "pydantic", "jaxtyping", "rich", "safetensors", "cloudpickle")
TEXT = ("transformers", "tokenizers", "regex")
PEFT = (*TEXT, "peft")


class Part(NamedTuple):
    """One process."""

    name: str
    words: tuple[str, ...]
    """What follows ``python -P``."""
    limit: float
    """Seconds."""
    alone: bool = False
    """Whether nothing else runs beside it."""
    needs: tuple[str, ...] = ()
    """Packages besides those of ``CORE``."""
    environment: tuple[tuple[str, str], ...] = ()


def script(name: str, *cases: str) -> tuple[str, ...]:
    return (str(ROOT / "tools" / "gpu" / f"{name}.py"), *cases)


PYTEST = ("-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:jaxtyping", "-p", "no:xdist")
PYTEST += ("-o", "addopts=--import-mode=importlib --strict-markers")
DETERMINISTIC = (("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),)
CHECKED = "not shapes_of_calls"  # which the plugin of jaxtyping checks
MARKED = ("tests/functional", "tests/speed", "tests/envs/test_torch_tasks.py", "tests/algorithms/test_devices.py")
MARKED += ("tests/collectors/test_torch_groups.py", "tests/collectors/test_torch_vector.py")
MARKED += ("tests/text/test_vocabulary.py", "tests/text/test_update.py")
TESTED = ("-m", "gpu", "-k", CHECKED, *MARKED)
if DEVICE != "cuda":
    TESTED = ("-k", f"cpu and {CHECKED}", "tests/functional/test_gae.py" if TINY else "tests/functional")
PARTS = (
    Part("text_speed", script("text_speed"), 60, True, TEXT),
    Part("control_speed", script("control_speed"), 60, True),
    Part("idle", script("idle"), 60, True, TEXT),
    Part("rsl_rl", script("control_speed", "rsl_rl"), 25, True, ("rsl_rl",)),
    Part("trl", script("trl_speed"), 45, True, (*TEXT, "trl", "datasets", "accelerate")),
    Part("jax", script("control_speed", "jax"), 35, True, ("jax", "gymnax", "optax")),
    Part("repeats", script("repeats"), 120, needs=TEXT),
    Part("ranks", script("ranks"), 130, needs=PEFT),
    Part("memory", script("memory"), 80, needs=TEXT),
    Part("agreement", script("agreement"), 90, needs=PEFT),
    Part("deterministic", script("deterministic"), 60, needs=TEXT, environment=DETERMINISTIC),
    Part("tests", (*PYTEST, *TESTED), 150, needs=("pytest", "hypothesis", *PEFT)),
    Part("doctor", ("-m", "groupwise", "doctor"), 60),
)
"""In the order of their value, timings and checks each."""


class Report:
    """Results of parts and their cases, in a file that is whole at any time."""

    def __init__(self, folder: Path, card: str) -> None:
        name = re.sub(r"[^a-z0-9]+", "_", card.lower()).strip("_")
        self.path = folder / f"gpu_{name}{'_tiny' if TINY else ''}.json"
        self.lines = folder / f"{self.path.stem}.jsonl"
        """Cases as the parts append them."""
        self.lines.unlink(missing_ok=True)
        self.content: dict[str, Any] = {"machine": machine(card), "missing": {}, "parts": [], "cases": []}
        self._lock = threading.Lock()
        self.begin = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.begin

    def add(self, part: Part, outcome: str, seconds: float, log: str = "") -> None:
        """Note how a part ended, with the cases that it has written."""
        with self._lock:
            cases = [json.loads(line) for line in self.lines.read_text().splitlines()] if self.lines.is_file() else []
            own = [case for case in cases if case["part"] == part.name]
            ok = outcome == "ended" and all(case["ok"] for case in own)
            row = {"part": part.name, "ok": ok, "outcome": outcome, "seconds": round(seconds, 1), "cases": len(own)}
            row |= {} if ok or outcome.startswith("skipped") else {"log": log[-3000:]}
            self.content |= {"parts": [*self.content["parts"], row], "cases": cases, "seconds": round(self.seconds, 1)}
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(self.content, indent=1) + "\n")
            new.replace(self.path)
            print(f"{self.seconds:6.0f} s  {part.name:16} {outcome}{'' if ok else '  NOT OK'}", flush=True)

    def table(self) -> str:
        """A line for each case, and for each part that did not end or has no cases."""
        rows = []
        for part in self.content["parts"]:
            own = [case for case in self.content["cases"] if case["part"] == part["part"]]
            rows += [(part["part"], case["case"], "ok" if case["ok"] else "NOT OK", numbers(case)) for case in own]
            if not own or part["outcome"] != "ended":
                word = "ok" if part["ok"] else "-" if part["outcome"].startswith("skipped") else "NOT OK"
                rows.append((part["part"], "", word, part["outcome"] + last_line(part.get("log", ""))))
        return "\n".join(f"{part:14} {case:34} {ok:7} {more}" for part, case, ok, more in rows)

    @property
    def ok(self) -> bool:
        return all(part["ok"] or part["outcome"].startswith("skipped") for part in self.content["parts"])


def numbers(case: dict[str, Any]) -> str:
    """The plain figures of a case, or its error."""
    if "error" in case:
        return str(case["error"])[:160]
    halves = [f"{key}: {value['idle']} idle, {value['syncs']} syncs" for key, value in case.items() if is_half(value)]
    plain = [f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in case.items()
             if isinstance(value, int | float) and key not in ("ok", "seconds", "iterations")]  # fmt: skip
    return ", ".join([*halves, *plain])[:200]


def is_half(value: Any) -> bool:
    return isinstance(value, dict) and {"idle", "syncs"} <= value.keys()


def last_line(log: str) -> str:
    return f": {log.strip().splitlines()[-1][:140]}" if log.strip() else ""


def machine(card: str) -> dict[str, Any]:
    """The machine and the versions of what the figures depend on."""
    found: dict[str, Any] = {"device": card, "cpus": os.cpu_count(), "python": platform.python_version()}
    if DEVICE == "cuda" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=memory.total,driver_version", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    commit = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    if shutil.which("git"):
        found["commit"] = subprocess.run(commit, capture_output=True, text=True, check=False).stdout.strip()
    for name in ("torch", "triton", "transformers", "peft", "tensordict", "trl", "rsl-rl-lib", "jax"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def card_name() -> str:
    """The name of the first GPU; on a CPU its architecture."""
    if DEVICE != "cuda":
        return f"cpu {platform.machine()}"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False) if shutil.which("nvidia-smi") else None
    if done is not None and done.stdout.strip():
        return done.stdout.splitlines()[0].strip()
    code = "import torch; print(torch.cuda.get_device_name())"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"torch finds no GPU{last_line(done.stderr)}; fix: DEV=cpu TINY=1 for a dry run on a CPU")
    return done.stdout.strip()


def environment(part: Part, report: Report) -> dict[str, str]:
    folders = [ROOT / "src", ROOT / "tools" / "gpu", ROOT / "benchmarks", ROOT / "examples", ROOT / "tests" / "support"]
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
    quiet |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    own = {"PYTHONPATH": os.pathsep.join(paths), "GPU_RESULTS": str(report.lines), "GPU_PART": part.name, "DEV": DEVICE}
    threads = {"OMP_NUM_THREADS": "1" if TINY else "4"}
    return os.environ | quiet | threads | own | dict(part.environment)


def descendants(process: int) -> list[int]:
    """Processes that a process has started, and those that these have started."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.parent.name)] = int(fields[1])
    found, last = [], {process}
    while last:
        last = {child for child, parent in parents.items() if parent in last}
        found += last
    return found


def run(part: Part, report: Report, until: float) -> None:
    """Run a part, within its limit and before ``until``; end it and what it has started where it takes longer."""
    limit = min(part.limit * (6 if TINY else 1), until - report.seconds)  # a dry run may share its CPU
    if limit < LEAST:
        report.add(part, "skipped: no time", 0.0)
        return
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", *part.words],
            cwd=ROOT,
            env=environment(part, report),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            code = process.wait(limit)
            outcome = "ended" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {limit:.0f} s"
            for child in [*descendants(process.pid), process.pid]:
                try:
                    os.kill(child, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()
        log.seek(0)
        report.add(part, outcome, time.monotonic() - begin, log.read())


def main() -> int:
    asked = sys.argv[1:]
    if unknown := sorted(set(asked) - {part.name for part in PARTS}):
        sys.exit(f"no such part: {', '.join(unknown)}; parts: {', '.join(part.name for part in PARTS)}")
    if missing := [name for name in CORE if find_spec(name) is None]:
        sys.exit(f"not installed: {', '.join(missing)}; fix: pip install -e . (or their wheels, and PYTHONPATH=src)")
    folder = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(folder, card_name())
    ready = []
    for part in (part for part in PARTS if not asked or part.name in asked):
        if absent := [name for name in part.needs if find_spec(name) is None]:
            report.content["missing"] |= {
                name: [*report.content["missing"].get(name, ()), part.name] for name in absent
            }
            report.add(part, f"skipped: not installed: {', '.join(absent)}", 0.0)
        else:
            ready.append(part)
    checks = [part for part in ready if not part.alone]
    for part in (part for part in ready if part.alone):
        run(part, report, SECONDS - (FOR_CHECKS if checks else 0.0))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(run, part, report, SECONDS) for part in checks]:
            done.result()
    print(f"\n{report.table()}\n\n{report.content['machine']}\n{report.seconds:.0f} s -> {report.path}")
    return int(not report.ok)


if __name__ == "__main__":
    sys.exit(main())
