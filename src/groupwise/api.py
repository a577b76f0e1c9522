"""Train, evaluate and resume: the parts of a run put together, and what it leaves in its folder."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import ValidationError

from groupwise import config
from groupwise.algorithms.base import BaseAlgorithm
from groupwise.algorithms.configs import AlgorithmCfg
from groupwise.engines.base import Engine
from groupwise.engines.distributed import from_environment
from groupwise.envs.base import GroupEnv
from groupwise.envs.configs import EnvCfg
from groupwise.errors import ConfigError, RunFolderError
from groupwise.plugins import blaming_absence
from groupwise.policies.base import Policy
from groupwise.policies.configs import PolicyCfg
from groupwise.report.curve import plot_curve
from groupwise.report.folder import RunFolder
from groupwise.report.scores import scores_of
from groupwise.seeding import derive_seed
from groupwise.settings import RunCfg
from groupwise.training.base import Callback
from groupwise.training.build import (
    GIVEN,
    Evaluator,
    Given,
    Parts,
    build_callbacks,
    build_parts,
    build_trainer,
    pick_device,
    threads,
)
from groupwise.training.checkpoint import has_checkpoint, load_checkpoint, load_policy, saved_steps
from groupwise.training.ending import (
    closing_after,
    failure,
    finishing_on_signal,
    interruption,
    is_interruption,
    preparing,
)
from groupwise.training.evaluation import EvaluationResult
from groupwise.training.filming import record, record_if_possible
from groupwise.training.trainer import Trainer

if TYPE_CHECKING:
    import gymnasium

    EnvFactory = Callable[..., gymnasium.Env] | Callable[..., GroupEnv] | GroupEnv | gymnasium.vector.VectorEnv

SMALL_TENSOR = 2**17
"""Elements; networks whose largest matrix is no larger run fastest on one thread."""


@dataclass(frozen=True)
class Run:
    """A run on disk, and its policy in memory."""

    path: Path
    """The run folder."""
    cfg: RunCfg
    """Every setting, as ``config.json`` has it, without the folder, so that it can be trained again."""
    algorithm: BaseAlgorithm
    """What trained the policy, as it was left."""
    summary: dict[str, Any]
    """What the run reached and why it ended."""
    given: Given = field(default=Given(), repr=False)
    """Python objects that the run was given."""

    def __repr__(self) -> str:
        """Where, what and how well: the settings alone would be a page."""
        reached = {key: self.summary.get(key) for key in ("env_steps", "return_mean")}
        numbers = ", ".join(f"{key}={value:.6g}" for key, value in reached.items() if value is not None)
        return f"Run({str(self.path)!r}, {self.cfg.env.id!r}, {self.cfg.algorithm.name!r}, {numbers or 'untrained'})"

    @property
    def policy(self) -> Policy:
        """The trained policy."""
        return self.algorithm.policy

    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary per iteration."""
        return RunFolder(self.path).read_metrics()

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        checkpoint: Literal["latest", "best"] = "latest",
        env: object | None = None,
        policy: Policy | None = None,
    ) -> "Run":
        """An earlier run with the policy of one of its checkpoints.

        Args:
            env: the environment again, if the run was given it as a Python object.
            policy: the policy again, likewise; it gets the checkpoint's weights.

        Raises:
            RunFolderError: ``path`` is no run folder, or a damaged one.
            CheckpointError: the checkpoint is missing, damaged or of another environment or architecture.
        """
        folder = RunFolder.open(Path(path))
        given = Given(env, policy)
        parts = _build_again(_read_cfg(folder, given), given, folder, Engine())
        with _closing_own(parts, given):
            where = folder.checkpoints / checkpoint
            load_policy(parts.algorithm.policy, load_checkpoint(where, parts.identity).policy, where)
        return cls(folder.path, parts.cfg, parts.algorithm, folder.read_summary(), given)


def train(
    env: "str | EnvCfg | RunCfg | EnvFactory" = "CartPole-v1",
    algorithm: str | AlgorithmCfg | None = None,
    *,
    policy: Policy | PolicyCfg | None = None,
    preset: str | None = None,
    num_envs: int | None = None,
    max_episode_steps: int | None = None,
    seed: int | None = None,
    total_steps: int | None = None,
    run_dir: Path | str | None = None,
    callbacks: Sequence[Callback] = (),
    **fields: Any,
) -> Run:
    """A policy trained on ``env``, with its run folder.

    Args:
        env: a Gymnasium id, an ``EnvCfg``, a callable that returns a ``gymnasium.Env``, a
            ``gymnasium.vector.VectorEnv``, or a ``RunCfg`` with all the settings (then only a ``Policy`` and ``callbacks``
            may come besides).
        algorithm: a name, or a config whose set fields go over the environment's preset; None is "grpo".
        preset: credit and objective of a paper or library, by name.
        num_envs, max_episode_steps: go over those of ``env``.
        run_dir: must not exist yet, or be empty; None makes a fresh folder under ``runs/``.
        fields: other fields of ``RunCfg``, such as ``device="auto"`` or ``evaluation={"interval": 10_000}``.

    Raises:
        ConfigError: a setting is unknown or impossible.
        EnvError: the environment cannot be used as asked.
        RunFolderError: ``run_dir`` is taken.
        DivergedError: training produced non-finite numbers.
    """
    given = policy if isinstance(policy, Policy) else None
    settings = {
        **fields,
        "seed": seed,
        "total_steps": total_steps,
        "run_dir": None if run_dir is None else Path(run_dir),
        "policy": policy if isinstance(policy, PolicyCfg) else None,
    }
    of_env = {"num_envs": num_envs, "max_episode_steps": max_episode_steps}
    if isinstance(env, RunCfg):
        named = settings | of_env | {"algorithm": algorithm, "preset": preset}
        if extra := [key for key, value in named.items() if value is not None]:
            raise ConfigError(
                f"a RunCfg holds all settings, but {', '.join(extra)} came besides; mend: put them into it"
            )
        return train_from_config(env, policy=given, callbacks=callbacks)
    env_id, env_fields = _describe_env(env)
    env_fields |= {key: value for key, value in of_env.items() if value is not None}
    cfg = config.resolve(env_id, algorithm, preset, env=env_fields, **settings)
    return train_from_config(cfg, None if isinstance(env, str | EnvCfg) else env, given, callbacks)


def train_from_config(
    cfg: RunCfg, env: object | None = None, policy: Policy | None = None, callbacks: Sequence[Callback] = ()
) -> Run:
    """A policy trained as ``cfg`` says; see ``train``.

    Args:
        env: used instead of ``cfg.env.id``.
        policy: trained instead of a new one.
    """
    given, engine = Given(env, policy), from_environment(pick_device(cfg.device).type)
    if engine.world_size > 1 and cfg.run_dir is None:
        raise ConfigError("several processes train together, and all must know the run folder; mend: set run_dir")
    if cfg.run_dir is not None and engine.rank == 0:
        RunFolder.check_free(cfg.run_dir)  # building the parts may take long
    with preparing():
        parts = build_parts(cfg.model_copy(update={"run_dir": None}), given, engine)
    name = f"{parts.identity.env_id}-{cfg.algorithm.name}-seed{cfg.seed}"
    if engine.rank == 0:
        folder = RunFolder.create(_plain(parts.cfg), cfg.run_dir, name=name, given=given.names())
    else:
        folder = RunFolder(Path(cfg.run_dir or ""))
    return _run(parts, given, folder, callbacks, engine, resume=False)


def resume(
    path: Path | str,
    total_steps: int | None = None,
    *,
    env: object | None = None,
    policy: Policy | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """A run taken up at its latest checkpoint and trained to its end, as if it had never stopped; says from which step.

    Nothing is trained if the run is finished, or had stopped at its score, unless ``total_steps`` asks for more.

    Args:
        total_steps: goes on to here instead; schedules stretch accordingly.
        env: the environment again, if the run was given it as a Python object; ``policy`` and ``callbacks`` likewise.

    Raises:
        ConfigError: ``total_steps`` is no more than was trained already.
        RunFolderError: ``path`` is no run folder, or a damaged one.
        CheckpointError: the checkpoint is damaged or of another environment or architecture.
    """
    if total_steps is not None and total_steps < 1:
        raise ConfigError(f"total_steps = {total_steps}: expected at least 1")
    folder, given = RunFolder.open(Path(path)), Given(env, policy)
    cfg = _read_cfg(folder, given)
    if total_steps is not None:
        if total_steps <= (done := saved_steps(folder.latest) or 0):
            raise ConfigError(
                f"total_steps = {total_steps:,}, but {folder.path} has {done:,} steps behind it; mend: give a greater one"
            )
        cfg = cfg.model_copy(update={"total_steps": total_steps})
    engine = from_environment(pick_device(cfg.device).type)
    parts = _build_again(cfg, given, folder, engine)
    return _run(parts, given, folder, callbacks, engine, resume=True)


def evaluate(
    run: Run | Path | str,
    episodes: int = 100,
    *,
    deterministic: bool = True,
    seed: int | None = None,
    video: bool = False,
    checkpoint: Literal["latest", "best"] = "latest",
    env: object | None = None,
    policy: Policy | None = None,
) -> EvaluationResult:
    """Scores of exactly ``episodes`` episodes in environments that training never used.

    Args:
        run: as ``train`` returned it, or its folder.
        seed: of the episodes; None derives one from the run's seed that evaluations during training do not use.
        video: also writes ``policy.gif`` into the run folder.
        checkpoint: whose policy to play, if ``run`` is a folder.

    Raises:
        ConfigError: ``episodes`` is less than 1.
        EnvError: ``video`` was asked for and the environment does not render, or its renderer failed.
    """
    if episodes < 1:
        raise ConfigError(f"episodes = {episodes}: expected at least 1")
    if not isinstance(run, Run):
        run = Run.load(run, checkpoint=checkpoint, env=env, policy=policy)
    seed = derive_seed(run.cfg.seed, "final evaluation") if seed is None else seed
    evaluator = Evaluator(run.cfg, run.given, run.policy, episodes=episodes, deterministic=deterministic, seed=seed)
    with _threads_for(run.policy), closing(evaluator):
        if video:  # first, so that no episodes are played for an error
            record(run.cfg, run.given, run.policy, RunFolder(run.path).video, seed)
        return evaluator()


def _run(
    parts: Parts, given: Given, folder: RunFolder, users: Sequence[Callback], engine: Engine, *, resume: bool
) -> Run:
    cfg, policy = parts.cfg, parts.algorithm.policy
    evaluator = Evaluator(
        cfg,
        given,
        policy,
        episodes=cfg.evaluation.episodes,
        deterministic=cfg.evaluation.deterministic,
        seed=derive_seed(cfg.seed, "evaluation"),
    )
    trainer = build_trainer(parts, build_callbacks(parts, folder, users, evaluator, engine.rank), engine)
    with _threads_for(policy), closing(engine), closing_after(evaluator.close), _closing_own(parts, given):
        if resume:
            _take_up(trainer, parts, folder, engine)
        begun = trainer.iteration
        summary = _train_and_report(trainer, parts, folder, engine, given)
        if resume and trainer.iteration == begun and engine.rank == 0:
            _say(f"nothing was left to train ({summary['stopped']}); mend: give more total_steps")
        if engine.rank == 0:
            record_if_possible(cfg, given, policy, folder.video, evaluator.seed)
    return Run(folder.path, cfg, parts.algorithm, summary, given)


def _take_up(trainer: Trainer, parts: Parts, folder: RunFolder, engine: Engine) -> None:
    """Put the latest checkpoint into the trainer; a run killed before its first one begins again.

    Once that has worked, the folder is brought in line with it.
    """
    where = "; no checkpoint was saved, so that training begins again"
    if has_checkpoint(folder.latest):
        checkpoint = load_checkpoint(folder.latest, parts.identity)
        load_policy(parts.algorithm.policy, checkpoint.policy, folder.latest)
        trainer.load_state_dict(checkpoint.state)
        where = ""
    if engine.rank == 0:
        folder.truncate_metrics(trainer.iteration)
        if folder.read_config()["total_steps"] != parts.cfg.total_steps:
            folder.rewrite_config(_plain(parts.cfg))
        _say(f"resuming from step {trainer.env_steps:,} of {parts.cfg.total_steps:,}{where}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _train_and_report(
    trainer: Trainer, parts: Parts, folder: RunFolder, engine: Engine, given: Given
) -> dict[str, Any]:
    """Train; whatever happens, leave a summary and a curve of what there is."""
    cfg, stopped = parts.cfg, "failed"
    try:
        with finishing_on_signal(trainer):
            trainer.train()
        stopped = trainer.stop_reason or "total_steps"
    except (KeyboardInterrupt, Exception) as error:
        if is_interruption(error, trainer):
            stopped = "interrupted"
            raise KeyboardInterrupt(interruption(error, folder, given.names())) from error
        error.add_note(failure(error, trainer, cfg.algorithm, parts.identity.env_id, folder, given.names()))
        raise
    finally:
        summary = {"env": cfg.env.id, "algorithm": cfg.algorithm.name, "seed": cfg.seed, "stopped": stopped}
        if engine.rank == 0:
            metrics = folder.read_metrics()
            summary |= scores_of(metrics)
            if report := parts.start_report():
                summary["group_start"] = f"by {report.tier}, verified"
            folder.write_summary(summary)
            plot_curve(metrics, folder.curve, f"{cfg.env.id}, {cfg.algorithm.name}, seed {cfg.seed}")
    return summary


def _describe_env(env: "str | EnvCfg | EnvFactory") -> tuple[str, dict[str, Any]]:
    """Id for the config, and the settings that come with the environment, as a ready vector brings its rows."""
    import gymnasium

    if isinstance(env, str):
        return env, {}
    if isinstance(env, EnvCfg):
        return env.id, env.model_dump(exclude_unset=True)
    if not isinstance(env, gymnasium.vector.VectorEnv | GroupEnv):
        return GIVEN, {}
    return GIVEN, {"num_envs": env.num_envs}


def _read_cfg(folder: RunFolder, given: Given) -> RunCfg:
    missing = sorted(set(folder.read_given()) - set(given.names()))
    if missing:
        raise ConfigError(
            f"{folder.path} was given {' and '.join(missing)} in Python; mend: give the same again, as {missing[0]}=..."
        )
    with blaming_absence(folder.path, folder.read_plugins()):
        try:
            return RunCfg.model_validate(folder.read_config())
        except ValidationError as error:
            reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise RunFolderError(
                f"{folder.config} does not fit: {reasons}; mend: correct it, or register the algorithm first"
            ) from error


def _build_again(cfg: RunCfg, given: Given, folder: RunFolder, engine: Engine) -> Parts:
    with blaming_absence(folder.path, folder.read_plugins()):
        return build_parts(cfg, given, engine)


def _plain(cfg: RunCfg) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(config.to_json(cfg))
    return tree


def _closing_own(parts: Parts, given: Given) -> AbstractContextManager[None]:
    """Close the environments at the end, unless they are the user's own."""
    import gymnasium

    theirs = isinstance(given.env, gymnasium.vector.VectorEnv | GroupEnv)
    return nullcontext() if theirs else closing_after(parts.collector.close)


def _threads_for(policy: Policy) -> AbstractContextManager[None]:
    """One thread for small networks on the CPU, where more only wait for each other."""
    small = all(p.dim() <= 2 and p.numel() <= SMALL_TENSOR for p in policy.parameters())
    return threads(1 if small else torch.get_num_threads())
