"""``groupwise convert``: the agent configs of EmbodiChain's RL module as settings of this library. Imports no torch.

Source: https://github.com/DexForce/EmbodiChain, the tutorial on reinforcement learning in its docs.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.cli.parser import Parser
from groupwise.config.base import flat
from groupwise.config.load import read_json, resolve
from groupwise.config.presets import Tree
from groupwise.errors import ConfigError, UnknownNameError
from groupwise.system.terminal import show

HELP = """Print the settings of another library as settings of groupwise, and name on stderr what has no counterpart.

  groupwise convert embodichain agent.json > run.json
  groupwise train run.json

LIBRARY is embodichain, whose agent configs have the parts trainer, env, policy and algorithm.
"""
_COUNTERPARTS = {
    "trainer.seed": "seed",
    "trainer.device": "device",
    "trainer.iterations": "total_iterations",
    "trainer.num_envs": "env.num_envs",
    "trainer.buffer_size": "algorithm.num_steps",
    "trainer.eval_freq": "evaluation.interval",
    "trainer.num_eval_episodes": "evaluation.episodes",
    "trainer.save_freq": "checkpoint_interval",
    "env.id": "env.id",
    "env.cfg.num_envs": "env.num_envs",
    "policy.actor.network_cfg.hidden_sizes": "policy.hidden_sizes",
    "policy.actor.network_cfg.activation": "policy.activation",
    "algorithm.name": "algorithm.name",
    "algorithm.cfg.learning_rate": "algorithm.learning_rate",
    "algorithm.cfg.optimizer.lr": "algorithm.learning_rate",
    "algorithm.cfg.n_epochs": "algorithm.num_epochs",
    "algorithm.cfg.batch_size": "algorithm.minibatch_size",
    "algorithm.cfg.gamma": "algorithm.gamma",
    "algorithm.cfg.gae_lambda": "algorithm.gae_lambda",
    "algorithm.cfg.clip_coef": "algorithm.clip_coef",
    "algorithm.cfg.ent_coef": "algorithm.ent_coef",
    "algorithm.cfg.vf_coef": "algorithm.vf_coef",
    "algorithm.cfg.max_grad_norm": "algorithm.max_grad_norm",
    "algorithm.cfg.kl_coef": "algorithm.kl_coef",
    "algorithm.cfg.group_size": "algorithm.group_size",
    "algorithm.cfg.eps": "algorithm.credit.eps",
}
_COMPUTED = (
    "trainer.use_wandb", "trainer.wandb_project_name", "policy.actor.type", "policy.critic.type", "policy.action_dim",
    "algorithm.cfg.device", "algorithm.cfg.optimizer.name",
)  # fmt: skip
"""What ``_trackers`` reads, and what follows from other settings here."""
_AS_HERE: dict[str, tuple[Any, ...]] = {
    "policy.name": ("actor_critic", "actor_only"),
    "algorithm.cfg.reset_every_rollout": (True,),
    "algorithm.cfg.truncate_at_first_done": (True,),
}
"""Values that need no setting here."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo": {"ent_coef": 0.01, "vf_coef": 0.5},
    "grpo": {"ent_coef": 0.0, "group_size": 4, "kl_coef": 0.02, "eps": 1e-8},
}
_COMMON_DEFAULTS = {
    "learning_rate": 3e-4, "batch_size": 64, "gamma": 0.99, "max_grad_norm": 0.5, "n_epochs": 10, "clip_coef": 0.2,
}  # fmt: skip
_UNREAD_BY_GRPO = ("algorithm.cfg.gae_lambda", "algorithm.cfg.vf_coef")


class Converted(NamedTuple):
    """The settings, and what has no counterpart."""

    settings: Tree
    """A settings file of ``groupwise train``."""
    missing: list[str]
    """One line each."""


def run(parser: Parser, argv: Sequence[str]) -> None:
    """Print the settings of the file in ``argv``."""
    parser.add_argument("library", help="embodichain")
    parser.add_argument("file", type=Path, help="agent config as JSON")
    options = parser.read(argv)
    if options.library != "embodichain":
        raise UnknownNameError("library", options.library, ["embodichain"])
    try:
        found = convert_embodichain(read_json(options.file))
    except ConfigError as error:
        raise ConfigError(f"{options.file}: {error}") from error
    show(json.dumps(found.settings, indent=2))
    for line in found.missing:
        print(f"no counterpart: {line}", file=sys.stderr)


def convert_embodichain(agent: Tree) -> Converted:
    """The settings that correspond to an agent config of EmbodiChain.

    Raises:
        ConfigError: a part is missing, the algorithm is neither PPO nor GRPO, or a value is impossible.
    """
    given = flat(agent)
    name = given.get("algorithm.name")
    if name not in _DEFAULTS:
        raise ConfigError(f"algorithm.name = {name!r}: expected one of ppo, grpo; fix: an agent config of one of them")
    if "env.id" not in given:
        raise ConfigError("env.id is missing; fix: name the environment, as registered with Gymnasium")
    defaults = {f"algorithm.cfg.{key}": value for key, value in (_COMMON_DEFAULTS | _DEFAULTS[name]).items()}
    if "algorithm.cfg.optimizer.lr" in given:
        del defaults["algorithm.cfg.learning_rate"]
    unread = _UNREAD_BY_GRPO if name == "grpo" else ()
    settings: Tree = {"preset": "embodichain"} if name == "grpo" else {}
    settings["policy"] = {"normalize_obs": False, "normalize_reward": False}
    for path, value in (defaults | given).items():
        if path in _COUNTERPARTS and path not in unread:
            _put(settings, _COUNTERPARTS[path], value)
    settings |= _trackers(given)
    fields = {key: value for key, value in settings.items() if key not in ("env", "algorithm", "preset")}
    env = {key: value for key, value in settings["env"].items() if key != "id"}
    resolve(settings["env"]["id"], settings["algorithm"], settings.get("preset"), env=env, **fields)
    return Converted(settings, _missing(given, unread))


def _trackers(given: Tree) -> Tree:
    """The trackers, if any."""
    if given.get("trainer.use_wandb"):
        project = {"project": given["trainer.wandb_project_name"]} if "trainer.wandb_project_name" in given else {}
        return {"logging": {"report_to": ["tensorboard", {"name": "wandb", **project}]}}
    return {}


def _missing(given: Tree, unread: Sequence[str]) -> list[str]:
    same = {path for path, values in _AS_HERE.items() if given.get(path) in values}
    same |= {path for path in given if "critic" in path and given[path] == given.get(path.replace("critic", "actor"))}
    lost = given.keys() - (_COUNTERPARTS.keys() - set(unread)) - set(_COMPUTED) - same
    return sorted(f"{path} = {json.dumps(given[path])}" for path in lost)


def _put(tree: Tree, path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for key in outer:
        tree = tree.setdefault(key, {})
    tree[last] = value
