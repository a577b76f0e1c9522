"""Methods compared by records of their runs, wherever these come from; and the picture of it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from groupwise.comparison.results import RunRecord, compare_records, figure
from groupwise.errors import ConfigError, DataError


def records(environment: str, method: str, finals, **fields) -> list[RunRecord]:
    """Runs that rise from 0 to their final return."""
    fields = {"env_steps": (100, 200, 300), **fields}
    points = len(fields["env_steps"])
    return [
        RunRecord(environment, method, seed, returns=tuple(final * (k + 1) / points for k in range(points)), **fields)
        for seed, final in enumerate(finals)
    ]


A = records("E", "a", (3.0, 6.0, 9.0, 30.0), seconds=2.0, memory_mib=50.0)
B = records("E", "b", (1.0, 2.0))


def test_what_a_method_reached():
    [found] = compare_records(A + B).environments
    a, b = found.methods
    assert (a.method, a.seeds, a.scores) == ("a", (0, 1, 2, 3), (3.0, 6.0, 9.0, 30.0))
    assert (a.iqm.value, a.mean, a.least) == (7.5, 12.0, 3.0)
    assert a.iqm.interval is not None
    assert a.iqm.interval[0] >= 3
    # from 1/3 to 1 of the final return, straight: 2/3 on average
    assert a.mean_height.value == pytest.approx(5.0)
    assert (a.curve.env_steps[0], a.curve.env_steps[-1]) == (100, 300)
    assert a.curve.iqm[-1] == 7.5
    assert (a.seconds, a.memory_mib, a.env_steps) == (2.0, 50.0, 300)
    assert (b.seconds, b.memory_mib) == (None, None)
    [lacks] = compare_records([*A[:3], A[3]._replace(seconds=None)]).environments[0].methods
    assert (lacks.seconds, lacks.memory_mib) == (None, 50.0), "a median needs the number of every run"
    [pair] = found.improvements
    assert (pair.method, pair.other, pair.probability.value) == ("a", "b", 1.0)


def test_arrays_of_other_libraries_are_numbers_like_any():
    found = [run._replace(env_steps=np.array(run.env_steps), returns=np.array(run.returns)) for run in A + B]
    assert compare_records(found) == compare_records(A + B)
    episodes = A[0]._replace(returns=np.ones((3, 5)))  # those of each evaluation
    with pytest.raises(DataError, match="15 returns at 3 steps; expected one at each"):
        compare_records([episodes])


def test_curves_of_other_evaluation_times_stand_on_one_grid():
    late = records("E", "late", (2.0, 4.0), env_steps=(150, 250, 350))
    [found] = compare_records(A + late).environments
    assert found.methods[0].curve.env_steps == found.methods[1].curve.env_steps
    assert (found.methods[0].curve.env_steps[0], found.methods[0].curve.env_steps[-1]) == (150, 300)
    # at 300, the last two points of `late` are 2/3 and 1 of its final return, at 250 and 350: 5/6 of 3
    assert found.methods[1].curve.iqm[-1] == pytest.approx(2.5)
    assert found.methods[1].iqm.value == 3.0  # the score is the last evaluation, where the curve is cut or not


def test_steps_that_differ_much_and_methods_of_few_runs_are_noted():
    longer = records("E", "b", (1.0, 2.0), env_steps=(100, 200, 330))
    assert any("took 300 to 330 steps" in note for note in compare_records(A + longer).notes)
    found = compare_records([*A, *B, *records("E", "many", range(5))])
    assert found.notes == ("E: fewer than 5 runs of a, b, too few for intervals; fix: more seeds",)
    assert compare_records([*records("E", "a", range(5)), *records("E", "b", range(6))]).notes == ()


def test_a_run_that_was_first_evaluated_late_is_noted():
    often = RunRecord("E", "a", 0, (1000, 2000, 8000), (1.0, 2.0, 3.0))
    late = RunRecord("E", "b", 7, (8000,), (4.0,))
    note = "E: curves and means over training begin at step 8,000, with the first score of b, seed 7"
    assert note in compare_records([often, late]).notes
    assert not [each for each in compare_records([often, often._replace(method="c")]).notes if "begin at" in each]


def test_one_run_has_no_interval():
    [found] = compare_records(A + records("E", "alone", (5.0,))).environments
    alone = found.methods[1]
    assert (alone.iqm.value, alone.iqm.interval, alone.curve.low) == (5.0, None, None)
    assert found.improvements[0].probability.interval is None


def test_a_shift_of_all_returns_changes_no_probability():
    moved = [run._replace(returns=tuple(value - 1000 for value in run.returns)) for run in A + B]
    before, after = (compare_records(runs).environments[0] for runs in (A + B, moved))
    assert before.improvements == after.improvements
    assert after.methods[0].iqm.value == pytest.approx(before.methods[0].iqm.value - 1000)


F = records("F", "b", (100.0, 200.0)) + records("F", "a", (0.0, 0.0, 0.0)) + records("F", "only here", (1.0, 1.0))


def test_environments_are_put_on_one_scale():
    found = compare_records(A + B + F, {"E": (0, 10), "F": (0, 200), "unused": (0, 1)})
    assert found.overall is not None
    a, b = found.overall.methods
    assert found.overall.reference == {"E": (0, 10), "F": (0, 200)}
    # a: 0 0 0 0.3 0.6 0.9 3.0 without the first and the last
    assert (a.method, a.iqm.value) == ("a", pytest.approx((0.3 + 0.6 + 0.9) / 5))
    assert a.mean == pytest.approx(1.2 / 2)
    assert (b.method, b.iqm.value) == ("b", pytest.approx((0.2 + 0.5) / 2))  # the middle of 0.1 0.2 0.5 1.0
    [pair] = found.overall.improvements
    assert pair.probability.value == 0.5  # 1 in E, 0 in F
    assert pair.probability.interval == (0.5, 0.5)
    assert any("without only here" in note for note in found.notes)


@pytest.mark.parametrize(
    ("runs", "reference", "message"),
    [
        (A + B + F, {"E": (0, 1), "FF": (0, 1)}, "no reference scores of F; did you mean 'FF'"),
        (A + B + F, {"E": (0, 1), "F": (2, 2)}, r"F are \(2, 2\): expected two different numbers; fix: "),
        (A + B + F, {"E": (0, 1), "F": [20, math.nan]}, r"F are \[20, nan\]: expected two different numbers"),
        (A + B + F, {"E": (0, 1), "F": (0, math.inf)}, "expected two different numbers"),
        (A + B + F, {"E": (0, 1), "F": ("a", 1)}, r"F are \('a', 1\): expected two different numbers"),
        (A + B + F, {"E": (0, 1), "F": (0, 1, 2)}, "expected two different numbers"),
        (A + B + F, {"E": (0, 1), "F": 5}, "F are 5: expected two different numbers"),
        (A + records("F", "b", (1.0, 2.0)), {"E": (0, 1), "F": (0, 1)}, "no method has runs in all of E, F"),
    ],
    ids=["missing", "equal", "nan", "inf", "text", "three", "no pair", "no method"],
)
def test_reference_scores_that_do_not_serve(runs, reference, message):
    with pytest.raises(ConfigError, match=message):
        compare_records(runs, reference)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "no runs"),
        ([*A, A[1]._replace(source="twin")], r"seed 1 came more than once \(\?, twin\)"),
        ([*A, B[0]._replace(returns=(1.0, math.nan, 2.0))], "E, b, seed 0: a return is not finite"),
        ([*A, B[0]._replace(returns=())], "0 returns at 3 steps"),
        ([*A, B[0]._replace(env_steps=(100, 300, 200))], "env_steps fall"),
        ([*A, B[0]._replace(measure="training")], "returns of evaluations and of training"),
    ],
    ids=["none", "twice", "nan", "empty", "disorder", "two measures"],
)
def test_records_that_cannot_be_used(runs, message):
    with pytest.raises(DataError, match=message):
        compare_records(runs)


def test_report_is_plain_json_and_repr_is_a_line(tmp_path: Path):
    found = compare_records(A + B + F, {"E": (0, 10), "F": (0, 200)}, settings={"E": {"gamma": {"a": 1.0, "b": 0.9}}})
    found.save(tmp_path / "new" / "folder")
    data = json.loads((tmp_path / "new" / "folder" / "comparison.json").read_text())
    assert data == json.loads(json.dumps(found.report()))
    assert data["environments"][0]["settings"] == {"gamma": {"a": 1.0, "b": 0.9}}
    assert set(data) == {"environments", "overall", "notes"}
    assert repr(compare_records(B)) == "Comparison(E: b 1.500 [1.000, 2.000] (2 runs))"


@pytest.mark.parametrize(
    ("value", "text"),
    [(500.0, "500.0"), (12345.6, "12346"), (-0.12345, "-0.1235"), (0.0, "0"), (1e-9, "1e-09"), (99.999, "100.00")],
)
def test_figures_have_four_digits(value, text):
    assert figure(value) == text


def test_the_page_shows_every_method_and_environment(tmp_path: Path):
    many = [*A, *records("E", "<b>bold", (1.0,), env_steps=(9,))]
    for number in range(10):
        many += records("E", f"grpo learning_rate={number}", (1.0, 2.0))
    found = compare_records(many + F, {"E": (0, 10), "F": (0, 200)})
    found.save(tmp_path)
    page = (tmp_path / "comparison.html").read_text()
    assert page.count("<svg") == 2
    assert page.count("<polyline") == sum(len(one.methods) for one in found.environments)
    assert page.count('stroke-dasharray="7 3"') == 2  # the eleventh method and the next
    assert "<b>" not in page
    assert "all environments, normalised" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
