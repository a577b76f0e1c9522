"""What a critic adds on Hopper: PPO at its preset, with values from elsewhere.

Rollouts, step sizes and seeds are the same; the values under the generalised advantages differ. Without a critic they are told
by the rollout itself, a state's by other episodes only. Nobody then learns values, so the gradient that is clipped is the policy's alone; and
behind a cut, a window's end among them, stands the value of the last step instead of that of the observation behind it:

    critic               PPO as it is: a network that has learned since the run began
    critic, cut alike    the same, with the value of the last step behind cuts
    network              one fitted to the returns of this rollout, two halves telling each other's values
    near states          the mean of what was earned from the 16 nearest states (``credit.baseline="near_states"``)
    locally linear       a linear fit over the 64 nearest, features scaled by how much returns change along them
    ... of 4 rollouts    the same, states of the three rollouts before among them

    python benchmarks/study/values.py            # results/study_values.json, six minutes of a core a seed
    python benchmarks/study/values.py --report   # docs/generated/study_values.md
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from run import HERE, RESULTS
from torch import Tensor, nn

FOUND = RESULTS.parent / "study_values.json"
TABLE = HERE.parent.parent / "docs" / "generated" / "study_values.md"
ENV = "Hopper-v5"
STEPS = 300_000
SEEDS = (1320, 1321, 1322, 1323)
NEAR, LINEAR, EARLIER = 16, 64, 3
RIDGE = 0.3
"""Of a local fit, in mean variances of the features around."""
FIT = {"steps": 50, "size": 256, "rate": 3e-3}
"""Of the network: optimiser steps between two rounds of values behind cuts, ten of which there are."""

Mean = Callable[[Tensor], Tensor]
"""Values of all states [n] from what was earned from them [n]."""


class NearStates:
    """The library's."""

    def __call__(self, state: Tensor, episode: Tensor) -> Mean:
        from groupwise.functional.neighbours import nearest

        return nearest(state, episode, torch.arange(len(state)), k=NEAR).mean

    def keep(self, score: Tensor) -> None:
        """What was earned in the end."""


class Network(NearStates):
    """Two networks, each fitted to the episodes that the other one is asked about."""

    def __call__(self, state: Tensor, episode: Tensor) -> Mean:
        inputs = standardised(state)
        odd = episode.unique(return_inverse=True)[1] % 2 == 1
        halves = [(odd, ~odd, fresh(inputs)), (~odd, odd, fresh(inputs))]

        def mean(score: Tensor) -> Tensor:
            value, centre, scale = torch.empty_like(score), score.mean(), score.std() + 1e-6
            target = (score - centre) / scale
            for asked, told, (network, optimizer) in halves:
                fit(network, optimizer, inputs[told], target[told])
                with torch.no_grad():
                    value[asked] = network(inputs[asked])[:, 0] * scale + centre
            return value

        return mean


class LocallyLinear(NearStates):
    """Linear fits around each state, over states and steps of an episode; of this rollout and of ``earlier`` ones before."""

    def __init__(self, earlier: int = 0) -> None:
        self.earlier = earlier
        self.before: list[tuple[Tensor, Tensor]] = []
        self.first: Tensor | None = None

    def __call__(self, state: Tensor, episode: Tensor) -> Mean:
        self.state = state
        everyone = torch.cat([state, *(kept for kept, _ in self.before)])
        known = [score for _, score in self.before]
        whose = torch.cat([episode, torch.full([len(everyone) - len(state)], -2)])
        weights: list[tuple[Tensor, Tensor]] = []

        def mean(score: Tensor) -> Tensor:
            told = torch.cat([score, *known])
            if not weights:  # the returns at hand first say which features matter
                weights.append(local_weights(scaled(everyone, told), whose, len(state)))
            place, weight = weights[0]
            return (told[place] * weight).sum(dim=1)

        return mean

    def keep(self, score: Tensor) -> None:
        self.before = [*self.before, (self.state, score)][-self.earlier :] if self.earlier else []


ESTIMATORS: dict[str, Callable[[], NearStates]] = {
    "network": Network,
    "near states": NearStates,
    "locally linear": LocallyLinear,
    f"locally linear, of {EARLIER + 1} rollouts": lambda: LocallyLinear(EARLIER),
}
CUT_ALIKE = "critic, cut alike"
RUNS = ("critic", CUT_ALIKE, *ESTIMATORS)


def standardised(state: Tensor) -> Tensor:
    """Features less their means over their deviations."""
    return (state - state.mean(dim=0)) / (state.std(dim=0) + 1e-6)


def scaled(state: Tensor, score: Tensor) -> Tensor:
    """Features in units of how much returns change along them, after a quadratic fit.

    Source: gradient weights, Kpotufe et al. 2016, https://www.jmlr.org/papers/v17/12-289.html.
    """
    inputs = standardised(state).clamp(-5, 5).double()
    width = inputs.shape[1]
    i, j = torch.triu_indices(width, width)
    design = torch.cat([torch.ones(len(inputs), 1), inputs, inputs[:, i] * inputs[:, j]], dim=1)
    penalty = 0.01 * len(inputs) * torch.eye(design.shape[1])
    found = torch.linalg.solve(design.T @ design + penalty, design.T @ (score - score.mean()).double())
    square = torch.zeros(width, width, dtype=inputs.dtype)
    square[i, j] = found[1 + width :]
    slope = (found[1 : 1 + width] + inputs @ (square + square.T)).square().mean(dim=0).sqrt()
    return standardised(state) * (slope / slope.max().clamp(min=1e-9)).float()


def local_weights(state: Tensor, episode: Tensor, asked: int) -> tuple[Tensor, Tensor]:
    """Of the first ``asked`` states: the nearest ones of other episodes, and what each counts in a linear fit at the state.

    Source: locally weighted learning, Atkeson et al. 1997, https://doi.org/10.1023/A:1006559212014.
    """
    found = [_local_weights(state[rows], episode[rows], state, episode) for rows in torch.arange(asked).split(512)]
    places, weights = zip(*found, strict=True)
    return torch.cat(places), torch.cat(weights)


def _local_weights(at: Tensor, whose: Tensor, state: Tensor, episode: Tensor) -> tuple[Tensor, Tensor]:
    distance = torch.cdist(at, state).masked_fill(whose[:, None] == episode, torch.inf)
    distance, place = distance.topk(min(LINEAR, len(state)), largest=False)
    counts = distance.isfinite()
    even = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    offset = state[place] - at[:, None]
    centre = (offset * even[..., None]).sum(dim=1, keepdim=True)
    offset = (offset - centre) * counts[..., None]
    spread = offset.mT @ offset
    ridge = RIDGE * spread.diagonal(dim1=1, dim2=2).mean(dim=1) + 1e-8
    slope = torch.linalg.solve(spread + ridge[:, None, None] * torch.eye(at.shape[1]), centre.mT)
    return place, even - (offset @ slope)[..., 0]


def fresh(inputs: Tensor) -> tuple[nn.Sequential, torch.optim.Adam]:
    """The critic's shape, and its optimiser."""
    width = 64
    network = nn.Sequential(
        nn.Linear(inputs.shape[1], width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )
    return network, torch.optim.Adam(network.parameters(), FIT["rate"])


@torch.enable_grad()
def fit(network: nn.Sequential, optimizer: torch.optim.Adam, inputs: Tensor, target: Tensor) -> None:
    """Some steps on the squared error."""
    for _ in range(int(FIT["steps"])):
        rows = torch.randint(len(inputs), (int(FIT["size"]),))
        optimizer.zero_grad()
        (network(inputs[rows])[:, 0] - target[rows]).square().mean().backward()
        optimizer.step()


def advantages_from(estimator: NearStates) -> Callable[..., tuple[Tensor, Tensor]]:
    """What stands in the place of ``PPO.compute_gae``: a window's end cuts episodes, as a time limit does."""
    from groupwise.data.rollout import transition_view
    from groupwise.engines.base import Engine
    from groupwise.functional.advantages import gae
    from groupwise.recipes.knn_values import gathered, next_values, values

    class Smoothed:
        """Stands where neighbours do."""

        def __init__(self, mean: Mean) -> None:
            self.mean = mean

    def compute_gae(_: Any, rollout: Any, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
        batch = transition_view(rollout).clone()
        reward, member = batch["reward"], batch["loss_mask"]
        batch["truncated"][:, -1] |= ~batch["terminated"][:, -1]
        steps, value = gathered(batch, reward, gamma, Engine()), torch.zeros_like(reward)
        state = steps.state
        if isinstance(estimator, LocallyLinear):
            state = torch.cat([state, batch["step"][member][:, None].to(state)], dim=1)
        near: Any = Smoothed(estimator(state, steps.episode))
        value[member] = values(near, torch.arange(len(state)), steps, Engine())
        ends = (next_values(value, batch["truncated"]), batch["terminated"], batch["truncated"])
        estimator.keep((gae(reward, value, *ends, gamma=gamma, gae_lambda=1.0) + value)[member])
        advantage = gae(reward, value, *ends, gamma=gamma, gae_lambda=gae_lambda)
        return advantage, advantage + value

    return compute_gae


def critic_cut_alike(ppo: Any, rollout: Any, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """The critic's advantages with the last step's own value behind cuts, as the others have it."""
    from groupwise.data.rollout import transition_view
    from groupwise.functional.advantages import gae
    from groupwise.recipes.knn_values import next_values

    batch = transition_view(rollout).clone()
    batch["truncated"][:, -1] |= ~batch["terminated"][:, -1]
    value, ends = batch["value"], (batch["terminated"], batch["truncated"])
    reward, following = ppo.policy.normalize_reward(batch["reward"]), next_values(value, batch["truncated"])
    advantage = gae(reward, value, following, *ends, gamma=gamma, gae_lambda=gae_lambda)
    return advantage, advantage + value


def trained(name: str, seed: int) -> dict[str, Any]:
    """One run, and what it reached."""
    torch.set_num_threads(1)
    from cell import ours, settings
    from plan import Task, task_of

    import groupwise as gw

    task = task_of(ENV)
    if name == CUT_ALIKE:
        gw.PPO.compute_gae = critic_cut_alike  # type: ignore[method-assign]
    elif name in ESTIMATORS:
        import cell

        def without_critic(*args: Any) -> Any:
            cfg = settings(*args)
            return cfg.model_copy(update={"algorithm": cfg.algorithm.model_copy(update={"vf_coef": 0.0})})

        torch.manual_seed(seed)
        cell.settings = without_critic
        gw.PPO.compute_gae = advantages_from(ESTIMATORS[name]())  # type: ignore[method-assign]
    return (
        {"values": name} | ours(Task(task.env, STEPS, 1, task.methods, task.horizon), "ppo", seed, {}) | {"seed": seed}
    )


def report(found: list[dict[str, Any]]) -> str:
    """A row per way to tell values."""
    lines = ["| values | end, seed by seed | on the way |", "|---|---|---|"]
    for name in RUNS:
        runs = sorted((run for run in found if run["values"] == name), key=lambda run: run["seed"])
        if runs:
            ends = ", ".join(f"{run['final']:,.0f}" for run in runs)
            way = ", ".join(f"{statistics.mean(run['returns']):,.0f}" for run in runs)
            lines.append(f"| {name} | {ends} | {way} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    found = json.loads(FOUND.read_text()) if FOUND.exists() else []
    if not args.report:
        there = {(run["values"], run["seed"]) for run in found}
        missing = [(name, seed) for seed in SEEDS for name in RUNS if (name, seed) not in there]
        # a process each: values are replaced for good
        pool = ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1)
        for job in [pool.submit(trained, *run) for run in missing]:
            found.append(job.result())
            FOUND.write_text(json.dumps(found) + "\n")
            print(f"{found[-1]['values']} {found[-1]['seed']}: {found[-1]['final']:.0f}", flush=True)
    TABLE.write_text(report(found) + "\n")
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
