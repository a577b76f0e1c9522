"""The public names, for type checkers."""

# fmt: off
from groupwise import config as config
from groupwise import errors as errors
from groupwise.algorithms.advantages import register_baseline as register_baseline
from groupwise.algorithms.advantages import register_credit as register_credit
from groupwise.algorithms.grpo import GRPO as GRPO
from groupwise.algorithms.losses import register_loss as register_loss
from groupwise.algorithms.ppo import PPO as PPO
from groupwise.check import check_env as check_env
from groupwise.config import load_config as load_config
from groupwise.config.algorithm import CollectionCfg as CollectionCfg
from groupwise.config.algorithm import CreditCfg as CreditCfg
from groupwise.config.algorithm import GRPOCfg as GRPOCfg
from groupwise.config.algorithm import ObjectiveCfg as ObjectiveCfg
from groupwise.config.algorithm import PPOCfg as PPOCfg
from groupwise.config.algorithm import register_algorithm as register_algorithm
from groupwise.config.policy import ModelCfg as ModelCfg
from groupwise.config.policy import PolicyCfg as PolicyCfg
from groupwise.config.policy import SamplingCfg as SamplingCfg
from groupwise.config.policy import register_policy as register_policy
from groupwise.data.rollout import RolloutBuffer as RolloutBuffer

__version__: str
