"""``--launcher``: what is started, and what is refused."""

import pytest

from groupwise import cli
from groupwise.cli import train
from groupwise.cli.options import Parser


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workers 2", "--workers is for several processes; fix: --launcher torchrun, or ray"),
        ("--launcher torchrun --gpus 1", "--gpus is for --launcher ray; fix: leave it out"),
        ("--launcher rya", "expected local or torchrun or ray, got 'rya'; did you mean 'ray'?"),
        ("--launcher ray", "several processes need one run folder; fix: --run-dir"),
        ("--launcher torchrun --run-dir .", "run folder '.' is taken"),
        ("--launcher torchrun --algorithm.gama 1 --run-dir x", "unknown option --algorithm.gama"),
        ("--launcher ray --cpus nan", "--cpus nan: expected a number of at least 0"),
        ("--launcher ray --gpus -1", "--gpus -1: expected a number of at least 0"),
        ("--launcher ray --gpus 0.5", "--gpus"),
        ("--server-gpus 1", "--server-gpus is for --launcher ray; fix: leave it out"),
        ("--launcher ray --server-cpus inf", "--server-cpus inf: expected a number of at least 0"),
        ("--launcher ray --servers 0", "--servers: expected a whole number of at least 1"),
        ("--launcher ray --run-dir x --profile", "--profile is not for --launcher ray"),
        ("--launcher torchrun --seeds 0-2", "--seeds has processes of its own; fix: leave --launcher out"),
    ],
)
def test_mistakes(words, message, capsys):
    assert cli.main(["train", "CartPole-v1", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--launcher ray --total-steps 9000",
            "--launcher ray takes the run folder alone, got 'runs/x --total-steps 9000'",
        ),
        ("--launcher torchrun --fork runs/y", "--fork is of one process"),
    ],
)
def test_mistakes_of_resume(words, message, capsys):
    assert cli.main(["resume", "runs/x", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train CartPole-v1 --run-dir runs/new", "resume runs/x"])
def test_torchrun_gets_all_other_words(command, monkeypatch, tmp_path):
    class ReplacedError(Exception):
        """This process goes on as another program."""

    def execv(program, words):
        raise ReplacedError(words)

    plugin = tmp_path / "mine.py"
    plugin.write_text("")
    monkeypatch.setattr(train.os, "execv", execv)
    with pytest.raises(ReplacedError) as caught:
        cli.main(f"{command} --total-steps 5 --launcher torchrun --workers 4 --plugin {plugin}".split())
    [words] = caught.value.args
    ours = words.index("groupwise")
    assert words[1:ours] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m"]
    assert words[ours + 1 :] == f"{command} --total-steps 5 --plugin {plugin}".split()


def test_ray_gets_what_it_keeps_for_workers_and_servers(capsys):
    pytest.importorskip("ray")
    from groupwise.integrations.ray import Servers, Workers

    words = "train text.json --launcher ray --cpus 3 --servers 2 --server-cpus 4 --server-gpus 1"
    launch, rest = train.parse_launch(Parser(), words.split())
    assert rest == ["train", "text.json"]
    assert train.on_ray(launch) == {"workers": Workers(2, cpus=3), "servers": Servers(2, cpus=4, gpus=1)}
    launch, _ = train.parse_launch(Parser(), ["--launcher", "ray"])
    assert train.on_ray(launch) == {"workers": Workers(2), "servers": None}
    assert capsys.readouterr().err.count("to follow it: groupwise view") == 2
