"""YAML settings are those of the same JSON."""

import pytest

import groupwise as gw
from groupwise import cli
from groupwise.config.load import resolve, to_json
from groupwise.errors import ConfigError, MissingExtraError

pytest.importorskip("yaml")

SETTINGS = """
# a comment
env: {id: CartPole-v1, kwargs: {}}
speed: off              # text, not false
algorithm:
  name: ppo
  learning_rate: 1e-4   # a number, without a dot too
  target_kl: ~
  clip_coef: .2
policy:
  hidden_sizes: [32, 64]
  normalize_obs: true
seed: 07
"""


def test_values_are_those_of_json(tmp_path):
    (tmp_path / "run.yaml").write_text(SETTINGS)
    algorithm = {"name": "ppo", "learning_rate": 1e-4, "target_kl": None, "clip_coef": 0.2}
    policy = {"hidden_sizes": [32, 64], "normalize_obs": True}
    expected = resolve("CartPole-v1", algorithm, policy=policy, speed="off", seed=7)
    assert gw.load_config(tmp_path / "run.yaml") == expected


@pytest.mark.parametrize("name", ["run.yml", "RUN.YAML"])
def test_the_command_line_takes_it(tmp_path, capsys, name):
    (tmp_path / name).write_text("{env: {id: Pendulum-v1}, seed: 3}")
    file = str(tmp_path / name)
    assert cli.main(["config", file, "--total-steps", "9"]) == 0
    assert capsys.readouterr().out.strip() == to_json(gw.load_config(file, total_steps=9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("env: {id: [", "broken YAML: while parsing"),
        ("- 1", "expected a YAML object, found list"),
        ("env: {id: CartPole-v1}\nseed: 1\nseed: 2", "broken YAML: the key 'seed' comes twice"),
        ("a: &a [1]\nb: *a", "broken YAML: line 2 has an alias; fix: write the value again"),
        ("a: !!python/object/apply:os.getcwd []", "broken YAML: could not determine a constructor"),
        ("a: !!binary aGk=", "broken YAML: Object of type bytes"),
        ("a: " + "[" * 5_000, "broken YAML: "),
        ("env: {id: CartPole-v1}\nsead: 1", "unknown key 'sead'; did you mean 'seed'"),
        ("env: {id: CartPole-v1}\nalgorithm: {gamma: .inf}", r"algorithm\.gamma = '\.inf'"),
        ("env: {id: CartPole-v1}\nseed: '1'", "seed = '1' has the wrong type"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        gw.load_config(tmp_path / "run.yaml")


def test_without_pyyaml_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(SETTINGS)
    monkeypatch.setattr("groupwise.errors.find_spec", lambda module: None)
    with pytest.raises(MissingExtraError, match=r"'yaml' is not installed; fix: pip install -e '\.\[yaml\]'"):
        gw.load_config(tmp_path / "run.yaml")
