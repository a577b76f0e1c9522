"""groupwise: trains a policy by comparing a group of attempts at the same start.

The names below are the public interface. They are imported when first used, so that ``import groupwise`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from groupwise.garbage import importing

if TYPE_CHECKING:
    from groupwise.algorithms.advantages import CreditInput, episode_groups, register_credit
    from groupwise.algorithms.base import BaseAlgorithm, LossOutput
    from groupwise.algorithms.grpo import GRPO
    from groupwise.algorithms.ppo import PPO
    from groupwise.api import evaluate, resume, sample, train
    from groupwise.check import check_env
    from groupwise.collectors.groups import GroupCollector
    from groupwise.collectors.torch_groups import TorchGroupCollector
    from groupwise.collectors.torch_vector import TorchVectorCollector
    from groupwise.collectors.vector import VectorCollector
    from groupwise.comparing import compare
    from groupwise.config import load_config
    from groupwise.config.algorithm import (
        AlgorithmCfg,
        CreditCfg,
        GRPOCfg,
        ObjectiveCfg,
        PPOCfg,
        ReferenceCfg,
    )
    from groupwise.config.env import EnvCfg
    from groupwise.config.policy import EvalSamplingCfg, LoRACfg, ModelCfg, PolicyCfg, SamplingCfg
    from groupwise.config.registry import register_algorithm
    from groupwise.config.run import (
        AgreementCfg,
        EvaluationCfg,
        LoggingCfg,
        OverlongCfg,
        RunCfg,
        StopCfg,
        TextEvaluationCfg,
        TextRunCfg,
    )
    from groupwise.config.text import RewardCfg, TextTaskCfg
    from groupwise.data.rollout import RolloutBuffer, transition_view
    from groupwise.envs.findings import EnvReport
    from groupwise.envs.groups import verify_group_start
    from groupwise.envs.make import make_env
    from groupwise.envs.native import TorchGroupEnv
    from groupwise.envs.torch_control import (
        TorchCartPole,
        TorchMountainCar,
        TorchMountainCarContinuous,
        TorchPendulum,
    )
    from groupwise.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DisagreementError,
        DivergedError,
        EnvError,
        GroupStartError,
        GroupStartWarning,
        GroupwiseError,
        MissingExtraError,
        RewardError,
        RunFolderError,
        SlowPathWarning,
        ToolError,
        UnknownNameError,
        UnsupportedSpaceError,
    )
    from groupwise.policies.actor_critic import ActorCritic
    from groupwise.policies.base import Evaluation, Policy
    from groupwise.report.comparison import Comparison
    from groupwise.runs import Run
    from groupwise.text.data import Example
    from groupwise.text.policy import CausalLM
    from groupwise.text.reward_functions import register_reward
    from groupwise.text.task import TextTask
    from groupwise.text.tools import Calculator, Tool, register_tool
    from groupwise.training.base import Callback
    from groupwise.training.trainer import Trainer

    __version__: str

__all__ = [
    "GRPO",
    "PPO",
    "ActorCritic",
    "AgreementCfg",
    "AlgorithmCfg",
    "BaseAlgorithm",
    "Calculator",
    "Callback",
    "CausalLM",
    "CheckpointError",
    "Comparison",
    "ConfigError",
    "CreditCfg",
    "CreditInput",
    "DataError",
    "DisagreementError",
    "DivergedError",
    "EnvCfg",
    "EnvError",
    "EnvReport",
    "EvalSamplingCfg",
    "Evaluation",
    "EvaluationCfg",
    "Example",
    "GRPOCfg",
    "GroupCollector",
    "GroupStartError",
    "GroupStartWarning",
    "GroupwiseError",
    "LoRACfg",
    "LoggingCfg",
    "LossOutput",
    "MissingExtraError",
    "ModelCfg",
    "ObjectiveCfg",
    "OverlongCfg",
    "PPOCfg",
    "Policy",
    "PolicyCfg",
    "ReferenceCfg",
    "RewardCfg",
    "RewardError",
    "RolloutBuffer",
    "Run",
    "RunCfg",
    "RunFolderError",
    "SamplingCfg",
    "SlowPathWarning",
    "StopCfg",
    "TextEvaluationCfg",
    "TextRunCfg",
    "TextTask",
    "TextTaskCfg",
    "Tool",
    "ToolError",
    "TorchCartPole",
    "TorchGroupCollector",
    "TorchGroupEnv",
    "TorchMountainCar",
    "TorchMountainCarContinuous",
    "TorchPendulum",
    "TorchVectorCollector",
    "Trainer",
    "UnknownNameError",
    "UnsupportedSpaceError",
    "VectorCollector",
    "__version__",
    "check_env",
    "compare",
    "episode_groups",
    "evaluate",
    "load_config",
    "make_env",
    "register_algorithm",
    "register_credit",
    "register_reward",
    "register_tool",
    "resume",
    "sample",
    "train",
    "transition_view",
    "verify_group_start",
]

_MODULES = {
    "groupwise.algorithms.base": "BaseAlgorithm LossOutput",
    "groupwise.config.algorithm": "AlgorithmCfg CreditCfg GRPOCfg ObjectiveCfg PPOCfg ReferenceCfg",
    "groupwise.algorithms.advantages": "CreditInput episode_groups register_credit",
    "groupwise.algorithms.grpo": "GRPO",
    "groupwise.algorithms.ppo": "PPO",
    "groupwise.api": "evaluate resume sample train",
    "groupwise.check": "check_env",
    "groupwise.collectors.groups": "GroupCollector",
    "groupwise.collectors.torch_groups": "TorchGroupCollector",
    "groupwise.collectors.torch_vector": "TorchVectorCollector",
    "groupwise.collectors.vector": "VectorCollector",
    "groupwise.comparing": "compare",
    "groupwise.config": "load_config",
    "groupwise.data.rollout": "RolloutBuffer transition_view",
    "groupwise.config.env": "EnvCfg",
    "groupwise.envs.findings": "EnvReport",
    "groupwise.envs.groups": "verify_group_start",
    "groupwise.envs.make": "make_env",
    "groupwise.envs.native": "TorchGroupEnv",
    "groupwise.envs.torch_control": "TorchCartPole TorchMountainCar TorchMountainCarContinuous TorchPendulum",
    "groupwise.errors": "CheckpointError ConfigError DataError DisagreementError DivergedError EnvError GroupStartError GroupStartWarning GroupwiseError MissingExtraError RewardError RunFolderError SlowPathWarning ToolError UnknownNameError UnsupportedSpaceError",
    "groupwise.policies.actor_critic": "ActorCritic",
    "groupwise.policies.base": "Evaluation Policy",
    "groupwise.text.policy": "CausalLM",
    "groupwise.config.policy": "EvalSamplingCfg LoRACfg ModelCfg PolicyCfg SamplingCfg",
    "groupwise.config.registry": "register_algorithm",
    "groupwise.report.comparison": "Comparison",
    "groupwise.runs": "Run",
    "groupwise.config.run": "AgreementCfg EvaluationCfg LoggingCfg OverlongCfg RunCfg StopCfg TextEvaluationCfg TextRunCfg",
    "groupwise.config.text": "RewardCfg TextTaskCfg",
    "groupwise.text.data": "Example",
    "groupwise.text.reward_functions": "register_reward",
    "groupwise.text.task": "TextTask",
    "groupwise.text.tools": "Calculator Tool register_tool",
    "groupwise.training.base": "Callback",
    "groupwise.training.trainer": "Trainer",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        return version("groupwise")
    if name not in _MODULE_OF:
        from groupwise.errors import nearest

        raise AttributeError(f"module 'groupwise' has no attribute {name!r}{nearest(name, __all__)}")
    with importing():
        value = vars(import_module(_MODULE_OF[name]))[name]
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
