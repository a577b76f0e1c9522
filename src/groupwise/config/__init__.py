"""Settings: those that are not at the top level, and how files, presets and fields become settings. Imports no torch."""

from groupwise.config.algorithm import AlgorithmCfg as AlgorithmCfg
from groupwise.config.algorithm import BCCfg as BCCfg
from groupwise.config.evolution import EvolutionCfg as EvolutionCfg
from groupwise.config.evolution import MutationCfg as MutationCfg
from groupwise.config.evolution import Place as Place
from groupwise.config.evolution import SelectionCfg as SelectionCfg
from groupwise.config.load import json_schema as json_schema
from groupwise.config.load import load_config as load_config
from groupwise.config.load import resolve as resolve
from groupwise.config.load import resolve_text as resolve_text
from groupwise.config.load import to_json as to_json
from groupwise.config.policy import LoRACfg as LoRACfg
from groupwise.config.policy import RecurrentCfg as RecurrentCfg
from groupwise.config.policy import VLACfg as VLACfg
from groupwise.config.run import EvaluationCfg as EvaluationCfg
from groupwise.config.run import LoggingCfg as LoggingCfg
from groupwise.config.run import RewardCfg as RewardCfg
from groupwise.config.run import SamplerMismatchCfg as SamplerMismatchCfg
from groupwise.config.run import StopCfg as StopCfg
from groupwise.config.run import TextEvaluationCfg as TextEvaluationCfg
from groupwise.config.run import TextTaskCfg as TextTaskCfg
from groupwise.config.run import TrackedRun as TrackedRun
from groupwise.config.run import TrackerCfg as TrackerCfg
