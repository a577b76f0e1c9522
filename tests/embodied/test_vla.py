"""The vision-language-action policy: tokens, temperature, units, adapters, and that it learns what it is told."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import robot_policies
import robots
import torch
from robot_policies import BINS, ENV, TINY, A, C, observations, scores, seeded
from robots import TASKS, Robot, encoded

import groupwise as gw
from groupwise.config.algorithm import GRPOCfg
from groupwise.config.policy import LoRACfg, VLACfg
from groupwise.envs.gymnasium import ActionChunk
from groupwise.errors import ConfigError, DataError

pytest.importorskip("transformers")
from groupwise.embodied.vla import VLAPolicy

robots.register()
make_policy = partial(robot_policies.make_policy, "vla")


def test_actions_are_tokens_of_every_number():
    action = make_policy().act(observations()).action
    assert (action.shape, action.dtype) == ((4, C, A), torch.int64)


def test_probabilities_of_a_token_s_bins_add_up_to_one():
    policy, obs = make_policy(), observations()
    total = sum(scores(policy, obs, torch.full((4, C, A), token)).log_prob.exp() for token in range(BINS))
    torch.testing.assert_close(total, torch.ones(4, C * A))


def test_tokens_are_drawn_with_these_probabilities():
    policy, obs = make_policy(), observations(1)
    many = obs.expand(4000)
    drawn = policy.act(many, generator=seeded()).action.flatten(1)
    for token in range(BINS):
        expected = scores(policy, obs, torch.full((1, C, A), token)).log_prob.exp()[0]
        torch.testing.assert_close((drawn == token).float().mean(dim=0), expected.detach(), atol=0.03, rtol=0)


def test_deterministic_takes_the_likeliest_tokens():
    policy, obs = make_policy(), observations()
    best = policy.act(obs, deterministic=True)
    for token in range(BINS):
        assert (scores(policy, obs, torch.full((4, C, A), token)).log_prob <= best.log_prob + 1e-6).all()


def test_the_temperature_divides_the_logits_of_sampling_and_training():
    obs, warm, cold = observations(), make_policy(temperature=2.0), make_policy()
    warm.load_state_dict(cold.state_dict())
    one, other = torch.zeros(4, C, A, dtype=torch.int64), torch.ones(4, C, A, dtype=torch.int64)
    gaps = [scores(p, obs, one).log_prob - scores(p, obs, other).log_prob for p in (cold, warm)]
    torch.testing.assert_close(gaps[0], 2 * gaps[1])
    drawn = warm.act(obs, generator=seeded())
    torch.testing.assert_close(drawn.log_prob, scores(warm, obs, drawn.action).log_prob)


@pytest.mark.parametrize(("unit", "num_units"), [("token", C * A), ("action", C), ("chunk", 1)])
def test_units_are_sums_of_tokens(unit, num_units):
    obs, tokens, policy = observations(), make_policy(), make_policy(unit=unit)
    policy.load_state_dict(tokens.state_dict())
    action = tokens.act(obs, generator=seeded()).action
    one, all_of_them = scores(policy, obs, action), scores(tokens, obs, action)
    assert policy.num_units == num_units
    assert one.log_prob.shape == one.entropy.shape == (4, num_units)
    torch.testing.assert_close(one.log_prob.sum(dim=1), all_of_them.log_prob.sum(dim=1))
    torch.testing.assert_close(one.entropy.sum(dim=1), all_of_them.entropy.sum(dim=1))
    first = {"token": 1, "action": A, "chunk": C * A}[unit]
    torch.testing.assert_close(one.log_prob[:, 0], all_of_them.log_prob[:, :first].sum(dim=1))


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("token", [[1, 1, 0, 0, 0, 0], [1] * 6]), ("action", [[1, 0, 0], [1, 1, 1]]), ("chunk", [[1], [1]])],
)
def test_units_of_actions_that_were_not_executed_are_masked(unit, expected):
    mask = make_policy(unit=unit).unit_mask({"executed": torch.tensor([1, 3])})
    assert mask.int().tolist() == expected


def test_without_chunks_every_unit_counts():
    policy = VLAPolicy(ENV.observation_space, Robot().action_space, VLACfg(**TINY["vla"]), actor_only=True)
    assert policy.num_units == A
    assert policy.unit_mask({"episode_id": torch.tensor([[0, 0, 1]])}).tolist() == [[[True] * A] * 3]
    assert policy.predict(ENV.reset(seed=0)[0]).shape == (A,)


def test_tokens_stand_for_numbers_at_equal_distances():
    space = gym.spaces.Box(np.array([-1, 0], np.float32), np.array([1, 4], np.float32))
    policy = VLAPolicy(ENV.observation_space, space, VLACfg(**TINY["vla"]), actor_only=True)
    tokens = torch.arange(BINS)[:, None, None].expand(-1, 1, 2)
    numbers = torch.tensor([[-1, 0], [-0.5, 1], [0, 2], [0.5, 3], [1, 4]])
    torch.testing.assert_close(policy.env_action(tokens), numbers)
    assert torch.equal(policy.own_action(numbers), tokens)
    near = torch.tensor([[-0.3, 3.4], [9.0, -9.0]])
    assert policy.own_action(near).tolist() == [[[1, 3]], [[4, 0]]]


def test_adapters_need_a_model():
    with pytest.raises(ConfigError, match="lora trains adapters of the model in path, which is empty"):
        VLACfg(lora=LoRACfg())


def from_folder(folder, **settings):
    torch.manual_seed(0)
    return VLAPolicy.from_pretrained(folder, ENV.observation_space, ENV.action_space, bins=BINS, **settings)


def test_a_model_without_a_chat_template_reads_plain_text(tmp_path):
    from tiny_vlm import save_tiny_vlm

    policy = from_folder(save_tiny_vlm(tmp_path, chat=False))
    obs = observations()
    assert policy.act(obs).action.shape == (4, C, A)
    obs["instruction"][0, 0] = 200
    with pytest.raises(DataError, match="instruction is not UTF-8"):
        policy.act(obs)


def test_adapters_alone_are_trained_and_saved(tmp_path):
    from tiny_vlm import save_tiny_vlm

    folder = save_tiny_vlm(tmp_path)
    policy = from_folder(folder, lora=LoRACfg(r=2), actor_only=True)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert all("lora" in name or not name.startswith("model.model") for name in trained)
    assert any("lora" in name for name in trained)
    assert set(policy.state_dict()) == trained
    obs, other = observations(), from_folder(folder, lora=LoRACfg(r=2), actor_only=True)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if name in trained:
                p += 0.1
    other.load_state_dict(policy.state_dict())
    action = policy.act(obs, deterministic=True)
    torch.testing.assert_close(other.act(obs, deterministic=True).log_prob, action.log_prob)


@pytest.mark.learn
def test_it_learns_from_success_and_reads_its_instruction(tmp_path):
    algorithm = GRPOCfg(num_steps=16, num_epochs=2, minibatch_size=128, learning_rate=1e-3)
    policy = VLACfg(**TINY["vla"] | {"hidden_size": 64})
    env = gw.EnvCfg(id="Robot-v0", action_chunk=C, num_envs=16)
    settings = {"preset": "vla", "logging": {"progress": "none"}, "seed": 3, "total_steps": 20_000}
    run = gw.train(env, algorithm, policy=policy, run_dir=tmp_path / "run", **settings)

    def success(swap):
        env, done = ActionChunk(Robot(), C), []
        for seed in range(20):
            obs, ended = env.reset(seed=seed)[0], False
            while not ended:
                if swap:
                    obs["instruction"] = encoded(TASKS[1 - env.unwrapped.side])
                obs, reward, terminated, truncated, _ = env.step(run.policy.predict(obs))
                ended = terminated or truncated
            done.append(reward)
        return np.mean(done)

    assert success(swap=False) > 0.9  # about 0.2 at first
    assert success(swap=True) < 0.2
