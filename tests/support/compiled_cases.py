"""What is compared where the compiler runs: in a process of its own, for the compiler does not see through jaxtyping's checks."""

import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import torch
from small_updates import OBS, build, make_rollout

import groupwise as gw
from groupwise.config.policy import PolicyCfg
from groupwise.policies.actor_critic import ActorCritic
from groupwise.speed.compile import CompiledBackward
from groupwise.speed.flat import flatten
from groupwise.speed.rollouts import CompiledStepper

ROWS, STEPS = 24, 20
UPDATES = {
    "ppo, scaled observations": (
        "ppo",
        {"num_epochs": 3, "minibatch_size": 30, "max_grad_norm": 0.5},
        {"normalize_obs": True},
    ),
    "grpo, micro-batches, kl": ("grpo", {"minibatch_size": 40, "micro_batch_size": 7, "kl_coef": 0.1}, {}),
}


def check_compiled(case, folder):
    """Run a case; raises where it fails."""
    command = [sys.executable, "-W", "error::UserWarning", __file__, case, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def make(kind, settings, network):
    torch.manual_seed(1)
    cfg = PolicyCfg(hidden_sizes=(16, 8), **network)
    policy = ActorCritic(OBS, gym.spaces.Discrete(3), cfg, actor_only=kind == "grpo")
    return build(kind, policy=policy, optimizer={"name": "adam"}, **{"learning_rate": 1e-3} | settings)


def close(found, expected, name="", **tolerance):
    torch.testing.assert_close(found, expected, **tolerance, msg=lambda text: f"{name}: {text}")


def updates(folder):
    """Of several algorithms in one process: what was compiled for one is not taken for another."""
    pairs = [(make(*case), make(*case)) for case in UPDATES.values()]
    for _, fast in pairs:
        fast.backward = CompiledBackward(fast, flatten(fast))
    for seed in range(10):
        for reference, fast in pairs:
            rollout = make_rollout(reference.policy, seed)
            expected, found = reference.update(rollout), fast.update(rollout)
            for name, value in expected.items():
                close(found[name], value, name, rtol=1e-3, atol=1e-5)
    for reference, fast in pairs:
        assert not fast.backward.failed
        for one, other in zip(fast.policy.parameters(), reference.policy.parameters(), strict=True):
            close(one, other, rtol=0, atol=1e-5)


RESUMED = {
    "ppo": ("Pendulum-v1", gw.PPOCfg(num_steps=16, num_epochs=2, minibatch_size=32, schedule={"name": "linear"}), {}),
    "grpo": (
        "CartPole-v1",
        gw.GRPOCfg(num_steps=16, group_size=2, schedule={"name": "linear"}, collection={"partial_groups": "truncate"}),
        {"vectorization": "torch"},
    ),
}


class Copies(gw.Callback):
    """The run folder after two iterations, as if training had been killed there."""

    def __init__(self, run_dir, to):
        self.run_dir, self.to = run_dir, to

    def on_iteration_end(self, trainer, rollout, metrics):
        if trainer.iteration == 3:  # by now the second is saved
            shutil.copytree(self.run_dir, self.to)


def train(folder, name, kind, *callbacks, compiling="on"):
    env_id, algorithm, env = RESUMED[name]
    cfg = gw.RunCfg(
        env={"id": env_id, "num_envs": 4, **env},
        algorithm=algorithm,
        compile=compiling,
        total_steps=320,
        run_dir=folder / f"{name}-{kind}",
        checkpoint_interval=1,
        evaluation={"episodes": 1},
        logging={"progress": "none"},
    )
    return gw.train(cfg, callbacks=callbacks)


def whole(folder):
    """Whole runs, of which copies are kept; with continuous actions they end as without compiling."""
    for name in RESUMED:
        whole = train(folder, name, "whole", Copies(folder / f"{name}-whole", folder / f"{name}-copy"))
        if name == "ppo":
            reference = train(folder, name, "reference", compiling="off")
            for one, other in zip(whole.policy.parameters(), reference.policy.parameters(), strict=True):
                close(one, other, rtol=0, atol=1e-4)


def resumed(folder):
    """In another process than before: equal to the whole ones bit for bit."""
    for name in RESUMED:
        found, whole = gw.resume(folder / f"{name}-copy"), gw.Run.load(folder / f"{name}-whole")
        assert len(found.metrics()) > 2
        pairs = zip(found.metrics(), whole.metrics(), strict=True)
        for one, other in pairs:
            shared = [key for key in one if not key.startswith("time/")]
            assert [one[key] for key in shared] == [other[key] for key in shared], name
        for one, other in zip(found.policy.parameters(), whole.policy.parameters(), strict=True):
            assert torch.equal(one, other), name


def collecting(kind):
    torch.manual_seed(0)
    env = gw.TorchCartPole(ROWS)
    policy = gw.ActorCritic(env.observation_space, env.action_space, actor_only=kind == "grpo")
    collector = (
        gw.TorchVectorCollector(env, policy, seed=1)
        if kind == "ppo"
        else gw.TorchGroupCollector(
            env, policy, group_size=8, collection=gw.CollectionCfg(partial_groups="truncate", horizon=30), seed=1
        )
    )
    specs = {"obs_spec": env.obs_spec, "action_spec": policy.action_spec}
    return collector, gw.RolloutBuffer(ROWS, STEPS, value=kind == "ppo", **specs)


def rollouts(folder):
    """From the same draws; changes of parameters in place are seen."""
    for kind in ("ppo", "grpo"):
        compare_rollouts(kind)


def compare_rollouts(kind):
    (reference, buffer), (fast, other) = collecting(kind), collecting(kind)
    stepper = fast.stepper = CompiledStepper(fast)
    for _ in range(4):
        expected = reference.collect(STEPS, rollout=buffer.start_rollout())
        found = fast.collect(STEPS, rollout=other.start_rollout())
        assert not stepper.failed
        for key in expected.keys():  # noqa: SIM118  iterating goes over rows
            close(found[key], expected[key], str(key), rtol=1e-3, atol=1e-3)
        with torch.no_grad():
            for policy in (reference.policy, fast.policy):
                policy.actor.head.bias.add_(torch.tensor([0.1, 0.0]))
    assert fast.metrics().keys() == reference.metrics().keys()


CASES = {
    "updates": updates,
    "whole": whole,
    "resumed": resumed,
    "rollouts": rollouts,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    CASES[sys.argv[1]](Path(sys.argv[2]))
