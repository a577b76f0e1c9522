"""Reinforcement learning with GRPO and PPO.

The public names are imported on first use (PEP 562), so ``import groupwise`` is fast. Other settings are in
``groupwise.config``, errors in ``groupwise.errors``. ``__init__.pyi`` says the same to type checkers.
"""

from importlib import import_module

_MODULES = {
    "ActorCritic": "groupwise.policies.actor_critic",
    "Callback": "groupwise.training.trainer",
    "CausalLM": "groupwise.text.policy",
    "CollectionCfg": "groupwise.config.algorithm",
    "CreditCfg": "groupwise.config.algorithm",
    "EnvCfg": "groupwise.config.run",
    "GRPO": "groupwise.algorithms.grpo",
    "GRPOCfg": "groupwise.config.algorithm",
    "GroupCollector": "groupwise.collectors.groups",
    "LanguageAgent": "groupwise.text.agent",
    "ModelCfg": "groupwise.config.policy",
    "ObjectiveCfg": "groupwise.config.algorithm",
    "PPO": "groupwise.algorithms.ppo",
    "PPOCfg": "groupwise.config.algorithm",
    "PolicyCfg": "groupwise.config.policy",
    "PromptEnv": "groupwise.text.agent",
    "RolloutBuffer": "groupwise.data.rollout",
    "Run": "groupwise.run",
    "RunCfg": "groupwise.config.run",
    "SamplingCfg": "groupwise.config.policy",
    "TextRunCfg": "groupwise.config.run",
    "TextTask": "groupwise.text.task",
    "TorchGroupEnv": "groupwise.envs.torch_env",
    "Trainer": "groupwise.training.trainer",
    "VLAPolicy": "groupwise.embodied.vla",
    "VectorCollector": "groupwise.collectors.vector",
    "check_env": "groupwise.check",
    "compare": "groupwise.comparison.compare",
    "evaluate": "groupwise.run",
    "evolve": "groupwise.evolution.evolve",
    "fork": "groupwise.training.checkpoint",
    "from_torch_sim": "groupwise.embodied.torch_sim",
    "load_config": "groupwise.config",
    "make_env": "groupwise.envs.make",
    "register_algorithm": "groupwise.config.algorithm",
    "register_baseline": "groupwise.algorithms.advantages",
    "register_choice": "groupwise.config.base",
    "register_credit": "groupwise.algorithms.advantages",
    "register_loss": "groupwise.algorithms.losses",
    "register_policy": "groupwise.config.policy",
    "register_reward": "groupwise.text.rewards",
    "register_tool": "groupwise.text.tools",
    "resume": "groupwise.run",
    "sample": "groupwise.run",
    "train": "groupwise.run",
}
"""Public names, and the module of each."""
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name == "__version__":
        from importlib.metadata import version

        return version("groupwise")
    if name in ("config", "errors"):
        return import_module(f"groupwise.{name}")
    if name not in _MODULES:
        from groupwise.errors import nearest

        loads = "; fix: gw.Run.load for a run folder, gw.load_config for a file of settings"
        hint = loads if name.startswith("load") else nearest(name, __all__)
        raise AttributeError(f"module 'groupwise' has no attribute {name!r}{hint}")
    value = vars(import_module(_MODULES[name]))[name]
    globals()[name] = value  # the next use does not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "config", "errors"})
