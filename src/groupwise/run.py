"""Train, evaluate, resume and sample: what a user calls."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import ValidationError

from groupwise import config
from groupwise.algorithms.base import BaseAlgorithm
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.config.base import GIVEN
from groupwise.config.env import EnvCfg
from groupwise.config.policy import LoRACfg, ModelCfg, PolicyCfg
from groupwise.config.run import CommonCfg, RunCfg, TextRunCfg
from groupwise.engines.base import Engine
from groupwise.engines.distributed import from_environment
from groupwise.envs.base import GroupEnv
from groupwise.errors import ConfigError, RunFolderError
from groupwise.plugins import blaming_absence
from groupwise.policies.base import Policy
from groupwise.report.folder import RunFolder
from groupwise.seeding import derive_seed
from groupwise.text.files import short
from groupwise.text.task import TextTask
from groupwise.training import running
from groupwise.training.base import Callback
from groupwise.training.build import build_components
from groupwise.training.checkpoint import load_checkpoint, load_policy, saved_steps
from groupwise.training.components import Components, UserObjects, pick_device
from groupwise.training.ending import closing_after, preparing
from groupwise.training.env_evaluator import EnvEvaluator
from groupwise.training.filming import record

if TYPE_CHECKING:
    import gymnasium

    from groupwise.text.evaluation import TextEvaluation
    from groupwise.training.evaluation import EvaluationResult

    EnvFactory = Callable[..., gymnasium.Env] | Callable[..., GroupEnv] | GroupEnv | gymnasium.vector.VectorEnv

_DEFAULT_EPISODES = 100


@dataclass(frozen=True)
class Run:
    """A run on disk, and its policy in memory."""

    path: Path
    """The run folder."""
    cfg: CommonCfg
    """Every setting, as ``config.json`` has it, without the folder, so that it can be trained again."""
    algorithm: BaseAlgorithm
    """What trained the policy, as it was left."""
    summary: dict[str, Any]
    """What the run reached and why it ended."""
    given: UserObjects = field(default=UserObjects(), repr=False)
    """Python objects that the run was given."""

    def __repr__(self) -> str:
        """Where, what and how well: the settings alone would be a page."""
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

    @classmethod
    def load(cls, path: Path | str, *, checkpoint: Literal["latest", "best"] = "latest", **given: Any) -> "Run":
        """An earlier run with the policy of one of its checkpoints.

        Args:
            given: what the run was given as Python objects, again: ``env``, ``policy`` (it gets the checkpoint's weights),
                ``data``, ``eval_data``, ``reward`` or ``tool``.

        Raises:
            RunFolderError: ``path`` is no run folder, or a damaged one.
            CheckpointError: the checkpoint is missing, damaged or of another environment or architecture.
        """
        folder, objects = RunFolder.open(Path(path)), UserObjects.again(given)
        check_given(folder, objects)
        parts = build_again(read_cfg(folder), objects, folder, Engine())
        with closing_after(parts.close):
            where = folder.checkpoints / checkpoint
            load_policy(parts.policy, load_checkpoint(where, parts.identity).policy, where)
        return cls(folder.path, parts.cfg, parts.algorithm, folder.read_summary(), objects)


def train(
    env: "str | EnvCfg | TextTask | RunCfg | TextRunCfg | EnvFactory" = "CartPole-v1",
    algorithm: str | AlgorithmCfg | None = None,
    *,
    policy: Policy | PolicyCfg | Mapping[str, Any] | None = None,
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
            ``gymnasium.vector.VectorEnv``; a ``TextTask``; or a ``RunCfg`` or ``TextRunCfg`` with all the settings (then
            only a ``Policy`` and ``callbacks`` may come besides).
        algorithm: a name, or a config whose set fields go over the preset of environment or texts; None is "grpo".
        policy: trained instead of a new one; or its settings, as a config or some of its fields.
        preset: credit and objective of a paper or library, by name.
        run_dir: must not exist yet, or be empty; None makes a fresh folder under ``runs/``.
        num_envs, max_episode_steps: go over those of ``env``.
        fields: other fields of ``RunCfg``, such as ``device="auto"`` or ``evaluation={"interval": 10_000}``; or, for texts,
            of ``TextRunCfg``: ``model`` (a folder or hub id, or a ``ModelCfg``), ``sampling``, ``num_prompts``, ..., and
            ``lora``.

    Raises:
        ConfigError: a setting is unknown or impossible.
        EnvError: the environment cannot be used as asked.
        DataError: prompts that cannot be used.
        RunFolderError: ``run_dir`` is taken.
        DivergedError: training produced non-finite numbers.
    """
    given, policy_fields = (policy, None) if isinstance(policy, Policy) else (None, policy)
    named = {
        **fields,
        "seed": seed,
        "total_steps": total_steps,
        "run_dir": None if run_dir is None else Path(run_dir),
        "policy": policy_fields,
        "num_envs": num_envs,
        "max_episode_steps": max_episode_steps,
    }
    settings = {key: value for key, value in named.items() if value is not None}
    if isinstance(env, CommonCfg):
        _refuse_besides(env, settings | {"algorithm": algorithm, "preset": preset})
        return train_from_config(env, UserObjects(policy=given), callbacks)
    if isinstance(env, TextTask):
        cfg: CommonCfg = _text_cfg(env, algorithm, preset, policy, settings)
        return train_from_config(cfg, _given_texts(env)._replace(policy=given), callbacks)
    _check_policy_fields(policy_fields)
    env_id, env_fields = _describe_env(env)
    env_fields |= {key: settings.pop(key) for key in ("num_envs", "max_episode_steps") if key in settings}
    cfg = config.resolve(env_id, algorithm, preset, env=env_fields, **settings)
    return train_from_config(cfg, UserObjects(None if isinstance(env, str | EnvCfg) else env, given), callbacks)


def _check_policy_fields(fields: object) -> None:
    if not isinstance(fields, PolicyCfg | Mapping | None):
        raise ConfigError(
            f"policy = {short(fields)}: expected a gw.Policy, a gw.PolicyCfg or its fields, as {{'normalize_obs': True}}; "
            "fix: make networks of your own a gw.Policy"
        )


def train_from_config(cfg: CommonCfg, given: UserObjects | None = None, callbacks: Sequence[Callback] = ()) -> Run:
    """A policy trained as ``cfg`` says; see ``train``.

    Args:
        given: used instead of what ``cfg`` names.
    """
    given, engine = given or UserObjects(), from_environment(pick_device(cfg.device).type)
    if engine.world_size > 1 and cfg.run_dir is None:
        raise ConfigError("several processes train together, and all must know the run folder; fix: set run_dir")
    if cfg.run_dir is not None and engine.rank == 0:
        RunFolder.check_free(cfg.run_dir)  # building the parts may take long
    with preparing():
        parts = build(cfg.model_copy(update={"run_dir": None}), given, engine)
    name = f"{parts.identity.env_id}-{cfg.algorithm.name}-seed{cfg.seed}"
    if engine.rank == 0:
        folder = RunFolder.create(running.plain(parts.cfg), cfg.run_dir, name=name, given=given.names())
    else:
        folder = RunFolder(Path(cfg.run_dir or ""))
    summary = running.run(parts, folder, callbacks, engine, resume=False)
    return Run(folder.path, parts.cfg, parts.algorithm, summary, given)


def resume(
    path: Path | str, total_steps: int | None = None, *, callbacks: Sequence[Callback] = (), **given: Any
) -> Run:
    """A run taken up at its latest checkpoint and trained to its end, as if it had never stopped; says from which step.

    Nothing is trained if the run is finished, or had stopped at its score, unless ``total_steps`` asks for more.

    Args:
        total_steps: goes on to here instead; schedules stretch accordingly.
        callbacks: again, as the run had them.
        given: what the run was given as Python objects, again: ``env``, ``policy``, ``data``, ``eval_data``, ``reward`` or
            ``tool``.

    Raises:
        ConfigError: ``total_steps`` is no more than was trained already.
        RunFolderError: ``path`` is no run folder, or a damaged one.
        CheckpointError: the checkpoint is damaged or of another environment or architecture.
    """
    if total_steps is not None and total_steps < 1:
        raise ConfigError(f"total_steps = {total_steps}: expected at least 1")
    folder, objects = RunFolder.open(Path(path)), UserObjects.again(given)
    check_given(folder, objects)
    cfg = read_cfg(folder)
    if total_steps is not None:
        if total_steps <= (done := saved_steps(folder.latest) or 0):
            raise ConfigError(
                f"total_steps = {total_steps:,}, but {folder.path} has {done:,} steps behind it; fix: give a greater one"
            )
        cfg = cfg.model_copy(update={"total_steps": total_steps})
    engine = from_environment(pick_device(cfg.device).type)
    parts = build_again(cfg, objects, folder, engine)
    summary = running.run(parts, folder, callbacks, engine, resume=True)
    return Run(folder.path, parts.cfg, parts.algorithm, summary, objects)


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
    """Scores of exactly ``episodes`` episodes in environments that training never used, or of held-out prompts.

    Args:
        run: as ``train`` returned it, or its folder.
        episodes: or prompts; None: 100 episodes, or all prompts.
        completions_per_prompt: completions of each prompt, for pass@k; of texts only.
        deterministic: take the most likely action; None: yes, unless there are several completions of a prompt.
        seed: of the episodes; None derives one from the run's seed that evaluations during training do not use.
        video: also writes ``policy.gif`` into the run folder.
        checkpoint: whose policy to play, if ``run`` is a folder.
        given: what a run that comes as a folder was given as Python objects, again.

    Raises:
        ConfigError: ``episodes`` is less than 1, the run has no prompts that are held out, or ``run`` is no folder and
            ``checkpoint`` or objects came with it.
        EnvError: ``video`` was asked for and the environment does not render, or its renderer failed.
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
        return _evaluate_texts(
            run,
            run.cfg,
            prompts=episodes,
            completions_per_prompt=completions_per_prompt,
            deterministic=greedy,
            seed=seed,
        )
    assert isinstance(run.cfg, RunCfg)
    if completions_per_prompt != 1:
        raise ConfigError(
            f"completions_per_prompt = {completions_per_prompt} is of text runs; got a run on {run.cfg.subject}, fix: more episodes"
        )
    evaluator = EnvEvaluator(
        run.cfg, run.given, run.policy, episodes=episodes or _DEFAULT_EPISODES, deterministic=greedy, seed=seed
    )
    with running.threads_for(run.policy), closing(evaluator):
        if video:  # first, so that no episodes are played for an error
            record(run.cfg, run.given, run.policy, RunFolder(run.path).video, seed)
        return evaluator()


def sample(
    run: Run | Path | str,
    prompt: str,
    count: int = 1,
    *,
    deterministic: bool = False,
    seed: int = 0,
    checkpoint: Literal["latest", "best"] = "latest",
    policy: Policy | None = None,
    tool: "Callable[[str], str | None] | None" = None,
) -> list[str]:
    """Texts that a run's language model writes behind a prompt.

    Args:
        count: how many.
        deterministic: take the likeliest token each time.
        policy, tool: again, if a run that comes as a folder was given them as Python objects.

    Raises:
        ConfigError: the run is not about texts, or ``prompt`` is no text.
    """
    if not isinstance(prompt, str):
        raise ConfigError(f"prompt = {short(prompt)}: expected one text; fix: a call for each prompt")
    if isinstance(run, Run):
        _refuse_for_live(run, checkpoint, {"policy": policy, "tool": tool})
    cfg = run.cfg if isinstance(run, Run) else read_cfg(RunFolder.open(Path(run)))
    if not isinstance(cfg, TextRunCfg):
        raise ConfigError(f"{run} is about {cfg.subject}, which writes no texts; fix: groupwise eval")
    from groupwise.text.build import load_trained
    from groupwise.text.evaluation import write_texts

    trained = run.policy if isinstance(run, Run) else load_trained(cfg, RunFolder(Path(run)), checkpoint, policy)
    tool = run.given.tool if isinstance(run, Run) else tool
    return write_texts(cfg, trained, prompt, count, deterministic=deterministic, seed=seed, tool=tool)


def _refuse_for_live(run: Run, checkpoint: str, objects: Mapping[str, Any]) -> None:
    """A run that is at hand has its policy and its objects: what goes with a folder would be ignored."""
    named = ["checkpoint"] if checkpoint != "latest" else []
    if named := named + [key for key, value in objects.items() if value is not None]:
        raise ConfigError(
            f"{', '.join(named)} {'is' if len(named) == 1 else 'are'} for runs that come as a folder; fix: give {str(run.path)!r} "
            "in place of the Run"
        )


def _refuse_besides(cfg: CommonCfg, settings: dict[str, Any]) -> None:
    if extra := [key for key, value in settings.items() if value is not None]:
        raise ConfigError(
            f"a {type(cfg).__name__} holds all settings, but {', '.join(extra)} came besides; fix: put them into it"
        )


def _evaluate_texts(
    run: Run, cfg: TextRunCfg, *, prompts: int | None, completions_per_prompt: int, deterministic: bool, seed: int
) -> "TextEvaluation":
    from groupwise.text.evaluation import TextEvaluator, task_of

    changed = {"prompts": prompts, "completions_per_prompt": completions_per_prompt, "deterministic": deterministic}
    evaluation = type(cfg.evaluation)(**dict(cfg.evaluation) | changed)
    cfg = cfg.model_copy(update={"evaluation": evaluation})
    task = task_of(cfg, run.given)
    with closing(TextEvaluator(task, task.load().eval, cfg, run.policy, seed=seed)) as evaluator:
        return evaluator()


def _text_cfg(
    task: TextTask,
    algorithm: str | AlgorithmCfg | None,
    preset: str | None,
    policy: Policy | PolicyCfg | Mapping[str, Any] | None,
    settings: Any,
) -> TextRunCfg:
    """The settings of a run on a task; a policy that is given brings model and sampling."""
    if policy is not None and not isinstance(policy, Policy):
        raise ConfigError(f"policy = {short(policy)}: expected a gw.CausalLM; fix: model='path-or-hub-id', lora=...")
    model, lora = settings.pop("model", None), settings.pop("lora", None)
    if policy is not None:
        besides = {"model": model, "lora": lora, "sampling": settings.get("sampling")}
        if named := [key for key, value in besides.items() if value is not None]:
            raise ConfigError(
                f"a policy brings its model and sampling, but {', '.join(named)} came besides; fix: one of the two"
            )
        model, settings["sampling"] = ModelCfg(path=GIVEN), cast(Any, policy).sampling
    elif model is None:
        raise ConfigError("no model; fix: model='path-or-hub-id', or policy=CausalLM(...)")
    fields = {"path": str(model)} if isinstance(model, str | Path) else model
    if lora is not None:
        own = fields.model_dump(exclude_unset=True) if isinstance(fields, ModelCfg) else dict(fields)
        if not isinstance(lora, LoRACfg | Mapping):
            raise ConfigError(f"lora = {short(lora)}: expected a gw.LoRACfg or its fields; fix: lora={{'r': 16}}")
        fields = own | {"lora": lora if isinstance(lora, LoRACfg) else LoRACfg(**lora)}
    return config.resolve_text(algorithm, preset, task=task.cfg, model=fields, **settings)


def _given_texts(task: TextTask) -> UserObjects:
    data, eval_data = (None if isinstance(d, str | Path) else d for d in (task.data, task.eval_data))
    reward = [f for f in task.functions if f is not None] or None
    return UserObjects(data=data, eval_data=eval_data, reward=reward, tool=task.given_tool)


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


def build(cfg: CommonCfg, given: UserObjects, engine: Engine) -> Components:
    """The parts that the settings describe."""
    if isinstance(cfg, TextRunCfg):
        from groupwise.text.build import build_text_components

        return build_text_components(cfg, given, engine)
    assert isinstance(cfg, RunCfg)
    return build_components(cfg, given, engine)


def build_again(cfg: CommonCfg, given: UserObjects, folder: RunFolder, engine: Engine) -> Components:
    """The parts of an earlier run, which may need its plugins."""
    with blaming_absence(folder.path, folder.read_plugins()):
        return build(cfg, given, engine)


def check_given(folder: RunFolder, given: UserObjects) -> None:
    """Refuse to go on without the Python objects that an earlier run was given.

    Raises:
        ConfigError: names those that are missing.
    """
    missing = sorted(set(folder.read_given()) - set(given.names()))
    if missing:
        raise ConfigError(
            f"{folder.path} was given {' and '.join(missing)} in Python; fix: from Python, give the same again, as {missing[0]}=..."
        )


def read_cfg(folder: RunFolder) -> CommonCfg:
    """Settings of an earlier run.

    Raises:
        RunFolderError: they do not fit, or another version wrote them.
    """
    with blaming_absence(folder.path, folder.read_plugins()):
        try:
            folder.check_format()
            tree = folder.read_config()
            return (TextRunCfg if "task" in tree else RunCfg).model_validate(tree)
        except ValidationError as error:
            reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise RunFolderError(
                f"{folder.config} does not fit: {reasons}; fix: correct it, or register the algorithm first"
            ) from error
