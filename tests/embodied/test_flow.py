"""The flow policy: its stochastic step by hand, scores of stored decisions, checkpoints of the user's."""

import math
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import robot_policies
import torch
from robot_policies import ENV, TINY, A, C, observations, scores, seeded

from groupwise.config.policy import FlowCfg
from groupwise.errors import ConfigError

pytest.importorskip("transformers")
from groupwise.embodied.flow import Denoising, FlowPolicy, sde_step

make_policy = partial(robot_policies.make_policy, "flow")


# --- the stochastic step ---


def step_of_numbers(noisy, velocity, time, size, noise_level):
    noisy, velocity, time = (torch.tensor([x], dtype=torch.float64) for x in (noisy, velocity, time))
    mean, std = sde_step(noisy[:, None, None], velocity[:, None, None], time, size, noise_level)
    return mean.item(), std.item()


def test_the_step_by_hand():
    """sigma^2 = 0.5^2 * 0.5 / 0.5 = 1/4; x + (1 - t) v = 2; mean = 1 - (2 + 1/4 * 2) / 4; std = 1/2 * 1/2."""
    mean, std = step_of_numbers(1.0, 2.0, 0.5, 0.25, 0.5)
    assert (mean, std) == (1 - 2.5 / 4, 0.25)


def test_the_first_step_by_hand():
    """At time 1, 1 - t is replaced by the size: sigma^2 = 0.5^2 / 0.25 = 1; mean = 1 - (2 + 1/2 * 1) / 4; std = 1 * 1/2."""
    mean, std = step_of_numbers(1.0, 2.0, 1.0, 0.25, 0.5)
    assert (mean, std) == (1 - 2.5 / 4, 0.5)


def test_the_last_step_by_hand():
    """sigma^2 = 1/4 * (1/4) / (3/4) = 1/12; x + (1 - t) v = 5/2; mean = 1 - (2 + 1/12 * 2 * 5/2) / 4; std = sqrt(1/48)."""
    mean, std = step_of_numbers(1.0, 2.0, 0.25, 0.25, 0.5)
    assert mean == pytest.approx(1 - (2 + 5 / 12) / 4)
    assert std == pytest.approx(math.sqrt(1 / 48))


def test_without_noise_it_is_the_flow():
    mean, std = step_of_numbers(1.0, 2.0, 0.5, 0.25, 1e-6)
    assert mean == pytest.approx(1 - 2 / 4)
    assert std < 1e-6


def moments_after(mean, var, center, spread, time, size, noise_level):
    """Of x after a step whose velocity is that of actions from N(center, spread^2): the step is linear in x."""

    def velocity(x):
        slope = (time - (1 - time) * spread**2) / (time**2 + (1 - time) ** 2 * spread**2)
        return -center + slope * (x - (1 - time) * center)

    at = [step_of_numbers(x, velocity(x), time, size, noise_level) for x in (0.0, 1.0)]
    slope = at[1][0] - at[0][0]
    return at[0][0] + slope * mean, slope**2 * var + at[0][1] ** 2


def marginal(time, center=0.7, spread=0.4):
    """Mean and variance of x at ``time``."""
    return (1 - time) * center, (1 - time) ** 2 * spread**2 + time**2


@pytest.mark.parametrize("noise_level", [0.3, 1.0])
@pytest.mark.parametrize("time", [0.3, 0.8])
def test_a_step_keeps_the_marginal_of_the_flow_to_second_order(time, noise_level):
    """Halving a step quarters what is wrong after it."""
    wrong = []
    for size in (0.02, 0.01):
        found, wanted = moments_after(*marginal(time), 0.7, 0.4, time, size, noise_level), marginal(time - size)
        wrong.append([a - b for a, b in zip(found, wanted, strict=True)])
    assert wrong[0][0] == pytest.approx(4 * wrong[1][0], rel=0.2, abs=1e-9)
    assert wrong[0][1] == pytest.approx(4 * wrong[1][1], rel=0.2)


def test_many_stochastic_steps_end_in_the_distribution_of_the_actions():
    mean, var, steps = 0.0, 1.0, 400
    for step in range(steps):
        mean, var = moments_after(mean, var, 0.7, 0.4, 1 - step / steps, 1 / steps, 0.5)
    assert mean == pytest.approx(0.7, abs=0.01)
    assert math.sqrt(var) == pytest.approx(0.4, abs=0.01)


# --- decisions and their scores ---


@pytest.mark.parametrize("steps", [1, 3])
def test_other_numbers_of_steps_are_scored_alike(steps):
    policy, obs = make_policy(denoising_steps=steps), observations()
    action = policy.act(obs, generator=seeded())
    log_prob = scores(policy, obs, action.action).log_prob
    torch.testing.assert_close(log_prob, action.log_prob, atol=1e-5, rtol=1e-5)


def constant_velocity(policy, velocity):
    """Let the model give the same velocity for everything."""
    with torch.no_grad():
        policy.model.network.action_out_proj.weight.zero_()
        policy.model.network.action_out_proj.bias.fill_(velocity)


def test_the_log_probability_by_hand():
    """As in ``test_the_step_by_hand``, each of 6 numbers is 0.5 above the mean 0.375 in units of the deviation 0.25."""
    policy, obs = make_policy(), observations(1)
    constant_velocity(policy, 2.0)
    numbers = torch.ones(1, C, A)
    own = Denoising(numbers, 0.5 * numbers, numbers, torch.tensor([[0.5]])).packed()
    evaluation = scores(policy, obs, own)
    one = -0.5 * 0.5**2 - math.log(0.25) - 0.5 * math.log(2 * math.pi)
    assert evaluation.log_prob.item() == pytest.approx(6 * one)
    assert evaluation.entropy.item() == pytest.approx(6 * (math.log(0.25) + 0.5 * math.log(2 * math.pi * math.e)))


def test_one_step_drawn_at_random_is_stochastic_and_the_others_follow_the_flow():
    policy, obs = make_policy(), observations(1)
    constant_velocity(policy, 2.0)
    own = policy.unpacked(policy.act(obs.expand(2000), generator=seeded()).action)
    time = own.time[:, 0]
    counts = [(time == t).float().mean().item() for t in (1.0, 0.75, 0.5, 0.25)]
    np.testing.assert_allclose(counts, 0.25, atol=0.04)
    left = time[:, None, None] - 0.25  # after the stochastic step
    torch.testing.assert_close(own.actions, own.after - 2.0 * left, atol=1e-5, rtol=1e-5)
    first = time == 1
    start = own.before + 2.0 * (1 - time[:, None, None])
    assert start.std().item() == pytest.approx(1, abs=0.03)
    mean, std = sde_step(own.before, torch.full_like(own.before, 2.0), time, 0.25, 0.5)
    noise = (own.after - mean) / std
    assert (noise.mean().item(), noise.std().item()) == (pytest.approx(0, abs=0.03), pytest.approx(1, abs=0.03))
    assert abs(torch.corrcoef(torch.stack([noise[first][:, 0, 0], start[first][:, 0, 0]]))[0, 1].item()) < 0.15


def test_less_noise_brings_it_to_the_flow():
    obs, quiet = observations(), make_policy(noise_level=1e-5)
    own = quiet.unpacked(quiet.act(obs, generator=seeded()).action)
    flow = own.before.clone()
    seen = quiet.model.read(obs)
    time = own.time[:, 0].clone()
    with torch.no_grad():
        while (time > 0).any():
            velocity, _ = quiet.model(seen, flow, time.clamp(min=0.25))
            flow = torch.where(time[:, None, None] > 0, flow - velocity / 4, flow)
            time = time - 0.25
    torch.testing.assert_close(own.actions, flow, atol=1e-3, rtol=1e-3)


def test_deterministic_actions_are_those_of_transformers_from_the_noise_zero():
    policy, obs = make_policy(), observations()
    found = policy.unpacked(policy.act(obs, deterministic=True).action).actions
    network, text = policy.model.network, obs["instruction"].long()
    images = torch.full((4, 8), 256)  # two views of 2 x 2 patches
    wanted = network.sample_actions(
        state=obs["proprio"],
        input_ids=torch.cat([images, text], dim=1),
        attention_mask=torch.cat([torch.ones_like(images), (text != 0).long()], dim=1),
        pixel_values=obs["image"].movedim(-1, 2) / 127.5 - 1,
        pixel_attention_mask=torch.ones(4, 2, dtype=torch.bool),
        noise=torch.zeros(4, C, A),
        num_steps=4,
    )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    again = policy.unpacked(policy.act(obs, deterministic=True, generator=seeded(5)).action).actions
    assert torch.equal(again, found)


def test_the_value_does_not_depend_on_the_noise():
    policy, obs = make_policy(False), observations()
    first, second = (policy.act(obs, generator=seeded(seed)) for seed in (0, 1))
    assert not torch.equal(first.action, second.action)
    torch.testing.assert_close(first.value, second.value)


def test_the_entropy_depends_on_the_step_alone():
    obs, one, other = observations(), make_policy(), make_policy(seed=1)
    action = one.act(obs, generator=seeded()).action
    torch.testing.assert_close(scores(one, obs, action).entropy, scores(other, obs, action).entropy)


def test_actions_fill_the_box_and_are_clipped_to_it():
    space = gym.spaces.Box(np.array([-1, 0], np.float32), np.array([1, 4], np.float32))
    policy = FlowPolicy(ENV.observation_space, space, FlowCfg(**TINY["flow"]), actor_only=True)
    actions = torch.tensor([[[-1.0, -1.0]], [[0.0, 0.5]], [[1.0, 3.0]]])
    own = Denoising(torch.zeros_like(actions), torch.zeros_like(actions), actions, torch.ones(3, 1)).packed()
    torch.testing.assert_close(policy.env_action(own), torch.tensor([[-1.0, 0.0], [0.0, 3.0], [1.0, 4.0]]))
    numbers = torch.tensor([[-0.5, 1.0], [1.0, 4.0]])
    torch.testing.assert_close(policy.env_action(policy.own_action(numbers)), numbers)
    assert policy.predict(ENV.reset(seed=0)[0]).shape == (2,)


def test_gradients_reach_expert_and_vision_language_model():
    policy, obs = make_policy(), observations()
    scores(policy, obs, policy.act(obs, generator=seeded()).action).log_prob.sum().backward()
    moved = {name for name, p in policy.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    for part in (
        "vision_tower",
        "embed_tokens",
        "multi_modal_projector",
        "dit.layers",
        "action_out_proj",
        "state_proj",
    ):
        assert any(part in name for name in moved), part


# --- checkpoints of the user's ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tiny_vlm import save_tiny_pi0

    return save_tiny_pi0(tmp_path_factory.mktemp("pi0"))


def from_folder(folder, **settings):
    return FlowPolicy.from_pretrained(folder, ENV.observation_space, ENV.action_space, **settings)


def test_a_checkpoint_of_the_user_s_stores_its_padding(folder):
    """Its actions have 4 numbers, more than the robot's."""
    policy = from_folder(folder)
    own = policy.unpacked(policy.act(observations(), generator=seeded()).action)
    assert (own.before.shape, own.after.shape, own.actions.shape) == ((4, C, 4), (4, C, A), (4, C, A))


def test_images_that_are_not_square_are_padded(folder):
    space = gym.spaces.Dict(ENV.observation_space.spaces | {"image": gym.spaces.Box(0, 255, (1, 16, 8, 3), np.uint8)})
    policy = FlowPolicy.from_pretrained(folder, space, ENV.action_space)
    obs = observations()
    obs["image"] = obs["image"][:, :1, :, :8]
    narrow = policy.act(obs, deterministic=True).action
    padded = torch.zeros(4, 1, 16, 16, 3, dtype=torch.uint8)
    padded[..., :8, :] = obs["image"]
    obs["image"] = padded
    torch.testing.assert_close(policy.act(obs, deterministic=True).action, narrow, atol=1e-2, rtol=1e-2)


def test_other_models_are_refused(tmp_path):
    from tiny_vlm import save_tiny_vlm

    with pytest.raises(ConfigError, match=r"is no PI0 that transformers can load \(model_type is 'idefics3'\)"):
        from_folder(save_tiny_vlm(tmp_path))


def test_a_folder_that_lacks_weights_is_refused(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["action_out_proj.bias"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"lacks 1 weights of its PI0, as action_out_proj\.bias; fix: save_pretrained"
    ):
        from_folder(tmp_path)


@pytest.mark.parametrize(
    ("part", "found"), [("action", "max_action_dim=4, got 5 numbers"), ("proprio", "max_state_dim=3, got 6 numbers")]
)
def test_robots_with_more_numbers_than_the_model_takes_are_refused(folder, part, found):
    actions = gym.spaces.Box(-1, 1, (C, 5 if part == "action" else 2), np.float32)
    proprio = gym.spaces.Box(-1, 1, (6 if part == "proprio" else 2,), np.float32)
    with pytest.raises(ConfigError, match=found):
        FlowPolicy.from_pretrained(
            folder, gym.spaces.Dict(ENV.observation_space.spaces | {"proprio": proprio}), actions
        )
