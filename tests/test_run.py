import copy
import inspect
import json
import logging
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from at_events import is_freed, on
from gymnasium.wrappers import RescaleAction
from PIL import Image
from plain_envs import Plain
from run_folders import same_weights

import groupwise as gw
from groupwise import config
from groupwise.algorithms.ppo import PPO

TINY = {
    "algorithm": gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64),
    "num_envs": 4,
    "total_steps": 128,
    "evaluation": {"episodes": 2},
    "logging": {"progress": "none"},
}
TINY_GRPO = TINY | {"algorithm": gw.GRPOCfg(num_steps=16, num_epochs=1, minibatch_size=64, group_size=2)}


@pytest.fixture(autouse=True)
def _in_a_fresh_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    return gw.train("CartPole-v1", seed=1, run_dir=tmp_path_factory.mktemp("runs") / "cartpole", **TINY)


def test_runs_in_two_threads_begin_as_they_do_alone(monkeypatch):
    draw = torch.nn.init.orthogonal_
    monkeypatch.setattr("torch.nn.init.orthogonal_", lambda *args: (time.sleep(0.02), draw(*args)))

    def first_weights(seed):
        found = []
        keep = on(
            "training_start", lambda trainer: found.extend(p.clone() for p in trainer.algorithm.policy.parameters())
        )
        gw.train("CartPole-v1", seed=seed, callbacks=[keep], **TINY)
        return found

    alone = [*map(first_weights, (1, 2))]
    with ThreadPoolExecutor(2) as pool:
        together = [*pool.map(first_weights, (1, 2))]
    assert all(map(torch.equal, chain(*alone), chain(*together)))


@pytest.mark.parametrize(
    ("env", "policy"),
    [(gw.EnvCfg(id="CartPole-v1", vectorization="torch"), {}), ("Pendulum-v1", {"squash_output": True})],
)
def test_a_run_is_in_float32_whatever_torchs_default_is(env, policy):
    first = gw.train(env, policy=policy, **TINY_GRPO).path
    torch.set_default_dtype(torch.float64)
    try:
        again = gw.train(env, policy=policy, **TINY_GRPO).path
        gw.resume(again, total_steps=1024)
    finally:
        torch.set_default_dtype(torch.float32)
    gw.resume(first, total_steps=1024)
    assert same_weights(first, again)


@pytest.mark.parametrize("squash", [False, True])
def test_actions_that_the_first_policy_hardly_explores_are_told(squash, tmp_path, capsys):
    far = lambda **options: RescaleAction(gymnasium.make("Pendulum-v1", **options), np.float32(30), np.float32(1017))  # noqa: E731
    quick = {"num_envs": 2, "total_steps": 16, "evaluation": {"episodes": 1}, "run_dir": tmp_path / "run"}
    gw.train(far, gw.PPOCfg(num_steps=8), policy={"squash_output": squash}, **quick)
    shown = capsys.readouterr().err
    assert ("Actions of Box(30.0, 1017.0, (1,), float32) are hardly explored" not in shown) is squash
    assert ("fix: policy.squash_output=True, which acts within the bounds" not in shown) is squash


@pytest.mark.parametrize(
    ("algorithm", "total_steps", "note"),
    [
        (gw.PPOCfg(num_steps=16), 65, "Training ends at 128 steps in place of 65: an iteration takes 64.\n"),
        (gw.PPOCfg(num_steps=16), 640, ""),
        (gw.GRPOCfg(num_steps=16, group_size=2), 65, "reaches 65 steps: one takes 64 to 2,564, because it completes"),
    ],
)
def test_a_budget_that_iterations_exceed_is_told_before_training(algorithm, total_steps, note, tmp_path, capsys):
    quick = {"num_envs": 4, "evaluation": {"episodes": 1, "interval": 10**6}}
    gw.train("CartPole-v1", algorithm, total_steps=total_steps, run_dir=tmp_path / "run", **quick)
    shown = "".join(capsys.readouterr())
    assert note in shown
    assert note or "Training ends" not in shown


TRUNCATED = TINY_GRPO | {
    "algorithm": TINY_GRPO["algorithm"].model_copy(update={"collection": gw.CollectionCfg(partial_groups="truncate")})
}


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("Pendulum-v1", TINY),
        (gw.EnvCfg(vectorization="torch"), TINY),
        (gw.EnvCfg(vectorization="torch"), TRUNCATED),
        ("Pendulum-v1", TINY_GRPO),
    ],
    ids=["ppo", "ppo-torch", "grpo-torch", "grpo"],
)
def test_the_memory_of_a_run_is_free_at_its_end(env, settings, pictures):
    if isinstance(env, gw.EnvCfg):
        env = env.model_copy(update={"num_envs": 4})
        settings = {name: value for name, value in settings.items() if name != "num_envs"}
    assert is_freed(lambda callbacks: gw.train(env, run_dir="run", callbacks=callbacks, **settings))


def test_everything_a_run_leaves_behind(pictures, tmp_path):
    cartpole = gw.train("CartPole-v1", seed=1, run_dir=tmp_path / "cartpole", **TINY)
    names = {"config.json", "metrics.jsonl", "summary.json", "checkpoints", "groups", "curve.svg", "policy.gif"}
    assert {path.name for path in cartpole.path.iterdir()} == names | {".groupwise.lock"}
    assert {path.name for path in (cartpole.path / "checkpoints").iterdir()} == {"latest", "latest.1", "best"}
    assert "</svg>" in (cartpole.path / "curve.svg").read_text()
    with Image.open(cartpole.path / "policy.gif") as image:
        image.load()
    assert [entry["env_steps"] for entry in cartpole.metrics()] == [64, 128]
    assert json.loads((cartpole.path / "summary.json").read_text()) == cartpole.summary
    assert cartpole.summary["stopped"] == "total_steps"
    assert cartpole.summary["episodes"] == 2
    assert config.load_config(cartpole.path / "config.json") == cartpole.cfg
    assert cartpole.policy.predict(np.zeros(4, np.float32)) in (0, 1)


@pytest.mark.parametrize("fields", [TINY, TINY_GRPO], ids=["ppo", "grpo"])
def test_default_folder_is_fresh_each_time_and_names_the_run(fields):
    runs = [gw.train("CartPole-v1", seed=5, **fields) for _ in range(2)]
    assert runs[0].path != runs[1].path
    assert all(run.path.parent.name == "runs" for run in runs)
    assert all(run.path.name.startswith(f"CartPole-v1-{fields['algorithm'].name}-seed5-") for run in runs)
    for times in runs[0].metrics():
        assert 0 < times["time/advantage_seconds"] < times["time/update_seconds"]


def test_run_can_be_loaded_and_plays_the_same(cartpole):
    loaded = gw.Run.load(cartpole.path)
    obs = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    assert np.array_equal(loaded.policy.predict(obs), cartpole.policy.predict(obs))
    assert gw.evaluate(loaded, 4) == gw.evaluate(cartpole.path, 4) == gw.evaluate(cartpole, 4)
    assert gw.evaluate(cartpole, 4, seed=1) != gw.evaluate(cartpole, 4, seed=2)
    assert gw.evaluate(str(cartpole.path), 2, checkpoint="best").episodes == 2


def test_settings_come_as_a_config_alone(cartpole):
    run = gw.train(cartpole.cfg)
    assert run.cfg == cartpole.cfg
    with pytest.raises(gw.errors.ConfigError, match="got seed too"):
        gw.train(cartpole.cfg, seed=3)


def test_environment_given_as_a_callable_must_be_given_again():
    run = gw.train(Plain, **TINY)
    assert run.cfg.env.id == "<given in Python>"
    assert gw.evaluate(run, 3).lengths == (10, 10, 10)
    with pytest.raises(gw.errors.ConfigError, match=r"was given env in Python; fix: .* env=\.\.\."):
        gw.resume(run.path)
    assert gw.resume(run.path, total_steps=192, env=Plain).summary["env_steps"] == 192


def test_environment_given_as_a_vector():
    env = gymnasium.make_vec("CartPole-v1", 6, vectorization_mode="sync")
    run = gw.train(env, **TINY | {"num_envs": None, "total_steps": 192})
    assert run.cfg.env.num_envs == 6
    assert run.summary["env_steps"] == 192
    assert run.summary["episodes"] == 2  # evaluated apart from it
    env.reset()  # it is the user's, and still open
    env.close()
    grouped = gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point")  # takes any start
    assert gw.train(grouped, **TINY_GRPO | {"num_envs": None}).summary["episodes"] == 2
    grouped.close()


def test_settings_of_environment_and_policy():
    env, policy = gw.EnvCfg(id="CartPole-v1", kwargs={"sutton_barto_reward": True}, num_envs=2), {"hidden_sizes": (4,)}
    run = gw.train(env, policy=policy, **TINY)
    assert run.cfg.env == gw.EnvCfg(id="CartPole-v1", kwargs={"sutton_barto_reward": True}, num_envs=4)
    assert run.summary["return_mean"] == -1.0  # this variant gives -1 at the end and 0 before
    assert run.cfg.policy.hidden_sizes == (4,)
    assert run.policy.state_dict().keys() == gw.Run.load(run.path).policy.state_dict().keys()


@pytest.mark.parametrize("kind", ["built by hand", "wrapped"])
def test_a_vector_that_cannot_be_made_again_is_not_evaluated(kind, caplog):
    env = gymnasium.vector.SyncVectorEnv([Plain] * 4)
    if kind == "wrapped":
        env = gymnasium.wrappers.vector.ClipReward(gymnasium.make_vec("MountainCar-v0", 4), 0.0, 1.0)
    run = gw.train(env, **TINY | {"num_envs": None})
    assert "return_mean" not in run.summary
    assert "no evaluation" in caplog.text
    with pytest.raises(gw.errors.ConfigError, match="cannot be made a second time"):
        gw.evaluate(run)
    folders = list(run.path.parent.iterdir())
    with pytest.raises(gw.errors.ConfigError, match=r"fix: leave evaluation\.interval and"):
        gw.train(env, **TINY | {"num_envs": None, "evaluation": {"interval": 10}})
    with pytest.raises(gw.errors.ConfigError, match=r"fix: leave .*stop\.threshold out"):
        gw.train(env, **TINY | {"num_envs": None, "stop": {"threshold": 1.0}})
    assert list(run.path.parent.iterdir()) == folders


def test_policy_given_in_python_is_trained_and_taken_again():
    def fresh():
        return gw.ActorCritic(Plain().observation_space, Plain().action_space, gw.PolicyCfg(hidden_sizes=(8,)))

    policy = fresh()
    before = copy.deepcopy(policy)
    run = gw.train(Plain, policy=policy, **TINY)
    assert run.policy is policy
    assert not same_weights(before, policy)
    with pytest.raises(gw.errors.ConfigError, match="was given policy in Python"):
        gw.Run.load(run.path, env=Plain)
    assert same_weights(gw.Run.load(run.path, env=Plain, policy=fresh()), policy)


@pytest.mark.parametrize("policy", [torch.nn.Linear(2, 2), [3], 3])
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(gw.errors.ConfigError, match=r"policy = .*expected a Policy, a gw\.PolicyCfg or its fields"):
        inspect.unwrap(gw.train)(Plain, policy=policy, **TINY)  # the types are checked in tests only


class PatientCfg(gw.PPOCfg, name="patient"):
    patience: int = 3
    """Iterations."""


@gw.register_algorithm(PatientCfg)
class Patient(PPO):
    def update(self, rollout):
        return super().update(rollout) | {"train/patience": torch.tensor(float(self.cfg.patience))}


def test_an_algorithm_of_the_users_own_trains_and_resumes():
    fields = TINY | {"algorithm": PatientCfg(patience=5, num_steps=16, num_epochs=1)}
    run = gw.train("CartPole-v1", **fields)
    assert run.metrics()[-1]["train/patience"] == 5.0
    again = gw.resume(run.path, total_steps=192)
    assert isinstance(again.algorithm, Patient)
    assert again.metrics()[-1]["train/patience"] == 5.0


def test_callbacks_hear_the_run_and_stop_it():
    heard = []

    def end(trainer, rollout, metrics):
        metrics["mine/number"] = 1.0
        trainer.stop("enough")

    evaluations = on("evaluation_end", lambda trainer, evaluation: heard.append(evaluation.episodes))
    checkpoints = on("checkpoint", lambda trainer, path: heard.append(path.name))
    run = gw.train("CartPole-v1", callbacks=[on("iteration_end", end), evaluations, checkpoints], **TINY)
    assert heard == [2, "latest"]  # the last iteration is evaluated, whoever ended the run
    assert run.summary["stopped"] == "enough"
    assert [entry["mine/number"] for entry in run.metrics()] == [1.0]


def test_longest_episode_is_filled_in_where_the_loss_needs_it():
    constant = {"objective": {"aggregation": "constant"}}
    cfg = TINY_GRPO["algorithm"].model_copy(update={"objective": gw.ObjectiveCfg(aggregation="constant")})
    run = gw.train("CartPole-v1", **TINY_GRPO | {"algorithm": cfg})
    assert run.algorithm.cfg.objective.aggregation.max_length == 500
    objective = json.loads((run.path / "config.json").read_text())["algorithm"]["objective"]
    assert objective["aggregation"] == {"name": "constant", "max_length": None}  # as given: it follows from others
    assert run.cfg == gw.Run.load(run.path).cfg == gw.resume(run.path).cfg
    assert run.cfg.algorithm.objective == cfg.objective  # so that a run with these settings is one of the same method
    for horizon, longest in ((20, 20), (5_000, 500)):
        windowed = gw.GRPOCfg(num_steps=16, num_epochs=1, group_size=2, collection={"horizon": horizon}, **constant)
        run = gw.train("CartPole-v1", **TINY_GRPO | {"algorithm": windowed})
        assert run.algorithm.cfg.objective.aggregation.max_length == longest


def test_thread_count_is_given_back():
    seen = []
    look = on("training_start", lambda _: seen.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        for width in (8, 400):
            policy = gw.PolicyCfg(hidden_sizes=(width, width))
            gw.train(Plain, policy=policy, callbacks=[look], **TINY | {"total_steps": 1})
        assert seen == [1, 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("env", "change", "error", "message"),
    [
        ("CartPole-v1", {"num_envs": 0}, gw.errors.ConfigError, r"env\.num_envs = 0"),
        ("CartPole-v1", {"total_steps": 0}, gw.errors.ConfigError, "total_steps = 0"),
        ("CartPole-v1", {"sead": 1}, gw.errors.ConfigError, "did you mean 'seed'"),
        ("CartPole-v1", {"policy": "vlaa"}, gw.errors.ConfigError, "did you mean 'vla'"),
        ("CartPole-v1", {"algorithm": "grppo"}, gw.errors.UnknownNameError, "did you mean 'grpo'"),
    ],
)
def test_settings_that_cannot_be_leave_no_folder(env, change, error, message):
    with pytest.raises(error, match=message):
        gw.train(env, **TINY_GRPO | change)
    assert not Path("runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_its_runs_are_loaded_and_not_trained(cartpole, tmp_path):
    shutil.copytree(cartpole.path, tmp_path / "run")
    settings = json.loads((tmp_path / "run/config.json").read_text())
    (tmp_path / "run/config.json").write_text(json.dumps(settings | {"device": "cuda:1"}))
    loaded = gw.Run.load(tmp_path / "run")
    assert (loaded.policy.device.type, same_weights(loaded, cartpole)) == ("cpu", True)
    assert gw.evaluate(loaded, 2).return_mean == gw.evaluate(cartpole, 2).return_mean
    with pytest.raises(gw.errors.ConfigError, match="device = 'cuda:1', but torch finds no GPU; fix: device='cpu'"):
        gw.resume(tmp_path / "run", total_steps=256)


def test_actor_without_a_critic_is_refused_where_one_is_needed():
    space = gymnasium.make("CartPole-v1")
    policy = gw.ActorCritic(space.observation_space, space.action_space, actor_only=True)
    with pytest.raises(gw.errors.ConfigError, match="PPO needs a critic"):
        gw.train("CartPole-v1", policy=policy, **TINY)


def test_checkpoint_of_another_environment_or_architecture_is_refused():
    run = gw.train(Plain, **TINY)
    other = type("Plain", (Plain,), {"observation_space": gymnasium.spaces.Box(-1, 1, (5,), np.float32)})
    with pytest.raises(gw.errors.CheckpointError, match="its observation_space is"):
        gw.resume(run.path, env=other)
    settings = json.loads((run.path / "config.json").read_text())
    settings["policy"]["hidden_sizes"] = [8]
    (run.path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(gw.errors.CheckpointError, match="has shape"):
        gw.resume(run.path, env=Plain)


def test_what_is_no_run_is_refused(cartpole):
    for call in (gw.resume, gw.evaluate, gw.Run.load):
        with pytest.raises(gw.errors.RunFolderError, match="there is no run folder 'nowhere'"):
            call("nowhere")
        with pytest.raises(gw.errors.RunFolderError, match=r"there is no run folder .*config\.json'; fix: "):
            call(cartpole.path / "config.json")
    with pytest.raises(gw.errors.EnvError, match=r"is a run folder, .* fix: groupwise resume .*config\.json"):
        gw.train(str(cartpole.path))
    for episodes in (0, "10", 2.5):
        message = f"episodes = {episodes!r}: expected a whole number of at least 1"
        with pytest.raises(gw.errors.ConfigError, match=message):
            gw.evaluate(cartpole, episodes)
    with pytest.raises(gw.errors.ConfigError, match="total_steps = 0"):
        gw.resume(cartpole.path, 0)
    with pytest.raises(gw.errors.RunFolderError, match="is taken"):
        gw.train("CartPole-v1", run_dir=cartpole.path, **TINY)
    Path("broken").mkdir()
    known = {"algorithm": {"name": "grpo"}, "seed": 0, "provenance": {"format": 2}}
    Path("broken", "config.json").write_text(json.dumps(known | {"total_steps": "many"}))
    with pytest.raises(gw.errors.RunFolderError, match="is damaged: total_steps = 'many': input should be"):
        gw.resume("broken")
    settings = json.loads((cartpole.path / "config.json").read_text())
    shutil.copytree(cartpole.path, "other")
    for name, value, expected in (
        ("gamma", 3, "gamma = 3: input should be less than or equal to 1; fix: correct it$"),
        ("optimizer", "mine", "unknown optimizer 'mine': .*; fix: correct it, or load what registers it"),
    ):
        changed = settings | {"algorithm": settings["algorithm"] | {name: value}}
        Path("other", "config.json").write_text(json.dumps(changed))
        with pytest.raises(gw.errors.RunFolderError, match=expected):
            gw.Run.load("other")


def test_video_is_recorded_on_demand(cartpole, pictures):
    gw.evaluate(cartpole.path, 1, video=True)
    with Image.open(cartpole.path / "policy.gif") as image:
        assert image.n_frames > 1


def test_environments_that_do_not_render_are_no_obstacle(caplog, pictures):
    caplog.set_level(logging.INFO)
    run = gw.train(Plain, **TINY)
    assert not (run.path / "policy.gif").exists()
    assert [r.levelname for r in caplog.records if "does not render to arrays" in r.message] == ["INFO"]
    with pytest.raises(gw.errors.EnvError, match="does not render to arrays"):
        gw.evaluate(run, 1, video=True)  # asked for, it is an error


class NoOpenGL(Plain):
    """Its renderer fails, and not by an error of Python's."""

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    class FatalError(Exception):
        pass

    def render(self):
        raise self.FatalError("no OpenGL")


def test_a_renderer_that_fails_at_the_end_of_training_is_a_warning(caplog, pictures):
    run = gw.train(NoOpenGL, **TINY)
    assert run.summary["stopped"] == "total_steps"
    lines = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert any("no video" in line and "FatalError: no OpenGL" in line and "fix: " in line for line in lines)
    gw.resume(run.path, run.cfg.total_steps + 1, env=NoOpenGL)
    with pytest.raises(gw.errors.EnvError, match="FatalError: no OpenGL"):
        gw.evaluate(run, 1, video=True)


def test_a_run_and_a_wrong_name_say_what_they_are_in_a_line(cartpole):
    steps, mean = cartpole.summary["env_steps"], cartpole.summary["return_mean"]
    assert repr(cartpole) == (
        f"Run({str(cartpole.path)!r}, 'CartPole-v1', {cartpole.cfg.algorithm.name!r}, env_steps={steps:.6g}, return_mean={mean:.6g})"
    )
    with pytest.raises(AttributeError, match="has no attribute 'GRPOConfig'; did you mean 'GRPOCfg'"):
        gw.GRPOConfig  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'zzz'$"):
        gw.zzz  # noqa: B018
