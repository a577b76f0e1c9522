"""Reinforcement learning with GRPO and PPO.

The public names are imported on first use (PEP 562), so ``import groupwise`` is fast. Other settings are in
``groupwise.config``, errors in ``groupwise.errors``. ``__init__.pyi`` says the same to type checkers.
"""

from importlib import import_module

_NAMES = {
    "algorithms.advantages": "register_baseline register_credit",
    "algorithms.grpo": "GRPO",
    "algorithms.losses": "register_loss",
    "algorithms.ppo": "PPO",
    "check": "check_env",
    "collectors.groups": "GroupCollector",
    "collectors.vector": "VectorCollector",
    "comparison.compare": "compare",
    "config": "load_config",
    "config.algorithm": "CollectionCfg CreditCfg GRPOCfg ObjectiveCfg PPOCfg register_algorithm",
    "config.policy": "ModelCfg PolicyCfg SamplingCfg register_policy",
    "config.run": "EnvCfg RunCfg TextRunCfg",
    "data.rollout": "RolloutBuffer",
    "embodied.torch_sim": "from_torch_sim",
    "embodied.vla": "VLAPolicy",
    "envs.make": "make_env",
    "envs.torch_env": "TorchGroupEnv",
    "evolution.population": "evolve",
    "plugins": "register_text_env",
    "policies.actor_critic": "ActorCritic",
    "run": "Run evaluate resume sample train",
    "text.agent": "LanguageAgent PromptEnv",
    "text.envs": "TextEnv",
    "text.policy": "CausalLM",
    "text.rewards": "register_reward",
    "text.task": "TextTask",
    "text.tools": "register_tool",
    "training.checkpoint": "fork",
    "training.trainer": "Callback Trainer",
}
"""Public names of each module."""
_MODULES = {name: f"groupwise.{module}" for module, names in _NAMES.items() for name in names.split()}
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
        trains = "; fix: gw.train(gw.TextTask(data, reward=my_reward), gw.GRPOCfg(), model='path-or-hub-id')"
        others = dict.fromkeys(("GRPOTrainer", "RLOOTrainer", "PPOTrainer"), trains)
        hint = loads if name.startswith("load") else others.get(name) or nearest(name, __all__)
        raise AttributeError(f"module 'groupwise' has no attribute {name!r}{hint}")
    value = vars(import_module(_MODULES[name]))[name]
    globals()[name] = value  # the next use does not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "config", "errors"})
