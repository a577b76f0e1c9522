"""What a fixed seed gives on the reference path: parameters as a SHA-256, metrics number by number.

``python tests/golden/recorded.py`` writes ``golden.json`` anew. Do that only in a commit that says why the numbers change.
``python tests/golden/recorded.py CASE ...`` records these cases only.

On another machine the numbers are compared closely, not to the bit. For a change that may not change a bit, record there
before it and compare after it: ``GOLDEN_FILE=PATH`` is written and read in place of ``golden.json``.
"""

import hashlib
import json
import math
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

import groupwise as gw
from groupwise import config
from groupwise.text.tools import Tool

HERE = Path(__file__).parent
FILE = Path(os.environ.get("GOLDEN_FILE", HERE / "golden.json"))
sys.path.insert(0, str(HERE.parent / "support"))
from variants import SETTINGS  # noqa: E402  of tests/support

QUIET = {"speed": "off", "logging": {"progress": "none"}, "evaluation": {"episodes": 2}}
CONTROL = ("CartPole-v1", "Pendulum-v1")
ALGORITHMS = ("ppo", "grpo")
ROWS, STEPS = 8, 12
PER_STEP = {
    "name": "grpo",
    "learning_rate": 2e-3,
    "gamma": 0.995,
    "schedule": "none",
    "credit": {"group_key": "group_step", "baseline": "mean", "scale": "batch_std", "normalize": "none"},
}
"""GRPO on CartPole compares per time step, which its preset does not."""

MEMORY = {"name": "recurrent", "hidden_size": 8, "hidden_sizes": (8,)}
WHOLE = {"finished_members": "trajectory", "singleton": "trajectory"}
"""Steps that cannot be compared take the advantage of their episode."""


def compared(baseline="mean", returns="return_to_go", scale="none", **fallback):
    """Credit that compares members at the same step."""
    group_key = {"name": "group_step"} | fallback
    return {"credit": {"group_key": group_key, "returns": returns, "baseline": baseline, "scale": scale}}


UPDATES = {
    "micro-batches": {"micro_batch_size": 10},
    "recomputed": {"objective": {"old_log_prob": "recomputed"}},
    "group_step zero": compared(finished_members="zero"),
    "group_step finished": compared(scale="std", finished_members="trajectory"),
    "group_step whole": compared(scale="batch_std", **WHOLE),
    "group_step turn": compared(returns="turn", **WHOLE),
}
"""Settings of further updates of GRPO."""
PPO_UPDATES = {
    "micro-batches": {"micro_batch_size": 10, "target_kl": None},
    "adaptive kl": {"target_kl": None, "schedule": {"name": "adaptive_kl", "desired_kl": 0.185}},
}


class Keep(gw.Callback):
    """Metrics of every iteration, but for times."""

    def __init__(self):
        self.metrics = []

    def on_iteration_end(self, trainer, rollout, metrics):
        self.metrics.append(numbers(metrics))


def numbers(metrics):
    """The metrics as plain floats; times and what evaluation or memory adds do not count."""
    kept = {k: float(v) for k, v in sorted(metrics.items()) if k.startswith(("train/", "rollout/", "completions/"))}
    return {k: v if math.isfinite(v) else str(v) for k, v in kept.items()}


def digest(policy):
    """SHA-256 of the parameters, then the buffers, in their order."""
    state = hashlib.sha256()
    for tensor in (*policy.parameters(), *policy.buffers()):
        state.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return state.hexdigest()


def machine():
    """SHA-256 of some arithmetic: where it differs, other bits are no error of ours."""
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    parts = [x @ x, x[:3] @ x, x.tanh(), x.exp(), x.log_softmax(-1), x.sum(0), torch.nn.functional.gelu(x)]
    network = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 64), torch.nn.Linear(64, 2)
    )
    optimizer = torch.optim.Adam(network.parameters(), fused=True)
    for rows in (1, 8, 20, 32, 64, 256, 2048):  # kernels depend on the shape
        network(torch.randn(rows, 3)).square().mean().backward()
        parts.append(torch.nn.utils.clip_grad_norm_(network.parameters(), 0.01))
        optimizer.step()
    parts += [parameter.detach() for parameter in network.parameters()]
    state = hashlib.sha256(torch.__version__.encode())
    for part in parts:
        state.update(part.contiguous().numpy().tobytes())
    return state.hexdigest()


def settings_of(env, algorithm):
    """What ``gw.train`` gets: the environment's own preset, except in one case."""
    return PER_STEP if (env, algorithm) == ("CartPole-v1", "grpo") else algorithm


def recorded(run):
    """What a run gives; ``run`` takes a folder and callbacks."""
    keep = Keep()
    with tempfile.TemporaryDirectory() as folder:
        return {"parameters": digest(run(Path(folder), [keep]).policy), "metrics": keep.metrics}


def trained(env, algorithm):
    """Three iterations."""
    algorithm = settings_of(env, algorithm)
    cfg = config.resolve(env, algorithm)
    steps = 3 * cfg.env.num_envs * cfg.algorithm.num_steps

    def run(folder, callbacks):
        return gw.train(env, algorithm, seed=3, run_dir=folder / "run", total_steps=steps, callbacks=callbacks, **QUIET)

    return recorded(run)


def resumed(algorithm):
    """Two iterations, and two more from the checkpoint that they end with."""
    algorithm = settings_of("CartPole-v1", algorithm)
    cfg = config.resolve("CartPole-v1", algorithm)
    steps = cfg.env.num_envs * cfg.algorithm.num_steps

    def run(folder, callbacks):
        gw.train("CartPole-v1", algorithm, seed=4, run_dir=folder / "run", total_steps=2 * steps, **QUIET)
        return gw.resume(folder / "run", total_steps=4 * steps, callbacks=callbacks)

    return recorded(run)


def updated(preset):
    """Two updates of a preset or variant on the same made-up rollout."""
    settings = SETTINGS[preset]
    objective = dict(settings.get("objective", {}))
    if objective.get("aggregation") in ("constant", "seq_mean_token_sum_norm"):
        objective["aggregation"] = {"name": objective["aggregation"], "max_length": STEPS}
    return updated_with(settings | {"kl_coef": 0.05, "objective": objective})


def updated_with(settings):
    """Two updates of GRPO on the same made-up rollout."""
    shared = {"num_epochs": 2, "learning_rate": 0.03, "minibatch_size": 32, "group_size": 4}
    policy = made_up_policy()
    algorithm = gw.GRPO(gw.GRPOCfg(**settings | shared), policy, seed=1)
    return twice(algorithm, made_up_rollout(policy))


def updated_ppo(**settings):
    """Two updates of PPO on the same made-up rollout."""
    policy = made_up_policy(actor_only=False)
    return twice(made_up_ppo(policy, **settings), made_up_rollout(policy))


def made_up_ppo(policy, engine=None, **settings):
    shared = {"num_epochs": 2, "learning_rate": 0.01, "minibatch_size": 32, "ent_coef": 0.01, "target_kl": 0.05}
    return gw.PPO(gw.PPOCfg(**shared | settings), policy, engine, seed=1)


def twice(algorithm, rollout):
    metrics = [numbers(algorithm.update(rollout)) for _ in range(2)]
    return {"parameters": digest(algorithm.policy), "metrics": metrics}


def updated_on_two_ranks(name):
    """The same on two ranks, each with one of the groups."""
    from two_ranks import on_two_ranks

    def work(part, policy, engine):
        if name == "ppo":
            return twice(made_up_ppo(policy, engine, target_kl=None, micro_batch_size=10), part)
        fields = {"num_epochs": 2, "learning_rate": 0.03, "minibatch_size": 32, "group_size": 4, "kl_coef": 0.05}
        return twice(gw.GRPO(gw.GRPOCfg(**fields | compared(scale="batch_std", **WHOLE)), policy, engine, seed=1), part)

    def make_policy():
        return made_up_policy(actor_only=name == "grpo")

    first, second = on_two_ranks(work, made_up_rollout(make_policy()), make_policy)
    assert first["parameters"] == second["parameters"]
    return first


def remembered(algorithm):
    """Three iterations of a recurrent policy."""
    cfg = {"name": algorithm, "num_steps": 32, "minibatch_size": 64, "micro_batch_size": 24, "num_epochs": 2}
    more = {"policy": MEMORY, "num_envs": 4, "seed": 3, "total_steps": 3 * 4 * 32}
    return recorded(
        lambda folder, callbacks: gw.train(
            "CartPole-v1", cfg, run_dir=folder / "run", callbacks=callbacks, **more, **QUIET
        )
    )


def moved(algorithm):
    """Two iterations of a policy that sees and reads, and is scored by the tokens of its chunks of actions."""
    import robots

    robots.register()
    env = gw.EnvCfg(id="Robot-v0", action_chunk=3, num_action_steps=2, num_envs=4)
    cfg = {"name": algorithm, "num_steps": 8, "minibatch_size": 16, "micro_batch_size": 6, "num_epochs": 2}
    policy = {"name": "vla", "hidden_size": 32, "num_layers": 1, "patch_size": 4, "bins": 5}
    more = {"policy": policy, "seed": 3, "total_steps": 2 * 4 * 8 * 2}
    return recorded(
        lambda folder, callbacks: gw.train(env, cfg, run_dir=folder / "run", callbacks=callbacks, **more, **QUIET)
    )


def made_up_policy(actor_only=True):
    import gymnasium as gym
    import numpy as np

    torch.manual_seed(0)
    obs, action = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(3)
    policy = gw.ActorCritic(obs, action, gw.PolicyCfg(hidden_sizes=(8,)), actor_only=actor_only)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.5)
    return policy


def made_up_rollout(policy):
    """Groups of 4 rows with one episode each, of 5 to 12 steps, two steps a turn, two parts of the reward; some observations recur."""
    from tensordict import TensorDict

    g = torch.Generator().manual_seed(2)
    shape = (ROWS, STEPS + 1)
    obs = torch.rand(*shape, 3, generator=g) * 2 - 1
    obs[:, ::4] = obs[:1, ::4]
    done = policy.act(obs.reshape(-1, 3), generator=g)
    parts = torch.rand(*shape, 2, generator=g)
    off = {
        key: torch.zeros(shape, dtype=torch.bool) for key in ("terminated", "truncated", "valid", "loss_mask", "greedy")
    }
    ids = {key: torch.full(shape, -1) for key in ("group_id", "episode_id", "turn_id")}
    rollout = {
        "obs": obs,
        "action": done.action.reshape(shape),
        "sample_log_prob": done.log_prob.reshape(shape) - 0.8 * torch.randn(shape, generator=g),
        "reward": torch.zeros(shape),
        "reward_parts": torch.zeros(*shape, 2),
        "step": torch.zeros(shape, dtype=torch.int64),
        **off,
        **ids,
    }
    if not policy.actor_only:
        rollout["value"] = done.value.reshape(shape).clone()
        rollout["next_value"] = torch.zeros(shape)
        rollout["next_value"][:, :-1] = rollout["value"][:, 1:]
    for row in range(ROWS):
        span = slice(0, 5 + row)
        rollout["reward_parts"][row, span] = parts[row, span]
        rollout["reward"][row, span] = parts[row, span].sum(-1)
        rollout["valid"][row, span] = rollout["loss_mask"][row, span] = True
        rollout["group_id"][row, span] = row // 4
        rollout["episode_id"][row, span] = row
        rollout["step"][row, span] = torch.arange(5 + row)
        rollout["turn_id"][row, span] = torch.arange(5 + row) // 2
        rollout["truncated" if row % 3 == 0 else "terminated"][row, 4 + row] = True
        if row % 4 == 3:  # of ReMax
            rollout["greedy"][row, span] = True
    return TensorDict(rollout, batch_size=list(shape))


def wrote():
    """Two iterations of a tiny language model, and one more from its checkpoint."""
    from text_runs import copying, save_model, train

    def run(folder, callbacks):
        train(
            copying(), save_model(folder / "model"), folder / "run", seed=2, total_steps=2 * 16 * 3, callbacks=callbacks
        )
        return gw.resume(folder / "run", total_steps=4 * 16 * 4, callbacks=callbacks, **copying().given)

    return recorded(run)


def used_a_tool():
    """Two iterations of a tiny language model that asks a tool; log-probabilities are computed anew at the update's start."""
    from text_runs import numbers as rows
    from text_runs import save_model, share_copied, train

    class Count(Tool):
        """Ends turns at some digits, and answers with how many characters they have."""

        stop = ("5", "6", "7")

        def __call__(self, text):
            return str(len(text)) if text.endswith(self.stop) else None

    task = gw.TextTask(rows()[:40], reward=share_copied, tool=Count(), max_turns=3, tool_answer=" {} ")
    shared = {"group_size": 4, "learning_rate": 1e-3, "kl_coef": 0.1, "minibatch_size": 24, "micro_batch_size": 8}
    cfg = gw.GRPOCfg(**shared, objective={"old_log_prob": "recomputed"})

    def run(folder, callbacks):
        model = save_model(folder / "model")
        return train(task, model, folder / "run", cfg, seed=2, total_steps=150, callbacks=callbacks)

    return recorded(run)


def control_cases():
    """Name of each case of control, and what computes it."""
    cases = {f"{env} {name}": (trained, env, name) for env in CONTROL for name in ALGORITHMS}
    cases |= {f"resume {name}": (resumed, name) for name in ALGORITHMS}
    cases |= {f"preset {name}": (updated, name) for name in sorted(SETTINGS)}
    cases |= {f"update {name}": (updated_with, settings) for name, settings in UPDATES.items()}
    cases |= {f"update ppo {name}": (partial(updated_ppo, **settings),) for name, settings in PPO_UPDATES.items()}
    cases |= {f"two ranks {name}": (updated_on_two_ranks, name) for name in ALGORITHMS}
    cases |= {f"recurrent {name}": (remembered, name) for name in ALGORITHMS}
    cases |= {f"vla {name}": (moved, name) for name in ALGORITHMS}
    return cases | {"rollout ppo": (updated_ppo,)}


def text_cases():
    """Name of each case of texts, and what computes it."""
    return {"text": (wrote,), "text tool": (used_a_tool,)}


def compute(case):
    """What a case gives, on one thread."""
    function, *args = case
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(*args)
    finally:
        torch.set_num_threads(threads)


def main(names):
    """Record the cases of these names, or all, each with the machine that it comes from."""
    cases, found = control_cases() | text_cases(), {}
    if names:
        found = json.loads(FILE.read_text(encoding="utf-8"))
    here = compute((machine,))
    for name in names or cases:
        found[name] = compute(cases[name]) | {"machine": here}
        print(name, found[name]["parameters"][:12])
    FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
