"""The vision-language-action policy."""

import json
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import robots
import torch
from robots import TASKS, Robot, encoded, make_rollout

import groupwise as gw
from groupwise import cli
from groupwise.algorithms.grpo import GRPO
from groupwise.algorithms.ppo import PPO
from groupwise.config.algorithm import GRPOCfg, PPOCfg
from groupwise.config.policy import LoRACfg, VLACfg
from groupwise.embodied.chunks import ActionChunk
from groupwise.errors import ConfigError, DataError, UnsupportedSpaceError
from groupwise.training.checkpoint import initialize, load_checkpoint

pytest.importorskip("transformers")
from groupwise.embodied.vision_language import instructions
from groupwise.embodied.vla import VLAPolicy

C, A, BINS = 3, 2, 5
TINY = {"hidden_size": 32, "num_layers": 1, "patch_size": 4, "bins": BINS}
ENV = ActionChunk(Robot(), C)


def make_policy(actor_only=True, seed=0, **cfg):
    torch.manual_seed(seed)
    policy = VLAPolicy(ENV.observation_space, ENV.action_space, VLACfg(**TINY | cfg), actor_only=actor_only)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # new heads are nearly uniform
    return policy


observations = partial(robots.observations, ENV)


def scores(policy, obs, action):
    return policy.evaluate({"obs": obs, "action": action})


def test_it_has_about_as_many_parameters_as_its_settings_promise():
    space = gym.spaces.Dict(ENV.observation_space.spaces | {"image": gym.spaces.Box(0, 255, (1, 64, 64, 3), np.uint8)})
    policy = VLAPolicy(space, gym.spaces.Box(-1, 1, (5, 4), np.float32), actor_only=True)
    assert 1.1e6 < sum(p.numel() for p in policy.parameters()) < 1.3e6


def test_sampled_tokens_and_their_scores_agree():
    policy, obs = make_policy(False), observations()
    action = policy.act(obs, generator=torch.Generator().manual_seed(0))
    assert action.action.shape == (4, C, A)
    assert action.log_prob.shape == (4, C * A)
    evaluation = scores(policy, obs, action.action)
    torch.testing.assert_close(evaluation.log_prob, action.log_prob)
    torch.testing.assert_close(evaluation.value, action.value)
    torch.testing.assert_close(policy.value(obs), action.value)
    assert evaluation.log_prob.dtype == torch.float32


def test_probabilities_of_a_token_s_bins_add_up_to_one():
    policy, obs = make_policy(), observations()
    total = sum(scores(policy, obs, torch.full((4, C, A), token)).log_prob.exp() for token in range(BINS))
    torch.testing.assert_close(total, torch.ones(4, C * A))


def test_tokens_are_drawn_with_these_probabilities():
    policy, obs = make_policy(), observations(1)
    many = obs.expand(4000)
    drawn = policy.act(many, generator=torch.Generator().manual_seed(0)).action.flatten(1)
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
    drawn = warm.act(obs, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.log_prob, scores(warm, obs, drawn.action).log_prob)


@pytest.mark.parametrize(("unit", "num_units"), [("token", C * A), ("action", C), ("chunk", 1)])
def test_units_are_sums_of_tokens(unit, num_units):
    obs, tokens, policy = observations(), make_policy(), make_policy(unit=unit)
    policy.load_state_dict(tokens.state_dict())
    action = tokens.act(obs, generator=torch.Generator().manual_seed(0)).action
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
    policy = VLAPolicy(ENV.observation_space, Robot().action_space, VLACfg(**TINY), actor_only=True)
    assert policy.num_units == A
    assert policy.unit_mask({"episode_id": torch.tensor([[0, 0, 1]])}).tolist() == [[[True] * A] * 3]
    assert policy.predict(ENV.reset(seed=0)[0]).shape == (A,)


def test_tokens_stand_for_numbers_at_equal_distances():
    space = gym.spaces.Box(np.array([-1, 0], np.float32), np.array([1, 4], np.float32))
    policy = VLAPolicy(ENV.observation_space, space, VLACfg(**TINY), actor_only=True)
    tokens = torch.arange(BINS)[:, None, None].expand(-1, 1, 2)
    numbers = torch.tensor([[-1, 0], [-0.5, 1], [0, 2], [0.5, 3], [1, 4]])
    torch.testing.assert_close(policy.env_action(tokens), numbers)
    assert torch.equal(policy.own_action(numbers), tokens)
    near = torch.tensor([[-0.3, 3.4], [9.0, -9.0]])
    assert policy.own_action(near).tolist() == [[[1, 3]], [[4, 0]]]


@pytest.mark.parametrize("part", ["image", "proprio", "instruction"])
def test_it_looks_at_every_part_of_the_observation(part):
    policy, obs = make_policy(), observations(texts=TASKS[:1])
    action = torch.zeros(4, C, A, dtype=torch.int64)
    other = obs.clone()
    if part == "instruction":
        other[part][:] = torch.from_numpy(encoded(TASKS[1]))
    elif part == "image":
        other[part][:, 1, 4:8, 4:8] += 90  # of the second view
    else:
        other[part][:] += 1
    changed = scores(policy, other, action).log_prob - scores(policy, obs, action).log_prob
    assert (changed.abs().amax(dim=1) > 1e-4).all()


def test_views_are_told_apart():
    policy, obs = make_policy(), observations()
    swapped = obs.clone()
    swapped["image"] = obs["image"].flip(1)
    action = torch.zeros(4, C, A, dtype=torch.int64)
    assert (scores(policy, swapped, action).log_prob - scores(policy, obs, action).log_prob).abs().max() > 1e-4


def test_longer_instructions_in_a_batch_change_nothing():
    policy, obs = make_policy(), observations()
    action = torch.zeros(4, C, A, dtype=torch.int64)
    together = scores(policy, obs, action).log_prob
    for i in range(4):
        alone = scores(policy, obs[i : i + 1], action[i : i + 1]).log_prob
        torch.testing.assert_close(alone[0], together[i])


def test_images_stay_bytes():
    policy, obs = make_policy(), observations()
    before = obs.clone()
    policy.act(obs)
    assert obs["image"].dtype == torch.uint8
    assert (obs == before).all()


def test_predict_takes_one_observation_or_a_batch():
    policy = make_policy()
    one = ENV.reset(seed=0)[0]
    batch = {key: np.stack([value] * 2) for key, value in one.items()}
    action = policy.predict(one)
    assert ENV.action_space.contains(action)
    np.testing.assert_allclose(policy.predict(batch), np.stack([action] * 2))


def test_a_clone_shares_nothing_and_a_reference_is_frozen():
    policy, obs = make_policy(), observations()
    action = policy.act(obs).action
    reference = policy.make_reference()
    before = scores(policy, obs, action).log_prob.detach()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1
    torch.testing.assert_close(scores(reference, obs, action).log_prob, before)
    assert not any(p.requires_grad for p in reference.parameters())


# --- what it refuses ---


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"image": None}, "got a Dict of instruction, proprio"),
        ({"depth": gym.spaces.Box(0, 1, (2,))}, "got a Dict of depth, image"),
        ({"image": gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)}, "cannot read 'image' of"),
        ({"image": gym.spaces.Box(0, 1, (1, 16, 16, 3), np.float32)}, "cannot read 'image' of"),
        ({"instruction": gym.spaces.Text(9)}, "cannot read 'instruction' of"),
        ({"proprio": gym.spaces.Box(0, 255, (2,), np.uint8)}, "cannot read 'proprio' of"),
    ],
)
def test_other_observations_are_refused(change, found):
    parts = {key: part for key, part in (ENV.observation_space.spaces | change).items() if part is not None}
    with pytest.raises(UnsupportedSpaceError, match=f"{found}.*fix: a Dict of image uint8"):
        VLAPolicy(gym.spaces.Dict(parts), ENV.action_space, VLACfg(**TINY))


def test_a_flat_observation_is_refused():
    with pytest.raises(UnsupportedSpaceError, match=r"observes image, proprio and instruction, got Box"):
        VLAPolicy(gym.spaces.Box(-1, 1, (3,)), ENV.action_space, VLACfg(**TINY))


@pytest.mark.parametrize("space", [gym.spaces.Discrete(3), gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)])
def test_actions_without_bounds_are_refused(space):
    with pytest.raises(UnsupportedSpaceError, match="a VLA policy needs a bounded Box"):
        VLAPolicy(ENV.observation_space, space, VLACfg(**TINY))


def test_images_must_be_made_of_whole_tokens():
    with pytest.raises(ConfigError, match=r"16 x 16 pixels.*policy\.patch_size=5; fix: square images"):
        make_policy(patch_size=5)


def test_settings_of_a_new_model_are_not_those_of_a_folder():
    with pytest.raises(ConfigError, match="hidden_size are of a new model, and path='my_model' is one"):
        VLACfg(path="my_model", hidden_size=64)
    with pytest.raises(ConfigError, match="lora trains adapters of the model in path, which is empty"):
        VLACfg(lora=LoRACfg())


def test_instructions_are_utf8():
    assert instructions(torch.from_numpy(encoded("schiebe nach rechts: →", 30))[None]) == ["schiebe nach rechts: →"]
    with pytest.raises(DataError, match="instruction is not UTF-8"):
        instructions(torch.tensor([[200, 65, 0]], dtype=torch.uint8))


# --- updates ---


def updated(kind, unit="token", **cfg):
    policy = make_policy(kind == "grpo", unit=unit)
    shared = {"num_epochs": 2, "minibatch_size": 6, "learning_rate": 1e-3, "optimizer": {"eps": 1e-3}}
    if kind == "grpo":
        algorithm = GRPO(GRPOCfg(kl_coef=0.1, **shared | cfg), policy)
    else:
        algorithm = PPO(PPOCfg(**shared | cfg), policy)
    metrics = algorithm.update(make_rollout(ENV, policy))
    return torch.cat([p.detach().flatten() for p in policy.parameters()]), metrics


@pytest.mark.parametrize("unit", ["token", "action", "chunk"])
@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_micro_batches_never_change_the_update(kind, unit):
    whole, in_parts = updated(kind, unit), updated(kind, unit, micro_batch_size=2)
    torch.testing.assert_close(in_parts[0], whole[0], atol=1e-5, rtol=1e-4)
    for name, value in whole[1].items():
        torch.testing.assert_close(in_parts[1][name], value, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_the_ratio_is_one_at_the_start(kind):
    _, metrics = updated(kind, num_epochs=1, minibatch_size=None, learning_rate=1e-9)
    assert metrics["train/clip_fraction"] == 0
    assert metrics["train/approx_kl"].abs() < 1e-9


# --- runs ---

ROBOT = gw.EnvCfg(id="Robot-v0", action_chunk=C, num_envs=4)
SETTINGS = {
    "policy": {"name": "vla", **TINY},
    "evaluation": {"interval": 60, "episodes": 3},
    "logging": {"progress": "none"},
    "seed": 3,
}
ALGORITHMS = {
    "grpo": GRPOCfg(group_size=4, num_steps=4, num_epochs=1, minibatch_size=8, kl_coef=0.05),
    "ppo": PPOCfg(num_steps=5, num_epochs=1, minibatch_size=10),
}


@pytest.fixture
def registered():
    gym.register("Robot-v0", entry_point=Robot, max_episode_steps=12)
    yield
    del gym.registry["Robot-v0"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_loads_and_resumes_bit_for_bit(algorithm, registered, tmp_path):
    settings = SETTINGS | {"algorithm": ALGORITHMS[algorithm], "checkpoint_interval": 1}
    whole = gw.train(ROBOT, total_steps=150, run_dir=tmp_path / "whole", **settings)
    gw.train(ROBOT, total_steps=50, run_dir=tmp_path / "cut", **settings)
    cut = gw.resume(tmp_path / "cut", total_steps=150)
    first, second = (load_checkpoint(run.path / "checkpoints" / "latest") for run in (whole, cut))
    assert whole.metrics()[-1]["iteration"] > 1
    assert first.policy.keys() == second.policy.keys()
    assert all(torch.equal(first.policy[name], second.policy[name]) for name in first.policy)
    loaded = gw.Run.load(whole.path)
    assert isinstance(loaded.policy, VLAPolicy)
    obs = ENV.reset(seed=5)[0]
    np.testing.assert_array_equal(loaded.policy.predict(obs), whole.policy.predict(obs))


def test_the_command_line_trains_evaluates_and_resumes_it(registered, tmp_path, capsys):
    sizes = [f"--policy.{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    words = ["Robot-v0", "--policy", "vla", *sizes, "--preset", "vla", f"--env.action-chunk={C}", "--env.num-envs=4"]
    words += [
        "--total-steps=100",
        "--algorithm.num-steps=4",
        f"--run-dir={tmp_path / 'run'}",
        "--evaluation.episodes=2",
    ]
    assert cli.main(["train", *words]) == 0
    tree = json.loads((tmp_path / "run" / "config.json").read_text())
    assert tree["policy"]["name"] == "vla"
    assert tree["algorithm"]["objective"]["trust_region"] == {"name": "clip", "clip_low": 0.2, "clip_high": 0.28}
    assert cli.main(["eval", str(tmp_path / "run"), "--episodes=2"]) == 0
    assert cli.main(["resume", str(tmp_path / "run"), "--total-steps=200"]) == 0
    assert "episodes" in capsys.readouterr().out


def test_a_run_begins_with_the_policy_of_another_one(registered, tmp_path):
    settings = SETTINGS | {"algorithm": ALGORITHMS["grpo"], "total_steps": 50}
    first = gw.train(ROBOT, run_dir=tmp_path / "first", **settings)
    taken = {"policy": {"init_from": first.path}, "algorithm": ALGORITHMS["ppo"], "stop": {"time_limit": 1e-3}}
    second = gw.train(ROBOT, run_dir=tmp_path / "second", **settings | taken)
    assert second.cfg.policy == first.cfg.policy.model_copy(update={"init_from": first.path})
    loaded = VLAPolicy(ENV.observation_space, ENV.action_space, second.cfg.policy)  # what init_from fills
    assert initialize(loaded, first.path).fresh == ("value_head",)
    obs = ENV.reset(seed=5)[0]
    np.testing.assert_array_equal(loaded.predict(obs), first.policy.predict(obs))


@pytest.mark.slow
def test_it_learns_from_success_and_reads_its_instruction(registered, tmp_path):
    algorithm = GRPOCfg(num_steps=16, num_epochs=2, minibatch_size=128, learning_rate=1e-3)
    policy = VLACfg(**TINY | {"hidden_size": 64})
    settings = SETTINGS | {"policy": policy, "preset": "vla", "num_envs": 16, "total_steps": 20_000}
    run = gw.train(ROBOT, algorithm, run_dir=tmp_path / "run", **settings)

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


# --- models of the user's ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tiny_vlm import save_tiny_vlm

    return save_tiny_vlm(tmp_path_factory.mktemp("vlm"))


def from_folder(folder, **settings):
    torch.manual_seed(0)
    return VLAPolicy.from_pretrained(folder, ENV.observation_space, ENV.action_space, bins=BINS, **settings)


def test_a_model_of_the_user_s_acts_and_is_scored_alike(folder):
    policy, obs = from_folder(folder), observations()
    action = policy.act(obs, generator=torch.Generator().manual_seed(0))
    together = scores(policy, obs, action.action)
    torch.testing.assert_close(together.log_prob, action.log_prob)
    for i in range(4):  # instructions of two lengths
        alone = scores(policy, obs[i : i + 1], action.action[i : i + 1])
        torch.testing.assert_close(alone.log_prob[0], together.log_prob[i])


@pytest.mark.parametrize("part", ["image", "proprio", "instruction"])
def test_a_model_of_the_user_s_looks_at_every_part_of_the_observation(folder, part):
    policy, obs = from_folder(folder), observations(texts=TASKS[:1])
    with torch.no_grad():
        policy.token_head.weight += torch.randn_like(policy.token_head.weight)
    other = obs.clone()
    if part == "instruction":
        other[part][:] = torch.from_numpy(encoded(TASKS[1]))
    elif part == "image":
        other[part][:, 1] += 90
    else:
        other[part][:] += 1
    action = torch.zeros(4, C, A, dtype=torch.int64)
    assert (scores(policy, other, action).log_prob - scores(policy, obs, action).log_prob).abs().max() > 1e-5


def test_a_model_without_a_chat_template_reads_plain_text(tmp_path):
    from tiny_vlm import save_tiny_vlm

    policy = from_folder(save_tiny_vlm(tmp_path, chat=False))
    assert policy.act(observations()).action.shape == (4, C, A)


def test_adapters_alone_are_trained_and_saved(folder, tmp_path):
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


def test_a_run_on_a_model_of_the_user_s(folder, registered, tmp_path):
    policy = {"name": "vla", "path": str(folder), "lora": {"r": 2}, "bins": BINS, "unit": "action"}
    settings = SETTINGS | {"policy": policy, "algorithm": ALGORITHMS["grpo"]}
    run = gw.train(ROBOT, total_steps=50, run_dir=tmp_path / "run", **settings)
    loaded = gw.Run.load(run.path)
    obs = ENV.reset(seed=5)[0]
    np.testing.assert_array_equal(loaded.policy.predict(obs), run.policy.predict(obs))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no model for images and text that transformers can load"):
        from_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"no folder '\./nothing'"):
        from_folder("./nothing")
