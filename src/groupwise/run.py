"""The functions that users call: train, evaluate, resume and sample."""

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from pydantic import ValidationError

from groupwise import config, plugins
from groupwise import system as files
from groupwise.algorithms.base import BaseAlgorithm
from groupwise.algorithms.memory import ran_out_of_memory
from groupwise.config.algorithm import AlgorithmCfg, BCCfg
from groupwise.config.base import GIVEN, OTHER_NAMES, check_programs, explain, meant, refuse_unknown
from groupwise.config.load import with_absolute_paths
from groupwise.config.policy import AnyPolicyCfg, PolicyCfg, VLACfg
from groupwise.config.run import (
    BUDGETS,
    CommonCfg,
    EnvCfg,
    EvaluationCfg,
    RunCfg,
    TextEvaluationCfg,
    TextRunCfg,
)
from groupwise.engines import Engine, from_environment
from groupwise.envs.base import VectorEnv
from groupwise.envs.make import check_rows
from groupwise.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    GroupwiseError,
    RunFolderError,
    ServerError,
    UnknownNameError,
    nearest,
    require_count,
)
from groupwise.plugins import blaming_absence
from groupwise.policies.base import Policy
from groupwise.report.curve import plot_curve
from groupwise.report.folder import SCORES, RunFolder, scores_of
from groupwise.report.video import NoWindowError, Reel, play_episodes
from groupwise.seeding import derive_seed
from groupwise.system import show
from groupwise.text.task import TextTask, text_cfg
from groupwise.training.build import (
    Components,
    EnvEvaluator,
    UserObjects,
    build_callbacks,
    build_components,
    no_second_env,
    pick_device,
    record,
    separate_env,
    threads,
)
from groupwise.training.callbacks import Evaluate, MetricsLog
from groupwise.training.checkpoint import (
    has_checkpoint,
    load_checkpoint,
    load_policy,
    load_state,
    nonfinite_parameter,
    saved_counts,
)
from groupwise.training.evaluation import EvaluationResult
from groupwise.training.trainer import FAILED, INTERRUPTED, PAUSED, Callback, Trainer, check_callbacks

# Settings and Python objects from the arguments of ``train``


def read_settings(
    env: Any, algorithm: Any, policy: Any, preset: str | None, env_settings: dict[str, Any], settings: dict[str, Any]
) -> tuple[CommonCfg, UserObjects]:
    """All settings, and the Python objects, of what ``train`` takes."""
    of_texts = ["reward", "rewards", "reward_fn", "reward_funcs", "reward_function", "tool", "tools", "train_dataset"]
    of_texts += ["environment_factory"]
    of_texts += ["eval_dataset"] if isinstance(env, TextTask) else ["eval_dataset", "model", "lora"]
    if (named := [name for name in settings if name in of_texts]) and not isinstance(env, CommonCfg):
        tool = ", tools=[my_tool]" if {"tool", "tools"}.intersection(named) else ""
        tool += ", env=MyEnv" * ("environment_factory" in named)
        raise ConfigError(
            f"{', '.join(named)}: of language models, whose data, rewards and tool are a task; fix: "
            f"gw.train(gw.TextTask(data, reward=my_reward{tool}), model='path-or-hub-id'); for an environment: policy=..."
        )
    of_env = {key: OTHER_NAMES.get(key, key).removeprefix("env.") for key in settings}
    of_env = {key: name for key, name in of_env.items() if name in EnvCfg.model_fields and name not in env_settings}
    if of_env and not isinstance(env, CommonCfg | TextTask):
        env_id = env if isinstance(env, str) else env.id if isinstance(env, EnvCfg) else "MyEnv-v0"
        registered = "" if isinstance(env, str | EnvCfg) else ", after gymnasium.register"
        raise ConfigError(
            f"{', '.join(of_env)}: of the environment, whose settings come with its id; fix: "
            f"gw.train(gw.EnvCfg(id={env_id!r}, {', '.join(f'{name}=...' for name in of_env.values())})){registered}"
        )
    known = {*RunCfg.model_fields, *TextRunCfg.model_fields, *env_settings}
    others = [key for key in settings if key in OTHER_NAMES]
    refuse_unknown([key for key in others if settings[key] is None or OTHER_NAMES[key] in env_settings], known, "run")
    given = UserObjects(policy=policy if isinstance(policy, Policy) else None)
    policy_fields = None if isinstance(policy, Policy) else policy
    settings = settings | {"policy": policy_fields}
    env_settings = {key: value for key, value in env_settings.items() if value is not None}
    if isinstance(env, CommonCfg):
        more = settings | env_settings | {"algorithm": algorithm, "preset": preset}
        if extra := [key for key, value in more.items() if value is not None]:
            kind = type(env).__name__
            raise ConfigError(f"a {kind} has all settings, got {', '.join(extra)} too; fix: set them in the {kind}")
        return env, given
    if isinstance(env, TextTask):
        cfg: CommonCfg = text_cfg(env.cfg, algorithm, preset, policy, settings | env_settings)
        return cfg, UserObjects(**env.given, policy=given.policy)
    if not isinstance(policy_fields, AnyPolicyCfg | str | Mapping | None):
        raise ConfigError(
            f"policy = {policy_fields!r:.80}: expected a Policy, a gw.PolicyCfg or its fields, as "
            "{'normalize_obs': True}, or a name, as 'vla'; fix: make networks of your own a groupwise.policies.base.Policy"
        )
    import gymnasium

    env_id, env_fields = GIVEN, {}
    if isinstance(env, str):
        env_id = env
    elif isinstance(env, EnvCfg):
        env_id, env_fields = env.id, env.model_dump(exclude_unset=True)
    elif isinstance(env, gymnasium.vector.VectorEnv | VectorEnv):
        env_fields = {"num_envs": env.num_envs}
    cfg = config.resolve(env_id, algorithm, preset, env=env_fields | env_settings, **settings)
    check_rows(env, cfg.env.num_envs)
    return cfg, given if isinstance(env, str | EnvCfg) else given._replace(env=env)


# A run, from its first or next iteration to its end

log = logging.getLogger(__name__)

SMALL_TENSOR = 2**17
"""Elements; networks without larger matrices run fastest on one thread."""
SECONDS_TO_FINISH = 20
"""Time that an iteration has after a signal. A cluster often kills 30 s after it."""
MAX_ERROR = 300
"""Characters of an error in the summary."""
STOP = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if sys.platform != "win32" else ()))
"""Signals that end a run: Ctrl-C, a request of the system, and the end of the terminal."""


def run(
    parts: Components, folder: RunFolder, users: Sequence[Callback], engine: Engine, *, resume: bool
) -> dict[str, Any]:
    """Train to the end; the summary. The caller closes the parts."""
    cfg = parts.cfg
    with threads_for(parts.policy), closing(engine), ExitStack() as stack:
        evaluator = parts.evaluator() if engine.rank == 0 else None
        if evaluator is not None:
            stack.enter_context(closing_after(evaluator.close))
        trainer = Trainer(
            parts.algorithm,
            parts.collector,
            parts.buffer,
            num_steps=cfg.algorithm.num_steps,
            total_steps=cfg.total_steps,
            total_iterations=cfg.total_iterations,
            total_epochs=cfg.total_epochs if isinstance(cfg, TextRunCfg) else None,
            seed=cfg.seed,
            callbacks=build_callbacks(parts, folder, users, evaluator, engine.rank),
            engine=engine,
            run_dir=folder.path,
        )
        if resume:
            _load(trainer, parts, folder, engine)
        kind = "task" if isinstance(cfg, TextRunCfg) else "env"
        begun, summary = trainer.iteration, {kind: cfg.subject, "algorithm": cfg.algorithm.name, "seed": cfg.seed}
        try:
            with finishing_on_signal(trainer):
                trainer.train()
        except (KeyboardInterrupt, SystemExit, Exception) as error:
            if trainer.stop_reason == INTERRUPTED:
                besides = "" if isinstance(error, KeyboardInterrupt) else f" (the rollout ended with {error!r})"
                raise KeyboardInterrupt(f"interrupted{besides}; {_how_to_continue(folder, parts)}") from error
            error.add_note(_failure(error, trainer, parts, folder))
            summary["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR]
            raise
        finally:
            if engine.rank == 0:
                _report(summary, trainer, parts, folder)
        if engine.rank == 0 and trainer.stop_reason != PAUSED:
            if resume and trainer.iteration == begun and log.isEnabledFor(logging.WARNING):  # not with --quiet
                scored = str(summary["stopped"]).startswith("score: ")
                fix = "a larger total, or another stop.threshold" if scored else f"a larger {cfg.budget.name}"
                show(f"nothing was left to train ({summary['stopped']}); fix: {fix}", to="stderr")
            with files.warning_if_unwritable(folder.video):
                parts.render(folder.video, derive_seed(cfg.seed, "evaluation"))
            with files.warning_if_unwritable(folder.frames):
                parts.render_groups(folder)
    return summary


def _load(trainer: Trainer, parts: Components, folder: RunFolder, engine: Engine) -> None:
    """Load the latest checkpoint, and cut the logs back to it. A run without a checkpoint begins again."""
    where = "; no checkpoint was saved, so training begins again"
    if has_checkpoint(folder.latest):
        checkpoint = load_checkpoint(folder.latest, parts.identity, parts.policy)
        load_policy(parts.policy, checkpoint.policy, folder.latest)
        engine.load_learner(parts.algorithm.learner, parts.policy)
        if "algorithm" in checkpoint.state:
            load_state(trainer, checkpoint.state, folder.latest)
        else:  # a fork of the best one: it begins there, also in the data, with a new optimiser
            trainer.go_on_from(checkpoint.state)
            trainer.collector.position = checkpoint.state.get("position", 0) // engine.world_size
            for callback in trainer.callbacks:
                if isinstance(callback, Evaluate):
                    callback.load_state_dict({"best_score": checkpoint.state.get(SCORES[parts.metric])})
        where = ""
    else:
        interval, budget = parts.cfg.checkpoint_interval, parts.cfg.budget
        folder.check_never_saved(*(("env_steps", interval) if interval else (budget.metric, budget.tenth)))
    if engine.rank == 0:
        folder.remove_leftovers()
        folder.truncate_metrics(trainer.iteration)
        budget, saved = trainer.budget, folder.read_config()
        if saved.get(budget.name) != budget.total:
            settings = saved | dict.fromkeys(BUDGETS.keys() & saved.keys()) | {budget.name: budget.total}
            old = read_cfg(folder).budget
            early = ", before its end," if trainer.counts[old.unit] < old.total else ""
            noted = {"step": f"{trainer.env_steps:,}", "cut": early, "before": f"{old.name}={old.total}"}
            noted["after"] = f"{budget.name}={budget.total}"
            folder.rewrite_config(settings, *([noted] if trainer.iteration else []))
        forgot = any(isinstance(one, Evaluate) and one.best_score is None for one in trainer.callbacks)
        if forgot and any("eval/return_mean" in entry for entry in folder.read_scored()):
            folder.rewrite_config(folder.read_config(), scores_from=trainer.iteration)
        if log.isEnabledFor(logging.WARNING):  # not with --quiet
            show(f"resuming from {budget.unit[:-1]} {trainer.done:,} of {budget.total:,}{where}", to="stderr")


def _report(summary: dict[str, Any], trainer: Trainer, parts: Components, folder: RunFolder) -> None:
    """Complete the summary; write it, and the curve, also after an error."""
    ended = trainer.stop_reason
    summary["stopped"] = ended
    try:
        metrics = folder.read_metrics()
        summary |= (
            scores_of(folder.read_scored(), parts.metric) | peak_memory(parts.policy.device) | parts.summary_fields()
        )
        unsaved = {
            "unsaved_env_steps": trainer.env_steps - saved_counts(folder.latest)["steps"],
            "unlogged_iterations": sum(len(c.waiting) for c in trainer.callbacks if isinstance(c, MetricsLog)),
        }
    except GroupwiseError as error:
        if ended not in (FAILED, INTERRUPTED):
            raise
        log.warning("no summary: %s", error)  # it must not take the place of what ended training
        return
    summary |= {name: count for name, count in unsaved.items() if count}
    with files.warning_if_unwritable(folder.summary):
        folder.write_summary(summary)
    if ended == PAUSED:
        return  # it will be continued, perhaps many times
    with files.warning_if_unwritable(folder.curve):
        title = f"{parts.cfg.subject}, {summary['algorithm']}, seed {summary['seed']}"
        is_text = isinstance(parts.cfg, TextRunCfg)
        axes = ("tokens written", "reward") if is_text else ("environment steps", "episode return")
        plot_curve(metrics, folder.curve, title, *axes)


class FinishOnSignal:
    """Handler of signals: the first one of ``STOP`` ends training after the running iteration, the second at once.

    At the first signal, a rollout that can be collected again is abandoned. The second may be an alarm after
    ``SECONDS_TO_FINISH``. It waits for an update, which would be lost, and for saving.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.signals = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Interrupt training, raise a ``KeyboardInterrupt``, or ask again in a second."""
        trainer = self.trainer
        self.signals += 1
        if self.signals == 1:
            trainer.interrupt()
            self.alarm(SECONDS_TO_FINISH)
            if trainer.doing == "collecting" and trainer.collector.repeatable and trainer.engine.world_size == 1:
                raise KeyboardInterrupt
            with suppress(Exception):  # the terminal may be gone, or in the middle of another line
                log.warning("interrupted: finishing and saving this iteration; interrupt again to stop at once")
        elif number not in STOP and (trainer.doing == "updating" or trainer.ending):
            self.alarm(1)
        else:
            raise KeyboardInterrupt

    def alarm(self, seconds: int) -> None:
        """Send an alarm after ``seconds``, or not (0), if it is handled here."""
        if sys.platform != "win32" and signal.getsignal(signal.SIGALRM) is self:
            signal.alarm(seconds)


@contextmanager
def finishing_on_signal(trainer: Trainer) -> Iterator[None]:
    """Let signals end training as ``FinishOnSignal`` does; an alarm that the user has set stays the user's."""
    handle = FinishOnSignal(trainer)
    alarm = (signal.SIGALRM,) if sys.platform != "win32" and not signal.getitimer(signal.ITIMER_REAL)[0] else ()
    with handling(handle, *STOP, *alarm):
        try:
            yield
        finally:
            handle.alarm(0)


@contextmanager
def handling(handle: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Let ``handle`` take these signals. Outside of the main thread, or with other handlers set, nothing changes."""
    in_main = threading.current_thread() is threading.main_thread()
    before: dict[int, Any] = {number: signal.getsignal(number) for number in numbers if in_main}
    ours = {n: was for n, was in before.items() if was in (signal.default_int_handler, signal.SIG_DFL)}
    for number in ours:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, was in ours.items():
            signal.signal(number, was)


@contextmanager
def closing_after(close: Callable[[], None]) -> Iterator[None]:
    """Close in the end. After an error, that error is raised, also if closing fails."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            close()
        raise
    close()


def _failure(error: BaseException, trainer: Trainer, parts: Components, folder: RunFolder) -> str:
    """The note on an error that ended training: where it was, what is saved, how to continue."""
    collecting = trainer.doing == "collecting"
    where = f"in iteration {trainer.iteration + 1}" if collecting else f"after iteration {trainer.iteration}"
    of_groups = parts.cfg.algorithm.groups
    lines = [
        f"groupwise: {type(error).__name__} ended training on {parts.identity.env_id} {where} (step {trainer.env_steps:,})"
    ]
    # gloo raises a RuntimeError that begins with the place in its sources
    lost_rank = isinstance(error, dist.DistError) or "/gloo/transport/" in str(error)
    if lost_rank:
        lines.append(
            f"another process has ended, or gave no answer in ddp_timeout={parts.cfg.ddp_timeout:g} s: its own error says why; "
            "without one, look at the network between the machines"
        )
    notes = getattr(error, "__notes__", ())
    if trainer.doing == "updating" and not notes and isinstance(error, Exception) and ran_out_of_memory(error):
        lines.append(
            "smaller micro-batches would not help, as for the optimiser's state; fix: algorithm.optimizer='sgd', or for a "
            "language model adapters (model.lora) or engine='fsdp'"
        )
    again = (collecting and not isinstance(error, ServerError)) or isinstance(error, DataError)
    lines.insert(1, _how_to_continue(folder, parts, comes_again=again and not lost_rank))
    known = lost_rank or isinstance(error, DataError | DivergedError | SystemExit)
    in_env = collecting and isinstance(parts.cfg, RunCfg) and not known
    if in_env and of_groups.size > 1 and of_groups.collection.on_env_error == "raise":
        lines.append("if the environment fails now and then: algorithm.collection.on_env_error='retry' or 'drop'")
    return "; ".join(lines)


def _how_to_continue(folder: RunFolder, parts: Components, *, comes_again: bool = False) -> str:
    """Says how far the run is saved, and the command that goes on, after the cause of an error that comes again."""
    try:
        steps = saved_counts(folder.latest)["steps"]
        saved = f"saved after step {steps:,}" if steps else "nothing was saved yet"
    except CheckpointError as error:  # it must not take the place of what ended training
        saved = str(error)
    first = f"the same steps meet the same error: change its cause, or {folder.shown / folder.config.name}, then "
    given, allow = list(parts.given.as_arguments()), len(parts.cfg.named_programs()) > 0
    again = plugins.resume_command(folder.shown, given, plugins.loaded(), allow_programs=allow)
    return f"{saved}; {first * comes_again}{'begin again' if saved.startswith('nothing') else 'continue'} with: {again}"


def threads_for(policy: Policy) -> AbstractContextManager[None]:
    """One thread for small networks on the CPU, where more only add overhead."""
    small = all(p.dim() <= 2 and p.numel() <= SMALL_TENSOR for p in policy.parameters())
    return threads(1 if small else torch.get_num_threads())


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory in MiB: resident, of this process without its workers (on Linux), and of torch's tensors on a GPU."""
    found = {}
    status = Path("/proc/self/status")  # ru_maxrss would count the parent process, too
    if status.is_file() and (resident := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
        found["peak_memory_mib"] = round(int(resident[1]) / 1024, 1)
    if device.type == "cuda":
        found["peak_gpu_memory_mib"] = round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    return found


# Settings and Python objects from a run folder


def reopen(
    path: Path | str, given: Mapping[str, Any], *, to_train: bool, allow_programs: bool = False
) -> tuple[RunFolder, UserObjects, CommonCfg]:
    """A run's folder, Python objects and settings; a ``ConfigError`` if objects are missing, or programs not allowed.

    Args:
        to_train: False: what only training or scoring texts needs may be missing, also the GPU.
        allow_programs: whether training may start programs that the folder names.
    """
    folder = RunFolder.open(Path(path))
    cfg = read_cfg(folder)
    objects = UserObjects.again(given, cfg)
    if to_train and not allow_programs:
        check_programs(cfg, folder.config)
    asked = (cfg.task.given_in_python if to_train else set()) if isinstance(cfg, TextRunCfg) else {"env"}
    named = folder.read_provenance()["given_in_python"]  # also those that settings replaced since, as in a fork
    if missing := sorted((asked | {"policy"}).intersection(named) - objects.as_arguments().keys()):
        raise ConfigError(
            f"{path} was given {' and '.join(missing)} in Python; fix: from Python, give the same again, as in "
            f"gw.resume({str(path)!r}, {missing[0]}=...) or gw.Run.load"
        )
    if not to_train and cfg.device.startswith("cuda") and not torch.cuda.is_available():
        cfg = cfg.model_copy(update={"device": "cpu"})
    return folder, objects, cfg


def read_cfg(folder: RunFolder) -> CommonCfg:
    """Settings of a run in a folder; a ``RunFolderError`` if they are wrong, or of another version."""
    with blaming_absence(folder.shown, folder.read_provenance()["plugins"]):
        folder.check_format()
        tree = folder.read_config()
        try:
            return (TextRunCfg if "task" in tree else RunCfg).model_validate(tree)
        except ValidationError as error:
            reasons = "; ".join(explain(error.errors()))
            is_absent = any(isinstance(item.get("ctx", {}).get("error"), UnknownNameError) for item in error.errors())
            other = ", or load what registers it (--plugin FILE; in Python import it)" if is_absent else ""
            raise RunFolderError(f"{folder.config} does not fit: {reasons}; fix: correct it{other}") from error


if TYPE_CHECKING:
    import gymnasium

    from groupwise.collectors.vector import Conversation
    from groupwise.report.page import Curve, Frame
    from groupwise.text.evaluation import TextEvaluation

    EnvFactory = Callable[..., gymnasium.Env] | Callable[..., VectorEnv] | VectorEnv | gymnasium.vector.VectorEnv


@dataclass(frozen=True)
class Run:
    """A run on disk, and its policy in memory."""

    folder: RunFolder
    """Files of the run."""
    cfg: CommonCfg
    """Every setting as in ``config.json``. A run on a GPU is loaded on the CPU where there is none."""
    algorithm: BaseAlgorithm
    """The algorithm, with the policy."""
    summary: dict[str, Any]
    """Final scores and why training ended."""
    given: UserObjects = field(default=UserObjects(), repr=False)
    """Python objects that the run was given."""

    def __repr__(self) -> str:
        reached = {key: self.summary.get(key) for key in ("env_steps", "return_mean")}
        numbers = ", ".join(f"{key}={value:.6g}" for key, value in reached.items() if value is not None)
        return f"Run({str(self.path)!r}, {self.cfg.subject!r}, {self.cfg.algorithm.name!r}, {numbers or 'untrained'})"

    if not TYPE_CHECKING:  # for type checkers every attribute would exist

        def __getattr__(self, name: str) -> object:
            hint = f"; {meant([OTHER_NAMES[name]])}" if name in OTHER_NAMES else nearest(name, dir(type(self)))
            raise AttributeError(f"a Run has no attribute {name!r}{hint}")

    @property
    def path(self) -> Path:
        """The run folder, as it was given; the whole path where the working folder is another now."""
        return self.folder.shown

    @property
    def policy(self) -> Policy:
        """The trained policy."""
        return self.algorithm.policy

    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary per iteration."""
        return self.folder.read_metrics()

    def plot(self) -> "Curve":
        """The learning curve as SVG; a notebook shows it."""
        from groupwise.report.page import plot

        return plot(self.folder)

    def explore(self) -> "Frame":
        """The page of the run with the explorer of its groups; a notebook shows it."""
        from groupwise.report.page import explore

        return explore(self.folder)

    def report(self, out: Path | str | None = None) -> Path:
        """Write the page of the run, as ``groupwise report`` does; returns its path.

        Args:
            out: None: ``report.html`` in the run folder.
        """
        from groupwise.report.page import write_page

        return write_page(self.path, None if out is None else Path(out))

    def _repr_html_(self) -> str:
        """HTML for a notebook: whether the run learned, its curve, and where to look."""
        from groupwise.report.page import to_html

        return to_html(self.folder)

    @classmethod
    def load(cls, path: Path | str, *, checkpoint: Literal["latest", "best"] = "latest", **given: Any) -> "Run":
        """A run from its folder, with the policy of one of its checkpoints.

        Args:
            given: the Python objects that the run was trained with: ``env``, ``policy`` (its weights are replaced). A text
                run needs ``reward``, ``eval_data`` and ``tool`` only if it is evaluated.

        Raises:
            RunFolderError: ``path`` is not a run folder, or is damaged.
            CheckpointError: the checkpoint is missing, damaged, or of another environment or architecture.
        """
        folder, objects, cfg = reopen(path, given, to_train=False)
        if isinstance(cfg, TextRunCfg):
            from groupwise.text.build import load_algorithm

            algorithm = load_algorithm(cfg, objects.policy, folder, checkpoint)
            return cls(folder, cfg, algorithm, folder.read_summary(), objects)
        parts = _rebuild(cfg, objects, folder, Engine())
        with closing_after(parts.close):
            where = folder.checkpoints / checkpoint
            load_policy(parts.policy, load_checkpoint(where, parts.identity, parts.policy).policy, where)
        return cls(folder, cfg, parts.algorithm, folder.read_summary(), objects)


def train(
    env: "str | EnvCfg | TextTask | RunCfg | TextRunCfg | EnvFactory" = "CartPole-v1",
    algorithm: str | AlgorithmCfg | dict[str, Any] | None = None,
    *,
    policy: Policy | AnyPolicyCfg | str | Mapping[str, Any] | None = None,
    preset: str | None = None,
    num_envs: int | None = None,
    max_episode_steps: int | None = None,
    seed: int | None = None,
    total_steps: int | None = None,
    run_dir: Path | str | None = None,
    callbacks: Sequence[Callback] = (),
    **fields: Any,
) -> Run:
    """Train a policy on ``env``; returns the run.

    Args:
        env: a Gymnasium id, an ``EnvCfg``, a callable that returns a ``gymnasium.Env``, a ``gymnasium.vector.VectorEnv`` or
            a ``TextTask``. Or all settings as a ``RunCfg`` or ``TextRunCfg``; then only a ``Policy`` and ``callbacks`` may be
            given, too.
        algorithm: a name ("grpo" by default), a config, or some of its fields; fields that are set override the preset of the
            environment.
        policy: a policy to train, or settings for a new one: a ``PolicyCfg``, a ``VLACfg``, a name, or some fields.
        preset: credit and objective of a paper or library, by name. ``auto`` or None: those of the environment.
        run_dir: a folder that does not exist or is empty. None: a new one under ``runs/``.
        num_envs, max_episode_steps: override those of ``env``.
        fields: other fields of ``RunCfg``, such as ``device="auto"`` or ``evaluation={"interval": 10_000}``. For a
            ``TextTask`` those of ``TextRunCfg``, such as ``model`` (a folder or hub id, or a ``ModelCfg``), and ``lora``.

    Raises:
        ConfigError: a setting is unknown or impossible.
        EnvError: the environment cannot be used as asked.
        DataError: the prompts cannot be used.
        RunFolderError: ``run_dir`` is taken.
        DivergedError: training produced non-finite numbers.
    """
    settings = {"seed": seed, "total_steps": total_steps, "run_dir": run_dir, **fields}
    env_settings = {"num_envs": num_envs, "max_episode_steps": max_episode_steps}
    cfg, given = read_settings(env, algorithm, policy, preset, env_settings, settings)
    return train_from_config(cfg, given, callbacks)


def train_from_config(cfg: CommonCfg, given: UserObjects | None = None, callbacks: Sequence[Callback] = ()) -> Run:
    """Train with the settings of ``cfg``; see ``train``.

    Args:
        given: Python objects that replace what ``cfg`` names.
    """
    check_callbacks(callbacks)
    given, engine, here = given or UserObjects(), _engine(cfg), Path.cwd()  # which an environment may change
    if engine.world_size > 1 and cfg.run_dir is None:
        raise ConfigError("several processes need one run folder, got run_dir=None; fix: set run_dir")
    if cfg.run_dir is not None and engine.rank == 0:
        RunFolder.check_free(cfg.run_dir)  # before the parts are built, which may take long
    settings = with_absolute_paths(cfg.model_copy(update={"run_dir": None}))  # build fills in others
    parts = build(settings, given, engine)
    with closing_after(parts.close):
        folder = RunFolder(Path(cfg.run_dir or ""), here)
        if engine.rank == 0:
            name = f"{parts.identity.env_id}-{cfg.algorithm.name}-seed{cfg.seed}"
            tree, objects = settings.model_dump(mode="json"), list(parts.given.as_arguments())
            folder = RunFolder.create(tree, cfg.run_dir, name=name, here=here, given_in_python=objects)
        with folder.locked(engine.rank):
            summary = run(parts, folder, callbacks, engine, resume=False)
    return Run(folder, settings, parts.algorithm, summary, given)


def resume(
    path: Path | str,
    total_steps: int | None = None,
    *,
    total_iterations: int | None = None,
    total_epochs: int | float | None = None,
    callbacks: Sequence[Callback] = (),
    allow_programs: bool = False,
    progress: str | None = None,
    **given: Any,
) -> Run:
    """Continue a run from its latest checkpoint, as if it had never stopped. A finished run is left as it is.

    Args:
        total_steps, total_iterations, total_epochs: train until then instead; schedules stretch accordingly.
        callbacks: those that the run was trained with.
        allow_programs: whether to start programs that the folder names, such as ``generation.python``.
        progress: what is shown meanwhile, as of ``LoggingCfg``. None: as before.
        given: the Python objects that the run was trained with, as in ``Run.load``.

    Raises:
        ConfigError: the new budget is not more than was already trained, or the folder names a program.
        RunFolderError: ``path`` is not a run folder, or is damaged.
        CheckpointError: the checkpoint is damaged, or of another environment or architecture.
    """
    check_callbacks(callbacks)
    folder, objects, cfg = reopen(path, given, to_train=True, allow_programs=allow_programs)
    if isinstance(cfg, RunCfg):
        check_rows(objects.env, cfg.env.num_envs)
    cfg = cfg.with_progress(progress)
    totals = {"total_steps": total_steps, "total_iterations": total_iterations, "total_epochs": total_epochs}
    if any(total is not None for total in totals.values()):
        if isinstance(cfg, RunCfg) and totals.pop("total_epochs") is not None:
            raise ConfigError(f"total_epochs = {total_epochs}: an environment has no epochs; fix: total_steps")
        cfg = type(cfg)(**dict(cfg) | totals)
        cfg.budget.check_exceeds(saved_counts(folder.latest)[cfg.budget.unit], folder.path)
    engine = _engine(cfg)
    with folder.locked(engine.rank):
        parts = _rebuild(cfg, objects, folder, engine)
        with closing_after(parts.close):
            summary = run(parts, folder, callbacks, engine, resume=True)
    return Run(folder, cfg, parts.algorithm, summary, objects)


def _engine(cfg: CommonCfg) -> Engine:
    """The processes that train together."""
    device = pick_device(cfg.device).type
    if isinstance(cfg, TextRunCfg) and cfg.engine == "fsdp":
        from groupwise.text.sharding import ShardedEngine

        return from_environment(device, partial(ShardedEngine, cpu_offload=cfg.cpu_offload), cfg.ddp_timeout)
    return from_environment(device, timeout=cfg.ddp_timeout)


def evaluate(
    run: Run | Path | str,
    episodes: int | None = None,
    *,
    completions_per_prompt: int = 1,
    deterministic: bool | None = None,
    seed: int | None = None,
    video: bool = False,
    checkpoint: Literal["latest", "best"] = "latest",
    **given: Any,
) -> "EvaluationResult | TextEvaluation":
    """Evaluate exactly ``episodes`` episodes in new environments, or at most as many held-out prompts.

    Args:
        run: a run, or its folder.
        episodes: episodes, or the most prompts. None: 100 episodes, or all prompts.
        completions_per_prompt: completions of each prompt, for pass@k (text only).
        deterministic: take the most likely action. None: yes, unless there are several completions per prompt.
        seed: of the episodes. None: derived from the run's seed, and not used in training.
        video: also write ``policy.gif`` into the run folder.
        checkpoint: which policy, if ``run`` is a folder.
        given: if ``run`` is a folder: the Python objects that it was trained with, as in ``Run.load``.

    Raises:
        ConfigError: ``episodes`` is less than 1, there are no held-out prompts, or ``run`` is not a folder and
            ``checkpoint`` or objects were given.
        DataError, CheckpointError: a parameter of the policy is not finite.
        EnvError: the environment cannot render a ``video``.
    """
    require_count("episodes", 1 if episodes is None else episodes)
    require_count("completions_per_prompt", completions_per_prompt)
    if isinstance(run, Run):
        _refuse_for_live(run, checkpoint, given)
        if (bad := nonfinite_parameter(run.policy)) is not None:
            raise DataError(
                f"the parameter {bad!r} of the policy is not finite, so its scores would mean nothing; fix: "
                f"gw.Run.load({str(run.path)!r}) has the saved one"
            )
    elif isinstance(run, str | os.PathLike):
        run = Run.load(run, checkpoint=checkpoint, **given)
    else:
        raise ConfigError(
            f"run is a {type(run).__name__}, expected a Run or its folder; fix: what gw.train returned, or for a model of "
            "Stable-Baselines3 its evaluate_policy"
        )
    seed = derive_seed(run.cfg.seed, "final evaluation") if seed is None else seed
    greedy = completions_per_prompt == 1 if deterministic is None else deterministic
    if isinstance(run.cfg, TextRunCfg):
        if video:
            raise ConfigError(f"video is of environments; got a run on {run.cfg.subject}, fix: groupwise sample")
        from groupwise.text.evaluation import TextEvaluator

        changed = {"prompts": episodes, "completions_per_prompt": completions_per_prompt, "deterministic": greedy}
        asked = TextEvaluationCfg(**dict(run.cfg.evaluation) | changed)
        task, text = TextTask.from_cfg(run.cfg.task, run.given), run.cfg.model_copy(update={"evaluation": asked})
        with closing(TextEvaluator(task, task.held_out(episodes or 0), text, run.policy, seed=seed)) as scores:
            return scores()
    assert isinstance(run.cfg, RunCfg)
    if completions_per_prompt != 1:
        raise ConfigError(
            f"completions_per_prompt = {completions_per_prompt} is of text runs; got a run on {run.cfg.subject}, fix: more episodes"
        )
    cfg = run.cfg.model_copy(update={"evaluation": EvaluationCfg(episodes=episodes or 100, deterministic=greedy)})
    target = run.folder.video
    fresh = str(run.summary.get("start_mode")).startswith("fresh")
    evaluator = EnvEvaluator(cfg, run.given, run.policy, seed=seed, fresh=fresh)
    with threads_for(run.policy), closing(evaluator):
        if video:  # first: it may fail
            record(run.cfg, run.given, run.policy, target, seed)
        return evaluator()


def play(
    path: Path | str,
    episodes: int = 3,
    *,
    output: Path | str | None = None,
    deterministic: bool = True,
    seed: int | None = None,
    checkpoint: Literal["latest", "best"] = "latest",
    **given: Any,
) -> tuple[EvaluationResult, Path | None]:
    """Play episodes of a run's policy in a window, or into a video; returns their scores, and the path of the video.

    Args:
        path: the folder of the run. Further arguments are those of ``evaluate``.
        output: a video: ``.gif``, ``.webp`` or, with ffmpeg, ``.mp4``. None: a window; where there is none, ``play.mp4`` or
            ``play.gif`` in the folder.

    Raises:
        ConfigError: no such video can be written there, or the run is on texts.
        EnvError: the environment has neither a window nor pictures.
    """
    require_count("episodes", episodes)
    folder = RunFolder.open(Path(path))
    cfg = read_cfg(folder)
    if not isinstance(cfg, RunCfg):
        raise ConfigError(f"{path} is a run on {cfg.subject}, which has no pictures; fix: groupwise sample or eval")
    video, program = None if output is None else Path(output), files.find_program("ffmpeg")
    if video and (video.suffix not in (".mp4", ".gif", ".webp") or not video.parent.is_dir()):
        raise ConfigError(f"--output {output}: expected a name ending with .mp4, .gif or .webp, in an existing folder")
    if video and video.suffix == ".mp4" and not program:
        raise ConfigError(f"--output {output}: ffmpeg is not on the PATH; fix: install it, or a name ending with .gif")
    reel = None if video is None else Reel(video.absolute(), episodes)  # an environment may change the working folder
    run = Run.load(path, checkpoint=checkpoint, **given)
    if (separate := separate_env(cfg.env, run.given.env)) is None:
        raise no_second_env(run.given.env)
    seed = derive_seed(cfg.seed, "final evaluation") if seed is None else seed
    perform = partial(play_episodes, run.policy.eval(), *separate, deterministic, seed, episodes)
    with threads_for(run.policy):
        try:
            played = perform(reel)
        except NoWindowError as error:
            show(f"{error}; a video is written", to="stderr")
            name = "play.mp4" if program else "play.gif"
            video, reel = folder.shown / name, Reel(folder.path / name, episodes)
            played = perform(reel)
    if reel is not None:
        reel.write()
    returns, lengths, successes = zip(*played, strict=True)
    told = None if {*successes} == {None} else tuple(map(bool, successes))
    return EvaluationResult(returns, lengths, successes=told), video


def sample(
    run: Run | Path | str | TextRunCfg,
    prompt: str | Sequence[Any] | None = None,
    count: int = 1,
    *,
    deterministic: bool = False,
    seed: int = 0,
    checkpoint: Literal["latest", "best"] = "latest",
    policy: Policy | None = None,
    tool: "Callable[[str], str | None] | None" = None,
    env: object | None = None,
    tools: Sequence[Any] | None = None,
) -> "list[str] | list[list[str]] | list[Conversation]":
    """Completions of a prompt by a run's language model; of several prompts, a list for each. Episodes of its text environment.

    Args:
        run: settings stand for their model, as it is before training.
        prompt: a text, a list of messages (``{"role": "user", "content": "..."}``), or a list of prompts. None with an
            environment, which begins each episode.
        count: number of completions, or episodes.
        deterministic: take the most likely token each time.
        policy, tool, env, tools: if ``run`` is a folder: the Python objects that it was trained with.

    Raises:
        ConfigError: the run has no language model, no prompt, or an environment and a prompt.
        DataError: a prompt is neither a text nor messages, or too long.
    """
    given = {"policy": policy, "tool": tool, "env": env, "tools": tools}
    if isinstance(run, Run):
        _refuse_for_live(run, checkpoint, given)
    require_count("count", count)
    of_run = run.cfg if isinstance(run, Run) else run
    cfg = of_run if isinstance(of_run, CommonCfg) else read_cfg(RunFolder.open(Path(of_run)))
    if not isinstance(cfg, TextRunCfg):
        raise ConfigError(f"{run} is a run on {cfg.subject}, without a language model; fix: groupwise eval")
    if (prompt is None) != (cfg.task.env is not None):
        if prompt is None:
            raise ConfigError("there is no prompt, and the run has no environment that gives one; fix: give a prompt")
        raise ConfigError(
            f"prompt = {prompt!r:.80}: the run has an environment, whose first observation is the prompt; fix: leave it out"
        )
    from groupwise.text.build import build_algorithm
    from groupwise.text.evaluation import fresh_envs, is_single, play_episodes, read_prompts, write_texts
    from groupwise.text.policy import CausalLM

    prompts = [] if prompt is None else read_prompts(prompt)
    if isinstance(run, TextRunCfg):
        objects = UserObjects.again(given, run)
        language_model: Policy = build_algorithm(run, objects.policy, Engine()).policy
    else:
        run = run if isinstance(run, Run) else Run.load(run, checkpoint=checkpoint, **given)
        objects, language_model = run.given, run.policy
    assert isinstance(language_model, CausalLM)
    how: dict[str, Any] = {"sampling": cfg.sampling, "deterministic": deterministic, "seed": seed}
    task = TextTask.from_cfg(cfg.task, objects)
    if prompt is None:
        return play_episodes(language_model, task, count, **how)
    texts = write_texts(language_model, prompts, count, task=cfg.task, envs=fresh_envs(task), **how)
    return texts[0] if is_single(prompt) else texts


def _refuse_for_live(run: Run, checkpoint: str, objects: Mapping[str, Any]) -> None:
    """A ``Run`` has its policy and objects; those of a folder would be ignored."""
    UserObjects.again(objects)
    named = ["checkpoint"] if checkpoint != "latest" else []
    if named := named + [key for key, value in objects.items() if value is not None]:
        raise ConfigError(f"{', '.join(named)}: only for a run's folder; fix: give {str(run.path)!r}, not the Run")


def build(cfg: CommonCfg, given: UserObjects, engine: Engine, *, restored: bool = False) -> Components:
    """The parts that the settings describe.

    Args:
        restored: the weights will come from a checkpoint of the run itself, so ``init_from`` is not read.
    """
    if isinstance(cfg, TextRunCfg):
        from groupwise.text.build import build_text_components

        return build_text_components(cfg, given, engine, restored=restored)
    assert isinstance(cfg, RunCfg)
    kinds: dict[str, Any] = {}  # components that the core does not know
    if isinstance(cfg.algorithm, BCCfg):
        from groupwise.embodied.cloning import demo_collector

        kinds = {"make_collector": demo_collector}
    if isinstance(cfg.policy, VLACfg) and cfg.policy.policy is None:
        from groupwise.embodied.vla import VLAPolicy

        kinds["policy_type"] = VLAPolicy
    elif cfg.env.action_chunk > 1 and type(cfg.policy) is PolicyCfg:
        from groupwise.embodied.vla import ChunkActorCritic

        kinds["policy_type"] = ChunkActorCritic
    return build_components(cfg, given, engine, restored=restored, **kinds)


def _rebuild(cfg: CommonCfg, given: UserObjects, folder: RunFolder, engine: Engine) -> Components:
    """Parts of the run in a folder, which may need its plugins."""
    with blaming_absence(folder.shown, folder.read_provenance()["plugins"]):
        return build(cfg, given, engine, restored=has_checkpoint(folder.latest))
