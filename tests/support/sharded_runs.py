"""What ``test_sharding`` starts, alone or under torchrun.

sharded_runs.py updates FILE [CASE ...]   updates on the rows of all ranks; writes FILE.<rank>: parameters, metrics, state,
    with parts on the host, too
sharded_runs.py train|train_adapters|fail|resume FOLDER ITERATIONS   a whole run; resume writes what it begins with,
    and train_adapters keeps a copy of its second checkpoint
"""

import itertools
import os
import sys
from functools import partial
from pathlib import Path

import torch
from at_events import copies, on
from text_runs import SETTINGS, numbers, share_copied
from text_updates import rows_of
from tiny_models import moved, tiny_model
from torch.distributed.tensor import DTensor

import groupwise as gw
from groupwise.algorithms.grpo import GRPO
from groupwise.algorithms.ppo import PPO
from groupwise.config.algorithm import GRPOCfg, PPOCfg
from groupwise.config.policy import LoRACfg
from groupwise.engines import from_environment
from groupwise.text.collector import text_rollout
from groupwise.text.load import with_adapters
from groupwise.text.policy import CausalLM
from groupwise.text.sharding import ShardedEngine

PROMPTS = [[5, 6, 7], [9], [5, 8]]
SGD = {"optimizer": {"name": "sgd", "momentum": 0.9}, "learning_rate": 0.1, "max_grad_norm": None}
RECOMPUTED = {"objective": {"old_log_prob": "recomputed"}}
REFERENCE = {"kl_coef": 0.5, "num_epochs": 2, "sync_ref_model": {"steps": 2, "mixup_alpha": 0.5}}
ON_THE_HOST = ("clipped", "idle_rank", "adapters", "adam")
CASES = {
    "tied": {"family": "smollm", "autocast": torch.bfloat16},
    "clipped": {"family": "gpt2", "max_grad_norm": 0.01},
    "idle_rank": {"unscorable": [2], "micro_batch_size": 12},
    "recomputed": RECOMPUTED | {"gradient_checkpointing": True, "top_entropy_quantile": 0.5, "micro_batch_size": 12},
    "reference": REFERENCE,
    "adapters": REFERENCE | {"lora": True},
    "half": {"dtype": torch.bfloat16, "lora": True, "kl_coef": 0.1},
    "adam": {"optimizer": {"name": "adamw", "weight_decay": 0.1}, "learning_rate": 1e-3},
    "critic": {"algorithm": (PPO, PPOCfg)},
    "not_finite": {"bad_reward": True, "on_nonfinite": "zero"},
}


WRITTEN = {}


def rows_of_all(policy, unscorable, *kind):
    """Policies of a kind write the same."""
    if kind not in WRITTEN:
        WRITTEN[kind] = rows_of(policy, PROMPTS, score=lambda _, tokens: float(sum(tokens) % 5))
    return [row._replace(reward=None) if row.group in unscorable else row for row in WRITTEN[kind]]


def own_rows(rows, engine):
    """Two groups on rank 0, and one on rank 1."""
    if engine.world_size == 1:
        return rows
    return [r for r in rows if r.group < 2] if engine.rank == 0 else [r._replace(group=0) for r in rows if r.group == 2]


def elements_held(algorithm):
    """Numbers of trained parameters and of the optimiser's state that this rank holds."""
    state = [entries.values() for entries in algorithm.optimizer.state.values()]
    tensors = [t for t in (*algorithm.parameters, *itertools.chain(*state)) if t.dim()]
    return sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors)


def updated(engine, family="llama", lora=False, dtype=torch.float32, algorithm=(GRPO, GRPOCfg), unscorable=(),
            bad_reward=False, gradient_checkpointing=False, autocast=None, **settings):  # fmt: skip
    model = moved(tiny_model(family), 0.05).to(dtype)
    if lora:
        model = with_adapters(model, LoRACfg(r=2))
    cls, cfg = algorithm
    policy = CausalLM(
        model, actor_only=cls.actor_only, autocast=autocast, gradient_checkpointing=gradient_checkpointing
    )
    rows = rows_of_all(policy, unscorable, family, lora, dtype, autocast)
    rollout = text_rollout(own_rows(rows, engine))
    extra = {"group_size": 4} if cls is GRPO else {}
    if cls is PPO:
        rollout["value"] = rollout["next_value"] = torch.zeros_like(rollout["reward"])
    trained = cls(cfg(**{"num_epochs": 1, "minibatch_size": 10_000} | extra | SGD | settings), policy, engine)
    if bad_reward and engine.rank == 0:
        rollout["reward"][rollout["loss_mask"]] = float("nan")
    for _ in range(2):
        metrics = trained.update(rollout.clone())
    return {
        "policy": {name: p.detach().clone() for name, p in policy.named_parameters()},
        "metrics": {name: float(value) for name, value in metrics.items()},
        "state": trained.state_dict(),
        "held": elements_held(trained),
    }


def save_loaded(trainer, file):
    """Writes what a run begins with, as rank 0 has it."""
    state = trainer.algorithm.state_dict()
    if trainer.engine.rank == 0:
        policy = {name: p.detach().clone() for name, p in trainer.algorithm.policy.named_parameters()}
        torch.save({"state": state, "policy": policy, "position": trainer.collector.position}, file)


def failing(prompts, completions, **columns):
    """Fails on rank 1 in its second iteration."""
    failing.calls += 1
    if os.environ.get("RANK") == "1" and failing.calls == 2:
        raise RuntimeError("the reward of rank 1 is broken")
    return share_copied(prompts, completions)


failing.calls = 0


def whole_run(folder, mode, number):
    """Train ``number`` iterations, or resume until then."""
    cfg = gw.GRPOCfg(group_size=4, learning_rate=1e-3, kl_coef=0.1)
    reward = failing if mode == "fail" else share_copied
    given = {"reward": reward, "data": numbers()[:60]}
    if mode == "resume":
        callback = on("training_start", lambda trainer: save_loaded(trainer, folder.with_name(f"{folder.name}.loaded")))
        gw.resume(folder, total_iterations=number, callbacks=[callback], **given)
    else:
        settings = {k: v for k, v in SETTINGS.items() if k != "total_steps"}
        task = gw.TextTask(given["data"], reward=reward)
        model = {"path": str(folder.with_name("model")), "lora": {"r": 2} if mode == "train_adapters" else None}
        settings |= {"engine": "fsdp", "total_iterations": number}
        callbacks = [copies(folder, folder.with_name("copy"))] if mode == "train_adapters" else []
        gw.train(task, cfg, model=model, run_dir=folder, callbacks=callbacks, **settings)


def all_updates(file, cases):
    engine = from_environment("cpu", ShardedEngine)
    given = cases or CASES
    found = {case: updated(engine, **CASES[case]) for case in given}
    host = from_environment("cpu", partial(ShardedEngine, cpu_offload=True))
    found |= {f"{case} on the host": updated(host, **CASES[case]) for case in ON_THE_HOST if case in given}
    torch.save(found, f"{file}.{engine.rank}")
    engine.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, path, *rest = sys.argv[1:]
    if mode == "updates":
        all_updates(path, rest)
    else:
        whole_run(Path(path), mode, int(rest[0]))
