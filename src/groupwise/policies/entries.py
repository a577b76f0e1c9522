"""Which entries of an observation actor and critic read."""

from typing import Any, NamedTuple

from groupwise.config.policy import PolicyCfg
from groupwise.data.action_masks import KEY, has_mask
from groupwise.data.spaces import chosen_entries


class Entries(NamedTuple):
    """Spaces with some entries of the observation each; without keys and masks all are the observation's own space."""

    actor: Any
    """Features of the actor."""
    critic: Any
    """Features of the critic."""
    to_act: Any
    """What acting needs: the actor's, and the mask of allowed actions."""
    masked: bool
    """Whether there are masks, which are no features."""

    @classmethod
    def of(cls, observation_space: Any, action_space: Any, cfg: PolicyCfg) -> "Entries":
        """The entries that the settings choose.

        Raises:
            ConfigError: an unknown key, or a mask of the wrong size.
        """
        masked = has_mask(observation_space, action_space)
        features = observation_space
        if masked:
            kind = type(observation_space)
            features = kind({key: space for key, space in observation_space.spaces.items() if key != KEY})
        actor = to_act = chosen_entries(features, cfg.actor_keys, "policy.actor_keys")
        if masked:
            to_act = kind({**actor.spaces, KEY: observation_space[KEY]})
        return cls(actor, chosen_entries(features, cfg.critic_keys, "policy.critic_keys"), to_act, masked)
