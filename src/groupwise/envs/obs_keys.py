"""Which entries of an observation the policy gets."""

from typing import Any

import gymnasium

from groupwise.data.spaces import leaf_spaces, space_kind, subspaces
from groupwise.errors import EnvError, nearest


def kept_space(space: Any, keys: tuple[str, ...] | None, env_id: str) -> tuple[Any, tuple[str, ...]]:
    """The space without the entries that the policy does not get, and a note that names those without a fixed shape.

    Args:
        keys: of a Dict, or positions in a Tuple, to keep; None: all that can be stored.

    Raises:
        EnvError: there is no such key.
    """
    if keys is not None:
        return _chosen(space, keys, env_id), ()
    kept = _storable(space) or space
    rest = leaf_spaces(kept)
    missing = {path: leaf for path, leaf in leaf_spaces(space).items() if path not in rest}
    if not missing:
        return kept, ()
    names = ", ".join(f"{'.'.join(path)} ({type(leaf).__name__})" for path, leaf in missing.items())
    return kept, (f"Left out of the observation, because it has no fixed shape: {names}.",)


def _chosen(space: Any, keys: tuple[str, ...], env_id: str) -> Any:
    children = subspaces(space)
    if children is None:
        raise EnvError(
            f"env.obs_keys is {list(keys)}, but an observation of {env_id} is a {type(space).__name__}, which has no keys; "
            "fix: leave env.obs_keys out"
        )
    for key in keys:
        if key not in children:
            hint = nearest(key, children)
            raise EnvError(f"env.obs_keys has no key {key!r} in {env_id}{hint}; known: {', '.join(children)}")
    return gymnasium.spaces.Dict({key: child for key, child in children.items() if key in keys})


def _storable(space: Any) -> Any | None:
    """The space without leaves of unsupported kinds; itself if it has none, and None if it has nothing else."""
    children = subspaces(space)
    if children is None:
        return None if space_kind(space) == "unsupported" else space
    kept = {key: found for key, child in children.items() if (found := _storable(child)) is not None}
    if len(kept) == len(children) and all(kept[key] is child for key, child in children.items()):
        return space
    return gymnasium.spaces.Dict(kept) if kept else None
