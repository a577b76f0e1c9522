"""Train, evaluate, resume and sample: what a user calls."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.config.budget import BUDGETS, Budget
from groupwise.config.env import EnvCfg
from groupwise.config.policy import AnyPolicyCfg
from groupwise.config.run import CommonCfg, EvaluationCfg, RunCfg, TextEvaluationCfg, TextRunCfg
from groupwise.engines.base import Engine
from groupwise.engines.distributed import from_environment
from groupwise.envs.base import VectorEnv
from groupwise.errors import ConfigError
from groupwise.plugins import blaming_absence
from groupwise.policies.base import Policy
from groupwise.report.folder import RunFolder
from groupwise.seeding import derive_seed
from groupwise.settings import read_settings
from groupwise.text.task import TextTask
from groupwise.training import running
from groupwise.training.base import Callback, check_callbacks
from groupwise.training.build import build_components
from groupwise.training.checkpoint import has_checkpoint, load_checkpoint, load_policy, saved_counts
from groupwise.training.components import Components, UserObjects, pick_device
from groupwise.training.env_evaluator import EnvEvaluator, record
from groupwise.training.reopening import read_cfg, reopen

if TYPE_CHECKING:
    import gymnasium
    from matplotlib.figure import Figure

    from groupwise.report.notebook import Frame
    from groupwise.text.evaluation import TextEvaluation
    from groupwise.training.evaluation import EvaluationResult

    EnvFactory = Callable[..., gymnasium.Env] | Callable[..., VectorEnv] | VectorEnv | gymnasium.vector.VectorEnv


@dataclass(frozen=True)
class Run:
    """A run on disk, and its policy in memory."""

    path: Path
    """The run folder."""
    cfg: CommonCfg
    """Every setting, as in ``config.json``, without the run folder. A run on a GPU is loaded on the CPU where there is none."""
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

    @property
    def policy(self) -> Policy:
        """The trained policy."""
        return self.algorithm.policy

    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary per iteration."""
        return RunFolder(self.path).read_metrics()

    def plot(self) -> "Figure":
        """The learning curve; a notebook shows it."""
        from groupwise.report.notebook import plot

        return plot(RunFolder(self.path))

    def explore(self) -> "Frame":
        """The page of the run with the explorer of its groups; a notebook shows it."""
        from groupwise.report.notebook import explore

        return explore(RunFolder(self.path))

    def report(self, out: Path | str | None = None) -> Path:
        """Write the page of the run, as ``groupwise report`` does; returns its path.

        Args:
            out: None: ``report.html`` in the run folder.
        """
        from groupwise.report.page.page import write_page

        return write_page(self.path, None if out is None else Path(out))

    def _repr_html_(self) -> str:
        """What a notebook shows of the run: whether it learned, its curve, and what to look at."""
        from groupwise.report.notebook import to_html

        return to_html(RunFolder(self.path))

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
            return cls(folder.path, cfg, algorithm, folder.read_summary(), objects)
        parts = _rebuild(cfg, objects, folder, Engine())
        with running.closing_after(parts.close):
            where = folder.checkpoints / checkpoint
            load_policy(parts.policy, load_checkpoint(where, parts.identity, parts.policy).policy, where)
        return cls(folder.path, parts.cfg, parts.algorithm, folder.read_summary(), objects)


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
    given, engine = given or UserObjects(), _engine(cfg)
    if engine.world_size > 1 and cfg.run_dir is None:
        raise ConfigError("several processes need one run folder, got run_dir=None; fix: set run_dir")
    if cfg.run_dir is not None and engine.rank == 0:
        RunFolder.check_free(cfg.run_dir)  # before the parts are built, which may take long
    parts = build(cfg.model_copy(update={"run_dir": None}), given, engine)
    with running.closing_after(parts.close):
        folder = _new_folder(parts, cfg.run_dir, engine)
        with folder.locked(engine.rank):
            summary = running.run(parts, folder, callbacks, engine, resume=False)
    return Run(folder.path, parts.cfg, parts.algorithm, summary, given)


def _new_folder(parts: Components, path: Path | None, engine: Engine) -> RunFolder:
    """The folder of a new run, which rank 0 creates."""
    if engine.rank != 0:
        return RunFolder(Path(path or ""))
    name = f"{parts.identity.env_id}-{parts.cfg.algorithm.name}-seed{parts.cfg.seed}"
    return RunFolder.create(parts.cfg.model_dump(mode="json"), path, name=name, given_in_python=parts.given.names())


def resume(
    path: Path | str,
    total_steps: int | None = None,
    *,
    total_iterations: int | None = None,
    total_epochs: int | float | None = None,
    callbacks: Sequence[Callback] = (),
    **given: Any,
) -> Run:
    """Continue a run from its latest checkpoint, as if it had never stopped. A finished run is left as it is.

    Args:
        total_steps, total_iterations, total_epochs: train until then instead; schedules stretch accordingly.
        callbacks: those that the run was trained with.
        given: the Python objects that the run was trained with, as in ``Run.load``.

    Raises:
        ConfigError: the new budget is not more than was already trained.
        RunFolderError: ``path`` is not a run folder, or is damaged.
        CheckpointError: the checkpoint is damaged, or of another environment or architecture.
    """
    check_callbacks(callbacks)
    folder, objects, cfg = reopen(path, given, to_train=True)
    totals = {"total_steps": total_steps, "total_iterations": total_iterations, "total_epochs": total_epochs}
    if any(total is not None for total in totals.values()):
        cfg = _with_budget(cfg, Budget.only(**totals), folder)
    engine = _engine(cfg)
    with folder.locked(engine.rank):
        parts = _rebuild(cfg, objects, folder, engine)
        with running.closing_after(parts.close):
            summary = running.run(parts, folder, callbacks, engine, resume=True)
    return Run(folder.path, parts.cfg, parts.algorithm, summary, objects)


def _engine(cfg: CommonCfg) -> Engine:
    """The processes that train together."""
    device = pick_device(cfg.device).type
    if isinstance(cfg, TextRunCfg) and cfg.engine == "fsdp":
        from groupwise.text.sharding import ShardedEngine

        return from_environment(device, partial(ShardedEngine, cpu_offload=cfg.cpu_offload), cfg.ddp_timeout)
    return from_environment(device, timeout=cfg.ddp_timeout)


def _with_budget(cfg: CommonCfg, budget: Budget, folder: RunFolder) -> CommonCfg:
    """The settings with another budget, which must be more than the run has used."""
    name, unit, total = budget.name, budget.unit, budget.total
    if name not in type(cfg).model_fields:
        raise ConfigError(f"{name} = {total:,}: an environment has no {unit}; fix: total_steps or total_iterations")
    budget.check_exceeds(saved_counts(folder.latest)[unit], folder.path)
    return cfg.model_copy(update={other: None for other in BUDGETS if other in type(cfg).model_fields} | {name: total})


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
    """Evaluate exactly ``episodes`` episodes in new environments, or held-out prompts.

    Args:
        run: a run, or its folder.
        episodes: episodes or prompts. None: 100 episodes, or all prompts.
        completions_per_prompt: completions of each prompt, for pass@k (text only).
        deterministic: take the most likely action. None: yes, unless there are several completions per prompt.
        seed: of the episodes. None: derived from the run's seed, and not used in training.
        video: also write ``policy.gif`` into the run folder.
        checkpoint: which policy, if ``run`` is a folder.
        given: if ``run`` is a folder: the Python objects that it was trained with, as in ``Run.load``.

    Raises:
        ConfigError: ``episodes`` is less than 1, there are no held-out prompts, or ``run`` is not a folder and
            ``checkpoint`` or objects were given.
        EnvError: the environment cannot render a ``video``.
    """
    if episodes is not None and episodes < 1:
        raise ConfigError(f"episodes = {episodes}: expected at least 1")
    if isinstance(run, Run):
        _refuse_for_live(run, checkpoint, given)
    else:
        run = Run.load(run, checkpoint=checkpoint, **given)
    seed = derive_seed(run.cfg.seed, "final evaluation") if seed is None else seed
    greedy = completions_per_prompt == 1 if deterministic is None else deterministic
    if isinstance(run.cfg, TextRunCfg):
        if video:
            raise ConfigError(f"video is of environments; got a run on {run.cfg.subject}, fix: groupwise sample")
        changed = {"prompts": episodes, "completions_per_prompt": completions_per_prompt, "deterministic": greedy}
        return _evaluate_texts(run, run.cfg, changed, seed)
    assert isinstance(run.cfg, RunCfg)
    if completions_per_prompt != 1:
        raise ConfigError(
            f"completions_per_prompt = {completions_per_prompt} is of text runs; got a run on {run.cfg.subject}, fix: more episodes"
        )
    cfg = run.cfg.model_copy(update={"evaluation": EvaluationCfg(episodes=episodes or 100, deterministic=greedy)})
    evaluator = EnvEvaluator(cfg, run.given, run.policy, seed=seed)
    with running.threads_for(run.policy), closing(evaluator):
        if video:  # first: it may fail
            record(run.cfg, run.given, run.policy, RunFolder(run.path).video, seed)
        return evaluator()


def sample(
    run: Run | Path | str,
    prompt: str | Sequence[Any],
    count: int = 1,
    *,
    deterministic: bool = False,
    seed: int = 0,
    checkpoint: Literal["latest", "best"] = "latest",
    policy: Policy | None = None,
    tool: "Callable[[str], str | None] | None" = None,
) -> list[str] | list[list[str]]:
    """Completions of a prompt by a run's language model; of several prompts, a list for each.

    Args:
        prompt: a text, a list of messages (``{"role": "user", "content": "..."}``), or a list of prompts.
        count: number of completions.
        deterministic: take the most likely token each time.
        policy, tool: if ``run`` is a folder: the Python objects that it was trained with.

    Raises:
        ConfigError: the run has no language model.
        DataError: a prompt is neither a text nor messages, or too long.
    """
    given = {"policy": policy, "tool": tool}
    if isinstance(run, Run):
        _refuse_for_live(run, checkpoint, given)
    cfg = run.cfg if isinstance(run, Run) else read_cfg(RunFolder.open(Path(run)))
    if not isinstance(cfg, TextRunCfg):
        raise ConfigError(f"{run} is a run on {cfg.subject}, without a language model; fix: groupwise eval")
    from groupwise.text.policy import CausalLM
    from groupwise.text.samples import is_single, read_prompts, write_texts

    prompts = read_prompts(prompt)
    run = run if isinstance(run, Run) else Run.load(run, checkpoint=checkpoint, **given)
    assert isinstance(run.policy, CausalLM)
    how: dict[str, Any] = {"sampling": cfg.sampling, "task": cfg.task, "tool": run.given.tool}
    texts = write_texts(run.policy, prompts, count, deterministic=deterministic, seed=seed, **how)
    return texts[0] if is_single(prompt) else texts


def _refuse_for_live(run: Run, checkpoint: str, objects: Mapping[str, Any]) -> None:
    """A ``Run`` has its policy and objects; those of a folder would be ignored."""
    UserObjects.again(objects)
    named = ["checkpoint"] if checkpoint != "latest" else []
    if named := named + [key for key, value in objects.items() if value is not None]:
        raise ConfigError(
            f"{', '.join(named)}: only for a run's folder; fix: give {str(run.path)!r} instead of the Run"
        )


def _evaluate_texts(run: Run, cfg: TextRunCfg, changed: dict[str, Any], seed: int) -> "TextEvaluation":
    from groupwise.text.evaluation import TextEvaluator

    cfg = cfg.model_copy(update={"evaluation": TextEvaluationCfg(**dict(cfg.evaluation) | changed)})
    task = TextTask.from_cfg(cfg.task, run.given)
    with closing(TextEvaluator(task, task.held_out(), cfg, run.policy, seed=seed)) as evaluator:
        return evaluator()


def build(cfg: CommonCfg, given: UserObjects, engine: Engine, *, restored: bool = False) -> Components:
    """The parts that the settings describe.

    Args:
        restored: the weights will come from a checkpoint of the run itself, so ``policy.init_from`` is not read.
    """
    if isinstance(cfg, TextRunCfg):
        from groupwise.text.build import build_text_components

        return build_text_components(cfg, given, engine)
    assert isinstance(cfg, RunCfg)
    return build_components(cfg, given, engine, restored=restored)


def _rebuild(cfg: CommonCfg, given: UserObjects, folder: RunFolder, engine: Engine) -> Components:
    """The parts of a run in a folder, which may need its plugins."""
    with blaming_absence(folder.path, folder.read_provenance()["plugins"]):
        return build(cfg, given, engine, restored=has_checkpoint(folder.latest))
