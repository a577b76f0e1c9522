"""From what ``train`` takes to settings and Python objects."""

from collections.abc import Mapping
from typing import Any

from groupwise import config
from groupwise.config.base import GIVEN
from groupwise.config.env import EnvCfg
from groupwise.config.policy import AnyPolicyCfg
from groupwise.config.run import CommonCfg
from groupwise.envs.base import VectorEnv
from groupwise.errors import ConfigError
from groupwise.policies.base import Policy
from groupwise.text.settings import text_cfg
from groupwise.text.task import TextTask
from groupwise.training.components import UserObjects


def read_settings(
    env: Any, algorithm: Any, policy: Any, preset: str | None, env_settings: dict[str, Any], settings: dict[str, Any]
) -> tuple[CommonCfg, UserObjects]:
    """All settings, and the Python objects, of what ``train`` takes."""
    given = UserObjects(policy=policy if isinstance(policy, Policy) else None)
    policy_fields = None if isinstance(policy, Policy) else policy
    settings = settings | {"policy": policy_fields}
    env_settings = {key: value for key, value in env_settings.items() if value is not None}
    if isinstance(env, CommonCfg):
        more = settings | env_settings | {"algorithm": algorithm, "preset": preset}
        if extra := [key for key, value in more.items() if value is not None]:
            kind = type(env).__name__
            raise ConfigError(f"a {kind} has all settings, got {', '.join(extra)} too; fix: set them in the {kind}")
        return env, given
    if isinstance(env, TextTask):
        cfg: CommonCfg = text_cfg(env.cfg, algorithm, preset, policy, settings | env_settings)
        return cfg, UserObjects(**env.given, policy=given.policy)
    if not isinstance(policy_fields, AnyPolicyCfg | str | Mapping | None):
        raise ConfigError(
            f"policy = {policy_fields!r:.80}: expected a Policy, a gw.PolicyCfg or its fields, as "
            "{'normalize_obs': True}, or a name, as 'vla'; fix: make networks of your own a groupwise.policies.base.Policy"
        )
    env_id, env_fields = _describe_env(env)
    cfg = config.resolve(env_id, algorithm, preset, env=env_fields | env_settings, **settings)
    return cfg, given if isinstance(env, str | EnvCfg) else given._replace(env=env)


def _describe_env(env: Any) -> tuple[str, dict[str, Any]]:
    """Id for the config, and the settings that follow from the environment."""
    import gymnasium

    if isinstance(env, str):
        return env, {}
    if isinstance(env, EnvCfg):
        return env.id, env.model_dump(exclude_unset=True)
    return GIVEN, {"num_envs": env.num_envs} if isinstance(env, gymnasium.vector.VectorEnv | VectorEnv) else {}
