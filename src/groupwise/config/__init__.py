"""Every setting: its classes, presets, files and fields to settings, and their checks. Imports no torch."""

from groupwise.config.algorithm import (
    AlgorithmCfg,
    BCCfg,
    CollectionCfg,
    CreditCfg,
    GRPOCfg,
    ObjectiveCfg,
    PPOCfg,
    register_algorithm,
)
from groupwise.config.choices import register_choice
from groupwise.config.env import EnvCfg
from groupwise.config.evolution import EvolutionCfg, MutationCfg, Place, SelectionCfg
from groupwise.config.load import json_schema, load_config, resolve, resolve_text, to_json
from groupwise.config.policy import LoRACfg, ModelCfg, PolicyCfg, RecurrentCfg, SamplingCfg, VLACfg, register_policy
from groupwise.config.run import (
    EvaluationCfg,
    LoggingCfg,
    RunCfg,
    SamplerMismatchCfg,
    StopCfg,
    TextEvaluationCfg,
    TextRunCfg,
)
from groupwise.config.text import RewardCfg, TextTaskCfg
from groupwise.config.trackers import TrackedRun, TrackerCfg

__all__ = [
    "AlgorithmCfg",
    "BCCfg",
    "CollectionCfg",
    "CreditCfg",
    "EnvCfg",
    "EvaluationCfg",
    "EvolutionCfg",
    "GRPOCfg",
    "LoRACfg",
    "LoggingCfg",
    "ModelCfg",
    "MutationCfg",
    "ObjectiveCfg",
    "PPOCfg",
    "Place",
    "PolicyCfg",
    "RecurrentCfg",
    "RewardCfg",
    "RunCfg",
    "SamplerMismatchCfg",
    "SamplingCfg",
    "SelectionCfg",
    "StopCfg",
    "TextEvaluationCfg",
    "TextRunCfg",
    "TextTaskCfg",
    "TrackedRun",
    "TrackerCfg",
    "VLACfg",
    "json_schema",
    "load_config",
    "register_algorithm",
    "register_choice",
    "register_policy",
    "resolve",
    "resolve_text",
    "to_json",
]
