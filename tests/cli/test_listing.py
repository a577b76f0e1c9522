import pytest

from groupwise import cli
from groupwise.config import load as presets
from groupwise.config.algorithm import AlgorithmCfg, PPOCfg


@pytest.mark.parametrize("columns", [80, 120])
def test_list_fits_the_terminal_and_says_what_each_preset_chooses(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["list", "presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > columns and "://" not in line] == []  # addresses stay whole
    for name, preset in presets.objective_presets().items():
        start = next(i for i, line in enumerate(lines) if line.startswith(f"{name}: {preset.title[:20]}"))
        entry = " ".join(line.strip() for line in lines[start : start + 14])
        for value in preset.settings["objective"].values():
            assert not isinstance(value, str) or value in entry, name


SCALES = [f"credit.scale {key.rsplit('.', 1)[1]}: " for key in presets.choices() if key.startswith("credit.scale.")]


@pytest.mark.parametrize(
    ("word", "shown", "left_out"),
    [
        ("", ["bc, grpo, ", "LunarLander-v3", "embodichain", "--algorithm.credit.scale std, "], ["arxiv.org"]),
        ("choices", [*SCALES, "batch_std: one"], ["Algorithms"]),
        ("presets", ["dr_grpo: Dr. GRPO", "arxiv.org/abs/2503.20783"], ["LunarLander-v3"]),
        ("cispo", ['{"name": "cispo", "low": null, "high": 5.0}', "objective.trust-region"], ["embodichain"]),
        ("Ent_Coef: 0.0", ["https://"], ["embodichain"]),
        ("gspo", ["--algorithm.objective.ratio sequence_token: "], ["sequence_product: "]),  # another choice of it
        ("CartPole-v1", ["CartPole-v1: grpo, ppo"], ["Acrobot", "Algorithms"]),
        ("credit.scale", SCALES, ["credit.baseline"]),
    ],
)
def test_list_shows_what_contains_the_word(word, shown, left_out, capsys):
    assert cli.main(["list", word]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert word or len(lines) < 48  # a screen
    out = " ".join(" ".join(lines).split())
    assert [one for one in shown if one not in out] == []
    assert [one for one in left_out if one in out] == []


def test_list_of_an_unknown_word_names_every_preset(capsys):
    assert cli.main(["list", "qqq"]) == 2
    err = capsys.readouterr().err
    assert "no entry contains 'qqq'" in err
    assert all(name in err for name in presets.objective_presets())
    assert len(presets.objective_presets()) > 20


def test_list_takes_an_algorithm_that_says_nothing_of_itself(capsys, registry):
    class SilentCfg(PPOCfg):
        name: str = "silent"

    AlgorithmCfg.known["silent"] = SilentCfg
    assert cli.main(["list", "silent"]) == 0
    assert "\nsilent:\n" in capsys.readouterr().out
