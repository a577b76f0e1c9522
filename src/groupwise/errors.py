"""Every error that groupwise raises for a user's mistake.

GroupwiseError
├── ConfigError            a setting that is unknown, mistyped or impossible (ValueError)
│   ├── UnknownNameError   a name nobody registered; says which is nearest
│   └── PolicyError        a policy that GRPO behind Stable-Baselines3's interface cannot train (contrib.sb3.settings)
├── EnvError               an environment that cannot be used as asked (ValueError)
│   ├── UnsupportedSpaceError
│   └── GroupStartError    members cannot be made to share a start
├── DataError              a rollout with wrong shapes, types or non-finite numbers (ValueError)
├── RewardError            a reward function that failed, took too long or returned what is no score (RuntimeError)
├── ToolError              a tool that failed, or answered with what is no text (RuntimeError)
├── DivergedError          training produced non-finite numbers (RuntimeError)
│   └── SamplerMismatchError  Sampler and trainer differ
├── CheckpointError        a checkpoint that is damaged or belongs to something else (ValueError)
├── RunFolderError         a run folder that does not exist, is damaged or is taken (ValueError)
└── MissingExtraError      an optional dependency is not installed (ImportError)

Warnings of ours are ``GroupStartWarning`` and ``SlowPathWarning``.
"""

import difflib
from collections.abc import Iterable
from importlib.util import find_spec


class GroupwiseError(Exception):
    """Base of all errors below; catch it to catch them all."""


class ConfigError(GroupwiseError, ValueError):
    """A setting that is unknown, mistyped or impossible."""


class UnknownNameError(ConfigError):
    """A name that nobody registered.

    Args:
        kind: what the name should name ("environment", "algorithm", ...).
        known: the names that exist.
        hint: what to say instead of the nearest of them.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], *, hint: str | None = None) -> None:
        options = sorted(known)
        near = difflib.get_close_matches(name, options, n=3, cutoff=0.5)
        found = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {_some(options)}"
        super().__init__(f"unknown {kind} {name!r}: {found if hint is None else hint}")


class EnvError(GroupwiseError, ValueError):
    """An environment that cannot be used as asked."""


class UnsupportedSpaceError(EnvError):
    """An observation or action space that no policy here can handle."""


class GroupStartError(EnvError):
    """Members of a group cannot be made to begin in the same state."""


class GroupStartWarning(UserWarning):
    """Members share their start, but not in the best way; says why, and what to do about it. No error."""


class SlowPathWarning(UserWarning):
    """Something is right, but not computed in the fastest way; says why. No error."""


class DataError(GroupwiseError, ValueError):
    """A rollout with wrong shapes, types or non-finite numbers."""


class RewardError(GroupwiseError, RuntimeError):
    """A reward function that failed, took too long or returned what is no score."""


class ToolError(GroupwiseError, RuntimeError):
    """A tool that failed, or answered with what is no text."""


class DivergedError(GroupwiseError, RuntimeError):
    """Training produced non-finite numbers."""


class SamplerMismatchError(DivergedError):
    """Sampler and trainer differ."""


class CheckpointError(GroupwiseError, ValueError):
    """A checkpoint that is damaged or belongs to something else."""


class RunFolderError(GroupwiseError, ValueError):
    """A run folder that does not exist, is damaged or is taken."""


class MissingExtraError(GroupwiseError, ImportError):
    """An optional dependency that is not installed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like ``name``, as the end of a message; empty if none is like it."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _some(names: list[str]) -> str:
    """All names, or of very many the first, and how many there are besides."""
    if len(names) <= 60:
        return ", ".join(names) or "none"
    return f"{', '.join(names[:20])} and {len(names) - 20} more"


def require_extra(module: str, extra: str) -> None:
    """Raise with the install command unless ``module`` can be imported.

    Raises:
        MissingExtraError: ``module`` is absent; names the extra that brings it.
    """
    if find_spec(module) is None:
        raise MissingExtraError(f"{module!r} is not installed; fix: {installing(extra)}")


def installing(extra: str) -> str:
    """The command that installs an extra, as the documentation has it."""
    return f"pip install -e '.[{extra}]' in the checkout"
