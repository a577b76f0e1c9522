"""What is compared where the compiler runs: in a process of its own, for the compiler does not see through jaxtyping's checks."""

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from small_updates import OBS, build, make_rollout

import groupwise as gw
from groupwise.collectors.torch import TorchGroupCollector, TorchVectorCollector
from groupwise.config.policy import PolicyCfg
from groupwise.envs.torch_env import TorchCartPole
from groupwise.policies.actor_critic import ActorCritic
from groupwise.speed.control import compiled_gradient, compiled_stepper, flat_adam

ROWS, STEPS = 24, 20


def check_compiled(folder, *cases):
    """Run cases in one process; raises where one fails."""
    command = [sys.executable, "-W", "error::UserWarning", __file__, str(folder), *cases]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def make(**fast):
    torch.manual_seed(1)
    policy = ActorCritic(
        OBS, gym.spaces.Box(-1, 1, (2,), np.float32), PolicyCfg(hidden_sizes=(16, 8), normalize_obs=True)
    )
    settings = {"num_epochs": 3, "minibatch_size": 30, "max_grad_norm": 0.5, "learning_rate": 1e-3}
    return build("ppo", policy=policy, fast=fast, optimizer={"name": "adam"}, **settings)


def close(found, expected, name="", **tolerance):
    torch.testing.assert_close(found, expected, **tolerance, msg=lambda text: f"{name}: {text}")


GROUPS = {"num_steps": 16, "group_size": 2, "minibatch_size": 40, "micro_batch_size": 7, "kl_coef": 0.1}
GROUPS |= {"schedule": {"name": "linear"}, "collection": {"partial_groups": "truncate"}}


def updates(folder):
    """Of PPO with continuous actions and scaled observations."""
    reference, fast = make(), make(optimizer=flat_adam, gradient=compiled_gradient)
    for seed in range(10):
        rollout = make_rollout(reference.policy, seed)
        expected, found = reference.update(rollout), fast.update(rollout)
        for name, value in expected.items():
            close(found[name], value, name, rtol=1e-3, atol=1e-5)
    assert not fast.gradient.failed
    for one, other in zip(fast.policy.parameters(), reference.policy.parameters(), strict=True):
        close(one, other, rtol=0, atol=1e-5)


class Copies(gw.Callback):
    """The run folder with its second checkpoint, as if training had been killed after it.

    Copied before the third is begun, for a file that is being written can vanish under the copy.
    """

    def __init__(self, run_dir, to):
        self.run_dir, self.to = run_dir, to
        self.checkpoints = 0

    def on_checkpoint(self, trainer, folder):
        self.checkpoints += 1
        if self.checkpoints == 2:
            shutil.copytree(self.run_dir, self.to)


class Ends(gw.Callback):
    """Ends a run after five iterations of its many."""

    def on_iteration_end(self, trainer, rollout, metrics):
        if trainer.iteration == 5:
            trainer.stop("five iterations")


def whole(folder):
    """A whole run of groups, of which a copy is kept; its first iterations are those of a run that is not compiled."""
    settings = gw.RunCfg(
        env={"id": "CartPole-v1", "num_envs": 4, "vectorization": "torch"},
        algorithm=gw.GRPOCfg(**GROUPS),
        total_steps=2_000_000,  # so many that it pays to compile
        run_dir=folder / "whole",
        checkpoint_interval=1,
        evaluation={"episodes": 1},
        logging={"progress": "none"},
    )
    compiled = gw.train(settings, callbacks=[Copies(folder / "whole", folder / "copy"), Ends()])
    reference = gw.train(
        settings.model_copy(update={"speed": "off", "run_dir": folder / "reference"}), callbacks=[Ends()]
    )
    for found, expected in itertools.islice(zip(compiled.metrics(), reference.metrics(), strict=True), 2):
        for name, value in expected.items():
            if not name.startswith("time/"):
                assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def resumed(folder):
    """In another process than before: equal to the whole one bit for bit."""
    found, whole = gw.resume(folder / "copy", callbacks=[Ends()]), gw.Run.load(folder / "whole")
    assert len(found.metrics()) > 2
    for one, other in zip(found.metrics(), whole.metrics(), strict=True):
        shared = [key for key in one if not key.startswith("time/")]
        assert [one[key] for key in shared] == [other[key] for key in shared]
    for one, other in zip(found.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def collecting(kind, **fast):
    torch.manual_seed(0)
    env = TorchCartPole(ROWS)
    policy = gw.ActorCritic(env.observation_space, env.action_space, actor_only=kind == "grpo")
    if kind == "ppo":
        collector = TorchVectorCollector(env, policy, seed=1, **fast)
    else:
        cfg = gw.CollectionCfg(partial_groups="truncate", horizon=30)
        collector = TorchGroupCollector(env, policy, group_size=8, collection=cfg, seed=1, **fast)
    specs = {"obs_spec": env.obs_spec, "action_spec": policy.action_spec}
    return collector, gw.RolloutBuffer(ROWS, STEPS, value=kind == "ppo", **specs)


def rollouts(folder):
    """From the same draws; changes of parameters in place are seen."""
    for kind in ("ppo", "grpo"):
        (reference, buffer), (fast, other) = collecting(kind), collecting(kind, stepper=compiled_stepper)
        for _ in range(4):
            expected = reference.collect(STEPS, rollout=buffer.start_rollout())
            found = fast.collect(STEPS, rollout=other.start_rollout())
            assert not fast.fast_stepper.failed
            for key in expected.keys():  # noqa: SIM118  iterating goes over rows
                close(found[key], expected[key], str(key), rtol=1e-3, atol=1e-3)
            with torch.no_grad():
                for policy in (reference.policy, fast.policy):
                    policy.actor.head.bias.add_(torch.tensor([0.1, 0.0]))
        assert fast.metrics().keys() == reference.metrics().keys()


CASES = {case.__name__: case for case in (updates, whole, rollouts, resumed)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        CASES[name](Path(sys.argv[1]))
