"""Behaviour cloning: which steps it sees, its loss and scores by hand, chunks, resuming, and what it learns."""

import math
import shutil
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import toy_robots
from toy_robots import along_the_longer_axis, straight

import groupwise as gw
from groupwise.algorithms.bc import BehaviorCloning
from groupwise.config import resolve
from groupwise.data.rollout import RolloutBuffer, TensorSpec
from groupwise.embodied.cloning import DemoCollector, DemoScores
from groupwise.embodied.demos import record_demos
from groupwise.embodied.lerobot import Demonstration, write_demos
from groupwise.engines import Engine
from groupwise.envs.base import VectorEnv
from groupwise.errors import ConfigError, DataError
from groupwise.policies.actor_critic import ActorCritic
from groupwise.report.folder import RunFolder
from groupwise.run import build
from groupwise.training.build import UserObjects
from groupwise.training.checkpoint import load_checkpoint

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.contrib
toy_robots.register()
QUIET = {"logging": {"progress": "none"}}
STATE, MOVES = toy_robots.Reaching.observation_space, toy_robots.Reaching.action_space


@pytest.fixture(scope="module")
def reaching(tmp_path_factory) -> Path:
    return record_demos("ToyReaching-v0", straight, episodes=30, out=tmp_path_factory.mktemp("reaching")).path


@pytest.fixture(scope="module")
def turning(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("turning")
    return record_demos("ToyTurning-v0", along_the_longer_axis, episodes=30, out=out).path


def write(folder: Path, episodes: list[tuple[np.ndarray, np.ndarray]], actions=MOVES) -> Path:
    """Demonstrations of given observations and actions."""
    zeros = [np.zeros(len(obs), np.float32) for obs, _ in episodes]
    demos = [
        Demonstration(torch.from_numpy(o), a, zero, True, "toy") for (o, a), zero in zip(episodes, zeros, strict=True)
    ]
    write_demos(folder, STATE, actions, 20, demos)
    return folder


def numbered(lengths, size=2) -> list[tuple[np.ndarray, np.ndarray]]:
    """Episodes whose observations and actions are numbers that count through all steps."""
    episodes, first = [], 0
    for length in lengths:
        count = np.arange(first, first + length, dtype=np.float32)[:, None]
        episodes.append((count.repeat(4, axis=1), count.repeat(size, axis=1) / 1000))
        first += length
    return episodes


class Spaces(VectorEnv):
    """An environment that is asked for nothing but its spaces."""

    env_id, observation_space, obs_spec = "Toy", STATE, TensorSpec((4,), torch.float32)
    max_episode_steps, autoreset = None, "disabled"

    def __init__(self, action_space, num_envs) -> None:
        self.action_space, self.num_envs = action_space, num_envs

    def reset(self, *, seed=None, mask=None):
        raise NotImplementedError

    step = close = reset


def collector(folder, actions=MOVES, *, rank=0, world_size=1, num_envs=2, seed=0, **settings) -> DemoCollector:
    env = Spaces(actions, num_envs)
    engine = Engine()
    engine.rank, engine.world_size = rank, world_size
    policy = ActorCritic(STATE, actions, actor_only=True)
    settings = {"label_noise": 0.0, "holdout": 0.0} | settings
    return DemoCollector(env, policy, gw.config.BCCfg(data=folder, **settings), engine, seed=seed)


def collected(demos: DemoCollector, num_steps: int):
    """The transitions of the next rollout."""
    obs_spec = TensorSpec((4,), torch.float32)
    buffer = RolloutBuffer(demos.env.num_envs, num_steps, obs_spec=obs_spec, action_spec=demos.policy.action_spec)
    rollout = demos.collect(num_steps, buffer.start_rollout())
    buffer.add(rollout)
    return buffer.get(flatten=True)


def steps_of(batch) -> list[int]:
    """The numbers of ``numbered`` steps."""
    return batch["obs"][:, 0].int().tolist()


# --- which steps ---


@pytest.fixture
def twelve(tmp_path) -> Path:
    """Twelve steps in episodes of 5, 4 and 3."""
    return write(tmp_path / "twelve", numbered([5, 4, 3]))


def test_a_pass_over_the_data_has_each_step_once_in_an_order_of_its_own(twelve):
    demos = collector(twelve)
    passes = [steps_of(collected(demos, 3)) + steps_of(collected(demos, 3)) for _ in range(2)]
    assert all(sorted(steps) == list(range(12)) for steps in passes)
    assert passes[0] != passes[1] != list(range(12))
    ranks = [steps_of(collected(collector(twelve, rank=rank, world_size=2), 3)) for rank in range(2)]
    assert sorted(ranks[0] + ranks[1]) == list(range(12)), "several processes share a pass"


def test_batches_go_on_into_the_next_pass(tmp_path):
    demos = collector(write(tmp_path / "x", numbered([5, 2])))
    seen = [step for _ in range(7) for step in steps_of(collected(demos, 5))]  # 70 of 7 steps: ten passes
    assert np.bincount(seen).tolist() == [10] * 7


def test_actions_and_episodes_stay_with_their_observations(twelve):
    batch = collected(collector(twelve), 6)
    torch.testing.assert_close(batch["action"], batch["obs"][:, :2] / 1000)
    assert [int(step >= 5) + int(step >= 9) for step in steps_of(batch)] == batch["episode_id"].tolist()


@pytest.mark.parametrize(
    ("holdout", "episodes", "count"), [(0.25, 8, 2), (0.1, 4, 1), (0.0, 4, 0), (0.5, 1, 0), (0.9, 3, 2)]
)
def test_whole_episodes_are_held_out(tmp_path, holdout, episodes, count):
    demos = collector(write(tmp_path / "x", numbered([3] * episodes)), holdout=holdout)
    held = set(demos.labels["episode_id"][demos.held_out].tolist())
    assert len(held) == count
    assert int(demos.held_out.sum()) == 3 * count
    batch = collected(demos, 3 * episodes)
    assert set(batch["episode_id"].tolist()) == set(range(episodes)) - held


@pytest.mark.parametrize("part", [0, 1])
def test_numbers_that_are_not_finite_are_named(tmp_path, part):
    episodes = numbered([5, 4, 3])
    episodes[1][part][2, 1] = np.nan
    folder = write(tmp_path / "x", episodes)
    named = rf"{('obs', 'action')[part]} of .*x, episode 1, frame 2, is not finite; fix: record it again"
    with pytest.raises(DataError, match=named):
        _ = collector(folder, on_nonfinite="drop").labels


def test_label_noise_moves_labels_of_boxes_and_leaves_held_out_ones(tmp_path):
    demos = collector(write(tmp_path / "x", numbered([300] * 4)), label_noise=0.2)
    batch = collected(demos, 600)
    moved = batch["action"] - batch["obs"][:, :2] / 1000
    assert float(moved.std()) == pytest.approx(0.2, rel=0.1)
    torch.testing.assert_close(demos.labels["action"], demos.labels["obs"][:, :2] / 1000)


def test_discrete_labels_are_the_policy_s_own_without_noise(turning):
    batch = collected(collector(turning, toy_robots.Turning.action_space, label_noise=0.2), 40)
    wanted = [along_the_longer_axis(obs) - 2 for obs in batch["obs"].numpy()]
    assert batch["action"].tolist() == wanted


def test_normalizers_get_the_statistics_of_the_steps_that_are_trained_on(reaching, tmp_path):
    cfg = gw.config.BCCfg(data=reaching, num_steps=4, holdout=0.3)
    policy = {"normalize_obs": True}
    run = gw.train("ToyReaching-v0", cfg, policy=policy, total_steps=64, run_dir=tmp_path / "x", **QUIET)
    statistics = run.policy.obs_normalizer.statistics[0]
    demos = collector(reaching, holdout=0.3)
    trained = demos.labels["obs"][~demos.held_out].double()
    torch.testing.assert_close(statistics.mean, trained.mean(dim=0))
    torch.testing.assert_close(statistics.var, trained.var(dim=0, correction=0))


def test_a_policy_of_the_user_s_gets_statistics_once(reaching, tmp_path):
    policy = ActorCritic(STATE, MOVES, gw.PolicyCfg(normalize_obs=True), actor_only=True)
    for holdout in (0.3, 0.0):
        cfg = gw.config.BCCfg(data=reaching, num_steps=4, holdout=holdout)
        gw.train("ToyReaching-v0", cfg, policy=policy, total_steps=64, run_dir=tmp_path / str(holdout), **QUIET)
        demos = collector(reaching, holdout=0.3)
        assert policy.obs_normalizer.statistics[0].count == (~demos.held_out).sum(), "a trained one keeps its own"


# --- chunks ---


def test_a_chunk_is_the_next_actions_of_the_same_episode(tmp_path):
    one = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    folder = write(tmp_path / "x", numbered([4, 2], size=1), one)
    chunks = gymnasium.spaces.Box(-1, 1, (3, 1), np.float32)
    labels = collector(folder, chunks).labels
    numbers = (1000 * labels["action"]).round().int().squeeze(-1).tolist()
    assert numbers == [[0, 1, 2], [1, 2, 3], [2, 3, 3], [3, 3, 3], [4, 5, 5], [5, 5, 5]]
    assert labels["executed"].tolist() == [3, 3, 2, 1, 2, 1]
    assert labels["episode_id"].tolist() == [0, 0, 0, 0, 1, 1]
    assert collector(folder, one).labels["executed"].tolist() == [1] * 6, "without chunks"


def test_a_chunk_of_scalars_is_no_vector(tmp_path, monkeypatch):
    class Sliding(toy_robots.Reaching):
        action_space = gymnasium.spaces.Box(-1, 1, (), np.float32)

    spec = gymnasium.envs.registration.EnvSpec("Sliding-v0", entry_point=Sliding)
    monkeypatch.setitem(gymnasium.registry, "Sliding-v0", spec)
    folder = write(tmp_path / "x", numbered([4], size=1), Sliding.action_space)
    numbers = (1000 * parts_of(folder, "Sliding-v0").collector.labels["action"]).round().int().tolist()
    assert numbers == [[0, 1, 2], [1, 2, 3], [2, 3, 3], [3, 3, 3]]
    three = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    with pytest.raises(DataError, match=r"has actions float32 of shape \[1\], but those of Toy are in Box"):
        _ = collector(folder, three).labels


@pytest.mark.parametrize(
    "space",
    [
        gymnasium.spaces.Box(-1, 1, (3,), np.float32),
        gymnasium.spaces.Box(-1, 1, (2, 2, 2), np.float32),
        gymnasium.spaces.MultiDiscrete([3, 3]),
        gymnasium.spaces.Discrete(2),
    ],
)
def test_other_actions_are_refused(tmp_path, space):
    folder = write(tmp_path / "x", numbered([4]))
    with pytest.raises(gw.errors.DataError, match=r"has actions float32 of shape \[2\]"):
        _ = collector(folder, space).labels


def parts_of(data, env_id="ToyReaching-v0"):
    """The parts of a run that clones in chunks of three."""
    env = {"num_envs": 2, "action_chunk": 3}
    cfg = resolve(env_id, gw.config.BCCfg(data=data, num_steps=16, label_noise=0.0), env=env, total_steps=64)
    parts = build(cfg, UserObjects(), Engine())
    parts.close()
    return parts


def updated(parts):
    """Metrics of an update, and the parameters after it."""
    rollout = parts.collector.collect(16, parts.buffer.start_rollout())
    metrics = parts.algorithm.update(rollout)
    return metrics, torch.cat([parameter.flatten() for parameter in parts.policy.parameters()])


def test_the_budget_is_of_demonstrated_steps_also_in_chunks(reaching):
    parts = parts_of(reaching)
    parts.collector.collect(16, parts.buffer.start_rollout())
    assert parts.collector.last_steps == 32  # of 64, two iterations
    assert not [note for note in parts.notes() if "Training ends at" in note]


def test_labels_behind_the_end_change_nothing_and_those_before_do(reaching):
    first, second, third = (parts_of(reaching) for _ in range(3))
    executed = second.collector.labels["executed"]
    behind = torch.arange(3) >= executed[:, None]
    assert behind.any()
    second.collector.labels["action"][behind] = 0.9
    third.collector.labels["action"][:, 1][executed > 1] = 0.9
    found = [updated(parts) for parts in (first, second, third)]
    assert found[0][0]["train/loss"] == found[1][0]["train/loss"] != found[2][0]["train/loss"]
    assert torch.equal(found[0][1], found[1][1])


def test_the_loss_is_the_mean_over_actions_that_were_demonstrated(reaching):
    parts = parts_of(reaching)
    zero(parts.policy)
    *_, scores = parts.own_callbacks(RunFolder(reaching))
    labels = parts.collector.labels
    steps = torch.arange(len(labels["executed"]))
    shown = labels["action"][torch.arange(3) < labels["executed"][:, None]]
    found = scores.scores(steps)
    assert found["eval/demo_loss"] == pytest.approx(
        math.log(2 * math.pi) + 0.5 * shown.square().sum(dim=1).mean().item()
    )
    assert found["eval/demo_error"] == pytest.approx(shown.abs().mean().item(), rel=1e-5)


# --- own actions ---


def test_squashed_labels_lead_back_to_the_action():
    space = gymnasium.spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32))
    policy = ActorCritic(STATE, space, gw.PolicyCfg(squash_output=True), actor_only=True)
    action = torch.tensor([[0.5, 0.2], [-1.9, 0.99], [2.0, 0.0]])
    own = policy.own_action(action)
    assert own[0, 0] == pytest.approx(math.atanh(0.25))
    back = policy.env_action(own)
    torch.testing.assert_close(back[:2], action[:2])
    torch.testing.assert_close(back[2], torch.tensor([2.0 - 0.004, 0.001]), msg="a thousandth of the range inside")


# --- loss and scores ---


def first_update(env_id, data, tmp_path, **settings):
    """Metrics of a run of one iteration, whose policy's outputs are all 0 before its only optimiser step."""
    cfg = gw.config.BCCfg(data=data, num_steps=64, minibatch_size=None, learning_rate=1e-9, **settings)
    env = gymnasium.make(env_id)
    policy = zero(ActorCritic(env.observation_space, env.action_space, actor_only=True))
    settings = {"total_steps": 1, "num_envs": 1, "run_dir": tmp_path / "x", "evaluation": {"episodes": 2}}
    return gw.train(env_id, cfg, policy=policy, **settings, **QUIET).metrics()[-1]


def zero(policy: ActorCritic) -> ActorCritic:
    """The policy with weights that are all 0."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    return policy


def test_the_loss_of_discrete_actions_is_the_cross_entropy(turning, tmp_path):
    metrics = first_update("ToyTurning-v0", turning, tmp_path)
    for name in ("train/loss", "train/entropy", "eval/demo_loss"):
        assert metrics[name] == pytest.approx(math.log(5), rel=1e-5)


def test_the_loss_of_gaussians_is_the_squared_error(reaching, tmp_path):
    metrics = first_update("ToyReaching-v0", reaching, tmp_path, label_noise=0.0)
    demos = collector(reaching, holdout=0.1, num_envs=1)
    held_out, trained = demos.labels["action"][demos.held_out], collected(demos, 64)["action"]
    for name, action in (("train/loss", trained), ("eval/demo_loss", held_out)):
        wanted = math.log(2 * math.pi) + 0.5 * action.square().sum(dim=1).mean().item()
        assert metrics[name] == pytest.approx(wanted, rel=1e-5)
    assert metrics["eval/demo_error"] == pytest.approx(held_out.abs().mean().item(), rel=1e-5)


def test_each_dimension_has_an_accuracy(tmp_path):
    space = gymnasium.spaces.MultiDiscrete([3, 2])
    episodes = [(np.zeros((4, 4), np.float32), np.array([[0, 1], [0, 0], [0, 1], [2, 1]])) for _ in range(2)]
    folder = write(tmp_path / "demos", episodes, space)

    policy = zero(ActorCritic(STATE, space, actor_only=True))
    cfg = gw.config.BCCfg(data=folder, num_steps=4, learning_rate=1e-9, holdout=0.5)
    demos = DemoCollector(Spaces(space, 1), policy, cfg, Engine(), seed=0)
    found = DemoScores(BehaviorCloning(cfg, policy), demos).scores(demos.held_out.nonzero()[:, 0])
    accuracy = {"eval/demo_accuracy": 0.5, "eval/demo_accuracy_0": 0.75, "eval/demo_accuracy_1": 0.25}
    assert {name: found[name] for name in accuracy} == accuracy
    assert found["eval/demo_loss"] == pytest.approx(math.log(3) + math.log(2))


# --- runs ---


def test_a_resumed_run_equals_one_that_never_stopped(reaching, tmp_path):
    cfg = gw.config.BCCfg(data=reaching, num_steps=16, minibatch_size=32)
    common = {"evaluation": {"interval": 100_000, "episodes": 2}, "policy": {"normalize_obs": True}, **QUIET}
    whole = gw.train("ToyReaching-v0", cfg, total_steps=1024, run_dir=tmp_path / "whole", **common)
    gw.train("ToyReaching-v0", cfg, total_steps=512, run_dir=tmp_path / "parts", **common)
    gw.resume(tmp_path / "parts", 1024)
    states = [load_checkpoint(path / "checkpoints" / "latest").policy for path in (whole.path, tmp_path / "parts")]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_clone_is_evaluated_without_its_data(reaching, tmp_path):
    data = shutil.copytree(reaching, tmp_path / "data")
    cfg = gw.config.BCCfg(data=data, num_steps=16)
    run = gw.train("ToyReaching-v0", cfg, total_steps=128, run_dir=tmp_path / "run", **QUIET)
    before = gw.evaluate(run, 5, seed=3).returns
    shutil.rmtree(data)
    assert gw.evaluate(tmp_path / "run", 5, seed=3).returns == before
    with pytest.raises(gw.errors.DataError, match="holds no demonstrations"):
        gw.train("ToyReaching-v0", cfg, total_steps=128, run_dir=tmp_path / "other", **QUIET)
    assert not (tmp_path / "other").exists(), "the mistake shows before there is a run"


def test_mistakes(tmp_path):
    with pytest.raises(ConfigError, match=r"algorithm.data=None; fix: groupwise demos ToyReaching-v0"):
        gw.train("ToyReaching-v0", "bc", run_dir=tmp_path / "x", **QUIET)
    for settings in ({"target_kl": 0.1}, {"objective": {"ratio": "sequence"}}, {"clip_coef": 0.3}):
        with pytest.raises(ConfigError, match="has no effect on behaviour cloning"):
            gw.config.BCCfg(**settings)


@pytest.mark.learn
def test_a_clone_reaches_its_expert_and_grpo_starts_there(tmp_path):
    env, returns = gymnasium.make("ToyReaching-v0"), []
    for seed in range(100):
        obs, total, over = env.reset(seed=seed)[0], 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(straight(obs))
            total, over = total + reward, terminated or truncated
        returns.append(total)
    expert = float(np.mean(returns))
    record_demos("ToyReaching-v0", straight, episodes=100, out=tmp_path / "demos")
    cfg = gw.config.BCCfg(data=tmp_path / "demos")
    clone = gw.train("ToyReaching-v0", cfg, total_steps=200_000, run_dir=tmp_path / "bc", **QUIET)
    cloned = gw.evaluate(clone, 200).return_mean
    assert cloned == pytest.approx(expert, abs=0.06), "0.1 is one step of an episode"
    deviations = clone.policy.log_std.exp()
    assert ((deviations > 0.09) & (deviations < 0.2)).all(), "that of the label noise, and little more"

    sampled = gw.evaluate(clone, 200, deterministic=False).return_mean
    grpo = gw.GRPOCfg(num_steps=128)
    run = gw.train(
        "ToyReaching-v0", grpo, policy={"init_from": clone.path}, total_steps=8192, run_dir=tmp_path / "grpo", **QUIET
    )
    curve = [entry["rollout/return_mean"] for entry in run.metrics()]
    assert curve[0] == pytest.approx(sampled, abs=0.06), "it begins as the clone"
    assert min(curve) > sampled - 0.1, "and does not fall below it"
    untrained = gw.train("ToyReaching-v0", grpo, total_steps=1024, run_dir=tmp_path / "fresh", **QUIET).metrics()[0]
    assert untrained["rollout/return_mean"] < sampled - 1, "as a new policy does"


def test_a_choice_that_there_is_not_is_named(tmp_path):
    actions = gymnasium.spaces.Discrete(3)
    folder = write(tmp_path / "x", [(np.zeros((2, 4), np.float32), np.array([0, 3]))], actions)
    with pytest.raises(gw.errors.DataError, match=r"an action of .*x holds 3, expected 0 to 2"):
        _ = collector(folder, actions).labels
