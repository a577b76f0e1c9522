"""The vision-language-action policy: scores, updates, runs, models of the user's."""

import json
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import robot_policies
import robots
import torch
from robot_policies import ENV, KINDS, TINY, A, C, make_policy, observations, scores, seeded, stirred, updated
from robots import TASKS, encoded

import groupwise as gw
from groupwise import cli
from groupwise.errors import ConfigError, UnsupportedSpaceError
from groupwise.training.checkpoint import initialize, load_checkpoint

pytest.importorskip("transformers")
robots.register()


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model of each kind."""
    from tiny_vlm import save_tiny_vlm

    return {"vla": save_tiny_vlm(tmp_path_factory.mktemp("vlm"))}


@pytest.fixture(params=["new", "folder"])
def policy(request, kind, folders):
    """With a critic, and a new model or one of the user's."""
    if request.param == "new":
        return make_policy(kind, actor_only=False)
    torch.manual_seed(0)
    return stirred(KINDS[kind].from_pretrained(folders[kind], ENV.observation_space, ENV.action_space))


# --- decisions and their scores ---


@pytest.mark.parametrize(("kind", "millions"), [("vla", 1.2)])
def test_it_has_as_many_parameters_as_its_page_says(kind, millions):
    space = gym.spaces.Dict(ENV.observation_space.spaces | {"image": gym.spaces.Box(0, 255, (1, 64, 64, 3), np.uint8)})
    policy = KINDS[kind](space, gym.spaces.Box(-1, 1, (5, 4), np.float32), actor_only=True)
    assert sum(p.numel() for p in policy.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


def test_decisions_and_their_scores_agree(policy):
    obs = observations()
    action = policy.act(obs, generator=seeded())
    assert action.log_prob.shape == (4, *[C * A] * (policy.scored_by == "token"))
    evaluation = scores(policy, obs, action.action)
    assert evaluation.log_prob.dtype == torch.float32
    torch.testing.assert_close(evaluation.log_prob, action.log_prob, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(evaluation.value, action.value)
    torch.testing.assert_close(policy.value(obs), action.value)
    assert action.value.unique().numel() == 4


@pytest.mark.parametrize("part", ["image", "proprio", "instruction"])
def test_it_looks_at_every_part_of_the_observation(policy, part):
    obs = observations(texts=TASKS[:1])
    action = policy.act(obs, generator=seeded()).action
    other = obs.clone()
    if part == "instruction":
        other[part][:] = torch.from_numpy(encoded(TASKS[1]))
    elif part == "image":
        other[part][:, 1, 4:8, 4:8] += 90  # of the second view
    else:
        other[part][:] += 1
    before, after = scores(policy, obs, action), scores(policy, other, action)
    assert ((after.log_prob - before.log_prob).reshape(4, -1).abs().amax(dim=1) > 1e-4).all()
    assert ((after.value - before.value).abs() > 1e-5).all()


def test_views_are_told_apart(policy):
    obs = observations()
    swapped = obs.clone()
    swapped["image"] = obs["image"].flip(1)
    action = policy.act(obs, generator=seeded()).action
    assert (scores(policy, swapped, action).log_prob - scores(policy, obs, action).log_prob).abs().max() > 1e-4


def test_longer_instructions_in_a_batch_change_nothing(policy):
    obs = observations()
    action = policy.act(obs, generator=seeded()).action
    together = scores(policy, obs, action).log_prob
    for i in range(4):
        alone = scores(policy, obs[i : i + 1], action[i : i + 1]).log_prob
        torch.testing.assert_close(alone[0], together[i], atol=1e-4, rtol=1e-4)


def test_images_stay_bytes(policy):
    obs = observations()
    before = obs.clone()
    policy.act(obs)
    assert obs["image"].dtype == torch.uint8
    assert (obs == before).all()


def test_predict_takes_one_observation_or_a_batch(policy):
    one = ENV.reset(seed=0)[0]
    batch = {key: np.stack([value] * 2) for key, value in one.items()}
    action = policy.predict(one)
    assert ENV.action_space.contains(action)
    np.testing.assert_allclose(policy.predict(batch), np.stack([action] * 2), atol=1e-5)


def test_a_model_of_the_user_s_has_no_dropout(kind, folders):
    policy = KINDS[kind].from_pretrained(folders[kind], ENV.observation_space, ENV.action_space).train()
    obs = observations()
    action = policy.act(obs, generator=seeded())
    torch.testing.assert_close(scores(policy, obs, action.action).log_prob, action.log_prob, atol=1e-5, rtol=1e-5)


def test_without_a_critic_there_is_no_value(kind):
    policy, obs = make_policy(kind), observations()
    assert policy.act(obs).value is None
    with pytest.raises(TypeError, match="has no critic"):
        policy.value(obs)


def test_a_clone_shares_nothing_and_a_reference_is_frozen(kind):
    policy, obs = make_policy(kind), observations()
    action = policy.act(obs).action
    reference = policy.make_reference()
    before = scores(policy, obs, action).log_prob.detach()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1
    torch.testing.assert_close(scores(reference, obs, action).log_prob, before)
    assert not any(p.requires_grad for p in reference.parameters())


# --- updates ---


@pytest.mark.parametrize("actor_only", [True, False], ids=["grpo", "ppo"])
@pytest.mark.parametrize(
    ("kind", "cfg"),
    [("vla", {"unit": "token"}), ("vla", {"unit": "action"}), ("vla", {"unit": "chunk"})],
)
def test_micro_batches_never_change_the_update(kind, cfg, actor_only):
    whole = updated(make_policy(kind, actor_only, **cfg))
    in_parts = updated(make_policy(kind, actor_only, **cfg), micro_batch_size=2)
    torch.testing.assert_close(in_parts[0], whole[0], atol=1e-5, rtol=1e-4)
    for name, value in whole[1].items():
        torch.testing.assert_close(in_parts[1][name], value, atol=1e-3, rtol=1e-3, msg=name)


@pytest.mark.parametrize("actor_only", [True, False], ids=["grpo", "ppo"])
def test_the_ratio_is_one_at_the_start(kind, actor_only):
    policy = make_policy(kind, actor_only)
    _, metrics = updated(policy, num_epochs=1, minibatch_size=None, learning_rate=1e-9)
    assert metrics["train/clip_fraction"] == 0
    assert metrics["train/approx_kl"].abs() < 1e-9


# --- what is refused ---


@pytest.mark.parametrize(
    "change",
    [
        {"image": None},
        {"depth": gym.spaces.Box(0, 1, (2,))},
        {"depth": gym.spaces.Discrete(2)},
        {"image": gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)},
        {"image": gym.spaces.Box(0, 255, (1, 16, 16, 1), np.uint8)},
        {"image": gym.spaces.Box(0, 1, (1, 16, 16, 3), np.float32)},
        {"instruction": gym.spaces.Text(9)},
        {"proprio": gym.spaces.Box(0, 255, (2,), np.uint8)},
    ],
)
def test_other_observations_are_refused(kind, change):
    parts = {key: part for key, part in (ENV.observation_space.spaces | change).items() if part is not None}
    for space in (gym.spaces.Dict(parts), gym.spaces.Box(-1, 1, (3,))):
        with pytest.raises(UnsupportedSpaceError, match=r"cannot read (Dict|Box).*fix: a Dict of image uint8"):
            KINDS[kind](space, ENV.action_space)


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(3),
        gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
        gym.spaces.Box(np.array([-1.0, 0.5], np.float32), np.array([1.0, 0.5], np.float32)),
    ],
)
def test_actions_without_bounds_are_refused(kind, space):
    with pytest.raises(UnsupportedSpaceError, match="with low < high and both finite"):
        KINDS[kind](ENV.observation_space, space)


def test_images_must_be_made_of_whole_patches(kind):
    with pytest.raises(ConfigError, match=r"16 x 16 pixels.*policy\.patch_size=5; fix: square images"):
        make_policy(kind, patch_size=5)


def test_settings_of_a_new_model_are_not_those_of_a_folder(kind):
    with pytest.raises(ConfigError, match="hidden_size are of a new model, and path='my_model' is one"):
        gw.config.VLACfg(path="my_model", hidden_size=64)


def test_a_folder_without_a_model_is_refused(kind, tmp_path):
    load = KINDS[kind].from_pretrained
    with pytest.raises(ConfigError, match="is no model for images and text that transformers can load"):
        load(tmp_path, ENV.observation_space, ENV.action_space)
    with pytest.raises(ConfigError, match=r"no folder '\./nothing'"):
        load("./nothing", ENV.observation_space, ENV.action_space)


def test_weights_that_are_pickled_are_refused(kind, folders, tmp_path):
    from safetensors.torch import load_file

    for file in folders[kind].iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(load_file(folders[kind] / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"that transformers can load \(.*safetensors"):
        KINDS[kind].from_pretrained(tmp_path, ENV.observation_space, ENV.action_space)


_HIDING = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "transformers" else super().find_spec(name, path, target)

sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
import groupwise as gw
from robot_policies import ENV, KINDS

for policy in KINDS.values():
    try:
        policy(ENV.observation_space, ENV.action_space)
    except gw.errors.MissingExtraError as error:
        print(error)
"""


def test_without_transformers_the_extra_is_named():
    path = [p for p in sys.path if p]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{_HIDING}"], capture_output=True, text=True
    )
    wanted = "'transformers' is not installed; fix: pip install -e '.[text]' in the checkout"
    assert done.stdout.splitlines() == [wanted], done.stderr


# --- runs ---

ROBOT = gw.EnvCfg(id="Robot-v0", action_chunk=C, num_action_steps=2, num_envs=4)
SETTINGS = {"evaluation": {"interval": 60, "episodes": 3}, "logging": {"progress": "none"}, "seed": 3}
ALGORITHMS = {
    "grpo": gw.GRPOCfg(group_size=4, num_steps=4, num_epochs=1, minibatch_size=8, kl_coef=0.05),
    "ppo": gw.PPOCfg(num_steps=5, num_epochs=1, minibatch_size=10),
}


def train(kind, folder, algorithm="grpo", *, policy=None, **settings):
    """A short run."""
    policy = {"name": kind} | (TINY[kind] if policy is None else policy)
    return gw.train(ROBOT, ALGORITHMS[algorithm], policy=policy, run_dir=folder, **SETTINGS | settings)


def predicts_alike(one, other):
    obs = ENV.reset(seed=5)[0]
    np.testing.assert_array_equal(one.predict(obs), other.predict(obs))
    return True


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_loads_and_resumes_bit_for_bit(kind, algorithm, tmp_path):
    whole = train(kind, tmp_path / "whole", algorithm, total_steps=100, checkpoint_interval=1)
    train(kind, tmp_path / "cut", algorithm, total_steps=40, checkpoint_interval=1)
    cut = gw.resume(tmp_path / "cut", total_steps=100)
    first, second = (load_checkpoint(run.path / "checkpoints" / "latest") for run in (whole, cut))
    assert whole.metrics()[-1]["iteration"] > 1
    assert first.policy.keys() == second.policy.keys()
    assert all(torch.equal(first.policy[name], second.policy[name]) for name in first.policy)
    loaded = gw.Run.load(whole.path)
    assert isinstance(loaded.policy, KINDS[kind])
    assert predicts_alike(loaded.policy, whole.policy)


@pytest.mark.slow
def test_the_command_line_trains_goes_on_evaluates_and_resumes(kind, tmp_path, capsys):
    sizes = [f"--policy.{name.replace('_', '-')}={value}" for name, value in TINY[kind].items()]
    words = ["train", "Robot-v0", "--policy", kind, *sizes, f"--env.action-chunk={C}", "--env.num-envs=4"]
    words += ["--total-steps=30", "--algorithm.num-steps=4", "--evaluation.episodes=2"]
    assert cli.main([*words, "--algorithm", "ppo", f"--run-dir={tmp_path / 'ppo'}"]) == 0
    more = ["--preset", "vla", f"--policy.init-from={tmp_path / 'ppo'}", f"--run-dir={tmp_path / 'grpo'}"]
    assert cli.main([*words, *more]) == 0
    assert cli.main(["eval", str(tmp_path / "grpo"), "--episodes=2"]) == 0
    assert cli.main(["resume", str(tmp_path / "grpo"), "--total-steps=150"]) == 0
    tree = json.loads((tmp_path / "grpo" / "config.json").read_text())
    assert (tree["policy"]["name"], tree["policy"]["hidden_size"]) == (kind, 32)
    assert tree["algorithm"]["objective"]["trust_region"] == {"name": "clip", "clip_low": 0.2, "clip_high": 0.28}
    assert "episodes" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_begins_with_the_policy_of_another_one(kind, tmp_path):
    first = train(kind, tmp_path / "first", total_steps=40)
    taken = {"policy": {"init_from": first.path}, "stop": {"time_limit": 1e-3}, "total_steps": 40}
    second = train(kind, tmp_path / "second", "ppo", **taken)
    assert second.cfg.policy == first.cfg.policy.model_copy(update={"init_from": first.path})
    policy = KINDS[kind](ENV.observation_space, ENV.action_space, second.cfg.policy)  # what init_from fills
    assert "value_head starts fresh" in initialize(policy, first.path)
    assert predicts_alike(policy, first.policy)
    assert "fresh" not in initialize(make_policy(kind), second.path)  # an actor alone needs no critic


@pytest.mark.parametrize(
    ("kind", "settings"), [("vla", {"lora": {"r": 2}, "bins": robot_policies.BINS, "unit": "action"})]
)
def test_a_run_on_a_model_of_the_user_s(kind, settings, folders, tmp_path):
    run = train(kind, tmp_path / "run", policy={"path": str(folders[kind])} | settings, total_steps=30)
    assert predicts_alike(gw.Run.load(run.path).policy, run.policy)
