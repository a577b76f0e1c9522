"""The public names, each with its home. ``__init__.py`` reads this file, so that they stand here alone."""

# fmt: off
# ruff: noqa: I001
from groupwise.algorithms.advantages import CreditInput as CreditInput, Scores as Scores, episode_groups as episode_groups, register_baseline as register_baseline, register_credit as register_credit
from groupwise.algorithms.base import BaseAlgorithm as BaseAlgorithm, LossOutput as LossOutput
from groupwise.algorithms.grpo import GRPO as GRPO
from groupwise.algorithms.losses import LossInputs as LossInputs, register_correction as register_correction, register_loss as register_loss
from groupwise.algorithms.ppo import PPO as PPO
from groupwise.check import EnvReport as EnvReport
from groupwise.check import check_env as check_env
from groupwise.collectors.groups import GroupCollector as GroupCollector
from groupwise.collectors.torch_groups import TorchGroupCollector as TorchGroupCollector
from groupwise.collectors.torch_vector import TorchVectorCollector as TorchVectorCollector
from groupwise.collectors.vector import VectorCollector as VectorCollector
from groupwise.comparison.runs import compare as compare
from groupwise.config import load_config as load_config
from groupwise.config.algorithm import AlgorithmCfg as AlgorithmCfg, BCCfg as BCCfg, CollectionCfg as CollectionCfg, CreditCfg as CreditCfg, GRPOCfg as GRPOCfg, ObjectiveCfg as ObjectiveCfg, PPOCfg as PPOCfg, register_algorithm as register_algorithm
from groupwise.config.choices import register_choice as register_choice
from groupwise.config.evolution import EvolutionCfg as EvolutionCfg, MutationCfg as MutationCfg, Place as Place, SelectionCfg as SelectionCfg
from groupwise.config.env import EnvCfg as EnvCfg
from groupwise.config.policy import LoRACfg as LoRACfg, ModelCfg as ModelCfg, PolicyCfg as PolicyCfg, RecurrentCfg as RecurrentCfg, SamplingCfg as SamplingCfg, VLACfg as VLACfg, register_policy as register_policy
from groupwise.config.run import SamplerMismatchCfg as SamplerMismatchCfg, EvaluationCfg as EvaluationCfg, LoggingCfg as LoggingCfg, RunCfg as RunCfg, StopCfg as StopCfg, TextEvaluationCfg as TextEvaluationCfg, TextRunCfg as TextRunCfg
from groupwise.config.trackers import TrackedRun as TrackedRun, TrackerCfg as TrackerCfg
from groupwise.config.text import RewardCfg as RewardCfg, TextTaskCfg as TextTaskCfg
from groupwise.embodied.vla import VLAPolicy as VLAPolicy
from groupwise.data.rollout import RolloutBuffer as RolloutBuffer, transition_view as transition_view
from groupwise.embodied.torch_sim import from_torch_sim as from_torch_sim
from groupwise.embodied.demos import Recording as Recording, record_demos as record_demos
from groupwise.envs.starts import verify_group_start as verify_group_start
from groupwise.envs.make import make_env as make_env
from groupwise.envs.torch_env import TorchGroupEnv as TorchGroupEnv
from groupwise.envs.torch_control import TorchCartPole as TorchCartPole
from groupwise.errors import CheckpointError as CheckpointError, ConfigError as ConfigError, DataError as DataError, SamplerMismatchError as SamplerMismatchError, DivergedError as DivergedError, EnvError as EnvError, GroupStartError as GroupStartError, GroupStartWarning as GroupStartWarning, GroupwiseError as GroupwiseError, MemberError as MemberError, ServerError as ServerError, MissingExtraError as MissingExtraError, RewardError as RewardError, RunFolderError as RunFolderError, SlowPathWarning as SlowPathWarning, ToolError as ToolError, UnknownNameError as UnknownNameError, UnsupportedSpaceError as UnsupportedSpaceError
from groupwise.evolution.evolve import evolve as evolve
from groupwise.evolution.population import Member as Member, Population as Population
from groupwise.policies.actor_critic import ActorCritic as ActorCritic
from groupwise.policies.base import Evaluation as Evaluation, Policy as Policy
from groupwise.policies.export import export as export
from groupwise.policies.recurrent import RecurrentActorCritic as RecurrentActorCritic
from groupwise.comparison.results import Comparison as Comparison
from groupwise.run import Run as Run, evaluate as evaluate, resume as resume, sample as sample, train as train
from groupwise.text.agent import LanguageAgent as LanguageAgent
from groupwise.text.data import Example as Example
from groupwise.text.policy import CausalLM as CausalLM
from groupwise.text.prompt_env import PromptEnv as PromptEnv
from groupwise.text.rewards import register_reward as register_reward
from groupwise.text.task import TextTask as TextTask
from groupwise.text.tools import Calculator as Calculator, Tool as Tool, register_tool as register_tool
from groupwise.training.base import Callback as Callback
from groupwise.training.trackers import Tracker as Tracker
from groupwise.training.fork import fork as fork
from groupwise.training.profiler import Profiler as Profiler
from groupwise.training.trainer import Trainer as Trainer

__version__: str
