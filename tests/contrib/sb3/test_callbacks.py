"""``GRPO`` through Stable-Baselines3: callbacks and logs."""

import csv

import pytest
from sb3_corridor import Corridor, ShortPendulum, Starts, Watch, corridor
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure

import groupwise as gw
from groupwise.contrib.sb3 import GRPO


def test_stopped_and_continued_equals_not_stopped():
    """Besides the rollouts' borders nothing changes: episodes go on where they were."""
    starts, model = Starts(), corridor()
    model.learn(1000, CallbackList([starts, Watch(stop_at=10)]))
    assert model.num_timesteps == 10
    buffer = model.rollout_buffer
    assert any(steps for _, steps in (buffer.running(env) for env in range(2)))
    model.learn(30, starts, reset_num_timesteps=False)
    assert model.rollout_buffer is buffer
    assert set(range(8)) <= starts.seen.keys()
    assert model.num_timesteps >= 40
    model.learn(50)
    assert 50 <= model.num_timesteps < 1000


@pytest.mark.filterwarnings("ignore:rich is experimental")
def test_the_usual_callbacks_and_a_progress_bar(tmp_path):
    env = make_vec_env(Corridor)
    stop = StopTrainingOnRewardThreshold(reward_threshold=-1, verbose=0)
    evaluate = EvalCallback(env, callback_on_new_best=stop, best_model_save_path=str(tmp_path), eval_freq=20, verbose=0)
    model = corridor().learn(200, [CheckpointCallback(10, str(tmp_path / "kept")), evaluate], progress_bar=True)
    assert model.num_timesteps == 40  # any return reaches the threshold at the first evaluation, in call 20 of 2 steps
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert kept == ["rl_model_20_steps.zip", "rl_model_40_steps.zip"]
    best = GRPO.load(tmp_path / "best_model", env=env)
    assert best.num_timesteps == 40
    best.learn(30)
    model.learn(40, callback=lambda _locals, _globals: False)
    assert model.num_timesteps == 2


def test_someone_else_in_the_training_environment_is_found_out():
    class Meddler(BaseCallback):
        def _on_step(self) -> bool:
            if self.n_calls == 3:
                self.training_env.reset()
            return True

    with pytest.raises(gw.errors.EnvError, match="something else reset"):
        corridor().learn(100, Meddler())


def test_logged_names(tmp_path):
    model = corridor(kl_coef=0.1, env=make_vec_env(ShortPendulum, n_envs=2), group_size=2)
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn(200)
    model.logger.close()
    with open(tmp_path / "progress.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    train = "loss policy_gradient_loss entropy_loss approx_kl clip_fraction clip_range grad_norm learning_rate n_updates std kl"
    parts = {"train": train, "rollout": "ep_rew_mean ep_len_mean groups zero_variance_groups"}
    parts["time"] = "fps iterations time_elapsed total_timesteps"
    assert set(rows[0]) == {f"{part}/{name}" for part, names in parts.items() for name in names.split()}
    last = {key: float(value) for key, value in rows[-1].items()}
    assert last["train/entropy_loss"] == pytest.approx(-1.42, abs=0.1)  # a Gaussian of deviation 1 has 1.419 nats
    assert last["train/std"] == pytest.approx(1, abs=0.1)
    found = last["train/clip_range"], last["rollout/ep_len_mean"], last["rollout/zero_variance_groups"]
    assert found == (0.2, 20, 0)
    assert min(last["train/kl"], last["rollout/groups"]) > 0
