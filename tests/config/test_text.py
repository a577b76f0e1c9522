"""Settings of texts: read without heavy packages, and their mistakes are explained."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from groupwise.config import resolve, resolve_text
from groupwise.config.algorithm import GRPOCfg
from groupwise.config.load import objective_preset
from groupwise.config.policy import SamplingCfg
from groupwise.config.run import RewardCfg, TextEvaluationCfg, TextRunCfg, TextTaskCfg
from groupwise.errors import ConfigError


def test_tasks_and_rewards_import_neither_torch_nor_model_libraries():
    heavy = "{'torch', 'transformers', 'pyarrow', 'pandas', 'reasoning_gym', 'sympy', 'math_verify', 'datasets'}"
    code = f"import sys, groupwise.text.task, groupwise.text.builtin_rewards; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_sampling_of_the_evaluation_is_that_of_training_but_for_what_it_says():
    sampling = {"max_new_tokens": 512, "stop": ("</a>",), "temperature": 0.7}
    for own in ({"temperature": 1.0, "top_k": 20}, SamplingCfg(temperature=1.0, top_k=20)):
        for settings in ({"sampling": own}, TextEvaluationCfg(sampling=own)):
            cfg = resolve_text(task={"data": "x.jsonl"}, model={"path": "m"}, sampling=sampling, evaluation=settings)
            whole = SamplingCfg(max_new_tokens=512, stop=("</a>",), temperature=1.0, top_k=20)
            assert cfg.evaluation.sampling == whole
            assert TextRunCfg(sampling=sampling, evaluation=settings).evaluation.sampling == whole
            assert TextRunCfg.model_validate_json(cfg.model_dump_json()) == cfg
    assert TextRunCfg(sampling=sampling).evaluation.sampling is None
    with pytest.raises(ConfigError, match=r"evaluation: .*min_new_tokens=9 > max_new_tokens=8; fix"):
        TextRunCfg(sampling={"min_new_tokens": 9}, evaluation={"sampling": {"max_new_tokens": 8}})


def test_settings_survive_json():
    rewards = (RewardCfg(name="regex", weight=0.1, kwargs={"pattern": "a"}),)
    cfg = TextTaskCfg(data="reasoning-gym:chain_sum", data_kwargs={"max_terms": 2}, rewards=rewards)
    assert TextTaskCfg.model_validate_json(cfg.model_dump_json()) == cfg


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rewards": ({"name": "exact", "wieght": 2},)}, "rewards.0: unknown key 'wieght'"),
        ({"on_long_prompt": "cut"}, "on_long_prompt = 'cut': expected one of error, drop"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens = 0"),
        (
            {"tools": ("add",), "on_long_prompt": "drop"},
            "on_long_prompt='drop' is of prompts that are known before training",
        ),
        ({"chat": "always"}, "chat = 'always': expected one of auto, never"),
        ({"data_size": 5}, "data_size=5"),
        ({"data": "a.jsonl", "data_kwargs": {"max_terms": 2}}, "data_kwargs="),
        ({"data": "reasoning-gym:chain_sum", "eval_data": "a.jsonl", "eval_size": 5}, "eval_size=5"),
    ],
)
def test_mistakes_are_explained(fields, message):
    with pytest.raises(ConfigError, match=message):
        TextTaskCfg(**fields)


def test_a_discount_and_names_of_parts_that_nothing_reads_are_refused():
    discounted = {"returns": "return_to_go", "group_key": "group_step"}
    assert resolve_text({"gamma": 0.9, "credit": discounted}).algorithm.gamma == 0.9
    assert resolve_text({"name": "ppo", "gamma": 0.9}).algorithm.gamma == 0.9
    assert TextRunCfg(algorithm=GRPOCfg(group_size=4)).algorithm.group_size == 4
    for setting, value in {"gamma": 0.9, "credit": {"reward": {"name": "parts", "names": ["exact"]}}}.items():
        with pytest.raises(ConfigError, match=f"{setting}.* has no effect"):
            resolve_text({setting: value}, task={"data": "prompts.jsonl"}, model={"path": "model"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": {"tool": "calculator", "max_episode_tokens": 5}}, r"max_episode_tokens=5 is less than a turn, .*=16"),
        (
            {"algorithm": {"credit": {"reward": "parts"}}, "overlong_buffer": 8},
            "overlong_buffer has no effect on parts",
        ),
        (
            {
                "algorithm": {"credit": {"reward": "parts", "returns": "turn_to_go", "group_key": "group_step"}},
                "task": {"tool": "calculator"},
            },
            r"algorithm\.credit\.returns='turn_to_go' has no effect on parts",
        ),
        ({"algorithm": {"name": "bc", "schedule": "adaptive_kl"}}, "schedule='adaptive_kl' has no effect on behaviour"),
    ],
)
def test_settings_that_would_not_hold_are_refused(fields, message):
    algorithm = fields.pop("algorithm", {"name": "grpo"})
    task = {"data": "prompts.jsonl"} | fields.pop("task", {})
    with pytest.raises(ConfigError, match=message):
        resolve_text(algorithm, task=task, model={"path": "model"}, sampling={"max_new_tokens": 16}, **fields)


def test_a_tool_has_a_time_limit_of_its_own():
    with pytest.raises(ConfigError, match=r"env_timeout=2 leaves a tool that hangs to itself, .*; fix: tool_timeout"):
        resolve_text(task={"tool": "calculator", "env_timeout": 2.0})


@pytest.mark.parametrize("name", ["gigpo", "knn", "lstd"])
def test_texts_have_no_states_to_compare(name):
    """Their observations are single tokens: for ``6 7 8`` and ``9 7 4`` the two 7 would count as one state."""
    for how in ({"preset": name}, {"algorithm": {"credit": objective_preset(name).settings["credit"]}}):
        with pytest.raises(ConfigError, match=rf"credit.baseline='{name}' compares states .*; fix: baseline='mean'"):
            resolve_text(**how)
        if name == "gigpo":  # the turns of an environment have states
            for task in ({"env": "x"}, {"tools": ["x"]}, {"tool": "calculator"}):
                assert resolve_text(**how, task=task).algorithm.credit.baseline.name == name
        else:
            with pytest.raises(ConfigError, match=rf"credit.baseline='{name}' compares states"):
                resolve_text(**how, task={"env": "x"})
    assert resolve("CartPole-v1", preset=name).algorithm.credit.baseline.name == name


@pytest.mark.parametrize(
    ("settings", "is_wrong"),
    [
        ({"credit": {"returns": "process"}}, True),
        ({"credit": {"returns": "return_to_go"}, "gamma": 0.9}, True),
        ({"credit": {"returns": "return_to_go", "group_key": "group_step"}}, True),
        ({"credit": {"returns": "return_to_go"}}, False),
        ({"credit": {"returns": "turn_to_go", "group_key": "group_step"}, "gamma": 0.9}, False),
        ({"credit": {"rule": "mine", "returns": "process"}}, False),
    ],
)
@pytest.mark.parametrize("task", [{"env": "x"}, {"tools": ["x"]}, {"tool": "calculator"}])
def test_credit_that_counts_tokens_is_refused_where_an_environment_answers_turns(task, settings, is_wrong):
    if "turn_to_go" not in str(settings):
        assert not resolve_text(settings).task.has_env
    if is_wrong:
        with pytest.raises(ConfigError, match=r"counts tokens, .*; fix: credit.returns='turn_to_go' with group_key="):
            resolve_text(settings, task=task)
    else:
        assert resolve_text(settings, task=task).task.has_env


@pytest.mark.parametrize(("model", "rate"), [({}, 1e-6), ({"lora": {"r": 2}}, 1e-5), ({"path": "saved"}, 1e-5)])
def test_the_default_rate_of_adapters_is_higher(model, rate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "adapter_config.json").write_text("{}")
    for algorithm in ("grpo", "ppo"):
        assert resolve_text(algorithm, model=model).algorithm.learning_rate == rate
    assert resolve_text({"learning_rate": 1e-3}, model=model).algorithm.learning_rate == 1e-3


def test_settings_without_a_preset_are_read_back():
    cfg = TextRunCfg(
        task={"data": "x.jsonl", "rewards": [{"name": "exact"}]}, model={"path": "m"}, algorithm={"group_size": 2}
    )
    assert TextRunCfg.model_validate_json(cfg.model_dump_json()) == cfg
    with pytest.raises(
        ValidationError, match=r"algorithm.gamma=0.9 has no effect with credit.returns='outcome'; fix: leave"
    ):
        TextRunCfg.model_validate(cfg.model_dump() | {"algorithm": {"name": "grpo", "gamma": 0.9}})


def test_prime_rl_divides_by_the_sampler_s_probabilities_also_where_texts_recompute_them():
    assert resolve_text().algorithm.objective.old_log_prob == "recomputed"
    assert resolve_text(preset="prime_rl").algorithm.objective.old_log_prob == "sampled"
    assert resolve_text(preset="dppo").algorithm.objective.old_log_prob == "recomputed"  # as in TRL
