import json
import math
import re
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from groupwise.config import json_schema, load_config, resolve, to_json
from groupwise.config import load as presets
from groupwise.config.algorithm import (
    AlgorithmCfg,
    CreditCfg,
    GroupStepCfg,
    GRPOCfg,
    LinearCfg,
    ObjectiveCfg,
    PPOCfg,
    StepCfg,
    register_algorithm,
)
from groupwise.config.policy import PolicyCfg, RecurrentCfg, VLACfg
from groupwise.config.run import EnvCfg, RunCfg
from groupwise.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write_file(content) -> Path:
        path = tmp_path / "run.json"
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write_file


def test_user_beats_environment_preset_field_by_field_also_with_the_default_of_the_class():
    cfg = resolve("CartPole-v1", GRPOCfg(gamma=0.99, credit=CreditCfg(eps=1.0)))
    assert (cfg.algorithm.gamma, cfg.algorithm.credit.eps) == (0.99, 1.0)
    assert (cfg.algorithm.group_size, cfg.algorithm.credit.baseline.name) == (4, "knn")
    assert (GRPOCfg().gamma, resolve("CartPole-v1").algorithm.gamma) == (0.99, 0.98)


def test_objective_preset_replaces_credit_and_objective_as_a_whole():
    cfg = resolve("CartPole-v1", preset="dr_grpo")
    assert cfg.algorithm.credit == CreditCfg(group_key="group", returns="outcome", scale="none")
    assert cfg.algorithm.objective == ObjectiveCfg(aggregation="constant")
    assert cfg.algorithm.group_size == 4  # the rest of the environment's preset stays
    own = resolve("CartPole-v1", {"credit": {"scale": "std"}}, preset="dr_grpo").algorithm
    assert (own.credit.scale, own.objective.aggregation.name) == ("std", "constant")


@pytest.mark.parametrize("preset", ["dr_grpo", None])
def test_the_algorithm_of_another_run_is_taken_as_a_whole(preset):
    """Also what that run had from a preset of a paper, or as a default, which the preset of the environment would replace."""
    cfg = resolve("CartPole-v1", "grpo", preset)
    assert resolve("CartPole-v1", cfg.algorithm) == cfg
    assert resolve("CartPole-v1", cfg.algorithm, "rloo") == resolve("CartPole-v1", "grpo", "rloo")  # as over a file
    assert GRPOCfg().objective.model_fields_set == set()


def test_the_preset_auto_is_the_environments(tmp_path):
    assert resolve("CartPole-v1", preset="auto") == resolve("CartPole-v1")
    (tmp_path / "run.json").write_text('{"env": {"id": "CartPole-v1"}, "preset": "dapo"}')
    assert load_config(tmp_path / "run.json", preset="auto") == resolve("CartPole-v1")


def test_clip_coef_of_the_user_sets_both_sides_over_a_preset():
    objective = resolve("CartPole-v1", GRPOCfg(clip_coef=0.3), preset="sb3_outcome").algorithm.objective
    clipped = objective.trust_region.parameters()
    assert (clipped["clip_low"], clipped["clip_high"], objective.ratio) == (0.3, 0.3, "sequence_product")


def test_clip_coef_of_a_file_is_under_what_is_given_over_it(write):
    def bounds(**over):
        region = load_config(write({"env": {"id": "CartPole-v1"}, "algorithm": {"clip_coef": 0.1}}), **over)
        return region.algorithm.objective.trust_region.clip_low, region.algorithm.objective.trust_region.clip_high

    assert bounds() == (0.1, 0.1)
    assert bounds(preset="dapo") == (0.2, 0.28)
    above = {"objective": {"trust_region": {"clip_high": 0.4}}}
    assert bounds(algorithm=above) == (0.1, 0.4)
    assert bounds(algorithm={"objective": {"trust_region": "gmpo"}}) == (0.2, 0.2)
    assert bounds(algorithm={"clip_coef": 0.3}, preset="dapo") == (0.3, 0.3)


def test_clip_coef_sets_the_sides_that_are_not_given_beside_it(write):
    def bounds(cfg):
        region = cfg.algorithm.objective.trust_region
        return region.clip_low, region.clip_high

    beside = {"clip_coef": 0.3, "objective": {"trust_region": {"clip_high": 0.4}}}
    for cfg in (resolve("CartPole-v1", GRPOCfg(**beside)), resolve("CartPole-v1", {"name": "grpo"} | beside, "dapo")):
        assert bounds(cfg) == (0.3, 0.4)
    file = write({"env": {"id": "CartPole-v1"}, "algorithm": beside})
    assert bounds(load_config(file)) == (0.3, 0.4)
    assert bounds(load_config(file, algorithm={"clip_coef": 0.1})) == (0.1, 0.1)
    file = write({"env": {"id": "CartPole-v1"}, "algorithm": {"objective": {"trust_region": "gmpo"}}})
    assert bounds(load_config(file, algorithm={"clip_coef": 0.1})) == (0.1, 0.1)


def test_a_share_of_warmup_is_one_of_any_budget():
    schedule = {"name": "linear", "warmup": 0.3}
    assert resolve("CartPole-v1", {"schedule": schedule}, total_iterations=1).algorithm.schedule.warmup == 0.3
    with pytest.raises(ConfigError, match=r"warmup=5 is not less than total_iterations=5"):
        resolve("CartPole-v1", {"schedule": schedule | {"warmup": 5}}, total_iterations=5)


def test_run_fields_as_configs_dicts_and_values():
    fields = {"env": EnvCfg(num_envs=3), "policy": {"hidden_sizes": [32]}, "run_dir": None, "device": None}
    cfg = resolve("MyEnv-v0", "ppo", **fields)
    assert (cfg.env.id, cfg.env.num_envs, cfg.policy.hidden_sizes, cfg.device) == ("MyEnv-v0", 3, (32,), "cpu")
    assert cfg.policy.normalize_obs  # the preset of other environments


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_json_round_trip(write, algorithm):
    cfg = resolve("Acrobot-v1", algorithm, seed=3, stop={"time_limit": 2.5}, run_dir="runs/x")
    assert load_config(write(to_json(cfg))) == cfg
    assert load_config(write(json.loads(to_json(cfg)) | {"provenance": {"git": None}})) == cfg  # of a run folder


def test_partial_file_is_resolved_and_overridden(write):
    env = {"id": "CartPole-v1", "kwargs": {"a": 1}}
    path = write({"env": env, "algorithm": {"name": "ppo", "gamma": 0.7}, "seed": 1})
    cfg = load_config(path, {"learning_rate": 0.5}, seed=2, env={"kwargs": {"b": 2}})
    assert isinstance(cfg.algorithm, PPOCfg)
    assert (cfg.algorithm.gamma, cfg.algorithm.learning_rate, cfg.seed) == (0.7, 0.5, 2)
    assert cfg.algorithm.num_steps == 64  # preset
    assert cfg.env.kwargs == {"b": 2}  # replaced, not merged
    assert load_config(write('{"env": {"id": "CartPole-v1"}, "total_steps": 1e5}')).total_steps == 100_000


def test_a_file_may_name_the_algorithm_alone(write):
    path = write({"env": {"id": "CartPole-v1"}, "algorithm": "ppo"})
    assert load_config(path) == resolve("CartPole-v1", "ppo")
    assert (
        load_config(path, {"gamma": 0.7}).algorithm == resolve("CartPole-v1", {"name": "ppo", "gamma": 0.7}).algorithm
    )
    with pytest.raises(ConfigError, match=r"preset 'dapo' .* which algorithm 'ppo' lacks"):
        load_config(path, preset="dapo")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_files_of_powershell_are_read(encoding, tmp_path):
    file = tmp_path / "of_windows.JSON"
    file.write_text('{"env": {"id": "CartPole-v1"}, "seed": 4}', encoding=encoding)
    assert load_config(file).seed == 4


def test_file_may_name_a_preset_and_the_argument_beats_it(write):
    path = write({"env": {"id": "CartPole-v1"}, "preset": "rloo"})
    assert load_config(path).algorithm.credit.baseline.name == "leave_one_out"
    assert load_config(path, preset="grpo").algorithm.credit.baseline.name == "mean"


def test_a_preset_beside_a_whole_file_replaces_its_credit_and_objective(write):
    algorithm = {"name": "grpo", "group_size": 6, "gamma": 0.7, "collection": {"horizon": 30}}
    path = write(json.loads(to_json(resolve("CartPole-v1", algorithm, preset="grpo"))))
    named = load_config(path, preset="dapo").algorithm
    fresh = resolve("CartPole-v1", preset="dapo").algorithm
    assert (named.credit, named.objective) == (fresh.credit, fresh.objective)
    assert named.collection == fresh.collection.model_copy(update={"horizon": 30})
    assert (named.group_size, named.gamma) == (6, 0.7)
    environments = load_config(path, preset="auto").algorithm
    assert environments.credit == resolve("CartPole-v1").algorithm.credit
    assert load_config(path, {"credit": {"scale": "none"}}, preset="dapo").algorithm.credit.scale == "none"
    with pytest.raises(ConfigError, match=r"preset 'dapo' .* which algorithm 'ppo' lacks"):
        load_config(write(json.loads(to_json(resolve("CartPole-v1", "ppo")))), preset="dapo")


BROKEN = [
    ('{\n  "env": {,\n', r"broken JSON: .* line 2 column 11"),
    (b"\xff\xff", "broken JSON: 'utf-8' codec"),
    ("[1]", "expected a JSON object, found list"),
    ({"seed": 1}, "no environment or task; fix"),
    ({"env": {"id": "CartPole-v1"}, "task": {}}, "leave out env or task"),
    ({"task": {}, "model": {"lora": {"rank": 3}}}, r"model\.lora: unknown key 'rank'; did you mean 'r'\?"),
    ({"task": {}, "algorithm": {"collection": {"horizon": 9}}}, r"algorithm\.collection\.horizon=9 has no effect"),
    ({"env": "CartPole-v1"}, 'env = \'CartPole-v1\': expected an object .*; fix: {"id": "CartPole-v1"}'),
    ({"task": {}, "model": "m"}, 'model = \'m\': expected an object .*; fix: {"path": "m"}'),
    ({"env": {"id": "CartPole-v1"}, "algorithm": "gpro"}, "unknown algorithm 'gpro': did you mean 'grpo'"),
    ({"env": {"id": "CartPole-v1"}, "seeed": 1}, r"unknown key 'seeed'; did you mean 'seed'\?"),
    ('{"env": {"id": "CartPole-v1"}, "seed": 1, "seed": 2}', "'seed'"),
    ('{"env": {"id": "CartPole-v1"}, "policy": {"name": "mlp", "name": "cnn"}}', "'name'"),
    ('{"env": {"id": "CartPole-v1"}, "seed": "1"}', "seed = '1'"),
    ('{"env": {"id": "CartPole-v1"}, "seed": true}', "seed = True"),
    ('{"env": {"id": "CartPole-v1"}, "policy": {"normalize_obs": 1}}', "normalize_obs = 1"),
    ('{"env": {"id": "CartPole-v1"}, "policy": {"normalize_obs": "yes"}}', "normalize_obs = 'yes'"),
    ('{"env": {"id": "CartPole-v1"}, "policy": {"hidden_sizes": 64}}', "policy.hidden_sizes = 64"),
    ('{"env": {"id": "CartPole-v1"}, "policy": {"hidden_sizes": [64, "64"]}}', "hidden_sizes = \\[64, '64'\\]"),
    ('{"env": {"id": "CartPole-v1"}, "logging": {"report_to": "wandb"}}', "logging.report_to = 'wandb'"),
    ('{"task": {"rewards": [{"nam": "exact"}]}}', "task.rewards.0: unknown key 'nam'"),
    ('{"task": {"rewards": [{"name": "exact", "weight": "2"}]}}', "weight = '2'"),
    ('{"task": {"rewards": [{"name": "exact", "weight": true}]}}', "weight = True"),
    ('{"task": {"rewards": {"name": "exact"}}}', "task.rewards = "),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_broken_files_say_what_and_where(write, content, message):
    with pytest.raises(ConfigError, match=rf"run\.json: .*{message}"):
        load_config(write(content))
    with pytest.raises(ConfigError, match=r"absent\.json: No such file"):
        load_config("absent.json")


def test_what_comes_besides_a_file_is_not_blamed_on_it(write):
    path = write({"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo", "gae_lambda": 0.9}})
    with pytest.raises(ConfigError, match=r"^settings of algorithm 'ppo' in the file do not fit 'grpo'; fix: "):
        load_config(path, "grpo")
    with pytest.raises(ConfigError, match=r"^algorithm\.gamma = 2"):
        load_config(path, algorithm={"gamma": 2})
    with pytest.raises(ConfigError, match=r"run\.json: seed = -1"):
        load_config(write({"env": {"id": "CartPole-v1"}, "seed": -1}), algorithm={"gamma": 0.5})


WRONG = [
    # a key: the nearest one, one of the groups below, or the same in another library
    ({"learning_rat": 1}, "algorithm: unknown key 'learning_rat'; did you mean 'learning_rate'?"),
    ({"credit": {"scail": "std"}}, "algorithm.credit: unknown key 'scail'; did you mean 'scale'?"),
    ({"name": "ppo", "gae_lamda": 1}, "did you mean 'gae_lambda'?"),
    ({"eps": 1}, "unknown key 'eps'; did you mean optimizer.eps or credit.eps?"),
    ({"kl_beta": 1}, "algorithm: unknown key 'kl_beta'; did you mean 'kl_coef'?"),
    ({"scale_rewards": True}, "unknown key 'scale_rewards'; did you mean credit.scale?"),
    ({"batch_group_updates": True}, "did you mean 'minibatch_size'?"),
    ({"clip_range": 1}, "algorithm: unknown key 'clip_range'; did you mean 'clip_coef'?"),
    ({"optimizer": {"epsilon": 1}}, "optimizer: unknown key 'epsilon'; did you mean 'eps'?"),
    ({"name": "ppo", "group_size": 4}, "algorithm: unknown key 'group_size'; known: clip_coef, "),
    # a value
    ({"credit": {"scale": "stdd"}}, "algorithm.credit.scale = 'stdd': expected one of std, "),
    ({"group_size": 1}, "algorithm.group_size = 1: input should be greater"),
    ({"clip_coef": "wide"}, "algorithm.clip_coef = 'wide': input should be a valid number"),
    ({"clip_coef": lambda left: left}, "algorithm.clip_coef = <function"),
    ({"num_epochs": "3"}, "num_epochs = '3' has the wrong type; fix: 3"),
    ({"credit": {"returns": "outcome"}}, "baseline='knn' needs returns='return_to_go'"),
    ({"kl_coef": 0.1, "sync_ref_model": True}, "sync_ref_model = True: expected settings by name"),
    ({"sync_ref_model": {"steps": 2}}, "sync_ref_model updates a reference, and kl_coef=0 has none"),
    ({"credit": {"baseline": 3}}, "credit.baseline = 3: expected settings by name"),
    # a choice
    ({"schedule": "linaer"}, "schedule: unknown schedule 'linaer': did you mean 'linear'"),
    ({"schedule": {"name": "linear", "decay": 1}}, "schedule: unknown key 'decay'; known: final, name, warmup"),
    ({"optimizer": {"name": "sgd", "momentum": 3}}, "optimizer.momentum = 3: input should be less"),
    ({"name": "grpoo"}, "unknown algorithm 'grpoo': did you mean 'grpo'"),
]
WRONG_IN_RUN = [
    ({"xyz": 1}, "unknown key 'xyz'; known: algorithm, "),
    ({"n_envs": 1}, "unknown key 'n_envs'; did you mean env.num_envs?"),
    ({"num_env": 1}, "unknown key 'num_env'; did you mean env.num_envs?"),
    ({"env": {"start_mode": "copy"}}, "start_mode = 'copy': expected one of native, snapshot, seed, fresh, none, auto"),
    (
        {"algorithm": {"schedule": {"name": "linear", "warmup": 2.5}}},
        "schedule.warmup = 2.5: input should be less than 1, or a valid integer, got a number with a fractional part",
    ),
    ({"n_steps": 1}, "unknown key 'n_steps'; did you mean algorithm.num_steps?"),
    ({"n_eval_episodes": 3}, "unknown key 'n_eval_episodes'; did you mean evaluation.episodes?"),
    ({"callback": []}, "unknown key 'callback'; here: callbacks of gw.train"),
    ({"policy": {"net_arch": [64]}}, "policy: unknown key 'net_arch'; did you mean 'hidden_sizes'?"),
    ({"policy": {"hidden_sizes": [64, 0]}}, "policy.hidden_sizes.1 = 0: input should be greater"),
    ({"policy": {"normalize_obs": 1}}, "normalize_obs = 1 has the wrong type; fix: true"),
    ({"total_steps": "many"}, "total_steps = 'many': input should be a valid integer"),
    ({"seed": True}, "seed = True has the wrong type; fix: 1"),
    ({"env": 3}, "env = 3: expected an object"),
    (
        {"env": {"kwargs": {"render_mode": "human"}}},
        "render_mode='human' opens windows in training; fix: leave it out",
    ),
    ({"env": EnvCfg}, "env = <class "),
    (
        {"algorithm": GRPOCfg(clip_coef=0.1), "preset": "cispo"},
        "clip_coef=0.1 sets clip_low and clip_high; trust_region='cispo' has no clip_high and clip_low",
    ),
]


def test_a_setting_of_several_types_is_refused_in_one_line():
    with pytest.raises(
        ConfigError, match=r"^PPOCfg: schedule\.warmup = <built-in function len>: expected data"
    ) as refused:
        PPOCfg(schedule={"name": "linear", "warmup": len})
    assert str(refused.value).count("expected data") == 1


@pytest.mark.parametrize(("fields", "message"), [*(({"algorithm": one}, said) for one, said in WRONG), *WRONG_IN_RUN])
def test_wrong_settings_name_key_value_and_fix(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve("CartPole-v1", **fields)


@pytest.mark.parametrize("fields", [fields for fields, message in WRONG if "'knn'" not in message])
def test_a_config_built_in_python_complains_as_a_file_does(fields):
    cfg_type = PPOCfg if fields.get("name") == "ppo" else GRPOCfg
    with pytest.raises(ConfigError, match=f"^{cfg_type.__name__}: ") as caught:
        cfg_type(**fields)
    assert isinstance(caught.value, ValueError)


def test_every_mistake_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        resolve("CartPole-v1", {"gama": 1, "epochs": 1}, policy={"hidden": 1}, seed=-1)
    assert [line.split(";")[0] for line in str(caught.value).splitlines()] == [
        "algorithm: unknown key 'gama'",
        "seed = -1: input should be greater than or equal to 0",
        "policy: unknown key 'hidden'",
    ]
    assert "unknown key 'epochs'; did you mean 'num_epochs'?" in str(caught.value)


class MineCfg(GRPOCfg):
    """A user's algorithm on top of GRPO."""

    name: Literal["mine"] = "mine"
    temperature: float = 1.0
    """Of something."""


class Mine:
    pass


def test_registered_subclass_survives_the_round_trip_and_inherits_presets(registry, write):
    assert register_algorithm(MineCfg)(Mine) is Mine
    assert AlgorithmCfg.named("mine").algorithm is Mine
    cfg = resolve("CartPole-v1", MineCfg(temperature=2.0))
    again = load_config(write(to_json(cfg)))
    assert again == cfg
    assert again.algorithm == MineCfg(**cfg.algorithm.model_dump())
    assert resolve("CartPole-v1", "mine").algorithm.group_size == 4
    assert resolve("CartPole-v1", "mine", preset="rloo").algorithm.credit.baseline.name == "leave_one_out"


def test_a_config_needs_a_name_of_its_own(registry):
    class OwnCfg(AlgorithmCfg, name="own"):
        """Without presets."""

    class ThiefCfg(AlgorithmCfg):
        """Takes a name that is taken."""

        name: str = "ppo"

    class StrangerCfg(PPOCfg):
        """Not registered, but with a known name."""

    register_algorithm(OwnCfg)(Mine)
    register_algorithm(OwnCfg)(Mine)
    assert resolve("CartPole-v1", "own").algorithm == OwnCfg()
    for cfg_type, message in ((ThiefCfg, "'ppo' is registered already"), (AlgorithmCfg, "AlgorithmCfg has no name")):
        with pytest.raises(ConfigError, match=message):
            register_algorithm(cfg_type)
    with pytest.raises(ConfigError, match=r"fix: class StrangerCfg\(\.\.\., name="):
        RunCfg(algorithm=StrangerCfg())


def test_schema_knows_the_algorithms_and_the_file_s_own_key():
    whole = json_schema()
    schema = whole["$defs"]["RunCfg"]
    names, *others = schema["properties"]["algorithm"]["anyOf"]
    assert {*names["enum"]} >= {"grpo", "ppo"}
    variants = {ref["$ref"].rsplit("/")[-1] for ref in others}
    assert variants >= {"GRPOCfg", "PPOCfg"}  # other tests may have registered more
    assert "dr_grpo" in schema["properties"]["preset"]["anyOf"][0]["enum"]
    assert whole["$defs"]["GRPOCfg"]["properties"]["group_size"]["description"]
    assert schema["additionalProperties"] is False
    assert whole["$defs"]["TextRunCfg"]["properties"].keys() >= {"task", "model", "algorithm", "preset"}


def test_a_derived_configs_own_default_holds_against_its_bases_preset(registry):
    class Quick(GRPOCfg, name="quick"):
        num_epochs: int = 1
        group_size: int = 8  # as in the base, but said anew

    register_algorithm(Quick)(object)
    cfg = resolve("CartPole-v1", Quick())
    assert (cfg.algorithm.num_epochs, cfg.algorithm.group_size) == (1, 8)
    assert cfg.algorithm.learning_rate == resolve("CartPole-v1", "grpo").algorithm.learning_rate


@pytest.mark.parametrize("rules", [{"finished_members": "zero"}, {"singleton": "trajectory"}])
@pytest.mark.parametrize("given", [lambda c: GRPOCfg(credit=c), lambda c: {"credit": c}], ids=["config", "dictionary"])
def test_rules_for_single_steps_go_over_a_preset_that_compares_steps(rules, given):
    full = {"group_key": {"name": "group_step", **rules}, "returns": "return_to_go"}
    credit = resolve("CartPole-v1", given(full), preset="embodichain").algorithm.credit
    assert credit == CreditCfg(**full, scale="population_std", eps=1e-8)
    short = {"credit": {"group_key": rules}}
    assert resolve("CartPole-v1", short, preset="embodichain").algorithm.credit == credit
    with pytest.raises(ConfigError, match="group_key: unknown key"):
        resolve("CartPole-v1", short, preset="grpo")
    assert resolve("CartPole-v1", given(full), preset="grpo").algorithm.credit.group_key == GroupStepCfg(**rules)


@pytest.mark.parametrize("given", ["linear", {"name": "linear"}, LinearCfg(), {"name": "linear", "final": 0.0}])
def test_a_choice_is_given_by_name_fields_or_config(given):
    assert resolve("CartPole-v1", {"name": "grpo", "schedule": given}).algorithm.schedule == LinearCfg()
    assert GRPOCfg(schedule=given).schedule == LinearCfg()


def test_another_choice_drops_the_parameters_of_the_one_below(tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"env": {"id": "CartPole-v1"}, "algorithm": {"schedule": {"name": "linear", "final": 0.25}}}')
    assert load_config(path, {"schedule": {"name": "step", "decay": 0.1}}).algorithm.schedule == StepCfg(decay=0.1)
    assert load_config(path, {"schedule": "linear"}).algorithm.schedule == LinearCfg(final=0.25)


@pytest.mark.parametrize("policy", [PolicyCfg(hidden_sizes=(8,)), RecurrentCfg(cell="gru"), VLACfg(num_layers=1)])
def test_a_saved_policy_goes_over_a_preset_of_another_one(policy, write, monkeypatch):
    path = write(json.loads(to_json(resolve("CartPole-v1", "grpo", policy=policy))))
    monkeypatch.setattr(
        presets, "env_preset", lambda env_id: {"grpo": {"policy": {"name": "recurrent", "cell": "lstm"}}}
    )
    assert load_config(path).policy == policy


def test_arguments_of_an_environment_survive_the_round_trip_or_are_refused(write):
    cfg = resolve("CartPole-v1", env={"kwargs": {"range": (0.7, math.inf), "nested": {"a": [None, True]}}})
    path = write(to_json(cfg))
    assert load_config(path).env.kwargs == {"range": [0.7, math.inf], "nested": {"a": [None, True]}}
    for value, message in {
        "table": (
            {0: 1.0},
            r"env\.kwargs: \['table'\] has the key 0, and keys in a config file are text; fix: numbers",
        ),
        "array": ([np.zeros(2)], r"env\.kwargs: \['array'\]\[0\] = array\(\[0\., 0\.\]\) cannot be in a config file"),
        "function": (print, "cannot be in a config file"),
        "bytes": (b"a", "cannot be in a config file"),
    }.items():
        with pytest.raises(ConfigError, match=message[1]):
            resolve("CartPole-v1", env={"kwargs": {value: message[0]}})


def test_clip_coef_leaves_the_preset_s_objective_beside_an_object():
    given = GRPOCfg(clip_coef=0.1, objective=ObjectiveCfg(old_log_prob="recomputed"))
    assert given.objective.model_fields_set == {"old_log_prob", "trust_region"}
    objective = resolve("CartPole-v1", given, preset="gspo").algorithm.objective
    assert (objective.ratio, objective.aggregation.name) == ("sequence", "seq_mean_token_mean")
    assert (objective.trust_region.clip_low, objective.old_log_prob) == (0.1, "recomputed")
