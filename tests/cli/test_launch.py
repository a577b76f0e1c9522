"""``--launcher ray``: what is started, and what is refused."""

import pytest

from groupwise import cli
from groupwise.cli import train
from groupwise.cli.options import Parser


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train CartPole-v1 --workers 2", "--workers is for --launcher ray"),
        ("train CartPole-v1 --gpus 1", "--gpus is for --launcher ray"),
        ("train CartPole-v1 --launcher rya", "'ray'"),
        ("train CartPole-v1 --launcher ray", "--run-dir"),
        ("train CartPole-v1 --launcher ray --run-dir .", "run folder '.' is taken"),
        ("train CartPole-v1 --launcher ray --algorithm.gama 1 --run-dir x", "--algorithm.gama"),
        ("train CartPole-v1 --launcher ray --cpus nan", "--cpus nan"),
        ("train CartPole-v1 --launcher ray --gpus -1", "--gpus -1"),
        ("train CartPole-v1 --launcher ray --run-dir x --profile", "--profile is not for --launcher ray"),
        ("train CartPole-v1 --launcher ray --seeds 0-2", "--seeds has processes of its own"),
        ("resume runs/x --launcher ray --total-steps 9000", "takes the run folder alone"),
        ("resume runs/x --launcher ray --fork runs/y", "takes the run folder alone"),
    ],
)
def test_mistakes(words, message, capsys):
    assert cli.main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_ray_gets_what_it_keeps_for_workers(capsys):
    pytest.importorskip("ray")
    from groupwise.integrations.ray import Workers

    words = "train text.json --launcher ray --cpus 3 --gpus 1"
    launch, rest = train.parse_launch(Parser(), words.split())
    assert rest == ["train", "text.json"]
    assert train.on_ray(launch) == Workers(2, cpus=3, gpus=1)
    launch, _ = train.parse_launch(Parser(), ["--launcher", "ray"])
    assert train.on_ray(launch) == Workers(2)
    assert capsys.readouterr().err.count("to follow it: groupwise view") == 2
