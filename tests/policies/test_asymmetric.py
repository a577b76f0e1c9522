"""A critic that reads other entries of the observation than the actor."""

from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from tensordict import TensorDict

import groupwise as gw
from groupwise.config.policy import PolicyCfg
from groupwise.errors import ConfigError
from groupwise.policies.actor_critic import ActorCritic

SPACE = Dict({"seen": Box(-9, 9, (3,), np.float32), "hidden": Box(-9, 9, (2,), np.float32), "goal": Discrete(3)})
ACTIONS = Box(-1, 1, (2,), np.float32)
ACTOR, CRITIC = ("seen", "goal"), ("seen", "hidden")


def policy(**settings) -> ActorCritic:
    torch.manual_seed(0)
    made = ActorCritic(SPACE, ACTIONS, PolicyCfg(actor_keys=ACTOR, critic_keys=CRITIC, **settings))
    for head in (made.actor.head, made.critic.head):  # large outputs, so that any difference of inputs shows
        torch.nn.init.normal_(head.weight)
    return made


def observations(count=4, seed=0):
    SPACE.seed(seed)
    found = [SPACE.sample() for _ in range(count)]
    return {key: np.stack([obs[key] for obs in found]) for key in SPACE.spaces}


def tensors(obs):
    from groupwise.data.spaces import obs_to_tensor

    return obs_to_tensor(SPACE, obs, batched=True)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("key", ["seen", "hidden", "goal"])
def test_outputs_depend_on_the_keys_of_each_and_on_no_other(key, normalize):
    made, obs = policy(normalize_obs=normalize), observations()
    other = obs | {key: observations(seed=1)[key]}
    assert not np.array_equal(other[key], obs[key])
    action = torch.zeros(4, 2)
    before, after = (made.evaluate({"obs": tensors(o), "action": action}) for o in (obs, other))
    assert torch.equal(before.dist, after.dist) == (key not in ACTOR)
    assert torch.equal(before.value, after.value) == (key not in CRITIC)
    assert torch.equal(made.value(tensors(obs)), before.value)


def test_states_are_what_the_critic_reads():
    obs = tensors(observations())
    for actor_only in (False, True):
        made = ActorCritic(SPACE, ACTIONS, PolicyCfg(critic_keys=CRITIC), actor_only=actor_only)
        assert torch.equal(made.state_encoder(obs), torch.cat([obs["hidden"], obs["seen"]], dim=-1))
    one_hot = torch.nn.functional.one_hot(obs["goal"], 3).float()
    everything = ActorCritic(SPACE, ACTIONS).state_encoder(obs)
    assert torch.equal(everything, torch.cat([one_hot, obs["hidden"], obs["seen"]], dim=-1))


@pytest.mark.parametrize("normalize", [False, True])
def test_states_are_flat_and_as_they_came(normalize):
    """Their scale is the credit's business, and statistics of the policy would change it from update to update."""
    made = ActorCritic(Box(-9, 9, (2, 3), np.float32), ACTIONS, PolicyCfg(normalize_obs=normalize), actor_only=True)
    obs = torch.arange(24.0).reshape(2, 2, 2, 3)
    assert torch.equal(made.state_encoder(obs), obs.reshape(2, 2, 6))


def test_states_leave_out_masks_and_are_none_of_images():
    masked = Dict({"obs": Discrete(3, start=5), "action_mask": Box(0, 1, (2,), np.int8)})
    made = ActorCritic(masked, Discrete(2), actor_only=True)
    obs = TensorDict({"obs": torch.tensor([[5, 7]]), "action_mask": torch.ones(1, 2, 2, dtype=torch.int8)}, [1, 2])
    assert made.state_encoder(obs).tolist() == [[[1, 0, 0], [0, 0, 1]]]
    image = Dict({"seen": Box(-9, 9, (3,), np.float32), "image": Box(0, 255, (8, 8, 3), np.uint8)})
    pictures = TensorDict(
        {"seen": torch.zeros(1, 1, 3), "image": torch.zeros(1, 1, 8, 8, 3, dtype=torch.uint8)}, [1, 1]
    )
    assert ActorCritic(image, ACTIONS, actor_only=True).state_encoder is None
    of_the_rest = ActorCritic(image, ACTIONS, PolicyCfg(critic_keys=("seen",)), actor_only=True)
    assert of_the_rest.state_encoder(pictures).shape == (1, 1, 3)


def test_the_loss_of_one_gives_the_other_no_gradient():
    made = policy()
    found = made.evaluate({"obs": tensors(observations()), "action": torch.zeros(4, 2)})
    found.value.sum().backward()
    assert {name.split(".")[0] for name, p in made.named_parameters() if p.grad is not None} == {"critic"}


def test_predict_needs_the_keys_of_the_actor_only():
    made, obs = policy(normalize_obs=True), observations()
    alone = {key: obs[key] for key in ACTOR}
    np.testing.assert_array_equal(made.predict(alone), made.predict(obs))
    actor = made.without_critic()
    assert actor.state_encoder is None
    np.testing.assert_array_equal(actor.predict(alone), made.predict(obs))
    assert actor.act(tensors(obs)).value is None
    assert made.critic is not None


def test_unknown_keys_are_named_with_the_nearest():
    message = "policy.critic_keys: the observation has no 'hiden'; did you mean 'hidden'"
    with pytest.raises(ConfigError, match=message):
        ActorCritic(SPACE, ACTIONS, PolicyCfg(critic_keys=("hiden",)))
    with pytest.raises(ConfigError, match=r"policy.actor_keys names keys, and the observation is Box"):
        ActorCritic(SPACE["seen"], ACTIONS, PolicyCfg(actor_keys=("seen",)))


def test_keys_and_a_shared_trunk_exclude_each_other():
    with pytest.raises(ConfigError, match="trunk='shared' has one encoder, critic_keys asks for two; fix: trunk="):
        PolicyCfg(trunk="shared", critic_keys=CRITIC)
    with pytest.raises(ConfigError, match="at least 1"):
        PolicyCfg(actor_keys=())


def test_a_critic_alone_has_keys():
    made = ActorCritic(SPACE, ACTIONS, PolicyCfg(critic_keys=("hidden",)))
    assert (made.encoder.num_features, made.critic_encoder.num_features) == (8, 2)


class Luck(gymnasium.Env):
    """One step: 1 for the right action, plus or minus 10 by a coin that only the critic sees."""

    observation_space = Dict({"seen": Box(-1, 1, (1,), np.float32), "coin": Discrete(2)})
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen, self.coin = float(self.np_random.uniform(-1, 1)), int(self.np_random.integers(2))
        return self.look(), {}

    def step(self, action):
        return self.look(), 10.0 * (2 * self.coin - 1) + float(action == (self.seen > 0)), True, False, {}

    def look(self):
        return {"seen": np.array([self.seen], np.float32), "coin": self.coin}


def share_of_right_actions(folder: Path, seed: int, critic_keys: tuple[str, ...]) -> float:
    run = gw.train(
        Luck,
        gw.PPOCfg(num_steps=32, minibatch_size=64, num_epochs=4, learning_rate=3e-3),
        policy={"actor_keys": ("seen",), "critic_keys": critic_keys},
        num_envs=8,
        seed=seed,
        total_steps=3_072,
        max_episode_steps=1,
        evaluation={"episodes": 2, "interval": 10**6},
        run_dir=folder / f"{'-'.join(critic_keys)}-{seed}",
    )
    seen = np.linspace(-1, 1, 200, dtype=np.float32)[:, None]
    return float(np.mean(run.policy.predict({"seen": seen}) == (seen[:, 0] > 0)))


@pytest.mark.learn
def test_a_privileged_critic_removes_noise_that_the_actor_cannot_see(tmp_path):
    blind, privileged = (
        np.mean([share_of_right_actions(tmp_path, seed, keys) for seed in range(6)])
        for keys in (("seen",), ("seen", "coin"))
    )
    assert privileged > 0.98
    assert privileged > blind + 0.03
