"""Arguments of the Stable-Baselines3 class: an error says SB3's name, and what stands for it here."""

import inspect
import io

import gymnasium
import pytest
from sb3_corridor import Corridor
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

import groupwise as gw
from groupwise.config.algorithm import GRPOCfg
from groupwise.contrib.sb3 import ARGUMENTS, ELSEWHERE, GRPO, update_cfg

CARTPOLE = "CartPole-v1"
REFUSED = [
    ({"group_size": 1}, "group_size = 1"),
    ({"batch_size": 0}, "batch_size = 0"),
    ({"n_steps": 0}, "n_steps = 0"),
    ({"n_epochs": -3}, "n_epochs = -3"),
    ({"gamma": 1.5}, "gamma = 1.5"),
    ({"clip_range": -1.0}, "clip_range = -1.0"),
    ({"clip_range": 0.1, "objective": "cispo"}, "clip_range=0.1"),
    ({"kl_ref_iterations": 0}, "kl_ref_iterations = 0"),
    ({"kl_coef": -1.0}, "kl_coef = -1.0"),
    ({"credit": "gpro"}, "unknown preset 'gpro'"),
    ({"credit": {"scal": "none"}}, "credit: unknown key 'scal'; did you mean 'scale'?"),
    ({"credit": {"scale": "stdev"}}, "credit.scale = 'stdev'"),
    ({"credit": {"group_key": "group_step"}}, "credit: group_key='group_step'"),
    ({"objective": {"trust_region": {"clip_low": 0}}}, "objective.trust_region.clip_low = 0"),
    ({"preset": "aut"}, "unknown preset 'aut'"),
    ({"preset": "auto", "env": Corridor}, "preset='auto'"),
    ({"learning_rat": 1e-3}, "did you mean 'learning_rate'?"),
    # choices that read what no rollout here holds
    ({"credit": "gdpo"}, "credit.reward='parts'"),
    ({"credit": "remax"}, "credit.baseline='greedy'"),
    ({"objective": "agilerl_turn_ratio"}, "objective.ratio='turn'"),
    *(({name: None}, f"GRPO takes no {name}: {fix}") for name, fix in ELSEWHERE.items()),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_impossible_arguments_are_named_as_they_were_given(arguments, named):
    env = arguments.get("env", lambda: CARTPOLE)()
    with pytest.raises(gw.errors.ConfigError) as found:
        GRPO("MlpPolicy", env, **{name: value for name, value in arguments.items() if name != "env"})
    assert named in str(found.value)
    assert "pydantic" not in str(found.value)


def test_every_wrong_argument_is_named():
    with pytest.raises(gw.errors.ConfigError) as found:
        GRPO("MlpPolicy", CARTPOLE, batch_size=0, group_size=1)
    assert [line.split(" = ")[0] for line in str(found.value).splitlines()] == ["batch_size", "group_size"]


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
    for arguments in ({"kl_beta": 1e-3}, {"others": {}}, {"preset": "auto"}, {"credit": "gdpo"}, {"group_size": 1}):
        with pytest.raises(gw.errors.ConfigError):
            GRPO.load(path, **arguments)
    assert GRPO.load(io.BytesIO(path.read_bytes()), gamma=0.9).gamma == 0.9


def test_load_takes_the_arguments_of_a_subclass(tmp_path):
    class Named(GRPO):
        def __init__(self, *args, title="untitled", **kwargs):
            super().__init__(*args, **kwargs)
            self.title = title

    Named("MlpPolicy", CARTPOLE).save(tmp_path / "model", exclude=["title"])
    assert Named.load(tmp_path / "model", title="here").title == "here"


def test_the_update_has_every_argument():
    model = GRPO("MlpPolicy", CARTPOLE, n_steps=7, batch_size=8, n_epochs=9, kl_coef=0.1, kl_ref_iterations=3)
    cfg = update_cfg({name: vars(model)[name] for name in ARGUMENTS})
    assert (cfg.num_steps, cfg.minibatch_size, cfg.num_epochs) == (7, 8, 9)
    assert cfg.sync_ref_model.steps == 3
    assert cfg.model_fields_set <= GRPOCfg.model_fields.keys()


@pytest.mark.parametrize("kind", [PPO, A2C, DQN])
def test_a_file_of_another_algorithm_is_refused(tmp_path, kind):
    path = tmp_path / "other.zip"
    kind("MlpPolicy", gymnasium.make(CARTPOLE), device="cpu").save(path)
    for source in (path, io.BytesIO(path.read_bytes())):
        with pytest.raises(gw.errors.ConfigError, match="is not a policy without a critic"):
            GRPO.load(source, env=gymnasium.make(CARTPOLE))
