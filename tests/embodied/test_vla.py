"""The vision-language-action policy: scores, updates, runs, models of the user's."""

import json
import shutil
import sys
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import robots
import torch
from robots import TASKS, Robot, encoded

import groupwise as gw
from groupwise import cli
from groupwise.algorithms.grpo import GRPO
from groupwise.algorithms.ppo import PPO
from groupwise.config.algorithm import GRPOCfg
from groupwise.config.policy import LoRACfg, VLACfg
from groupwise.envs.gymnasium import ActionChunk
from groupwise.errors import ConfigError, DataError, MissingExtraError, UnsupportedSpaceError
from groupwise.training.checkpoint import load_checkpoint

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file
from tiny_vlm import save_tiny_vlm

from groupwise.embodied.vla import VLAPolicy

robots.register()
C, A, BINS = 3, 2, 5
ENV = ActionChunk(Robot(), C)
TINY = {"hidden_size": 32, "num_layers": 1, "patch_size": 4, "bins": BINS}
observations = partial(robots.observations, ENV)


def make_policy(actor_only=True, **cfg):
    """A new policy whose answers differ: new heads give 0, or nearly so."""
    torch.manual_seed(0)
    return stirred(VLAPolicy(ENV.observation_space, ENV.action_space, VLACfg(**TINY | cfg), actor_only=actor_only))


def stirred(policy):
    """The policy with noise on its weights."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return policy


def scores(policy, obs, action):
    return policy.evaluate({"obs": obs, "action": action})


def seeded():
    return torch.Generator().manual_seed(0)


def updated(policy, **cfg):
    """The weights after an update, and its metrics."""
    shared = {"num_epochs": 2, "minibatch_size": 6, "learning_rate": 1e-3, "optimizer": {"eps": 1e-3}} | cfg
    grpo = policy.actor_only
    algorithm = GRPO(GRPOCfg(kl_coef=0.1, **shared), policy) if grpo else PPO(gw.PPOCfg(**shared), policy)
    metrics = algorithm.update(robots.make_rollout(ENV, policy))
    return torch.cat([p.detach().flatten() for p in policy.parameters()]), metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of the user's."""
    return save_tiny_vlm(tmp_path_factory.mktemp("vlm"))


def from_folder(folder, actor_only=False, **settings):
    torch.manual_seed(0)
    cfg = VLACfg(path=str(folder), **{"bins": BINS} | settings)
    return VLAPolicy(ENV.observation_space, ENV.action_space, cfg, actor_only=actor_only)


@pytest.fixture(params=["new", "folder"])
def policy(request, folder):
    """With a critic, and a new model or one of the user's."""
    if request.param == "new":
        return make_policy(actor_only=False)
    return stirred(from_folder(folder))


# --- decisions and their scores ---


def test_it_has_as_many_parameters_as_its_page_says():
    space = gym.spaces.Dict(ENV.observation_space.spaces | {"image": gym.spaces.Box(0, 255, (1, 64, 64, 3), np.uint8)})
    policy = VLAPolicy(space, gym.spaces.Box(-1, 1, (5, 4), np.float32), actor_only=True)
    assert sum(p.numel() for p in policy.parameters()) / 1e6 == pytest.approx(1.2, abs=0.1)


def test_decisions_and_their_scores_agree(policy):
    obs = observations()
    policy.train()  # a model of the user's has no dropout
    action = policy.act(obs, generator=seeded())
    assert action.log_prob.shape == (4, *[C * A] * (policy.scored_by == "token"))
    evaluation = scores(policy, obs, action.action)
    assert evaluation.log_prob.dtype == torch.float32
    torch.testing.assert_close(evaluation.log_prob, action.log_prob, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(evaluation.value, action.value)
    torch.testing.assert_close(policy.value(obs), action.value)
    assert obs["image"].dtype == torch.uint8, "images stay bytes"
    assert action.value.unique().numel() == 4


@pytest.mark.parametrize("part", ["image", "proprio", "instruction", "order of views"])
def test_it_looks_at_every_part_of_the_observation(policy, part):
    obs = observations(texts=TASKS[:1])
    action = policy.act(obs, generator=seeded()).action
    other = obs.clone()
    if part == "instruction":
        other[part][:] = torch.from_numpy(encoded(TASKS[1]))
    elif part == "order of views":
        other["image"] = obs["image"].flip(1)
    elif part == "image":
        other[part][:, 1, 4:8, 4:8] += 90  # of the second view
    else:
        other[part][:] += 1
    before, after = scores(policy, obs, action), scores(policy, other, action)
    assert ((after.log_prob - before.log_prob).reshape(4, -1).abs().amax(dim=1) > 1e-4).all()
    assert ((after.value - before.value).abs() > 1e-5).all()


def test_longer_instructions_in_a_batch_change_nothing(policy):
    obs = observations()
    action = policy.act(obs, generator=seeded()).action
    together = scores(policy, obs, action).log_prob
    for i in range(4):
        alone = scores(policy, obs[i : i + 1], action[i : i + 1]).log_prob
        torch.testing.assert_close(alone[0], together[i], atol=1e-4, rtol=1e-4)


def test_predict_takes_one_observation_or_a_batch(policy):
    one = ENV.reset(seed=0)[0]
    batch = {key: np.stack([value] * 2) for key, value in one.items()}
    action = policy.predict(one)
    assert ENV.action_space.contains(action)
    np.testing.assert_allclose(policy.predict(batch), np.stack([action] * 2), atol=1e-5)


def test_an_actor_has_no_value_and_its_reference_is_frozen():
    policy, obs = make_policy(), observations()
    action = policy.act(obs).action
    assert policy.act(obs).value is None
    with pytest.raises(TypeError, match="has no critic"):
        policy.value(obs)
    reference = policy.make_reference()
    before = scores(policy, obs, action).log_prob.detach()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1
    torch.testing.assert_close(scores(reference, obs, action).log_prob, before)
    assert not any(p.requires_grad for p in reference.parameters())


# --- tokens, units and adapters ---


def test_tokens_are_drawn_with_probabilities_that_add_up_to_one():
    policy, obs = make_policy(), observations(1)
    drawn = policy.act(obs.expand(4000), generator=seeded()).action.flatten(1)
    best = policy.act(obs, deterministic=True).log_prob
    log_probs = [scores(policy, obs, torch.full((1, C, A), token)).log_prob.detach() for token in range(BINS)]
    torch.testing.assert_close(sum(log_prob.exp() for log_prob in log_probs), torch.ones(1, C * A))
    for token, log_prob in enumerate(log_probs):
        torch.testing.assert_close((drawn == token).float().mean(dim=0), log_prob[0].exp(), atol=0.03, rtol=0)
        assert (log_prob <= best + 1e-6).all(), "deterministic takes the likeliest"


def test_the_temperature_divides_the_logits_of_sampling_and_training():
    obs, warm, cold = observations(), make_policy(temperature=2.0), make_policy()
    warm.load_state_dict(cold.state_dict())
    one = torch.zeros(4, C, A, dtype=torch.int64)
    gaps = [scores(p, obs, one).log_prob - scores(p, obs, one + 1).log_prob for p in (cold, warm)]
    torch.testing.assert_close(gaps[0], 2 * gaps[1])
    drawn = warm.act(obs, generator=seeded())
    torch.testing.assert_close(drawn.log_prob, scores(warm, obs, drawn.action).log_prob)


@pytest.mark.parametrize(
    ("unit", "num_units", "executed"),
    [("token", C * A, [[1, 1, 0, 0, 0, 0], [1] * 6]), ("action", C, [[1, 0, 0], [1, 1, 1]]), ("chunk", 1, [[1], [1]])],
)
def test_units_are_sums_of_tokens_and_masked_where_actions_were_not_executed(unit, num_units, executed):
    obs, tokens, policy = observations(), make_policy(), make_policy(unit=unit)
    policy.load_state_dict(tokens.state_dict())
    action = tokens.act(obs, generator=seeded()).action
    one, all_of_them = scores(policy, obs, action), scores(tokens, obs, action)
    assert policy.num_units == num_units
    for name in ("log_prob", "entropy"):
        of_units, of_tokens = getattr(one, name), getattr(all_of_them, name)
        torch.testing.assert_close(of_units, of_tokens.reshape(4, num_units, -1).sum(dim=2))
    assert policy.unit_mask({"executed": torch.tensor([1, 3])}).int().tolist() == executed


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


def test_actions_are_inside_a_box_that_float32_cannot_hold():
    space = gym.spaces.Box(np.array([-0.1, 0.1]), np.array([0.3, 0.7]), dtype=np.float64)
    policy = VLAPolicy(ENV.observation_space, space, VLACfg(**TINY), actor_only=True)
    for tokens in ([0, 0], [BINS - 1, BINS - 1]):
        assert space.contains(policy.env_action(torch.tensor([[tokens]]))[0].double().numpy())


def test_a_model_without_a_chat_template_reads_plain_text(tmp_path):
    policy, obs = from_folder(save_tiny_vlm(tmp_path, chat=False)), observations()
    assert policy.act(obs).action.shape == (4, C, A)
    obs["instruction"][0, 0] = 200
    with pytest.raises(DataError, match="instruction is not UTF-8"):
        policy.act(obs)


def test_adapters_alone_are_trained_and_saved(folder):
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


# --- updates ---


@pytest.mark.parametrize("actor_only", [True, False], ids=["grpo", "ppo"])
@pytest.mark.parametrize("unit", ["token", "action", "chunk"])
def test_micro_batches_never_change_the_update(unit, actor_only):
    whole = updated(make_policy(actor_only, unit=unit))
    in_parts = updated(make_policy(actor_only, unit=unit), micro_batch_size=2)
    torch.testing.assert_close(in_parts[0], whole[0], atol=1e-5, rtol=1e-4)
    for name, value in whole[1].items():
        torch.testing.assert_close(in_parts[1][name], value, atol=1e-3, rtol=1e-3, msg=name)


@pytest.mark.parametrize("actor_only", [True, False], ids=["grpo", "ppo"])
def test_the_ratio_is_one_at_the_start(actor_only):
    policy = make_policy(actor_only)
    _, metrics = updated(policy, num_epochs=1, minibatch_size=None, learning_rate=1e-9)
    assert metrics["train/clip_fraction"] == 0
    assert abs(metrics["train/approx_kl"]) < 1e-9


# --- what is refused ---


def seeing(**change):
    """The observations with other parts, or without one."""
    parts = (ENV.observation_space.spaces | change).items()
    return gym.spaces.Dict({key: part for key, part in parts if part is not None})


@pytest.mark.parametrize(
    ("space", "message"),
    [
        *(
            (space, r"cannot read (Dict|Box).*fix: a Dict of image uint8")
            for space in (
                gym.spaces.Box(-1, 1, (3,)),
                seeing(depth=gym.spaces.Discrete(2)),
                seeing(image=gym.spaces.Box(0, 255, (1, 16, 16, 1), np.uint8)),
                seeing(image=gym.spaces.Box(0, 1, (1, 16, 16, 3), np.float32)),
                seeing(instruction=gym.spaces.Text(9)),
                seeing(proprio=gym.spaces.Box(0, 255, (2,), np.uint8)),
            )
        ),
        (seeing(image=None, instruction=None), "which has no image, instruction; fix: a Dict of image uint8"),
        *(
            ({"action_space": space}, "with low < high and both finite")
            for space in (gym.spaces.Discrete(3), gym.spaces.Box(-np.inf, 1, (2,)), gym.spaces.Box(-1, -1, (2,)))
        ),
    ],
)
def test_other_spaces_are_refused(space, message):
    other = space if isinstance(space, dict) else {"observation_space": space}
    spaces = {"observation_space": ENV.observation_space, "action_space": ENV.action_space}
    with pytest.raises(UnsupportedSpaceError, match=message):
        VLAPolicy(**spaces | other)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: make_policy(patch_size=5), r"16 x 16 pixels.*policy\.patch_size=5"),
        (lambda folder: VLACfg(path="my_model", hidden_size=64), "hidden_size: of a new model, but path='my_model'"),
        (lambda folder: VLACfg(lora=LoRACfg()), "lora trains adapters of the model in path, which is empty"),
        (from_folder, "is no model for images and text that transformers can load"),
        (lambda folder: from_folder("./nothing"), r"no folder '\./nothing'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(make, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


def test_weights_that_are_pickled_are_refused(folder, tmp_path):
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"that transformers can load \(.*safetensors"):
        from_folder(tmp_path)


def test_weights_that_are_absent_or_not_finite_and_adapters_are_refused(folder, tmp_path):
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "q_proj" in name)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for changed, message in (
        ({key: tensor for key, tensor in weights.items() if key != name}, "lack 1 of the model's"),
        (weights | {name: torch.full_like(weights[name], torch.nan)}, "are not finite: .*q_proj"),
    ):
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=f"the weights of {tmp_path} {message}"):
            from_folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(ConfigError, match="has adapters; fix: merge them"):
        from_folder(tmp_path)
    (tmp_path / "config.json").unlink()  # transformers takes a folder that has only adapters
    with pytest.raises(ConfigError, match="has adapters; fix: merge them"):
        from_folder(tmp_path)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match="'transformers' is not installed"):
        VLAPolicy(ENV.observation_space, ENV.action_space)


# --- runs ---

ROBOT = gw.EnvCfg(id="Robot-v0", action_chunk=C, num_action_steps=2, num_envs=4)
SETTINGS = {"evaluation": {"interval": 60, "episodes": 3}, "logging": {"progress": "none"}, "seed": 3}
ALGORITHMS = {
    "grpo": gw.GRPOCfg(group_size=4, num_steps=4, num_epochs=1, minibatch_size=8, kl_coef=0.05),
    "ppo": gw.PPOCfg(num_steps=5, num_epochs=1, minibatch_size=10),
}


def train(folder, algorithm="grpo", *, policy=TINY, **settings):
    """A short run."""
    policy = {"name": "vla"} | policy
    return gw.train(ROBOT, ALGORITHMS[algorithm], policy=policy, run_dir=folder, **SETTINGS | settings)


def predicts_alike(one, other):
    obs = ENV.reset(seed=5)[0]
    np.testing.assert_array_equal(one.predict(obs), other.predict(obs))
    return True


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_loads_and_resumes_bit_for_bit(algorithm, tmp_path):
    whole = train(tmp_path / "whole", algorithm, total_steps=100, checkpoint_interval=1)
    train(tmp_path / "cut", algorithm, total_steps=40, checkpoint_interval=1)
    cut = gw.resume(tmp_path / "cut", total_steps=100)
    first, second = (load_checkpoint(run.path / "checkpoints" / "latest") for run in (whole, cut))
    assert whole.metrics()[-1]["iteration"] > 1
    assert first.policy.keys() == second.policy.keys()
    assert all(torch.equal(first.policy[name], second.policy[name]) for name in first.policy)
    loaded = gw.Run.load(whole.path)
    assert isinstance(loaded.policy, VLAPolicy)
    assert predicts_alike(loaded.policy, whole.policy)


@pytest.mark.slow
def test_the_command_line_trains_goes_on_evaluates_and_resumes(tmp_path, capsys):
    sizes = [f"--policy.{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    words = ["train", "Robot-v0", "--policy", "vla", *sizes, f"--env.action-chunk={C}", "--env.num-envs=4"]
    words += ["--total-steps=30", "--algorithm.num-steps=4", "--evaluation.episodes=2"]
    assert cli.main([*words, "--algorithm", "ppo", f"--run-dir={tmp_path / 'ppo'}"]) == 0
    more = ["--preset", "vla", f"--policy.init-from={tmp_path / 'ppo'}", f"--run-dir={tmp_path / 'grpo'}"]
    assert cli.main([*words, *more]) == 0
    assert cli.main(["eval", str(tmp_path / "grpo"), "--episodes=2"]) == 0
    assert cli.main(["resume", str(tmp_path / "grpo"), "--total-steps=150"]) == 0
    tree = json.loads((tmp_path / "grpo" / "config.json").read_text())
    assert (tree["policy"]["name"], tree["policy"]["hidden_size"]) == ("vla", 32)
    assert tree["algorithm"]["objective"]["trust_region"] == {"name": "clip", "clip_low": 0.2, "clip_high": 0.28}
    assert "episodes" in capsys.readouterr().out


def test_a_run_on_a_model_of_the_user_s(folder, tmp_path):
    policy = {"path": str(folder), "lora": {"r": 2}, "bins": BINS, "unit": "action"}
    run = train(tmp_path / "run", policy=policy, total_steps=30)
    assert predicts_alike(gw.Run.load(run.path).policy, run.policy)


@pytest.mark.learn
def test_it_learns_from_success_and_reads_its_instruction(tmp_path):
    algorithm = GRPOCfg(num_steps=16, num_epochs=2, minibatch_size=128, learning_rate=1e-3)
    policy = VLACfg(**TINY | {"hidden_size": 64})
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
