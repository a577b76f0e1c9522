"""The task of a language model: prompts and rewards."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from groupwise.config.base import GIVEN
from groupwise.config.text import GYM, RewardCfg, TextTaskCfg
from groupwise.errors import ConfigError
from groupwise.text.data import Example, gym_examples, load_examples, without_overlap
from groupwise.text.rewards import Reward, RewardSet, make_reward
from groupwise.text.tools import Tool, make_tool

if TYPE_CHECKING:
    from groupwise.training.components import UserObjects


class TextData(NamedTuple):
    """Examples to train on, and those held out."""

    train: list[Example]
    eval: list[Example]


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
        rewards = _parse_rewards(reward)
        cfgs = [cfg for cfg, _ in rewards]
        if reward_weights is not None:
            if len(reward_weights) != len(cfgs):
                raise ConfigError(f"reward_weights = {list(reward_weights)} for {len(cfgs)} rewards; fix: one for each")
            cfgs = [cfg.model_copy(update={"weight": w}) for cfg, w in zip(cfgs, reward_weights, strict=True)]
        self.cfg = TextTaskCfg(
            data=_recorded(data),
            eval_data=None if eval_data is None else _recorded(eval_data),
            rewards=tuple(cfgs),
            tool=GIVEN if callable(tool) else tool,
            **settings,
        )
        """The settings, with ``<given in Python>`` in place of objects."""
        self.data = data
        self.eval_data = eval_data
        self.functions = tuple(function for _, function in rewards)
        """For each reward, the function given in Python; None for registered ones."""
        self.given_tool = tool if callable(tool) else None
        """The tool given in Python."""

    @classmethod
    def from_cfg(cls, cfg: TextTaskCfg, given: "UserObjects") -> "TextTask":
        """The task that the settings describe, with the objects that were given in Python.

        Raises:
            ConfigError: an object is missing, or there is one too many.
        """
        rewards = [function for _, function in _parse_rewards(given.reward) if function is not None]
        count = sum(one.name == GIVEN for one in cfg.rewards)
        if len(rewards) != count:
            raise ConfigError(
                f"{count} reward(s) were given in Python, but now {len(rewards)}; fix: give them again, in their order, as reward=..."
            )
        functions = iter(rewards)
        task = cls.__new__(cls)
        task.cfg = cfg
        task.data = _given_again(cfg.data, given.data, "data")
        task.eval_data = None if cfg.eval_data is None else _given_again(cfg.eval_data, given.eval_data, "eval_data")
        task.functions = tuple(next(functions) if one.name == GIVEN else None for one in cfg.rewards)
        task.given_tool = given.tool
        return task

    def load(self) -> TextData:
        """The examples; training prompts that are also held out are dropped unless ``eval_overlap="keep"``.

        Raises:
            DataError: no examples, or examples that cannot be read.
        """
        evaluation = [] if self.eval_data is None else self._examples(self.eval_data, "eval")
        train = self._examples(self.data, "train")
        return TextData(train if self.cfg.eval_overlap == "keep" else without_overlap(train, evaluation), evaluation)

    def rewards(self) -> RewardSet:
        """The functions, ready to score.

        Raises:
            UnknownNameError: no such reward.
            ConfigError: there is none, or it does not take its settings.
        """
        cfgs = self.cfg.rewards
        if not cfgs and self.cfg.data.startswith(GYM):
            return RewardSet([make_reward(RewardCfg(name="reasoning_gym"))])
        return RewardSet([make_reward(cfg, function) for cfg, function in zip(cfgs, self.functions, strict=True)])

    def tool(self) -> Tool | None:
        """The model's tool; None if it has none.

        Raises:
            UnknownNameError: no such tool.
            ConfigError: it does not take its settings.
        """
        return make_tool(self.cfg, self.given_tool)

    def _examples(self, source: object, part: Literal["train", "eval"]) -> list[Example]:
        cfg = self.cfg
        if isinstance(source, str) and source.startswith(GYM):
            size = cfg.data_size if part == "train" else cfg.eval_size
            return gym_examples(source, size=size, part=part, kwargs=cfg.data_kwargs)
        return load_examples(source, prompt_column=cfg.prompt_column)


def _parse_rewards(reward: object) -> list[tuple[RewardCfg, Reward | None]]:
    """The settings of each reward, and its function if that was given in Python."""
    if reward is None:
        return []
    return [_parse_reward(one) for one in (reward if isinstance(reward, (list, tuple)) else [reward])]


def _parse_reward(reward: object) -> tuple[RewardCfg, Reward | None]:
    if isinstance(reward, RewardCfg):
        return reward, None
    if isinstance(reward, str):
        return RewardCfg(name=reward), None
    if callable(reward):
        return RewardCfg(name=GIVEN), reward
    raise ConfigError(
        f"reward = {reward!r}: expected a function, the name of a registered one, or RewardCfg; fix: reward=my_function"
    )


def _recorded(source: object) -> str:
    return str(source) if isinstance(source, (str, Path)) else GIVEN


def _given_again(recorded: str, given: object, name: str) -> object:
    if recorded != GIVEN:
        return recorded
    if given is None:
        raise ConfigError(f"the {name.replace('_', ' ')} were given in Python; fix: give them again as {name}=...")
    return given
