"""``GRPO`` wherever a Stable-Baselines3 algorithm fits: spaces, vector environments, callbacks, logs, files."""

import csv
from collections import OrderedDict
from copy import deepcopy

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    EveryNTimesteps,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import (
    BitFlippingEnv,
    FakeImageEnv,
    IdentityEnv,
    IdentityEnvBox,
    IdentityEnvMultiBinary,
    IdentityEnvMultiDiscrete,
    SimpleMultiObsEnv,
)
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.utils import configure_logger
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
    is_vecenv_wrapped,
)

import groupwise as gw
from groupwise.integrations.sb3 import GRPO, ActorPolicy, SharedStart
from groupwise.presets import objective_presets

SMALL = {"n_steps": 16, "batch_size": 32, "n_epochs": 2, "policy_kwargs": {"net_arch": [8]}, "seed": 0}


class Corridor(gymnasium.Env):
    """Starts anywhere; action 1 pays; ends by chance or after six steps."""

    def __init__(self, actions: spaces.Space | None = None) -> None:
        self.observation_space = spaces.Box(-10, 10, (2,), np.float32)
        self.action_space = spaces.Discrete(2) if actions is None else actions

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start, self.steps = self.np_random.uniform(-1, 1), 0
        return self.look(), {}

    def look(self) -> np.ndarray:
        return np.array([self.start, self.steps], np.float32)

    def step(self, action):
        assert self.action_space.contains(action)
        self.steps += 1
        terminated = bool(self.np_random.uniform() < 0.1)
        return self.look(), float(np.mean(action)), terminated, self.steps == 6, {}


class MatrixActions(Corridor):
    def __init__(self) -> None:
        super().__init__(spaces.Box(-1, 1, (2, 2), np.float32))


class ShortPendulum(gymnasium.wrappers.TimeLimit):
    def __init__(self) -> None:
        super().__init__(gymnasium.make("Pendulum-v1").unwrapped, 20)


class ManySpaces(Corridor):
    """A dictionary of every kind of observation."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict(
            {
                "vec": spaces.Box(-10, 10, (2,), np.float32),
                "img": spaces.Box(0, 255, (1, 36, 36), np.uint8),
                "one": spaces.Discrete(7),
                "many": spaces.MultiDiscrete([7, 2]),
                "bits": spaces.MultiBinary(3),
            }
        )

    def look(self):
        return {
            "vec": super().look(),
            "img": np.full((1, 36, 36), self.steps, np.uint8),
            "one": self.steps,
            "many": np.array([self.steps, 0]),
            "bits": np.array([1, 0, 1], np.int8),
        }


def corridor(**kwargs) -> GRPO:
    return GRPO("MlpPolicy", kwargs.pop("env", None) or make_vec_env(Corridor, n_envs=2), **(SMALL | kwargs))


def parameters(model: GRPO) -> np.ndarray:
    return model.policy.parameters_to_vector()


class Watch(BaseCallback):
    """Counts calls, and stops the training at a number of steps."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.stop_at = stop_at
        self.events: list[str] = []
        self.rewards: list[np.ndarray] = []

    def _on_training_start(self) -> None:
        self.events.append("training_start")

    def _on_rollout_start(self) -> None:
        self.events.append("rollout_start")

    def _on_step(self) -> bool:
        self.rewards.append(self.locals["rewards"])
        assert {"obs_tensor", "actions", "clipped_actions", "new_obs", "dones", "infos"} <= self.locals.keys()
        return self.stop_at is None or self.num_timesteps < self.stop_at

    def _on_rollout_end(self) -> None:
        self.events.append("rollout_end")

    def _on_training_end(self) -> None:
        self.events.append("training_end")


# --- what it runs on -------------------------------------------------------------------------------------------------


def test_it_is_an_algorithm_of_stable_baselines():
    model = GRPO("MlpPolicy", "CartPole-v1", **SMALL)
    assert isinstance(model, OnPolicyAlgorithm)
    assert model.learn(150) is model
    assert model.num_timesteps >= 150
    assert evaluate_policy(model, model.get_env(), 2)[0] > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: IdentityEnv(3, ep_length=5),
        lambda: IdentityEnvBox(ep_length=5),
        lambda: IdentityEnvMultiBinary(2, ep_length=5),
        lambda: IdentityEnvMultiDiscrete(3, ep_length=5),
        MatrixActions,
        ShortPendulum,
    ],
    ids=["Discrete", "Box", "MultiBinary", "MultiDiscrete", "Box of two dimensions", "Pendulum"],
)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_action_spaces(make, num_envs):
    model = GRPO("MlpPolicy", make_vec_env(make, n_envs=num_envs), **SMALL)
    before = parameters(model)
    model.learn(200)
    assert (parameters(model) != before).any()
    assert evaluate_policy(model, make_vec_env(make), 2)[1] >= 0


@pytest.mark.parametrize("space", [spaces.Discrete(2, start=5), spaces.MultiDiscrete([2, 2], start=[3, -1])])
def test_actions_are_numbered_from_the_start_of_the_space(space):
    model = GRPO("MlpPolicy", Corridor(space), **SMALL).learn(60)  # the corridor refuses what is not of its space
    for deterministic in (True, False):
        assert space.contains(model.predict(np.zeros(2, np.float32), deterministic=deterministic)[0])


def test_an_environment_may_write_into_its_arrays():
    class Reuses(VecEnvWrapper):
        def reset(self):
            self.obs = self.venv.reset()
            return self.obs

        def step_wait(self):
            obs, *rest = self.venv.step_wait()
            self.obs[:] = obs
            return (self.obs, *rest)

    plain = parameters(corridor(env=DummyVecEnv([Corridor] * 2)).learn(100))
    np.testing.assert_array_equal(parameters(corridor(env=Reuses(DummyVecEnv([Corridor] * 2))).learn(100)), plain)


def test_unsupported_action_spaces_are_refused():
    with pytest.raises(AssertionError, match="only supports"):
        GRPO("MlpPolicy", Corridor(spaces.Dict({"a": spaces.Discrete(2)})))


@pytest.mark.parametrize("channel_first", [True, False])
def test_images(tmp_path, channel_first):
    env = FakeImageEnv(screen_height=36, screen_width=36, channel_first=channel_first)
    small = SMALL | {"policy_kwargs": {"features_extractor_kwargs": {"features_dim": 8}}}
    model = GRPO("CnnPolicy", env, **small).learn(50)
    assert is_vecenv_wrapped(model.get_env(), VecTransposeImage) != channel_first
    obs, _ = env.reset()
    model.save(tmp_path / "cnn")
    loaded = GRPO.load(tmp_path / "cnn", env=env)
    assert loaded.predict(obs, deterministic=True)[0] == model.predict(obs, deterministic=True)[0]
    loaded.learn(50)


def test_stacked_frames():
    env = VecFrameStack(make_vec_env(lambda: FakeImageEnv(3, 36, 36), n_envs=2), 2)
    small = SMALL | {"policy_kwargs": {"features_extractor_kwargs": {"features_dim": 8}}}
    model = GRPO("CnnPolicy", env, **small)
    assert model.observation_space.shape == (2, 36, 36)  # transposed: channels first
    model.learn(100)


@pytest.mark.parametrize("make", [ManySpaces, lambda: BitFlippingEnv(4), lambda: BitFlippingEnv(4, continuous=True)])
def test_dictionaries_of_observations(make):
    model = GRPO("MultiInputPolicy", make_vec_env(make, n_envs=2), **SMALL)
    before = parameters(model)
    model.learn(100)
    assert (parameters(model) != before).any()
    with pytest.raises(ValueError, match="MultiInputPolicy"):
        GRPO("MlpPolicy", make_vec_env(make))


def test_starts_of_their_own_for_an_environment_that_cannot_share_them():
    env = make_vec_env(lambda: SimpleMultiObsEnv(), n_envs=2)
    model = GRPO("MultiInputPolicy", env, **SMALL)
    with pytest.raises(gw.GroupStartError, match="shared_starts='off'"):
        model.learn(10)
    model = GRPO("MultiInputPolicy", env, shared_starts="off", **SMALL | {"group_size": 2})
    model.learn(300)


@pytest.mark.parametrize("around", [lambda env: env, VecNormalize, VecMonitor, lambda env: VecFrameStack(env, 3)])
def test_vector_environments(around):
    model = corridor(env=around(DummyVecEnv([Corridor] * 3)))
    model.learn(100)
    assert model.num_timesteps >= 100


def test_sub_processes_train_like_one_process():
    def trained(**kwargs) -> np.ndarray:
        env = make_vec_env("CartPole-v1", n_envs=2, **kwargs)
        model = GRPO("MlpPolicy", env, **SMALL).learn(150)
        env.close()
        return parameters(model)

    apart = trained(vec_env_cls=SubprocVecEnv, wrapper_class=SharedStart)
    np.testing.assert_array_equal(apart, trained())


def test_sub_processes_without_the_wrapper_are_refused():
    env = make_vec_env("CartPole-v1", n_envs=1, vec_env_cls=SubprocVecEnv)
    model = GRPO("MlpPolicy", env, **SMALL)
    with pytest.raises(gw.EnvError, match="wrapper_class=SharedStart"):
        model.learn(10)
    env.close()


def test_learning_without_an_environment_is_refused():
    with pytest.raises(gw.EnvError, match=r"mend: model\.set_env"):
        GRPO("MlpPolicy", None, _init_setup_model=False).learn(10)


# --- groups and starts -----------------------------------------------------------------------------------------------


class Starts(BaseCallback):
    """First observation of each attempt, and its number."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, float] = {}

    def _on_training_start(self) -> None:
        self.look(self.model._last_obs)

    def _on_step(self) -> bool:
        self.look(self.locals["new_obs"])
        return True

    def look(self, obs: np.ndarray) -> None:
        for env, one in enumerate(obs):
            if one[-1] == 0:  # the corridor's count of steps
                self.seen[self.model.rollout_buffer.running(env).attempt] = float(one[-2])


@pytest.mark.parametrize("num_envs", [1, 2, 5])
def test_siblings_begin_alike_in_training(num_envs):
    starts = Starts()
    corridor(env=make_vec_env(Corridor, n_envs=num_envs), group_size=3).learn(150, starts)
    groups = [{starts.seen[a] for a in starts.seen if a // 3 == g} for g in {a // 3 for a in starts.seen}]
    assert len(groups) > 5
    assert len(starts.seen) > 2.5 * len(groups)
    assert all(len(group) == 1 for group in groups)
    assert len(set.union(*groups)) == len(groups)


def test_starts_are_their_own_when_sharing_is_off():
    starts = Starts()
    corridor(shared_starts="off").learn(100, starts)
    assert len(set(starts.seen.values())) == len(starts.seen) > 10


@pytest.mark.parametrize(("choice", "trials"), [("verify", 1), ("trust", 0), ("off", 0)])
def test_the_start_is_tried_out_once_for_each_environment(monkeypatch, choice, trials):
    tried = []
    monkeypatch.setattr("groupwise.integrations.sb3.verify_shared_start", lambda env, seed: tried.append(env))
    model = corridor(shared_starts=choice).learn(20)
    model.learn(20)
    assert len(tried) == trials
    model.set_env(make_vec_env(Corridor, n_envs=2))
    model.learn(20)
    assert len(tried) == 2 * trials


def test_only_whole_groups_are_trained_on_and_nothing_is_lost(monkeypatch):
    taken = []
    model = corridor(group_size=3)
    update = model._core.update
    monkeypatch.setattr(model._core, "update", lambda rollout: taken.append(rollout.clone()) or update(rollout))
    model.learn(200)
    steps = 0
    for rollout in taken:
        group, episode = rollout["group_id"][0, :-1], rollout["episode_id"][0, :-1]
        done = (rollout["terminated"] | rollout["truncated"])[0, :-1]
        for number in group.unique():
            assert episode[group == number].unique().numel() == 3
            assert done[group == number].sum() == 3
        steps += len(group)
    waiting = sum(
        (attempt.end or model.rollout_buffer._now) - attempt.begin
        for members in model.rollout_buffer._groups.values()
        for attempt in members
    )
    assert steps + waiting == model.num_timesteps


def test_a_rollout_waits_for_the_groups_it_began():
    watch = Watch()
    model = corridor(n_steps=2, group_size=4).learn(60, watch)
    rollouts = watch.events.count("rollout_end")
    assert watch.events == ["training_start", *["rollout_start", "rollout_end"] * rollouts, "training_end"]
    assert model._core.iteration >= rollouts - 1  # only the last one may have been short of a group


def test_the_last_rollout_waits_for_nothing():
    model = corridor(n_steps=10, group_size=2).learn(40)
    assert model.num_timesteps <= 40 + 10 * 2


def test_nothing_learned_is_said():
    endless = gymnasium.make("Pendulum-v1").unwrapped
    model = GRPO("MlpPolicy", endless, **SMALL)
    before = parameters(model)
    with pytest.warns(UserWarning, match=r"no group of 4 attempts was finished in 48 steps; mend: .* step limit"):
        model.learn(48)
    np.testing.assert_array_equal(parameters(model), before)


def test_truncated_is_not_terminated(monkeypatch):
    taken = []
    model = GRPO("MlpPolicy", IdentityEnv(3, ep_length=5), **SMALL)
    update = model._core.update
    monkeypatch.setattr(model._core, "update", lambda rollout: taken.append(rollout.clone()) or update(rollout))
    model.learn(100)
    assert taken
    for rollout in taken:
        assert not rollout["terminated"][0, :-1].any()
        assert rollout["truncated"][0, :-1].sum() == rollout["episode_id"].max() + 1


@pytest.mark.parametrize("normalized", [False, True])
def test_old_probabilities_are_those_that_were_sampled_from(monkeypatch, normalized):
    env = make_vec_env(ShortPendulum, n_envs=2)
    model = corridor(env=VecNormalize(env) if normalized else env, group_size=3, learning_rate=0.01)
    ratios, update = [], model._core.update

    def spy(rollout):
        with torch.no_grad():
            log_prob = model._core.policy.evaluate({k: rollout[k][0, :-1] for k in ("obs", "action")}).log_prob
        ratios.append((log_prob - rollout["sample_log_prob"][0, :-1]).exp())
        return update(rollout)

    monkeypatch.setattr(model._core, "update", spy)
    model.learn(200)
    # all of the first rollout was drawn by the very policy that is now trained, though the normaliser moved meanwhile
    torch.testing.assert_close(ratios[0], torch.ones_like(ratios[0]))
    # later ones hold attempts that were begun under the policy before
    assert len(ratios) > 1
    assert any((ratio - 1).abs().max() > 1e-3 for ratio in ratios[1:])


def test_rewards_come_as_the_vector_environment_gives_them(monkeypatch):
    env = VecNormalize(make_vec_env(ShortPendulum, n_envs=2), clip_reward=0.5)
    model, watch, taken = corridor(env=env, group_size=2), Watch(), []
    update = model._core.update
    monkeypatch.setattr(model._core, "update", lambda rollout: taken.append(rollout.clone()) or update(rollout))
    model.learn(80, watch)
    given = np.concatenate(watch.rewards)
    assert np.abs(given).max() <= 0.5
    assert np.isin(taken[0]["reward"][0, :-1].numpy(), given).all()


# --- callbacks -------------------------------------------------------------------------------------------------------


def test_a_callback_that_stops_the_training_breaks_nothing():
    model = corridor()
    model.learn(1000, Watch(stop_at=30))
    assert model.num_timesteps == 30
    model.learn(60, reset_num_timesteps=False)
    assert model.num_timesteps >= 90
    model.learn(50)
    assert 50 <= model.num_timesteps < 1000


def test_stopped_and_continued_equals_not_stopped():
    """Besides the rollouts' borders nothing changes: attempts go on where they were."""
    starts = Starts()
    model = corridor()
    model.learn(1000, CallbackList([starts, Watch(stop_at=10)]))
    running = [model.rollout_buffer.running(env) for env in range(2)]
    assert any(run.steps for run in running)
    buffer = model.rollout_buffer
    model.learn(30, starts, reset_num_timesteps=False)
    assert model.rollout_buffer is buffer
    assert model.rollout_buffer._now == model.num_timesteps / 2
    assert set(range(8)) <= starts.seen.keys()


def test_the_usual_callbacks(tmp_path):
    env = make_vec_env(Corridor)
    stop = StopTrainingOnRewardThreshold(reward_threshold=-1, verbose=0)
    evaluate = EvalCallback(env, callback_on_new_best=stop, best_model_save_path=str(tmp_path), eval_freq=20, verbose=0)
    checkpoint = CheckpointCallback(10, str(tmp_path / "kept"))
    every = EveryNTimesteps(24, CheckpointCallback(1, str(tmp_path / "event"), name_prefix="event"))
    model = corridor().learn(200, [checkpoint, every, evaluate])
    assert model.num_timesteps == 40  # any return reaches the threshold at the first evaluation, in call 20 of 2 steps
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert kept == ["rl_model_20_steps.zip", "rl_model_40_steps.zip"]
    assert [path.name for path in (tmp_path / "event").iterdir()] == ["event_24_steps.zip"]
    best = GRPO.load(tmp_path / "best_model", env=env)
    assert best.num_timesteps == 40
    best.learn(30)
    model.learn(40, callback=lambda _locals, _globals: False)
    assert model.num_timesteps == 2


def test_evaluation_follows_the_normaliser():
    env = VecNormalize(make_vec_env(Corridor, n_envs=2))
    other = VecNormalize(make_vec_env(Corridor), training=False, norm_reward=False)
    corridor(env=env, n_steps=32).learn(64, EvalCallback(other, eval_freq=32, verbose=0))
    np.testing.assert_array_equal(env.obs_rms.mean, other.obs_rms.mean)


def test_counting_episodes():
    stop = StopTrainingOnMaxEpisodes(max_episodes=2)  # of each environment
    assert corridor().learn(1000, stop).num_timesteps < 100


@pytest.mark.filterwarnings("ignore:rich is experimental")
def test_progress_bar():
    corridor().learn(60, progress_bar=True)


def test_someone_else_in_the_training_environment_is_found_out():
    class Meddler(BaseCallback):
        def _on_step(self) -> bool:
            if self.n_calls == 3:
                self.training_env.reset()
            return True

    with pytest.raises(gw.EnvError, match="something else reset or stepped it during learn"):
        corridor().learn(100, Meddler())


# --- several calls, files, numbers -----------------------------------------------------------------------------------


def test_learning_again_goes_on_where_it_was():
    first = parameters(corridor().learn(32))
    twice = corridor().learn(32)
    np.testing.assert_array_equal(parameters(twice), first)
    twice.learn(32, reset_num_timesteps=False)
    assert twice.num_timesteps >= 64
    assert (parameters(twice) != first).any()


def test_using_the_environment_in_between_starts_afresh():
    model, starts = corridor(), Starts()
    model.learn(32)
    number = model.rollout_buffer.next_group
    evaluate_policy(model, model.get_env(), 2)
    model.learn(32, starts, reset_num_timesteps=False)
    assert min(starts.seen) == number * 4
    assert model.num_timesteps >= 64


def test_after_learning_the_environment_resets_as_ever():
    model = corridor().learn(32)
    env = model.get_env()
    env.seed(5)
    expected = [Corridor().reset(seed=5)[0], Corridor().reset(seed=6)[0]]
    np.testing.assert_array_equal(env.reset(), expected)


@pytest.mark.parametrize("normalized", [False, True])
def test_equal_seeds_train_equally(normalized):
    def run() -> list:
        env = make_vec_env(Corridor, n_envs=2)
        model = corridor(env=VecNormalize(env) if normalized else env).learn(120)
        vec, actions = model.get_env(), []
        obs = vec.reset()
        for _ in range(20):
            action = model.predict(obs)[0]
            actions.append(action.tolist())
            obs = vec.step(action)[0]
        return [actions, parameters(model).tolist()]

    assert run() == run()


def test_other_seeds_train_otherwise():
    assert (parameters(corridor(seed=1).learn(50)) != parameters(corridor(seed=2).learn(50))).any()
    unseeded = [corridor(seed=None)._start_seed for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def all_parameters(model: GRPO) -> dict[str, torch.Tensor]:
    return {f"{name}.{key}": t for name, state in model.get_parameters().items() for key, t in state.items()}


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_save_and_load(tmp_path, kl_coef):
    model = corridor(kl_coef=kl_coef, credit="rloo", objective=gw.ObjectiveCfg(clip_low=0.1)).learn(60)
    obs = np.stack([model.observation_space.sample() for _ in range(10)])
    model.save(tmp_path / "model.zip")
    env = make_vec_env(Corridor, n_envs=2)
    loaded = GRPO.load(tmp_path / "model.zip", env=env, device="cpu")
    np.testing.assert_array_equal(parameters(loaded), parameters(model))
    if kl_coef:
        np.testing.assert_array_equal(
            loaded.reference_policy.parameters_to_vector(), model.reference_policy.parameters_to_vector()
        )
        assert (loaded.reference_policy.parameters_to_vector() != parameters(loaded)).any()
    assert str(loaded.policy.optimizer.state_dict()) == str(model.policy.optimizer.state_dict())
    for deterministic in (True, False):
        actions = []
        for one in (model, loaded):
            torch.manual_seed(0)
            actions.append(one.predict(obs, deterministic=deterministic)[0])
        np.testing.assert_array_equal(*actions)
    assert loaded.credit == gw.CreditCfg(baseline="leave_one_out", scale="none", kl_placement="reward")
    assert loaded.objective.clip_low == 0.1
    assert (loaded.num_timesteps, loaded._core.iteration) == (model.num_timesteps, model._core.iteration)
    steps, next_group = model.num_timesteps, model._next_group
    starts = Starts()
    loaded.learn(60, starts, reset_num_timesteps=False)
    assert loaded.num_timesteps >= steps + 60
    assert min(starts.seen) >= next_group * 4  # fresh starts
    assert (parameters(loaded) != parameters(model)).any()


def test_what_the_update_remembers_is_saved(tmp_path):
    credit = gw.CreditCfg(baseline="ema", scale="none")
    model = corridor(credit=credit).learn(60)
    model.save(tmp_path / "model")
    average = GRPO.load(tmp_path / "model")._core.score_average
    assert average is not None
    torch.testing.assert_close(average, model._core.score_average)


def test_a_loaded_model_goes_on_like_the_saved_one(tmp_path):
    model = corridor().learn(60)
    model.save(tmp_path / "model")
    trained = []
    for _ in range(2):
        loaded = GRPO.load(tmp_path / "model", env=make_vec_env(Corridor, n_envs=2))
        trained.append(parameters(loaded.learn(60, reset_num_timesteps=False)))
    np.testing.assert_array_equal(*trained)


def test_load_takes_other_settings_and_another_number_of_environments(tmp_path):
    model = corridor().learn(40)
    model.save(tmp_path / "model")
    loaded = GRPO.load(tmp_path / "model", env=make_vec_env(Corridor, n_envs=3), n_epochs=1, learning_rate=1e-5)
    assert (loaded.n_envs, loaded.n_epochs, loaded.policy.optimizer.param_groups[0]["eps"]) == (3, 1, 1e-5)
    loaded.learn(40)
    assert loaded.policy.optimizer.param_groups[0]["lr"] == 1e-5
    assert GRPO.load(tmp_path / "model").predict(np.zeros(2, np.float32))[0].shape == ()


def test_what_is_saved_can_be_chosen(tmp_path):
    model = corridor(verbose=2)
    model.save(tmp_path / "without", exclude=["verbose"])
    assert GRPO.load(tmp_path / "without").verbose == 0
    model.save(tmp_path / "with", exclude=["verbose"], include=["verbose"])
    assert GRPO.load(tmp_path / "with").verbose == 2


def test_load_with_custom_objects(tmp_path):
    model = corridor(learning_rate=lambda left: 1e-3 * left)
    model.save(tmp_path / "model")
    loaded = GRPO.load(tmp_path / "model", custom_objects={"learning_rate": 2e-5, "lr_schedule": lambda _: 2e-5})
    assert loaded.learning_rate == 2e-5


def test_parameters_in_and_out():
    model = corridor(kl_coef=0.1).learn(40)
    original = deepcopy(model.get_parameters())
    assert set(original) == {"policy", "policy.optimizer", "reference_policy"}
    with pytest.raises(ValueError, match="invalid object name"):
        model.set_parameters({**original, "nothing": {}})
    with pytest.raises(ValueError, match="do not match"):
        model.set_parameters({"policy": original["policy"]})
    part = OrderedDict(list(original["policy"].items())[:-1])
    with pytest.raises(RuntimeError, match="Missing key"):
        model.set_parameters({**original, "policy": part})
    model.set_parameters({"policy": {key: torch.rand_like(value) for key, value in part.items()}}, exact_match=False)
    last = list(original["policy"])[-1]
    for key, value in model.get_parameters()["policy"].items():
        assert torch.equal(value, original["policy"][key]) == (key == last)
    model.set_parameters(original)
    for key, value in model.get_parameters()["policy"].items():
        assert torch.equal(value, original["policy"][key])
    model.learn(40)


def test_parameters_set_from_a_vector_are_trained_on():
    model = corridor().learn(40)
    model.policy.load_from_vector(parameters(model) * 0.5)
    half = parameters(model)
    model.learn(40)
    assert (parameters(model) != half).any()


def test_set_env():
    model = corridor().learn(40)
    other = make_vec_env(Corridor, n_envs=2)
    model.set_env(other)
    model.learn(40, reset_num_timesteps=False)
    assert model.get_env() is other
    assert model.num_timesteps >= 80
    model.set_env(other, force_reset=False)
    buffer = model.rollout_buffer
    model.learn(40, reset_num_timesteps=False)
    assert model.rollout_buffer is buffer
    with pytest.raises(AssertionError):
        model.set_env(make_vec_env(Corridor, n_envs=3))


def test_no_critic_is_built_trained_or_saved():
    model = corridor().learn(40)
    names = [name for name, _ in model.policy.named_parameters()]
    assert names == ["policy_net.0.weight", "policy_net.0.bias", "action_net.weight", "action_net.bias"]
    assert set(model.get_parameters()["policy"]) == set(names)
    assert len(model.get_parameters()["policy.optimizer"]["state"]) == len(names)


@pytest.mark.parametrize("policy", ["NoPolicy", ActorCriticPolicy])
def test_unsuited_policies_are_refused(policy):
    with pytest.raises(ValueError, match=r"NoPolicy unknown|ActorCriticPolicy is not a policy without a critic; mend"):
        GRPO(policy, "CartPole-v1")


def test_a_policy_of_ones_own():
    class Extractor(BaseFeaturesExtractor):
        def __init__(self, observation_space, width: int = 3):
            super().__init__(observation_space, width)
            self.norm = torch.nn.BatchNorm1d(2)
            self.linear = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Dropout(0.5))

        def forward(self, observations):
            return self.linear(self.norm(observations))

    class Own(ActorPolicy):
        pass

    model = GRPO(Own, make_vec_env(Corridor), **SMALL | {"policy_kwargs": {"features_extractor_class": Extractor}})
    before = model.policy.features_extractor.norm.bias.clone()
    model.learn(60)
    norm = model.policy.features_extractor.norm
    assert (norm.bias != before).any()
    assert not norm.running_mean.any()  # trained in evaluation mode, as it acted
    obs = np.ones(2, np.float32)
    assert len({int(model.predict(obs, deterministic=True)[0]) for _ in range(10)}) == 1


# --- logs ------------------------------------------------------------------------------------------------------------


def test_logged_names(tmp_path):
    model = corridor(kl_coef=0.1, env=make_vec_env(ShortPendulum, n_envs=2), group_size=2)
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn(200)
    model.logger.close()
    with open(tmp_path / "progress.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    train = "loss policy_gradient_loss entropy_loss approx_kl clip_fraction clip_range grad_norm learning_rate n_updates std reference_kl"
    names = {f"train/{name}" for name in train.split()}
    names |= {"rollout/ep_rew_mean", "rollout/ep_len_mean", "rollout/groups", "rollout/zero_variance_groups"}
    names |= {"time/fps", "time/iterations", "time/time_elapsed", "time/total_timesteps"}
    assert set(rows[0]) == names
    last = {key: float(value) for key, value in rows[-1].items()}
    assert last["train/entropy_loss"] == pytest.approx(-1.42, abs=0.1)  # a Gaussian of deviation 1 has 1.419 nats
    assert last["train/std"] == pytest.approx(1, abs=0.1)
    assert last["train/clip_range"] == 0.2
    assert last["train/reference_kl"] > 0
    assert last["rollout/ep_len_mean"] == 20
    assert last["rollout/groups"] >= 1
    assert last["rollout/zero_variance_groups"] == 0


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = corridor(tensorboard_log=str(tmp_path))
    model.learn(40)
    model.learn(40, tb_log_name="named")
    model.learn(40, reset_num_timesteps=False, tb_log_name="named")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["GRPO_1", "named_1"]
    events = EventAccumulator(str(tmp_path / "named_1")).Reload()
    steps = [event.step for event in events.Scalars("rollout/ep_rew_mean")]
    assert steps == sorted(steps)
    assert steps[-1] == model.num_timesteps
    assert "rollout/zero_variance_groups" in events.Tags()["scalars"]


def test_verbose_prints_the_table(capsys):
    corridor(verbose=1).learn(80)
    out = capsys.readouterr().out
    assert "zero_variance_groups" in out
    assert "policy_gradient_loss" in out


# --- settings --------------------------------------------------------------------------------------------------------


def test_an_update_takes_the_learning_rate_of_its_rollouts_start():
    model = corridor(learning_rate=lambda left: 1e-3 * left)
    started, rates, train = [], [], model.train

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            started.append(model.num_timesteps)

    def spy():
        train()
        rates.append(model.policy.optimizer.param_groups[0]["lr"])

    model.train = spy
    model.learn(200, Look())
    assert len(started) > 3
    assert rates == pytest.approx([1e-3 * (1 - steps / 200) for steps in started])
    assert (rates[0], model.num_timesteps > 200) == (1e-3, True)  # the last rollout goes beyond the end


def test_a_training_of_one_rollout_learns_at_the_default_rate():
    model = corridor()
    before = parameters(model)
    model.learn(32)
    assert model.num_timesteps == 32
    assert model.policy.optimizer.param_groups[0]["lr"] == 1e-3
    assert np.abs(parameters(model) - before).max() > 1e-4


def test_target_kl_ends_the_update():
    free, bounded = (corridor(n_epochs=40, learning_rate=0.05, target_kl=kl).learn(40) for kl in (None, 1e-3))
    assert 0 < bounded._n_updates < free._n_updates


def test_the_reference_is_renewed_in_its_interval():
    model = corridor(kl_coef=0.1, kl_ref_iterations=2)
    first = model.reference_policy.parameters_to_vector()
    seen = []

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            reference = model.reference_policy.parameters_to_vector()
            seen.append((model._core.iteration, (reference == parameters(model)).all(), (reference == first).all()))

    model.learn(300, Look())
    assert {(updates % 2 == 0) for updates, _, _ in seen} == {True, False}
    assert all(same == (updates % 2 == 0) for updates, same, _ in seen)
    frozen = corridor(kl_coef=0.1).learn(100)
    np.testing.assert_array_equal(frozen.reference_policy.parameters_to_vector(), first)


def test_without_kl_there_is_no_reference():
    with pytest.raises(gw.ConfigError, match="kl_coef is 0"):
        corridor().reference_policy  # noqa: B018


@pytest.mark.parametrize(
    "preset", sorted(objective_presets().keys() - {"gdpo", "remax", "agilerl_turn_ratio"})
)  # refused
def test_presets_by_name(preset):
    settings = objective_presets()[preset].settings
    objective = gw.ObjectiveCfg(**settings["objective"])
    if objective.aggregation in ("constant", "seq_mean_token_sum_norm"):
        objective = objective.model_copy(update={"max_length": 6})
    model = corridor(credit=preset, objective=preset if objective.max_length is None else objective)
    assert (model.credit, model.objective) == (gw.CreditCfg(**settings["credit"]), objective)


@pytest.mark.parametrize("preset", ["grpo", "rloo", "sb3_process", "sb3_outcome", "sb3_timestep"])
def test_presets_train(preset):
    model = corridor(credit=preset, objective=preset)
    before = parameters(model)
    model.learn(60)
    assert (parameters(model) != before).any()


def test_a_constant_divisor_is_given_in_the_objective():
    cfg = gw.ObjectiveCfg(aggregation="constant", max_length=6)
    corridor(credit="dr_grpo", objective=cfg).learn(40)
    with pytest.raises(gw.ConfigError, match=r"max_length, which is None; mend"):
        corridor(objective="dr_grpo")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"group_size": 1}, "group_size"),
        ({"n_steps": 0}, "n_steps"),
        ({"credit": "gpro"}, "unknown preset 'gpro': did you mean"),
        ({"gamma": 1.5}, "gamma"),
    ],
)
def test_impossible_settings_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        corridor(**kwargs)


# --- the same core ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("credit", ["grpo", "rloo", "embodichain", "sb3_process", "sb3_process_deepseek"])
@pytest.mark.parametrize("objective", ["grpo", "rloo", "embodichain", "sb3_outcome"])
def test_one_update_equals_that_of_the_library(credit, objective):
    """Two groups of two attempts of three and two steps, once through SB3, once as a padded rollout."""
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(4, 3, 2)).astype(np.float32)
    action, reward = rng.integers(0, 2, (4, 3)), rng.normal(size=(4, 3)).astype(np.float32)
    old = (np.log(0.5) + rng.normal(size=(4, 3)) * 0.2).astype(np.float32)
    settings = {"batch_size": 100, "n_epochs": 3, "gamma": 0.9, "kl_coef": 0.1, "ent_coef": 0.01, "group_size": 2}
    env = make_vec_env(Corridor, n_envs=2)
    model = corridor(env=env, credit=credit, objective=objective, learning_rate=0.01, **settings)
    through_sb3(model, obs, action, reward, old)

    cfg = gw.GRPOCfg(
        learning_rate=0.01,
        num_epochs=3,
        minibatch_size=100,
        gamma=0.9,
        kl_coef=0.1,
        ent_coef=0.01,
        group_size=2,
        credit=model.credit,
        objective=model.objective,
    )
    fresh = corridor(env=env, credit=credit, objective=objective)
    policy = gw.ActorCritic(
        Corridor().observation_space, Corridor().action_space, gw.PolicyCfg(hidden_sizes=(8,)), actor_only=True
    )
    with torch.no_grad():
        for target, source in zip(policy.parameters(), fresh.policy.parameters(), strict=True):
            target.copy_(source)
    before = parameters(fresh)
    gw.GRPO(cfg, policy).update(padded(obs, action, reward, old))
    expected = torch.nn.utils.parameters_to_vector(policy.parameters()).detach().numpy()
    assert np.abs(expected - before).max() > 5e-3
    np.testing.assert_allclose(parameters(model), expected, atol=2e-6)


LENGTHS = (3, 2, 3, 2)


def through_sb3(model: GRPO, obs, action, reward, old) -> None:
    """Attempts 0, 2 in environment 0 and 1, 3 in environment 1, one after another."""
    from groupwise.integrations.sb3_attempts import Attempts, Tick

    model.set_logger(configure_logger())
    model.rollout_buffer = Attempts(2, 2, seed=0, first_group=0, starts="shared")
    model.rollout_buffer.begin()
    when = {0: [(0, 0), (0, 1), (0, 2), (3, 0), (3, 1)], 1: [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]}
    for time in range(5):
        at = tuple(np.array([when[env][time] for env in range(2)]).T)
        last = at[1] == np.array(LENGTHS)[at[0]] - 1
        model.rollout_buffer.record(Tick(obs[at], action[at], old[at], reward[at], last, np.zeros(2, np.bool_)))
    model.train()


def padded(obs, action, reward, old):
    from tensordict import TensorDict

    def slots(values):
        return torch.cat([torch.as_tensor(values), torch.zeros_like(torch.as_tensor(values[:, :1]))], dim=1)

    step = torch.arange(4).expand(4, 4)
    length = torch.tensor(LENGTHS)[:, None]
    valid = step < length
    row = torch.arange(4)[:, None].expand(4, 4)
    return TensorDict(
        {
            "obs": slots(obs),
            "action": slots(action),
            "reward": slots(reward) * valid,
            "sample_log_prob": slots(old),
            "terminated": step == length - 1,
            "truncated": torch.zeros(4, 4, dtype=torch.bool),
            "valid": valid,
            "loss_mask": valid,
            "group_id": torch.where(valid, row // 2, -1),
            "episode_id": torch.where(valid, row, -1),
            "step": torch.where(valid, step, 0),
        },
        batch_size=[4, 4],
    )


@pytest.mark.learn
def test_it_learns_cartpole():
    model = GRPO("MlpPolicy", "CartPole-v1", gamma=1.0, seed=0).learn(60_000)
    assert evaluate_policy(model, make_vec_env("CartPole-v1", seed=1), 20)[0] >= 400


@pytest.mark.parametrize("wrong", ["yes", "Off", False, None])
def test_an_unknown_way_to_share_starts_is_refused(wrong):
    model = corridor(_init_setup_model=False)
    model.shared_starts = wrong  # the constructor's argument is checked by the tests' type checker, which users lack
    with pytest.raises(gw.ConfigError, match=r"shared_starts is .*expected 'verify', 'trust' or 'off'"):
        model._setup_model()


def test_credit_and_objective_may_be_plain_settings():
    model = corridor(credit={"scale": "none"}, objective={"clip_low": 0.1})
    assert model.credit == gw.CreditCfg(scale="none")
    assert model.objective == gw.ObjectiveCfg(clip_low=0.1)
    model.learn(32)
