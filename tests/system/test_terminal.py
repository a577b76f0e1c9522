import io

import pytest
from rich.console import Console

from groupwise import cli
from groupwise.system import printable
from groupwise.training.callbacks import Progress


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Ä 5 €\n\tb 🙂", "Ä 5 €\n\tb 🙂"),
        ("\x1b]0;title\x07\x1b[2J", "\\x1b]0;title\\x07\\x1b[2J"),
        ("a\rb\x08\x7f\x9b", "a\\rb\\x08\\x7f\\x9b"),
        ("\u202egpj.exe\u2066", "\\u202egpj.exe\\u2066"),
        ("\ud800", "\\ud800"),
    ],
)
def test_control_characters_are_shown(text: str, shown: str):
    assert printable(text) == shown
    shown.encode("utf-8")


def test_an_error_and_the_title_of_a_run_move_no_cursor(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["eval", "runs/\x1b[2J\x1b]0;owned\x07"]) == 2
    error = capsys.readouterr().err
    assert "\\x1b[2J" in error
    assert "\x1b" not in error
    stream = io.StringIO()
    progress = Progress("lines", title="a[/x][red]b\x1b[2J :smile:", console=Console(file=stream, width=100))
    progress._print(progress.title)
    assert stream.getvalue() == "a[/x][red]b\\x1b[2J :smile:\n"
