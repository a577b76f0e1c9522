import pytest

from groupwise.envs.findings import EnvReport, Finding, duration, none, speed, unknown


def test_a_report_prints_as_the_table(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "70")
    report = EnvReport(
        "Some-v0",
        Finding("Box[2] float32"),
        Finding("Discrete(2)"),
        Finding(500),
        Finding(False),
        unknown("RuntimeError: it broke"),
        {"native": none("nothing"), "seed": Finding(12.3)},
        none("nothing"),
        Finding("same_step"),
        {"sync": Finding(12345.0), "async": unknown("RuntimeError: it broke")},
        none("a long reason that does not fit into what is left of the line", "do it"),
    )
    expected = """Some-v0
observation                Box[2] float32
action                     Discrete(2)
step limit                 500
start depends on the seed  no
steps are random           unknown: RuntimeError: it broke
siblings share a start by
  native                   no: nothing
  seed                     yes, 12 us a start
starts in mid-episode      no, see 'native'
own vectorised version     yes, resets itself: same_step
steps a second, 8 at once
  sync                     12,000
  async                    unknown, see 'steps are random'
training uses              no: a long reason that does not fit into
                           what is left of the line
fix                       do it"""
    assert str(report) == expected


def test_the_docstring_of_the_report_says_every_field():
    for field in EnvReport._fields:
        assert f"``{field}``" in EnvReport.__doc__


@pytest.mark.parametrize(
    ("value", "text"), [(1.63, "1.6 us"), (126.4, "130 us"), (999.0, "1000 us"), (1260.0, "1.3 ms"), (0.04, "0.0 us")]
)
def test_durations_have_two_digits(value, text):
    assert duration(value) == text


def test_speeds_have_two_digits():
    assert [speed(44608.5), speed(7.3), speed(123.0)] == ["45,000", "7", "120"]
