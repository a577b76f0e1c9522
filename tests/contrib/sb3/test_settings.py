"""Arguments of the Stable-Baselines3 class: what is refused says SB3's name, and what stands for it here."""

import inspect
import io
import re

import gymnasium
import pytest
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

import groupwise as gw
from groupwise.config.algorithm import GRPOCfg
from groupwise.config.load import objective_preset
from groupwise.contrib.sb3 import ARGUMENTS, ELSEWHERE, GRPO, update_cfg

CARTPOLE = "CartPole-v1"


def refused(**arguments) -> str:
    with pytest.raises(gw.errors.ConfigError) as found:
        GRPO("MlpPolicy", CARTPOLE, **arguments)
    return str(found.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 1}, "group_size = 1: input should be greater than or equal to 2"),
        ({"batch_size": 0}, "batch_size = 0: input should be greater than or equal to 1"),
        ({"n_steps": 0}, "n_steps = 0: input should be greater than or equal to 1"),
        ({"n_epochs": -3}, "n_epochs = -3: input should be greater than or equal to 1"),
        ({"kl_ref_iterations": 0}, "kl_ref_iterations = 0: input should be greater than or equal to 1"),
        ({"kl_coef": -1.0}, "kl_coef = -1.0: input should be greater than or equal to 0"),
        ({"credit": {"scal": "none"}}, "credit: unknown key 'scal'; did you mean 'scale'?"),
        ({"credit": {"scale": "stdev"}}, "credit.scale = 'stdev': expected one of std"),
        (
            {"objective": {"trust_region": {"clip_low": 0}}},
            "objective.trust_region.clip_low = 0: input should be greater than 0",
        ),
        (
            {"credit": {"group_key": "group_step"}},
            "credit: group_key='group_step' compares returns from a step on; got",
        ),
    ],
)
def test_impossible_arguments_are_named_as_they_were_given(arguments, message):
    found = refused(**arguments)
    assert found.startswith(message)
    assert "pydantic" not in found
    assert "Cfg" not in found


def test_every_wrong_argument_is_named():
    assert [line.split(" = ")[0] for line in refused(batch_size=0, group_size=1).splitlines()] == [
        "batch_size",
        "group_size",
    ]


@pytest.mark.parametrize(
    ("argument", "value", "counterpart"),
    [
        ("clip_range_vf", 0.1, "there is no critic; fix: leave it out"),
        ("vf_coef", 0.5, "there is no critic; fix: leave it out"),
        ("gae_lambda", 0.95, "no critic looks ahead; fix: leave it out"),
        ("normalize_advantage", True, r"fix: credit=CreditCfg\(scale='std'\)"),
        ("use_sde", True, "drawn independently at every step; fix: leave it out"),
        ("sde_sample_freq", 4, "drawn independently at every step; fix: leave it out"),
        ("rollout_buffer_class", None, "a store of their own; fix: leave it out"),
        ("rollout_buffer_kwargs", {}, "a store of their own; fix: leave it out"),
    ],
)
def test_what_sb3_has_and_this_has_not_says_what_stands_for_it(tmp_path, argument, value, counterpart):
    GRPO("MlpPolicy", CARTPOLE).save(tmp_path / "model")
    for build in (
        lambda: GRPO("MlpPolicy", CARTPOLE, **{argument: value}),
        lambda: GRPO.load(tmp_path / "model", **{argument: value}),
    ):
        with pytest.raises(gw.errors.ConfigError, match=f"GRPO takes no {argument}: .*{counterpart}"):
            build()


def test_every_argument_of_ppo_is_here_or_says_what_stands_for_it():
    ppo = {*inspect.signature(PPO).parameters, *inspect.signature(OnPolicyAlgorithm).parameters}
    ours = inspect.signature(GRPO).parameters
    assert ppo - {*ours, *ELSEWHERE} == {"monitor_wrapper", "supported_action_spaces"}
    assert not ELSEWHERE.keys() & ours


def test_other_names_are_unknown():
    assert refused(learning_rat=1e-3) == "unknown argument of GRPO 'learning_rat': did you mean 'learning_rate'?"


def test_load_refuses_what_is_no_argument(tmp_path):
    path = tmp_path / "model.zip"
    GRPO("MlpPolicy", CARTPOLE).save(path)
    for source in (path, tmp_path / "model", io.BytesIO(path.read_bytes())):
        with pytest.raises(gw.errors.UnknownNameError, match="unknown argument of GRPO 'gamm': did you mean 'gamma'"):
            GRPO.load(source, gamm=0.9)
    with pytest.raises(gw.errors.ConfigError, match=r"GRPO takes no kl_beta: .* fix: kl_coef="):
        GRPO.load(path, kl_beta=1e-3)
    with pytest.raises(gw.errors.UnknownNameError, match="unknown argument of GRPO 'others'"):
        GRPO.load(path, others={})
    assert GRPO.load(io.BytesIO(path.read_bytes()), gamma=0.9).gamma == 0.9


def test_load_takes_the_arguments_of_a_subclass(tmp_path):
    class Named(GRPO):
        def __init__(self, *args, title="untitled", **kwargs):
            super().__init__(*args, **kwargs)
            self.title = title

    Named("MlpPolicy", CARTPOLE).save(tmp_path / "model", exclude=["title"])
    assert Named.load(tmp_path / "model", title="here").title == "here"


@pytest.mark.parametrize(
    ("arguments", "choice"),
    [
        ({"credit": "gdpo"}, "credit.reward='parts'"),
        ({"credit": "remax"}, "credit.baseline='greedy'"),
        ({"objective": "agilerl_turn_ratio"}, "objective.ratio='turn'"),
    ],
)
def test_choices_that_read_what_no_rollout_here_holds_are_refused_at_once(tmp_path, arguments, choice):
    found = refused(**arguments)
    assert found.startswith(f"GRPO cannot take {choice} in Stable-Baselines3: no ")
    (fix,) = re.findall(r"fix: (\S+)='(\w+)', or another preset$", found)
    part, _, name = fix[0].partition(".")
    settings = objective_preset(arguments[part]).settings[part]
    GRPO("MlpPolicy", CARTPOLE, **{part: settings | {name: fix[1]}})
    GRPO("MlpPolicy", CARTPOLE).save(tmp_path / "model")
    with pytest.raises(gw.errors.ConfigError, match="GRPO cannot take"):
        GRPO.load(tmp_path / "model", **arguments)


def test_the_update_has_every_argument():
    model = GRPO("MlpPolicy", CARTPOLE, n_steps=7, batch_size=8, n_epochs=9, kl_coef=0.1, kl_ref_iterations=3)
    cfg = update_cfg({name: vars(model)[name] for name in ARGUMENTS})
    assert (cfg.num_steps, cfg.minibatch_size, cfg.num_epochs) == (7, 8, 9)
    assert cfg.sync_ref_model.steps == 3
    assert cfg.model_fields_set <= GRPOCfg.model_fields.keys()


@pytest.mark.parametrize(
    ("kind", "policy"), [(PPO, "ActorCriticPolicy"), (A2C, "ActorCriticPolicy"), (DQN, "DQNPolicy")]
)
def test_a_file_of_another_algorithm_is_refused(tmp_path, kind, policy):
    path = tmp_path / "other.zip"
    kind("MlpPolicy", gymnasium.make(CARTPOLE), device="cpu").save(path)
    for source in (path, io.BytesIO(path.read_bytes())):
        with pytest.raises(
            gw.errors.ConfigError, match=rf"{policy} is not a policy without a critic.*load a file with the class"
        ):
            GRPO.load(source, env=gymnasium.make(CARTPOLE))
