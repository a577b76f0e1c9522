"""``--launcher``: what is started, and what is refused."""

import pytest

from groupwise import cli
from groupwise.cli import launch


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workers 2", "--workers is for several processes; fix: --launcher torchrun, or ray"),
        ("--launcher torchrun --gpus 1", "--gpus is for --launcher ray; fix: leave it out"),
        ("--launcher rya", "expected local or torchrun or ray, got 'rya'; did you mean 'ray'?"),
        ("--launcher ray", "several processes need one run folder, got run_dir=None; fix: set run_dir"),
        ("--launcher torchrun --seeds 0-2", "--seeds has processes of its own; fix: leave --launcher out"),
    ],
)
def test_mistakes(words, message, capsys):
    assert cli.main(["train", "CartPole-v1", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "resume"])
def test_torchrun_gets_all_other_words(command, monkeypatch, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text("")
    called = []
    monkeypatch.setattr(launch.subprocess, "call", lambda words: called.append(words) or 3)
    words = f"{command} runs/x --total-steps 5 --launcher torchrun --workers 4 --plugin {plugin}"
    assert cli.main(words.split()) == 3
    ours = called[0].index("groupwise")
    assert called[0][1:ours] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m"]
    assert called[0][ours + 1 :] == f"{command} runs/x --total-steps 5 --plugin {plugin}".split()
