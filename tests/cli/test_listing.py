import pytest

from groupwise import cli
from groupwise.config import load as presets
from groupwise.config.algorithm import AlgorithmCfg, PPOCfg


def listed(capsys, word):
    assert cli.main(["list", word]) == 0
    return capsys.readouterr().out


def test_list_shows_presets_algorithms_and_choices_with_sources(capsys):
    out = listed(capsys, "")
    names = ("grpo", "ppo", "LunarLander-v3", "dr_grpo", "embodichain", "--algorithm.credit.scale", "batch_std: one")
    assert all(name in out for name in (*names, "arxiv.org/abs/2503.20783"))


@pytest.mark.parametrize("columns", [80, 120])
def test_list_fits_the_terminal_and_says_what_each_preset_chooses(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > columns and "://" not in line] == []  # addresses stay whole
    for name, preset in presets.objective_presets().items():
        start = next(i for i, line in enumerate(lines) if line.startswith(f"{name}: {preset.title[:20]}"))
        entry = " ".join(line.strip() for line in lines[start : start + 14])
        for value in preset.settings["objective"].values():
            assert not isinstance(value, str) or value in entry, name


def test_list_shows_what_is_asked_for(capsys):
    assert cli.main(["list", "cispo"]) == 0
    out = capsys.readouterr().out
    assert '"trust_region": {"name": "cispo", "low": null, "high": 5.0}' in " ".join(out.split())
    assert "--algorithm.objective.trust-region" in out
    assert "embodichain" not in out
    assert cli.main(["list", "Ent_Coef: 0.0"]) == 0
    assert capsys.readouterr().out.count("https://") == 1


def test_list_shows_nothing_but_what_contains_the_word(capsys):
    out = listed(capsys, "gspo")
    assert "--algorithm.objective.ratio sequence_token: " in out
    assert "sequence_product: " not in out  # another choice of the same setting, which has nothing to do with it
    out = listed(capsys, "CartPole-v1")
    assert "CartPole-v1: grpo, ppo" in out
    assert "Acrobot" not in out
    assert "Algorithms" not in out


def test_list_of_a_setting_shows_all_its_choices(capsys):
    out = listed(capsys, "credit.scale")
    values = [key.rsplit(".", 1)[1] for key in presets.choices() if key.startswith("credit.scale.")]
    assert len(values) > 3
    assert all(f"--algorithm.credit.scale {value}: " in out for value in values)


def test_list_of_an_unknown_word_names_the_nearest_or_every_preset(capsys):
    assert cli.main(["list", "gspoo"]) == 2
    assert "no entry contains 'gspoo'; did you mean 'gspo'?" in capsys.readouterr().err
    assert cli.main(["list", "qqq"]) == 2
    err = capsys.readouterr().err
    assert all(name in err for name in presets.objective_presets())
    assert len(presets.objective_presets()) > 20
    assert err.count("\n") == 1


def test_list_takes_an_algorithm_that_says_nothing_of_itself(capsys, registry):
    class SilentCfg(PPOCfg):
        name: str = "silent"

    AlgorithmCfg.known["silent"] = SilentCfg
    assert "\nsilent:\n" in listed(capsys, "silent")
