"""All errors and warnings."""

import difflib
import textwrap
from collections.abc import Iterable
from importlib.util import find_spec
from numbers import Integral
from typing import Any


class GroupwiseError(Exception):
    """Base of all errors below."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes get the message, for any signature of ``__init__``."""
        return type(self).__new__, (type(self), *self.args), self.__dict__


class ConfigError(GroupwiseError, ValueError):
    """A setting that is unknown, mistyped or impossible."""


class UnknownNameError(ConfigError):
    """A name that is not registered; the message has the nearest ones, or ``hint``, and then ``more``."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, hint: str | None = None, more: str = "") -> None:
        options = sorted(known)
        near = difflib.get_close_matches(name, options, n=3, cutoff=0.5)
        some = textwrap.shorten(", ".join(options), 600, placeholder=" ...") or "none"
        found = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {some}"
        super().__init__(f"unknown {kind} {name!r}: {found if hint is None else hint}{more}")


class EnvError(GroupwiseError, ValueError):
    """An environment that cannot be used with these settings."""


class UnsupportedSpaceError(EnvError):
    """An observation or action space that is not supported."""


class GroupStartError(EnvError):
    """Members of a group cannot share a start."""


class GroupStartWarning(UserWarning):
    """Members share their start, but not in the best mode."""


class SlowPathWarning(UserWarning):
    """A result is correct, but not computed in the fastest way."""


class DataError(GroupwiseError, ValueError):
    """A rollout with wrong shapes, types or non-finite numbers."""


class RewardError(GroupwiseError, RuntimeError):
    """A reward function that failed or did not return scores."""


class ToolError(GroupwiseError, RuntimeError):
    """A tool that failed or did not return a string."""


class DivergedError(GroupwiseError, RuntimeError):
    """Training produced non-finite numbers."""

    @classmethod
    def because(cls, what: str) -> "DivergedError":
        """The error, with its fix."""
        return cls(f"training diverged: {what}; fix: lower learning_rate or max_grad_norm, or look at the rewards")


class SamplerMismatchError(DivergedError):
    """The sampler's probabilities differ too much from the trainer's."""


class ServerError(GroupwiseError, RuntimeError):
    """An inference server that does not answer, fails, or gives a wrong answer."""


class MemberError(GroupwiseError, RuntimeError):
    """A member of a population failed again and again."""


class CheckpointError(GroupwiseError, ValueError):
    """A checkpoint that is damaged, or of another environment or architecture."""


class RunFolderError(GroupwiseError, ValueError):
    """A run folder that does not exist, is damaged or is taken."""


class MissingExtraError(GroupwiseError, ImportError):
    """An optional dependency that is not installed."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """``; did you mean 'x'?`` with the nearest known name; empty if none is near."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def require_name(kind: str, name: object) -> None:
    """Raise a ``ConfigError`` where a decorator was used without the name that it takes."""
    if not isinstance(name, str):
        decorator = f"@register_{kind.replace(' ', '_')}"
        raise ConfigError(f"{decorator} was given {name!r:.80}, expected a name; fix: {decorator}('my_name')")


def require_count(name: str, value: object) -> None:
    """Raise a ``ConfigError`` unless the value is a whole number of at least 1."""
    if not isinstance(value, Integral) or value < 1:
        raise ConfigError(f"{name} = {value!r}: expected a whole number of at least 1; fix: {name}=1")


def require_extra(module: str, extra: str) -> None:
    """Raise a ``MissingExtraError`` with the install command if ``module`` is not installed."""
    if find_spec(module) is None:
        raise MissingExtraError(f"{module!r} is not installed; fix: {installing(extra)}")


def installing(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install -e '.[{extra}]' in the checkout"
