import json

import pytest
from tiny_models import tiny_model

from groupwise import cli


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tiny_model().config.save_pretrained(folder / "model")
    settings = {"task": {"data": "none.jsonl"}, "model": {"path": str(folder / "model")}}
    (folder / "run.json").write_text(json.dumps(settings | {"sampling": {"max_new_tokens": 100}}))
    return str(folder / "run.json")


def test_the_plan_is_a_table(run_file, capsys):
    assert cli.main(["plan", run_file, "--gpus", "8", "--gpu", "h100", "--engine", "fsdp"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[:4] == [
        "Llama, 18,080 parameters, all trained, in float32",
        "8 x h100 (80 GB), engine fsdp",
        "A step: 512 completions of at most 100 tokens",
        "Prompts of 256 tokens (assumed; --prompt-tokens)",
    ]
    shown = ("weights, whole, to generate", "weights, 1/8, to train", "only in generation", "of 72.0 usable: fits")
    assert all(word in out for word in shown)


def test_what_does_not_fit_ends_in_1_with_a_fix(run_file, capsys):
    assert cli.main(["plan", run_file, "--gpu", "rtx4090", "--num-prompts", "100000"]) == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out
    assert "fix: one of\n  --generation server " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan", "expected a file of settings first, as in: groupwise plan text.json"),
        ("plan CartPole-v1", "CartPole-v1 is a run on an environment; plan is for runs on texts; fix: "),
        ("plan FILE --gpu h10", "unknown GPU 'h10': did you mean 'h100'"),
        ("plan FILE --gpus 0", "--gpus: expected a whole number of at least 1"),
        ("plan FILE --gpuss 2", "unknown option --gpuss; did you mean --gpus?"),
    ],
)
def test_mistakes(run_file, capsys, words, message):
    assert cli.main(words.replace("FILE", run_file).split()) == 2
    assert message in capsys.readouterr().err
