"""The trial whether steps are random, wherever the numbers come from."""

import copy
import gc
import pickle
import random
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec

from groupwise.config.env import EnvCfg
from groupwise.envs.check import CannotTellError, Maker, make_single
from groupwise.envs.findings import Noise
from groupwise.envs.snapshots import Generator, noise_state, reseed_noise, seed_in_place, seeded_generators
from groupwise.seeding import derive_seed

_NUM_STEPS = 200
_NUM_TRIES = 8
_BUDGET_S = 1.2
_MOST_OBJECTS = 100_000


class _Play(NamedTuple):
    trace: list[bytes]
    """The first observation; then observation, reward and both flags of each step."""
    drew: bool
    """Whether a step moved any generator."""


def step_noise(cfg: EnvCfg, env: Maker | None) -> Noise:
    """Whether steps are random, by attempts at the same start with the same actions.

    Each is played in a fresh environment. Between attempts only the generators that training seeds get other seeds, then
    only the others: the global ones of NumPy, ``random`` and torch, the spaces', and those hidden in objects. They are
    left as the last attempt left them.

    Raises:
        CannotTellError: attempts differ though all generators had the same seeds.
    """
    first, again = _play(cfg, env), _play(cfg, env)
    if _differ(first, again):
        raise CannotTellError("equal seeds and equal actions gave other observations, rewards or flags")
    if not first.drew:
        return "none"
    begun = time.perf_counter()
    for number in range(1, _NUM_TRIES + 1):
        if _differ(first, _play(cfg, env, reached=number)):
            return "seen"
        if _differ(first, _play(cfg, env, stray=number)):
            return "stray"
        if time.perf_counter() - begun > _BUDGET_S:
            break
    return "drawn"


def _differ(first: _Play, other: _Play) -> bool:
    """Whether they parted, as far as both went: time may have cut one of them."""
    return any(left != right for left, right in zip(first.trace, other.trace, strict=False))


def _play(cfg: EnvCfg, env: Maker | None, *, reached: int = 0, stray: int = 0) -> _Play:
    """Some hundred random steps, in several episodes if they are short.

    Args:
        reached: after the start, seed of the generators that training seeds.
        stray: after the start, seed of all others.
    """
    _seed_globally(0)
    single = make_single(cfg, env)
    try:
        actions = copy.deepcopy(single.action_space)
        actions.seed(0)
        for space in _spaces(single):
            space.seed(0)
        obs, hidden = _begin(single, 0, reached, stray)
        trace, drew, begun = [obs], False, time.perf_counter()
        for number in range(1, _NUM_STEPS + 1):
            action, own = actions.sample(), _own_positions(single, hidden)
            # nothing of ours between these positions, the step and the next ones: run-time type checks draw
            common = _global_positions()
            *step, _ = single.step(action)
            drew = _global_positions() != common or _own_positions(single, hidden) != own or drew
            trace.append(_recorded(*step))
            if time.perf_counter() - begun > _BUDGET_S:
                break
            if step[2] or step[3]:
                obs, hidden = _begin(single, number, reached, stray)
                trace.append(obs)
        return _Play(trace, drew)
    finally:
        single.close()


def _recorded(obs: Any, reward: Any, terminated: Any, truncated: Any) -> bytes:
    return pickle.dumps((obs, float(reward), bool(terminated), bool(truncated)))


def _begin(single: gymnasium.Env, episode: int, reached: int, stray: int) -> tuple[bytes, list[Generator]]:
    """The first observation of an episode, equal in all plays, and the generators that training does not seed.

    From there on everything random follows from the two seeds.
    """
    _seed_globally(episode)
    obs, _ = single.reset(seed=episode)
    _seed_globally(derive_seed(stray, "global", episode))
    hidden = list(_hidden_generators(single))
    for number, generator in enumerate(hidden):
        seed_in_place(generator, derive_seed(stray, "hidden", episode, number))
    reseed_noise(single, derive_seed(reached, "reached", episode))
    return pickle.dumps(obs), hidden


def _own_positions(single: gymnasium.Env, hidden: list[Generator]) -> bytes:
    """Where the environment's generators stand, to be compared."""
    return pickle.dumps((noise_state(single), hidden))


def _hidden_generators(env: gymnasium.Env) -> Iterator[Generator]:
    """Generators anywhere in the environment's objects, its spaces among them, which training does not seed."""
    seeded = {id(generator) for generator in seeded_generators(env)}
    return (found for found in _generators_and_spaces(env) if isinstance(found, Generator) and id(found) not in seeded)


def _generators_and_spaces(env: gymnasium.Env) -> Iterator[Generator | gymnasium.Space[Any]]:
    """Those anywhere in the environment's objects."""
    seen: set[int] = set()
    waiting: list[Any] = [env, *_spaces(env)]
    while waiting and len(seen) < _MOST_OBJECTS:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind = type(value)  # a stand-in for another object may claim that object's class, and fail to
        if issubclass(kind, Generator | gymnasium.Space):
            yield value
        if issubclass(kind, Generator):
            continue
        if isinstance(value, types.FunctionType):  # its globals are the whole program
            waiting.extend(value.__closure__ or ())
        elif not isinstance(value, type | types.ModuleType | EnvSpec):
            waiting.extend(reversed(gc.get_referents(value)))


def _spaces(env: gymnasium.Env) -> list[gymnasium.Space[Any]]:
    """Those that ``step`` may draw from: often attributes of the class, where nothing else would find them."""
    inner = env.unwrapped
    return [env.action_space, env.observation_space, inner.action_space, inner.observation_space]


def _seed_globally(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def _global_positions() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes()))


@contextmanager
def generators_kept(env: gymnasium.Env) -> Iterator[None]:
    """Leave generators and spaces that other environments of the kind share with this one where they were."""
    found = list(_generators_and_spaces(env))
    spaces = [(space, dict(vars(space))) for space in found if isinstance(space, gymnasium.Space)]
    generators = [(generator, _state(generator)) for generator in found if isinstance(generator, Generator)]
    try:
        yield
    finally:
        for space, attributes in spaces:  # its generator is another one when it was seeded
            vars(space).update(attributes)
        for generator, state in generators:
            _put_back(generator, state)


def _state(generator: Generator) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return None if isinstance(generator, random.SystemRandom) else generator.getstate()


def _put_back(generator: Generator, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    elif not isinstance(generator, random.SystemRandom):
        generator.setstate(state)


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Leave the global generators where they were."""
    python, numpy, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(tensors)
