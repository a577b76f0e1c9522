"""What the integrations share."""

from collections.abc import Mapping
from typing import Any

import cloudpickle

from groupwise import plugins
from groupwise.config.evolution import Value
from groupwise.config.run import CommonCfg, EvaluationMetric, RunCfg, TextRunCfg
from groupwise.evolution.search import fitted, with_settings
from groupwise.settings import read_settings
from groupwise.training.components import UserObjects


class Base:
    """The runs of a search: what they have in common.

    Args:
        env, algorithm, fields: as of ``gw.train``.
    """

    def __init__(self, env: Any, algorithm: Any, fields: dict[str, Any]) -> None:
        in_env = {name: fields.pop(name, None) for name in ("num_envs", "max_episode_steps")}
        policy, preset = fields.pop("policy", None), fields.pop("preset", None)
        cfg, given = read_settings(env, algorithm, policy, preset, in_env, fields)
        assert isinstance(cfg, RunCfg | TextRunCfg)
        self.cfg: RunCfg | TextRunCfg = cfg
        self._payload = plugins.pickled(given)
        self.metric: EvaluationMetric = self.cfg.evaluation.metric if isinstance(self.cfg, RunCfg) else "return"

    def given(self) -> UserObjects:
        """The Python objects of a run, which has its own, since training changes a policy."""
        found: UserObjects = cloudpickle.loads(self._payload)
        return found

    def with_settings(self, settings: Mapping[str, Value], **fields: Any) -> CommonCfg:
        """The settings of a run: these, by path, in place of the common ones.

        Raises:
            ConfigError: there is no such setting, or they are not possible.
        """
        return with_settings(
            self.cfg, {path: fitted(self.cfg, path, value) for path, value in settings.items()}, **fields
        )
