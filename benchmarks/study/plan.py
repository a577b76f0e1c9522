"""What the study runs: environments, their budgets and seeds, and the methods that are compared on them."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """An environment with its budget."""

    env: str
    steps: int
    """Environment steps of every method."""
    seeds: int
    methods: tuple[str, ...]
    horizon: int
    """Steps after which a branch is cut: about a fifth of the longest episode."""


OURS: dict[str, dict[str, Any]] = {
    "outcome": {"group_key": "group", "returns": "outcome"},
    "leave_one_out": {"group_key": "group", "returns": "outcome", "baseline": "leave_one_out", "scale": "none"},
    "group_return_to_go": {"group_key": "group", "returns": "return_to_go"},
    "step_mask": {"finished_members": "mask"},
    "step_absorb": {"finished_members": "zero"},
    "step_trajectory": {"finished_members": "trajectory"},
    "branching": {},
    "near_states": {
        "group_key": "group",
        "returns": "return_to_go",
        "baseline": "near_states",
        "scale": "none",
        "finished_members": "mask",
        "singleton": "zero",
        "normalize": "batch",
    },
}
"""GRPO's credit in each method, over that of the environment's preset: per time step, members that ended left out.

``leave_one_out`` divides by nothing within the group, as RLOO does; its advantages are normalised over the batch, or its step
size would depend on the environment's rewards."""

CANDIDATE = "branching"
"""The method without a critic that stands for them beside PPO: the best one in tuning (``study_tuning.json``), chosen before the first run of
the study. The best of several afterwards would look better than it is."""

REMEDIES = ("near_states",)
"""Thought of once the others' runs were seen, on three environments and seeds of their own; tuned as the others were, and run on all."""

METHODS = (*OURS, "ppo", "sb3_ppo")
FIRST_SEED = 1200
"""Tuning used 1150 to 1199, and the presets were chosen on seeds below."""

SMALL = tuple(METHODS)
LARGE = ("step_mask", "step_absorb", "branching", "near_states", "ppo")
"""Where a run takes minutes: four of ours, and PPO. Three were chosen when CartPole and Acrobot were complete, and near states and PPO
on the next three, ``step_absorb`` when LunarLander had all of ours, where it is the best of them."""
TASKS = (
    Task("CartPole-v1", 100_000, 25, SMALL, 100),
    Task("Acrobot-v1", 500_000, 10, SMALL, 100),
    Task("MountainCarContinuous-v0", 300_000, 10, SMALL, 200),
    Task("Pendulum-v1", 300_000, 10, SMALL, 40),
    Task("LunarLander-v3", 1_000_000, 5, SMALL, 100),
    Task("HalfCheetah-v5", 1_000_000, 3, LARGE, 200),
    Task("Hopper-v5", 1_000_000, 3, LARGE, 200),
)

REFERENCES = {
    "CartPole-v1": (20, 500),
    "Acrobot-v1": (-500, -80),
    "MountainCarContinuous-v0": (0, 95),
    "Pendulum-v1": (-1200, -150),
    "LunarLander-v3": (-180, 250),
    "HalfCheetah-v5": (-280, 5000),
    "Hopper-v5": (20, 3000),
}
"""Scores that count as 0 and 1 where environments are put on one scale: about random actions (the car: standing still), and good policies."""

EVALUATIONS = 20
"""Of the greedy policy, evenly over a run."""
EPISODES = 20
"""Of each of them."""
FINAL_EPISODES = 100
"""Of the last one, fresh."""
OVERSHOOT = 0.03
"""Iterations are finished, and GRPO finishes the groups it opened, so runs are told to stop this share of the budget early."""


def algorithm_options(method: str, task: Task) -> dict[str, Any]:
    """What the method changes of the preset's algorithm."""
    if method == "ppo":
        return {"name": "ppo"}
    credit = dict(OURS[method])
    if method == "leave_one_out":
        credit["normalize"] = "batch"
    options: dict[str, Any] = {"name": "grpo", "credit": credit}
    if method == "branching":
        options["collection"] = {"branching": {"points": 2, "horizon": task.horizon, "trained_steps": 10}}
    return options


def task_of(env: str) -> Task:
    return next(task for task in TASKS if task.env == env)
