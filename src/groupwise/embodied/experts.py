"""Scripted experts, registered by the start of the ids of the environments that they solve."""

from collections.abc import Callable
from typing import Any, TypeAlias

from groupwise.errors import require_name

Expert: TypeAlias = Callable[[Any], Any]
"""Function from an observation to an action of the environment."""

ExpertMaker: TypeAlias = Callable[[Any, dict[str, Any]], Expert]
"""The expert for an episode, which may keep a state: called after each reset with the environment and the reset's info."""

EXPERTS: dict[str, ExpertMaker] = {}


def register_expert(prefix: str) -> Callable[[ExpertMaker], ExpertMaker]:
    """Decorator: makes the experts of ``groupwise demos`` for environments whose id starts with ``prefix``."""
    require_name("expert", prefix)

    def register(maker: ExpertMaker) -> ExpertMaker:
        if not (prefix in EXPERTS and maker.__module__.startswith("groupwise.")):  # that of a plugin comes first
            EXPERTS[prefix] = maker
        return maker

    return register
