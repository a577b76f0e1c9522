"""Arguments of the Stable-Baselines3 class: an error says SB3's name, and what stands for it here."""

import inspect
import io

import gymnasium
import pytest
from gymnasium.wrappers import FlattenObservation
from sb3_corridor import Corridor, corridor, parameters
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import LinearSchedule

import groupwise as gw
from groupwise.contrib.sb3 import ELSEWHERE, GRPO

CARTPOLE = "CartPole-v1"
REFUSED = [
    ({"batch_size": 0}, "batch_size = 0"),
    ({"n_steps": 0}, "n_steps = 0"),
    ({"n_epochs": -3}, "n_epochs = -3"),
    ({"clip_range": -1.0}, "clip_range = -1.0"),
    ({"clip_range": 0.1, "objective": "cispo"}, "clip_range=0.1"),
    ({"kl_ref_iterations": 0}, "kl_ref_iterations = 0"),
    ({"kl_ref_iterations": 2}, "kl_ref_iterations updates a reference, and kl_coef=0 has none"),
    ({"credit": "gpro"}, "unknown preset 'gpro'"),
    ({"credit": {"scal": "none"}}, "credit: unknown key 'scal'; did you mean 'scale'?"),
    ({"credit": {"group_key": "group_step"}}, "credit: group_key='group_step'"),
    ({"objective": {"trust_region": {"clip_low": 0}}}, "objective.trust_region.clip_low = 0"),
    ({"learning_rat": 1e-3}, "did you mean 'learning_rate'?"),
    ({"num_generations": 4}, "did you mean 'group_size'?"),
    # choices that read what no rollout here holds
    ({"credit": "gdpo"}, "credit.reward='parts'"),
    ({"credit": "remax"}, "credit.baseline='greedy'"),
    ({"objective": "agilerl_turn_ratio"}, "objective.ratio='turn'"),
    *(({name: None}, f"GRPO takes no {name}: {fix}") for name, fix in ELSEWHERE.items()),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_impossible_arguments_are_named_as_they_were_given(arguments, named):
    with pytest.raises(gw.errors.ConfigError) as found:
        GRPO("MlpPolicy", CARTPOLE, **arguments)
    assert named in str(found.value)
    assert "pydantic" not in str(found.value)


def test_every_wrong_argument_is_named_and_right_ones_arrive():
    with pytest.raises(gw.errors.ConfigError) as found:
        GRPO("MlpPolicy", CARTPOLE, batch_size=0, group_size=1)
    assert [line.split(" = ")[0] for line in str(found.value).splitlines()] == ["batch_size", "group_size"]
    settings = {"n_steps": 7, "batch_size": 8, "n_epochs": 9, "kl_coef": 0.1, "kl_ref_iterations": 3}
    cfg = GRPO("MlpPolicy", CARTPOLE, **settings).core.cfg
    assert (cfg.num_steps, cfg.minibatch_size, cfg.num_epochs) == (7, 8, 9)
    assert (cfg.kl_coef, cfg.sync_ref_model.steps) == (0.1, 3)


def test_every_argument_of_ppo_is_here_or_says_what_stands_for_it():
    ppo = {*inspect.signature(PPO).parameters, *inspect.signature(OnPolicyAlgorithm).parameters}
    ours = inspect.signature(GRPO).parameters
    assert ppo - {*ours, *ELSEWHERE} == {"monitor_wrapper", "supported_action_spaces"}
    assert not ELSEWHERE.keys() & ours


def test_load_refuses_what_is_no_argument(tmp_path):
    path = tmp_path / "model.zip"
    GRPO("MlpPolicy", CARTPOLE).save(path)
    for source in (path, tmp_path / "model", io.BytesIO(path.read_bytes())):
        with pytest.raises(gw.errors.UnknownNameError, match="'gamma'"):
            GRPO.load(source, gamm=0.9)
    for arguments in ({"kl_beta": 1e-3}, {"others": {}}, {"credit": "gdpo"}, {"group_size": 1}):
        with pytest.raises(gw.errors.ConfigError):
            GRPO.load(path, **arguments)
    assert GRPO.load(io.BytesIO(path.read_bytes()), gamma=0.9).gamma == 0.9


@pytest.mark.parametrize("kind", [PPO, DQN])
def test_a_file_of_another_algorithm_is_refused(tmp_path, kind):
    kind("MlpPolicy", gymnasium.make(CARTPOLE), device="cpu").save(tmp_path / "other.zip")
    with pytest.raises(gw.errors.ConfigError, match="is not a policy without a critic"):
        GRPO.load(tmp_path / "other.zip", env=gymnasium.make(CARTPOLE))


def clip_range_of(model):
    region = model.core.cfg.objective.trust_region.parameters()
    return region["clip_low"], region["clip_high"]


@pytest.mark.parametrize(
    ("clip_range", "first"), [(0.1, 0.1), (LinearSchedule(0.4, 0.2, 1.0), 0.4), (lambda left: left / 2, 0.5)]
)
def test_the_clip_range_is_a_number_or_a_function_of_the_progress(tmp_path, clip_range, first):
    model = corridor(clip_range=clip_range)
    seen, update = [], model.core.update

    def spy(rollout):
        seen.append(clip_range_of(model))
        return update(rollout)

    model.core.update = spy
    model.learn(64)
    assert seen[0] == pytest.approx((first, first))
    assert len(seen) == 2
    assert seen[1][0] < first if callable(clip_range) else seen[1][0] == first
    model.core.update = update
    model.save(tmp_path / "model")
    loaded = GRPO.load(tmp_path / "model", env=make_vec_env(Corridor, n_envs=2))
    assert clip_range_of(loaded) == pytest.approx((first, first))


def test_a_clip_range_is_that_of_the_objective():
    ours = corridor(clip_range=0.05).learn(96)
    theirs = corridor(objective={"trust_region": {"clip_low": 0.05, "clip_high": 0.05}}).learn(96)
    assert (parameters(ours) == parameters(theirs)).all()


def test_tuple_observations_name_the_wrapper_that_flattens_them():
    with pytest.raises(gw.errors.UnsupportedSpaceError, match=r"fix: gymnasium's FlattenObservation\(env\)"):
        GRPO("MlpPolicy", "Blackjack-v1")
    model = GRPO("MlpPolicy", FlattenObservation(gymnasium.make("Blackjack-v1")), n_steps=32).learn(64)
    assert model.num_timesteps >= 64
