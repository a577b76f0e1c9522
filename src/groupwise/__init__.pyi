"""The public names, for type checkers."""

# fmt: off
from groupwise import config as config, errors as errors
from groupwise.algorithms.advantages import register_baseline as register_baseline, register_credit as register_credit
from groupwise.algorithms.grpo import GRPO as GRPO
from groupwise.algorithms.losses import register_loss as register_loss
from groupwise.algorithms.ppo import PPO as PPO
from groupwise.check import check_env as check_env
from groupwise.collectors.groups import GroupCollector as GroupCollector
from groupwise.collectors.vector import VectorCollector as VectorCollector
from groupwise.comparison.runs import compare as compare
from groupwise.config import load_config as load_config
from groupwise.config.algorithm import CollectionCfg as CollectionCfg, CreditCfg as CreditCfg, GRPOCfg as GRPOCfg, ObjectiveCfg as ObjectiveCfg, PPOCfg as PPOCfg, register_algorithm as register_algorithm
from groupwise.config.choices import register_choice as register_choice
from groupwise.config.env import EnvCfg as EnvCfg
from groupwise.config.policy import ModelCfg as ModelCfg, PolicyCfg as PolicyCfg, SamplingCfg as SamplingCfg, register_policy as register_policy
from groupwise.config.run import RunCfg as RunCfg, TextRunCfg as TextRunCfg
from groupwise.data.rollout import RolloutBuffer as RolloutBuffer
from groupwise.embodied.torch_sim import from_torch_sim as from_torch_sim
from groupwise.embodied.vla import VLAPolicy as VLAPolicy
from groupwise.envs.make import make_env as make_env
from groupwise.envs.torch_env import TorchGroupEnv as TorchGroupEnv
from groupwise.evolution.evolve import evolve as evolve
from groupwise.policies.actor_critic import ActorCritic as ActorCritic
from groupwise.run import Run as Run, evaluate as evaluate, resume as resume, sample as sample, train as train
from groupwise.text.agent import LanguageAgent as LanguageAgent
from groupwise.text.policy import CausalLM as CausalLM
from groupwise.text.prompt_env import PromptEnv as PromptEnv
from groupwise.text.rewards import register_reward as register_reward
from groupwise.text.task import TextTask as TextTask
from groupwise.text.tools import register_tool as register_tool
from groupwise.training.base import Callback as Callback
from groupwise.training.fork import fork as fork
from groupwise.training.trainer import Trainer as Trainer

__version__: str
