"""The task of a language model: prompts and rewards."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from groupwise import config
from groupwise.config.algorithm import AlgorithmCfg, OnNonFinite
from groupwise.config.base import GIVEN, refuse_unknown
from groupwise.config.policy import ModelCfg
from groupwise.config.run import GYM, RewardCfg, TextRunCfg, TextTaskCfg
from groupwise.errors import ConfigError, require_extra
from groupwise.text.data import Example, gym_examples, load_examples, without_overlap
from groupwise.text.rewards import RewardSet, make_reward
from groupwise.text.tools import make_tool

if TYPE_CHECKING:
    from groupwise.training.build import UserObjects


class TextTask:
    """Prompts and rewards, as ``gw.train`` takes them.

    Args:
        data: a path, ``reasoning-gym:<task>``, or an iterable of texts or mappings, such as a ``datasets.Dataset``.
        reward: a function of TRL's signature, the name of a registered one, a ``RewardCfg``, or several of these. None: that
            of reasoning-gym data.
        eval_data: held-out data, like ``data``.
        reward_weights: one for each reward, in place of theirs.
        tool: a ``Tool``, a function from the text of a turn to the answer (None: no call), or the name of a registered
            tool.
        settings: other fields of ``TextTaskCfg``.

    Raises:
        ConfigError: a setting that does not exist or is impossible, or not one weight for each reward.
    """

    def __init__(
        self,
        data: object,
        *,
        reward: object = None,
        eval_data: object = None,
        reward_weights: Sequence[float] | None = None,
        tool: "str | Callable[[str], str | None] | None" = None,
        **settings: Any,
    ) -> None:
        refuse_unknown(settings, {*TextTaskCfg.model_fields, "reward", "reward_weights"} - {"rewards"}, "TextTask")
        rewards = _several(reward)
        for one in rewards:
            if not isinstance(one, RewardCfg | str) and not callable(one):
                raise ConfigError(
                    f"reward = {one!r}: expected a function, the name of a registered one, or RewardCfg; fix: reward=my_function"
                )
        names = [one if isinstance(one, RewardCfg | str) else GIVEN for one in rewards]
        cfgs = [RewardCfg(name=one) if isinstance(one, str) else one for one in names]
        if reward_weights is not None:
            if len(reward_weights) != len(cfgs):
                raise ConfigError(f"reward_weights = {list(reward_weights)} for {len(cfgs)} rewards; fix: one for each")
            cfgs = [cfg.model_copy(update={"weight": w}) for cfg, w in zip(cfgs, reward_weights, strict=True)]
        self.cfg = TextTaskCfg(
            data=str(data) if isinstance(data, str | Path) else GIVEN,
            eval_data=str(eval_data) if isinstance(eval_data, str | Path) else None if eval_data is None else GIVEN,
            rewards=tuple(cfgs),
            tool=GIVEN if callable(tool) else tool,
            **settings,
        )
        """The settings, with ``<given in Python>`` in place of objects."""
        self.given: dict[str, Any] = {
            "data": None if isinstance(data, str | Path) else data,
            "eval_data": None if isinstance(eval_data, str | Path) else eval_data,
            "reward": [one for one in rewards if callable(one)] or None,
            "tool": tool if callable(tool) else None,
        }
        """The objects, as ``gw.resume`` takes them again."""

    @classmethod
    def from_cfg(cls, cfg: TextTaskCfg, given: "UserObjects") -> "TextTask":
        """The task that the settings describe, with the objects that were given in Python."""
        task = cls.__new__(cls)
        task.cfg, task.given = cfg, given._asdict()
        return task

    def load(self) -> tuple[list[Example], list[Example]]:
        """Examples to train on, and those held out; the former without the latter unless ``eval_overlap="keep"``.

        Raises:
            ConfigError: data that were given in Python are missing.
            DataError: no examples, or examples that cannot be read.
        """
        train, held_out = self._examples("data"), self.held_out()
        return train if self.cfg.eval_overlap == "keep" else without_overlap(train, held_out), held_out

    def held_out(self) -> list[Example]:
        """Examples that are held out, none without ``eval_data``; errors as ``load``."""
        return [] if self.cfg.eval_data is None else self._examples("eval_data")

    def rewards(self, on_nonfinite: OnNonFinite = "stop") -> RewardSet:
        """The functions, ready to score; ``on_nonfinite`` as ``AlgorithmCfg.on_nonfinite``.

        Raises:
            ConfigError: there is none, it does not take its settings, or it was given in Python and is missing.
        """
        cfgs = self.cfg.rewards
        if not cfgs and self.cfg.data.startswith(GYM):
            cfgs = (RewardCfg(name="reasoning_gym"),)
        functions = [one for one in _several(self.given["reward"]) if callable(one)]
        count = sum(cfg.name == GIVEN for cfg in cfgs)
        if len(functions) != count:
            raise ConfigError(
                f"{count} reward(s) were given in Python, but now {len(functions)}; fix: give them again, in their order, as "
                "reward=..."
            )
        given = iter(functions)
        made = [make_reward(cfg, next(given) if cfg.name == GIVEN else None) for cfg in cfgs]
        return RewardSet(made, on_nonfinite, self.cfg.reward_timeout)

    def tool(self) -> Callable[[str], str | None] | None:
        """The model's tool, as ``make_tool`` makes it; None if it has none."""
        return make_tool(self.cfg, self.given["tool"])

    def _examples(self, name: Literal["data", "eval_data"]) -> list[Example]:
        cfg, source = self.cfg, vars(self.cfg)[name]
        if source.startswith(GYM):
            size, part = (cfg.data_size, "train") if name == "data" else (cfg.eval_size, "eval")
            return gym_examples(source, size=size, part=part, kwargs=cfg.data_kwargs)
        if source == GIVEN:
            source = self.given[name]
            if source is None:
                raise ConfigError(f"the {name} were given in Python; fix: give them again as {name}=...")
        return load_examples(source, prompt_column=cfg.prompt_column)


def _several(reward: object) -> list[Any]:
    """The rewards, of which there may be none, one or several."""
    if reward is None:
        return []
    return [*reward] if isinstance(reward, list | tuple) else [reward]


# Settings of a run from data and rewards given in Python


def text_cfg(
    task: TextTaskCfg,
    algorithm: str | AlgorithmCfg | dict[str, Any] | None,
    preset: str | None,
    policy: object,
    settings: dict[str, Any],
) -> TextRunCfg:
    """The settings of a run on a task, from ``model``, ``lora`` and other fields of ``TextRunCfg``. A given policy has its own model
    and sampling.

    Raises:
        ConfigError: a setting is unknown or impossible, or there is no model.
    """
    require_extra("transformers", "text")
    from groupwise.text.policy import CausalLM

    if policy is not None and not isinstance(policy, CausalLM):
        raise ConfigError(f"policy = {policy!r:.80}: expected a gw.CausalLM; fix: model='path-or-hub-id', lora=...")
    if "reward" in settings:
        raise ConfigError("the reward is the task's; fix: gw.TextTask(data, reward=...)")
    model, lora = settings.pop("model", None), settings.pop("lora", None)
    if policy is not None:
        others = {"model": model, "lora": lora, "sampling": settings.get("sampling")}
        if named := [key for key, value in others.items() if value is not None]:
            raise ConfigError(
                f"a policy has its own model and sampling, got {', '.join(named)}, too; fix: one of the two"
            )
        model, settings["sampling"] = ModelCfg(path=GIVEN), policy.sampling
        settings["adapters"] = policy.has_adapters
    elif model is None:
        raise ConfigError("no model; fix: model='path-or-hub-id', or policy=CausalLM(...)")
    if isinstance(model, str | Path):
        model = {"path": str(model)}
    elif isinstance(model, ModelCfg):
        model = model.model_dump(exclude_unset=True)
    if lora is not None:
        model = {**model, "lora": lora}
    return config.resolve_text(algorithm, preset, task=task, model=model, **settings)
