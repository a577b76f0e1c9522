"""Which entries of an observation the policy gets."""

from typing import Any

import gymnasium

from groupwise.data.spaces import chosen_entries, leaf_spaces, space_kind, subspaces


def kept_space(space: Any, keys: tuple[str, ...] | None) -> tuple[Any, tuple[str, ...]]:
    """The space without the entries that the policy does not get, and a note that names those without a fixed shape.

    Args:
        keys: of a Dict, to keep; None: all that can be stored.

    Raises:
        ConfigError: there is no such key.
    """
    if keys is not None:
        return chosen_entries(space, keys, "env.obs_keys"), ()
    kept = _storable(space) or space
    rest = leaf_spaces(kept)
    missing = {path: leaf for path, leaf in leaf_spaces(space).items() if path not in rest}
    if not missing:
        return kept, ()
    names = ", ".join(f"{'.'.join(path)} ({type(leaf).__name__})" for path, leaf in missing.items())
    return kept, (f"Left out of the observation, because it has no fixed shape: {names}.",)


def _storable(space: Any) -> Any | None:
    """The space without leaves of unsupported kinds; itself if it has none, and None if it has nothing else."""
    children = subspaces(space)
    if children is None:
        return None if space_kind(space) == "unsupported" else space
    kept = {key: found for key, child in children.items() if (found := _storable(child)) is not None}
    if len(kept) == len(children) and all(kept[key] is child for key, child in children.items()):
        return space
    return gymnasium.spaces.Dict(kept) if kept else None
