"""Checks of settings that depend on each other, across the parts of a run."""

from groupwise.config.algorithm import AlgorithmCfg, CollectionCfg, GRPOCfg, PPOCfg
from groupwise.config.env import EnvCfg
from groupwise.config.text import TextTaskCfg


def check_together(algorithm: AlgorithmCfg, env: EnvCfg) -> None:
    """Refuse what an environment lacks, and settings without effect, by a ``ValueError``."""
    if algorithm.objective.ratio == "turn" and type(algorithm) in (GRPOCfg, PPOCfg):  # a user's own may have turns
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
        _check_sampling(algorithm.collection)


def check_text(algorithm: AlgorithmCfg, task: TextTaskCfg) -> None:
    """Refuse settings of environments, and comparisons of turns where there is only one, by a ``ValueError``."""
    if task.tool is None and type(algorithm) in (GRPOCfg, PPOCfg):
        _check_turns(algorithm)
    fields = {"num_steps": (algorithm.num_steps, type(algorithm).model_fields["num_steps"].default)}
    if isinstance(algorithm, GRPOCfg):
        for name in ("noise", "horizon", "partial_groups", "on_env_error"):
            default = CollectionCfg.model_fields[name].default
            fields[f"collection.{name}"] = (vars(algorithm.collection)[name], default)
        _check_sampling(algorithm.collection)
    for name, (value, default) in fields.items():
        if value != default:
            raise ValueError(f"algorithm.{name}={value!r} has no effect on text; fix: leave it out")


def _check_turns(algorithm: AlgorithmCfg) -> None:
    needs = "needs turns, and without a tool a completion is one turn; fix: task.tool"
    if algorithm.objective.ratio == "turn":
        raise ValueError(f"algorithm.objective.ratio='turn' {needs}, or ratio='sequence'")
    if isinstance(algorithm, GRPOCfg) and algorithm.credit.rule == "composed" and algorithm.credit.returns == "turn":
        raise ValueError(f"algorithm.credit.returns='turn' {needs}, or credit.returns='outcome'")


def _check_sampling(collection: CollectionCfg) -> None:
    if collection.dynamic_sampling and not collection.filter_groups:
        raise ValueError(
            f"algorithm.collection.dynamic_sampling={collection.dynamic_sampling!r} has no effect without "
            "collection.filter_groups=True; fix: set both, or leave dynamic_sampling out"
        )
