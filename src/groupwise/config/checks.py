"""Settings of a run that need each other: what would fail after the first rollout, or do nothing, is refused beforehand."""

from groupwise.config.algorithm import AlgorithmCfg, CollectionCfg, GRPOCfg, PPOCfg
from groupwise.config.env import EnvCfg
from groupwise.config.text import TextTaskCfg


def check_together(algorithm: AlgorithmCfg, env: EnvCfg) -> None:
    """Refuse settings that lack what they need from another part of the run.

    Raises:
        ValueError: one does; names both, and the fix.
    """
    if algorithm.objective.ratio == "turn" and type(algorithm) in (GRPOCfg, PPOCfg):  # one of yours may know the turns
        raise ValueError(
            "algorithm.objective.ratio='turn' needs turn_id in the rollout, which environments do not give; fix: "
            "ratio='token' or 'sequence', another preset, or GRPO by hand on rollouts that have turn_id"
        )
    if isinstance(algorithm, GRPOCfg):
        if algorithm.credit.rule == "composed" and algorithm.credit.reward.name == "parts" and not env.reward_parts:
            raise ValueError(
                "algorithm.credit.reward='parts' compares the parts of a reward, and env.reward_parts names none; fix: "
                "env.reward_parts=('reward_forward', ...), as the environment's info calls them, or credit.reward='total'"
            )
        _refuse_idle(algorithm.collection)


def check_text(algorithm: AlgorithmCfg, task: TextTaskCfg) -> None:
    """Refuse what has no meaning for texts.

    Raises:
        ValueError: a setting of environments was changed, or turns are compared and there is one.
    """
    if task.tool is None:
        _refuse_turns(algorithm)
    fields: dict[str, object] = {"num_steps": algorithm.num_steps}
    defaults: dict[str, object] = {"num_steps": type(algorithm).model_fields["num_steps"].default}
    if isinstance(algorithm, GRPOCfg):
        of_envs = ("noise", "horizon", "partial_groups", "on_env_error")
        fields |= {f"collection.{name}": vars(algorithm.collection)[name] for name in of_envs}
        defaults |= {f"collection.{name}": vars(CollectionCfg())[name] for name in of_envs}
        _refuse_idle(algorithm.collection)
    for name, value in fields.items():
        if value != defaults[name]:
            raise ValueError(
                f"algorithm.{name}={value!r} is about environments, and does nothing for texts; fix: leave it out"
            )


def _refuse_turns(algorithm: AlgorithmCfg) -> None:
    """Refuse what compares turns of completions that have one."""
    if type(algorithm) not in (GRPOCfg, PPOCfg):  # one of yours may know other turns
        return
    fix = "fix: task.tool, which makes several"
    if algorithm.objective.ratio == "turn":
        raise ValueError(
            f"algorithm.objective.ratio='turn' needs turns, and without a tool a completion is one; {fix}, or ratio='sequence'"
        )
    if isinstance(algorithm, GRPOCfg) and algorithm.credit.rule == "composed" and algorithm.credit.returns == "turn":
        raise ValueError(
            "algorithm.credit.returns='turn' needs turns, and without a tool a completion is one; "
            f"{fix}, or credit.returns='outcome'"
        )


def _refuse_idle(collection: CollectionCfg) -> None:
    """Refuse a setting that was changed and that nothing would read."""
    if collection.dynamic_sampling and not collection.filter_groups:
        raise ValueError(
            f"algorithm.collection.dynamic_sampling={collection.dynamic_sampling!r} does nothing without "
            "collection.filter_groups=True; fix: set that, too, or leave dynamic_sampling out"
        )
