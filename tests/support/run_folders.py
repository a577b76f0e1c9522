"""Folders of runs that nobody trained: settings, metrics and summary as a training leaves them."""

import json
from pathlib import Path

import torch

from groupwise import config
from groupwise.report.folder import RunFolder
from groupwise.training.checkpoint import load_checkpoint

STEPS = (250, 500, 750, 1000)


def write_run(
    path,
    returns=(1.0, 2.0, 3.0, 4.0),
    *,
    steps=STEPS,
    env="CartPole-v1",
    algorithm="grpo",
    evaluated=True,
    summary=None,
    provenance=None,
    **fields,
):
    """A finished run's folder; its training returns are 10 more than those of its evaluations."""
    cfg = config.resolve(env, algorithm, **{"total_steps": 1000, **fields})
    path.mkdir(parents=True)
    known = {"versions": {"groupwise": "0.1.0"}, "git": None, "given_in_python": []}
    tree = json.loads(config.to_json(cfg)) | {"provenance": known | (provenance or {})}
    (path / "config.json").write_text(json.dumps(tree))
    lines = []
    for iteration, (at, value) in enumerate(zip(steps, returns, strict=True), start=1):
        entry = {"iteration": iteration, "env_steps": at, "rollout/return_mean": value + 10}
        entry["time/total_seconds"] = 0.5 * iteration
        evaluation = {"eval/return_mean": value, "eval/return_std": 1.0, "eval/episodes": 20.0}
        lines.append(json.dumps(entry | (evaluation if evaluated else {})))
    (path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    ending = {"stopped": "total_steps", "env_steps": steps[-1], "seconds": 2.0 + cfg.seed, "peak_memory_mib": 100.0}
    (path / "summary.json").write_text(json.dumps(ending | (summary or {})))
    return path


def rewrite_metrics(run, change):
    """Replace each entry of the metrics."""
    entries = [change(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def write_seeds(folder, finals, **settings):
    """A folder of runs that differ in their seed and reach these returns."""
    for seed, final in enumerate(finals):
        write_run(folder / f"seed_{seed}", (0.0, final / 4, final / 2, final), seed=seed, **settings)
    return folder


def logged(run):
    """Metrics of a run or its folder, without times."""
    entries = RunFolder(Path(getattr(run, "path", run))).read_metrics()
    return [{name: value for name, value in entry.items() if not name.startswith("time/")} for entry in entries]


def weights(run):
    """Weights of a run, of a policy, or of the last checkpoint in a folder."""
    if isinstance(run, Path):
        return load_checkpoint(run / "checkpoints/latest").policy
    return run if isinstance(run, dict) else getattr(run, "policy", run).state_dict()


def same_weights(run, other):
    """Whether their weights are equal, bit for bit."""
    one, two = weights(run), weights(other)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
