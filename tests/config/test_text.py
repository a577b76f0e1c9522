"""Settings of texts: read without heavy packages, and their mistakes are explained."""

import subprocess
import sys

import pytest

from groupwise.config.text import RewardCfg, TextTaskCfg
from groupwise.errors import ConfigError


def test_tasks_and_rewards_import_neither_torch_nor_model_libraries():
    heavy = "{'torch', 'transformers', 'pyarrow', 'pandas', 'reasoning_gym', 'sympy', 'math_verify', 'datasets'}"
    code = f"import sys, groupwise.text.task, groupwise.text.builtin_rewards; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_settings_survive_json():
    cfg = TextTaskCfg(
        data="reasoning-gym:chain_sum",
        data_kwargs={"max_terms": 2},
        rewards=(RewardCfg(name="regex", weight=0.1, kwargs={"pattern": "a"}),),
    )
    assert TextTaskCfg.model_validate_json(cfg.model_dump_json()) == cfg


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rewards": ({"name": "exact", "wieght": 2},)}, "rewards.0: unknown key 'wieght'"),
        ({"on_long_prompt": "cut"}, "on_long_prompt = 'cut': expected one of error, drop"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens = 0"),
        ({"chat": "always"}, "chat = 'always': expected one of auto, never"),
    ],
)
def test_mistakes_are_explained(fields, message):
    with pytest.raises(ConfigError, match=message):
        TextTaskCfg(**fields)
