"""Short trials that find out what an environment offers. Each gives a finding; what goes wrong is a finding, too."""

import pickle
import re
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeAlias, TypeVar

import gymnasium
import numpy as np
import torch

from groupwise.config.env import EnvCfg, StartTier
from groupwise.data.spaces import leaf_spaces, space_kind, subspaces
from groupwise.envs.base import GroupEnv, Mask, VectorEnv
from groupwise.envs.findings import Branching, Finding, none, unknown
from groupwise.envs.make import make_env
from groupwise.envs.single import explained, step_limit, with_limit
from groupwise.envs.workers import process_exit_code
from groupwise.errors import EnvError, GroupwiseError, UnsupportedSpaceError

TIERS: tuple[StartTier, ...] = ("native", "snapshot", "seed", "replay")
VECTORIZATIONS = ("entry_point", "sync", "async")
NUM_ENVS = 8
NO_ENTRY_POINT = "it registers no vectorised version"
NO_STEP_LIMIT = (
    "no step limit is known, so an attempt might never end; fix: env.max_episode_steps (also where it truncates by "
    "itself), or algorithm.attempt_steps"
)
_NUM_SEEDS = 16
_BRANCH_STEPS = 16
_BUDGET_S = 0.3

T = TypeVar("T")
Maker: TypeAlias = Callable[..., gymnasium.Env | GroupEnv]


class CannotTellError(Exception):
    """A trial that failed to tell. Becomes a finding."""


def attempt(probe: Callable[[], T]) -> Finding[T]:
    """What ``probe`` finds. An error of ours means that it does not work, any other one that nobody can tell."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what matters of them is found out here
        try:
            return Finding(probe())
        except GroupwiseError as error:
            return none(*reason_and_fix(error))
        except Exception as error:
            return unknown(*reason_and_fix(error))


def reason_and_fix(error: Exception) -> tuple[str, str]:
    """An error in a line, with its type unless it is one of ours, and what it says is to be done."""
    kind = "" if isinstance(error, GroupwiseError | CannotTellError) else f"{type(error).__name__}: "
    reason, _, fix = re.sub(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+", "", str(error)).partition(
        "; fix: "
    )
    reason = re.sub(r"^siblings of \S+ cannot share a start( by group_start='\w+')?: ", "", " ".join(reason.split()))
    return kind + reason, " ".join(fix.split())


def make_single(cfg: EnvCfg, env: Maker | None) -> gymnasium.Env:
    """One environment, as training would make it.

    Raises:
        UnknownNameError: nobody registered its id.
        MissingExtraError: it needs a package that is not installed.
        EnvError: it is no ``gymnasium.Env``, or cannot be made.
    """
    with explained(cfg.id):
        made: object = gymnasium.make(cfg.id, **with_limit(cfg)) if env is None else env(**cfg.kwargs)
    if not isinstance(made, gymnasium.Env):
        raise EnvError(f"the callable returned a {type(made).__name__}, expected a gymnasium.Env")
    return made


def observation_support(cfg: EnvCfg, env: Maker | None) -> str:
    """The observation space, if rollouts can hold it.

    Raises:
        UnsupportedSpaceError: they cannot; names the part.
    """
    single = make_single(cfg, env)
    single.close()
    for path, leaf in leaf_spaces(single.observation_space).items():
        if space_kind(leaf) == "unsupported":
            name = f"{'.'.join(path)!r} is a " if path else ""
            raise UnsupportedSpaceError(
                f"{name}{type(leaf).__name__}, which has no fixed shape; fix: wrap it so that only arrays are left "
                "(MiniGrid: minigrid.wrappers.ImgObsWrapper)"
            )
    return brief(single.observation_space)


def known_step_limit(cfg: EnvCfg, env: Maker | None) -> int:
    """Steps after which an episode is truncated.

    Raises:
        EnvError: nobody says; the environment may still end its episodes by itself.
    """
    single = make_single(cfg, env)
    limit = step_limit(single)
    single.close()
    return stated(limit)


def stated(limit: int | None) -> int:
    """``limit`` itself.

    Raises:
        EnvError: it is None.
    """
    if limit is None:
        raise EnvError(NO_STEP_LIMIT)
    return limit


def brief(space: Any) -> str:
    """A space in a few words, without its bounds."""
    children = subspaces(space)
    if children is not None:
        return f"{type(space).__name__}({', '.join(f'{name}: {brief(child)}' for name, child in children.items())})"
    if space_kind(space) == "box":
        return f"Box{list(space.shape)} {space.dtype}"
    return str(space)


def start_varies(cfg: EnvCfg, env: Maker | None) -> bool:
    """Whether some of 16 seeds show another first observation than the first one does (fewer where resets are slow).

    In one environment; in fresh ones if it keeps something from one episode to the next.

    Raises:
        CannotTellError: equal seeds start differently, so seeds say nothing.
    """
    single = make_single(cfg, env)
    try:
        for first_observation in (partial(_reset, single), partial(_reset_afresh, cfg, env)):
            first, begun = first_observation(0), time.perf_counter()
            if first_observation(0) == first:
                return any(first_observation(seed) != first for seed in _seeds(begun))
        raise CannotTellError("equal seeds start with different observations")
    finally:
        single.close()


def _seeds(begun: float) -> Iterator[int]:
    for seed in range(1, _NUM_SEEDS):
        if seed > 4 and time.perf_counter() - begun > 4 * _BUDGET_S:
            break
        yield seed


def _reset(single: gymnasium.Env, seed: int) -> bytes:
    return pickle.dumps(single.reset(seed=seed)[0])


def _reset_afresh(cfg: EnvCfg, env: Maker | None, seed: int) -> bytes:
    single = make_single(cfg, env)
    try:
        return _reset(single, seed)
    finally:
        single.close()


def tier_cost(cfg: EnvCfg, env: Maker | None, tier: StartTier) -> float:
    """Microseconds that a row's start takes when a sibling has started there before, by this tier, which is verified.

    Raises:
        GroupStartError: siblings cannot share a start in this way.
    """
    native = tier == "native"
    if native and not offers_entry_point(cfg, env):
        raise EnvError(NO_ENTRY_POINT)
    asked = {"group_start": tier, "vectorization": "entry_point" if native else "sync", "autoreset": "disabled"}
    num_envs = NUM_ENVS if native else 2
    made = make_env(cfg.model_copy(update=asked), grouped=True, num_envs=num_envs, env=env)
    try:
        rows = num_envs if native else 1
        return start_us(made, rows) / rows
    finally:
        made.close()


def start_us(env: GroupEnv, rows: int) -> float:
    """Median microseconds of starting so many rows at once where they have started before."""
    seeds = np.zeros(env.num_envs, np.int64)
    env.start(_first(env, env.num_envs), seeds, seeds)
    return median_us(lambda: env.start(_first(env, rows), seeds, seeds))


def branching(env: GroupEnv) -> Branching:
    """How a verified environment captures states, and what that costs.

    Raises:
        EnvError: it does not.
    """
    report = env.start_report
    if report is None or not env.can_branch:
        reasons = () if report is None else report.passed_over
        raise EnvError("; ".join(reasons) or f"no state of {env.env_id} can be captured")
    row, seeds = _first(env, 1), np.zeros(env.num_envs, np.int64)
    env.start(_first(env, env.num_envs), seeds, seeds)
    actions = sampled_actions(env, _BRANCH_STEPS)
    captured = env.snapshot([0])
    for action in actions:
        step = env.step(action)
        if step.terminated[0] or step.truncated[0]:
            break
        captured = env.snapshot([0])
    states = [*captured, *[None] * (env.num_envs - 1)]
    restore = median_us(lambda: env.restore(row, states, seeds))
    return Branching(report.states or "native", median_us(lambda: env.snapshot([0])), restore)


def entry_point_autoreset(cfg: EnvCfg, env: Maker | None) -> str:
    """Who resets finished rows in the environment's own vectorised version, by its metadata.

    Raises:
        EnvError: there is none, or it does not say.
    """
    if not offers_entry_point(cfg, env):
        raise EnvError(NO_ENTRY_POINT)
    with explained(cfg.id):
        vector = gymnasium.make_vec(cfg.id, 2, vectorization_mode="vector_entry_point", **with_limit(cfg))
    mode = vector.metadata.get("autoreset_mode")
    vector.close()
    if not isinstance(mode, gymnasium.vector.AutoresetMode):
        raise EnvError(f"its metadata does not say: autoreset_mode is {mode!r}")
    return mode.name.lower()


def offers_entry_point(cfg: EnvCfg, env: Maker | None) -> bool:
    """Whether the environment is registered with a vectorised version of its own."""
    return env is None and gymnasium.spec(cfg.id).vector_entry_point is not None


def steps_per_second(cfg: EnvCfg, env: Maker | None, vectorization: str) -> float:
    """Environment steps a second with 8 environments and random actions, resets included.

    ``sync`` and ``async`` are the rows that groups are made of, started again when they end; ``entry_point`` and
    ``envpool`` reset themselves.

    Raises:
        EnvError: it cannot be vectorised in this way.
        CannotTellError: no process can begin, which is the script's fault.
    """
    if vectorization == "async":
        _try_process()
    in_groups, autoreset = vectorization in ("sync", "async"), "next_step"
    if in_groups:
        autoreset = "disabled"
    elif vectorization == "entry_point":
        autoreset = entry_point_autoreset(cfg, env)
    asked = without_group_settings(cfg).model_copy(update={"vectorization": vectorization, "autoreset": autoreset})
    made = make_env(asked, grouped=in_groups, num_envs=NUM_ENVS, env=env, verify=False)
    try:
        return speed(made)
    finally:
        made.close()


def _try_process() -> None:
    """Find out by one process, since each imports the script that runs here, and does again what that has no guard for."""
    if exit_code := process_exit_code():
        raise CannotTellError(
            f"a new process, which imports this script, ended with exit code {exit_code}; fix: put what the script runs "
            "under `if __name__ == '__main__':`"
        )


def speed(env: VectorEnv) -> float:
    """Environment steps a second with random actions; rows that nobody resets are reset where they end."""
    env.reset(seed=0)
    actions = sampled_actions(env, 64)
    for action in actions[:8]:
        _step(env, action)
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < _BUDGET_S:
        _step(env, actions[count % len(actions)])
        count += 1
    return count * env.num_envs / (time.perf_counter() - begun)


def without_group_settings(cfg: EnvCfg) -> EnvCfg:
    """``cfg`` without what only some ways to make it can do, and what says nothing about the environment."""
    return cfg.model_copy(update={"group_start": "auto", "random_prefix": 0, "reward_parts": ()})


def in_envpool(env_id: str) -> bool:
    """Whether EnvPool is installed and has a task of this name."""
    if find_spec("envpool") is None:
        return False
    import envpool

    return env_id in envpool.list_all_envs()


def median_us(action: Callable[[], object], most: int = 50) -> float:
    """Median duration in microseconds, of up to 50 times in 0.3 s."""
    times: list[float] = []
    while len(times) < most and (len(times) < 3 or sum(times) < _BUDGET_S):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return float(np.median(times)) * 1e6


def sampled_actions(env: VectorEnv, count: int) -> list[torch.Tensor]:
    """Random actions of all rows."""
    env.action_space.seed(0)
    return [
        torch.from_numpy(np.stack([np.asarray(env.action_space.sample()) for _ in range(env.num_envs)]))
        for _ in range(count)
    ]


def _step(env: VectorEnv, action: torch.Tensor) -> None:
    step = env.step(action)
    if env.autoreset == "disabled" and (over := (step.terminated | step.truncated).cpu().numpy()).any():
        env.reset(mask=over)


def _first(env: VectorEnv, rows: int) -> Mask:
    return np.arange(env.num_envs) < rows
