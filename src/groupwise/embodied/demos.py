"""Records demonstrations of scripted experts.

Noise is added to the expert's action on the way to the environment, so the episode also visits states that the expert alone
would avoid. The dataset stores the action without the noise: it shows how to get back.

Source: Laskey et al. 2017, "DART: Noise Injection for Robust Imitation Learning", https://arxiv.org/abs/1703.09327.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

from groupwise import system as files
from groupwise.config.base import GIVEN
from groupwise.config.run import EnvCfg
from groupwise.data.rollout import leaves
from groupwise.data.spaces import allowed_action, check_fits, leaf_spaces, obs_to_tensor, space_kind
from groupwise.embodied.experts import EXPERTS, Expert, ExpertMaker
from groupwise.embodied.lerobot import INSTRUCTION, Array, Demonstration, has_instruction, write_demos
from groupwise.envs.base import success_of_row
from groupwise.envs.gymnasium import kept_space
from groupwise.envs.make import make_one
from groupwise.envs.names import import_package
from groupwise.errors import ConfigError, DataError, require_count
from groupwise.report.folder import is_free
from groupwise.seeding import derive_seed

MAX_ATTEMPTS = 20
"""Most episodes played for each requested one."""
_MOST_HELD = 2**28
"""Bytes of observations after which an environment that has not told of success is taken to tell of none."""
MAX_STEPS = 10_000  # of an episode in environments without a step limit


class Recording(NamedTuple):
    """Counts of a finished recording."""

    path: Path
    """The folder."""
    episodes: int
    steps: int
    """Steps of these episodes together."""
    attempts: int
    """Episodes played: the expert's successes are ``episodes`` of them, unless failures were kept."""


def record_demos(
    env: str | EnvCfg | Callable[..., gymnasium.Env],
    expert: Expert | None = None,
    *,
    episodes: int = 50,
    out: Path | str | None = None,
    noise: float = 0.1,
    seed: int = 0,
    keep_failures: bool = False,
) -> Recording:
    """Record an expert's episodes, in the layout of LeRobot's dataset format.

    Args:
        env: a Gymnasium id, an ``EnvCfg``, or a callable that returns an environment.
        expert: from an observation to an action. None: the one that is registered for the id.
        episodes: how many to keep.
        out: a folder that does not exist or is empty. None: ``demos/<environment>``.
        noise: of Box actions: standard deviation of Gaussian noise, as a share of half the range (of the unit, where
            there are no bounds). For other actions: probability of a random one. The stored action is without it.
        seed: of the starts and the noise.
        keep_failures: keep episodes that end without success, too. Environments that do not say keep all.

    Raises:
        ConfigError: no expert is known, ``out`` is taken, or a number is out of range.
        DataError: the expert hardly ever succeeds.
        EnvError: the environment cannot be made.
    """
    require_count("episodes", episodes)
    if not noise >= 0:
        raise ConfigError(f"noise = {noise}: expected a number of at least 0; fix: noise=0.1")
    cfg = env if isinstance(env, EnvCfg) else EnvCfg(id=env if isinstance(env, str) else GIVEN)
    # experts give single actions; cloning makes chunks of them
    cfg = cfg.model_copy(update={"action_chunk": 1, "num_action_steps": None})
    make = None if isinstance(env, str | EnvCfg) else env
    here = Path.cwd()  # which the environment may change
    if expert is None:
        import_package(cfg.id)  # which registers its experts
    known = (maker for prefix, maker in EXPERTS.items() if cfg.id.startswith(prefix))
    make_expert = next(known, None) if expert is None else lambda env, info: expert
    if make_expert is None:
        raise ConfigError(
            f"no expert is known for {cfg.id!r}; fix: --plugin FILE.py with @register_expert({cfg.id!r}) of "
            "groupwise.embodied.experts; or from Python record_demos(..., expert=...), from observation to action"
        )
    with closing(make_one(cfg, make)) as made:
        name = cfg.id if made.spec is None or cfg.id != GIVEN else made.spec.id
        folder = Path(out) if out is not None else Path("demos") / re.sub(r"\W+", "-", name).strip("-")
        if not is_free(here / folder):
            raise ConfigError(f"the folder {str(folder)!r} is taken; fix: delete it, or name another one (out, --out)")
        space = kept_space(made.observation_space, cfg.obs_keys, made.action_space)[0]
        action_repeat = cfg.action_repeat if make is None else None
        attempts, steps_per_second = 0, max(1, round((made.metadata.get("render_fps") or 10) / cfg.action_repeat))

        def kept() -> Iterator[Demonstration]:
            nonlocal attempts
            count, held, size, tells = 0, list[Demonstration](), 0, None
            while count + len(held) < episodes:
                if attempts == MAX_ATTEMPTS * episodes:
                    raise DataError(
                        f"the expert succeeded in {count} of {attempts} episodes of {name}, expected {episodes}; fix: less "
                        f"noise than {noise:g}, a higher step limit, or keep_failures"
                    )
                demo = _play(made, space, make_expert, noise, derive_seed(seed, "demo", attempts), name)
                attempts += 1
                held.append(demo)
                size += sum(leaf.nbytes for leaf in leaves(demo.obs))
                if tells is None and (demo.success is not None or size > _MOST_HELD):
                    tells = demo.success is not None  # then episodes without a flag failed
                if tells is not None:
                    done = [demo.success if tells else demo.success is not False for demo in held]
                    wanted = [
                        demo._replace(success=bool(is_done) if tells else None)
                        for demo, is_done in zip(held, done, strict=True)
                        if keep_failures or is_done
                    ]
                    count, held = count + len(wanted), []
                    yield from wanted
            yield from held

        fresh = files.fresh_name(here / folder / "demos")
        try:
            lengths = write_demos(fresh, space, made.action_space, steps_per_second, kept(), action_repeat)
            for part in sorted(fresh.iterdir()):  # meta comes last, without which it is no data set
                part.rename(here / folder / part.name)
        finally:
            files.remove(fresh)
        return Recording(folder, len(lengths), sum(lengths), attempts)


def _play(
    env: gymnasium.Env, obs_space: Any, make_expert: ExpertMaker, noise: float, seed: int, name: str
) -> Demonstration:
    """One episode. The expert gets whole observations, of which ``obs_space`` is kept."""
    space: Any = env.action_space
    is_box = space_kind(space) == "box"
    if is_box:
        half = (space.high.astype(np.float64) - space.low) / 2
        half = np.where(np.isfinite(half), half, 1.0)
    generator = np.random.default_rng(derive_seed(seed, "noise"))
    obs, info = env.reset(seed=seed)
    expert = make_expert(env, info)
    seen: list[Any] = []
    actions, rewards = [], []
    for _ in range(MAX_STEPS):
        action: Any = np.asarray(expert(obs))
        if action.shape != space.shape:
            raise DataError(
                f"the expert's action has shape {list(action.shape)}, expected {list(space.shape)}; fix: the expert"
            )
        check_fits(space, action, "the expert's action")
        action = (np.clip(action, space.low, space.high) if is_box else action).astype(space.dtype)
        seen.append(obs_to_tensor(obs_space, obs, batched=False).clone())
        actions.append(action)
        if is_box:
            noisy = action + noise * half * generator.standard_normal(space.shape)
            action = np.clip(noisy, space.low, space.high).astype(space.dtype)
        elif generator.random() < noise:
            space.seed(int(generator.integers(2**31)))
            drawn = torch.from_numpy(np.asarray(space.sample())[None])
            action = allowed_action(drawn, seen[-1][None], space)[0].numpy()[()]
        obs, reward, terminated, truncated, info = env.step(action[()])  # a number for a Discrete space
        rewards.append(float(reward))
        if terminated or truncated:
            break
    found: Any = torch.stack(seen)
    task = _text(found[INSTRUCTION].numpy()) if has_instruction(leaf_spaces(obs_space)) else name
    return Demonstration(found, np.stack(actions), np.array(rewards, np.float32), success_of_row(info), task)


def _text(rows: Array) -> str:
    """The instruction of an episode, from its bytes [T, B] at each step."""
    texts = [bytes(row).rstrip(b"\0") for row in rows]
    if other := [text for text in texts if text != texts[0]]:
        raise DataError(
            f"'instruction' changes within an episode, from {texts[0]!r:.200} to {other[0]!r:.200}, expected the same at every "
            "step; fix: one instruction for each episode, or another name for the entry"
        )
    try:
        return texts[0].decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"'instruction' is not UTF-8 ({error}); fix: text.encode(), padded with zeros, or another name for the entry"
        ) from error
