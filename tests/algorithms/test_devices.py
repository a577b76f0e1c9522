"""Updates on a GPU are those of the CPU, and on each device the same to the last bit each time."""

import objective_updates
import pytest
import small_updates
from devices import check_updates
from variants import SETTINGS

CREDITS = {str(preset["credit"]): preset["credit"] for preset in SETTINGS.values()}
CREDITS = {name: credit for name, credit in CREDITS.items() if "parts" not in name and "greedy" not in name}
"""Of all presets, for rollouts that have no more than rewards."""


@pytest.mark.parametrize("name", objective_updates.EVERY)
def test_every_objective(device, name):
    def updated(rollout, policy):
        return objective_updates.updated(objective_updates.EVERY[name], rollout, policy, num_epochs=2)

    make = objective_updates.make_policy
    check_updates(device, updated, make, objective_updates.make_rollout(make()))


@pytest.mark.parametrize(
    ("kind", "cfg"),
    [("ppo", {"num_epochs": 3, "minibatch_size": 16}), *[("grpo", {"credit": credit}) for credit in CREDITS.values()]],
    ids=["ppo", *CREDITS],
)
def test_ppo_and_every_credit(device, kind, cfg):
    def updated(rollout, policy):
        return small_updates.updated(kind, rollout, policy=policy, **cfg)

    def make():
        return small_updates.make_policy(actor_only=kind == "grpo")

    check_updates(device, updated, make, small_updates.make_rollout(make()))
