"""What is compared where the compiler runs: in processes of their own, for the compiler does not see through jaxtyping's checks."""

import itertools
import multiprocessing
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from at_events import copies, on
from forked import run_script
from small_updates import OBS, build, make_rollout

import groupwise as gw
from groupwise.config.policy import PolicyCfg
from groupwise.policies.actor_critic import ActorCritic
from groupwise.speed.control import compiled_gradient, flat_adam


def check_compiled(folder, *processes):
    """Run the cases of each process, named in one string; raises where one fails."""
    run_script(Path(__file__), folder, *processes)


class Walk(gw.TorchGroupEnv):
    """A walk along a line that ends at 1, from a random place: little to compile."""

    def __init__(self, num_envs, *, max_episode_steps=9, device="cpu"):
        box = gym.spaces.Box(-1, 1, (1,), np.float32)
        spaces = {"observation_space": box, "action_space": box}
        super().__init__(num_envs, env_id="Walk", max_episode_steps=max_episode_steps, device=device, **spaces)

    def initial(self, random):
        return random.uniform(1, low=-1.0)

    def transition(self, state, action, random):
        state = state + 0.3 * action
        return state, state[:, 0], state[:, 0] > 1


def close(found, expected, name="", **tolerance):
    torch.testing.assert_close(found, expected, **tolerance, msg=lambda text: f"{name}: {text}")


def updates(folder):
    """PPO's, with continuous actions and scaled observations."""

    def make(**fast):
        torch.manual_seed(1)
        cfg = PolicyCfg(hidden_sizes=(16, 8), normalize_obs=True)
        policy = ActorCritic(OBS, gym.spaces.Box(-1, 1, (2,), np.float32), cfg)
        settings = {"num_epochs": 3, "minibatch_size": 30, "max_grad_norm": 0.5, "learning_rate": 1e-3}
        return build("ppo", policy=policy, fast=fast, optimizer={"name": "adam"}, **settings)

    reference, fast = make(), make(optimizer=flat_adam, gradient=compiled_gradient)
    for seed in range(10):
        rollout = make_rollout(reference.policy, seed)
        expected, found = reference.update(rollout), fast.update(rollout)
        for name, value in expected.items():
            close(found[name], value, name, rtol=1e-3, atol=1e-5)
    assert not fast.gradient.failed
    for algorithm in (reference, fast):  # as a callback may: what was compiled has the former number
        algorithm.cfg = algorithm.cfg.model_copy(update={"ent_coef": 0.5})
    rollout = make_rollout(reference.policy, 10)
    close(fast.update(rollout)["train/loss"], reference.update(rollout)["train/loss"], rtol=1e-3, atol=1e-5)
    for one, other in zip(fast.policy.parameters(), reference.policy.parameters(), strict=True):
        close(one, other, rtol=0, atol=1e-5)


GROUPS = {"num_steps": 16, "group_size": 2, "minibatch_size": 40, "micro_batch_size": 7, "kl_coef": 0.1}
GROUPS |= {"schedule": {"name": "linear"}, "collection": {"partial_groups": "truncate"}}
# settings of a function, as presets have them
GROUPS |= {
    "credit": {
        "group_key": "group",
        "returns": "return_to_go",
        "baseline": "knn",
        "scale": "none",
        "normalize": "batch",
    }
}
ENDS = on("iteration_end", lambda trainer, *_: trainer.stop("five iterations") if trainer.iteration == 5 else None)


def compiles(trainer, *_):
    assert not trainer.algorithm.gradient.failed


COMPILED = on("iteration_end", compiles)


def whole(folder):
    """A whole run of groups, of which a copy is kept; its first iterations are those of a run that is not compiled."""

    def train(name, speed, *callbacks):
        return gw.train(
            Walk,
            gw.GRPOCfg(**GROUPS),
            num_envs=4,
            speed=speed,
            total_steps=2_000_000,  # so many that it pays to compile
            run_dir=folder / name,
            checkpoint_interval=1,
            evaluation={"episodes": 1},
            logging={"progress": "none"},
            callbacks=[*callbacks, ENDS],
        )

    compiled, reference = (
        train("whole", "auto", copies(folder / "whole", folder / "copy"), COMPILED),
        train("reference", "off"),
    )
    for found, expected in itertools.islice(zip(compiled.metrics(), reference.metrics(), strict=True), 2):
        for name, value in expected.items():
            if not name.startswith("time/"):
                assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def resumed(folder):
    """In another process than before: equal to the whole one bit for bit."""
    found, whole = (
        gw.resume(folder / "copy", env=Walk, callbacks=[COMPILED, ENDS]),
        gw.Run.load(folder / "whole", env=Walk),
    )
    assert len(found.metrics()) > 2
    for one, other in zip(found.metrics(), whole.metrics(), strict=True):
        shared = [key for key in one if not key.startswith("time/")]
        assert [one[key] for key in shared] == [other[key] for key in shared]
    for one, other in zip(found.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(one, other)


CASES = {case.__name__: case for case in (updates, whole, resumed)}


def run(folder, names):
    for name in names.split():
        CASES[name](folder)


if __name__ == "__main__":
    import torch._inductor.compile_fx  # once, for all processes

    torch.set_num_threads(1)
    for names in sys.argv[2:]:
        process = multiprocessing.get_context("fork").Process(target=run, args=(Path(sys.argv[1]), names))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)
