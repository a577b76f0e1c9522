import gc
import subprocess
import sys
import weakref

import pytest

from groupwise.garbage import PYTHONS_OWN, importing, leaving_out_what_exists


class Node:
    """Garbage that only a search finds, once it refers to itself."""


def cycle():
    node = Node()
    node.self = node
    return weakref.ref(node)


@pytest.fixture(autouse=True)
def nothing_changes():
    assert gc.isenabled()
    assert gc.get_freeze_count() < PYTHONS_OWN
    yield
    assert gc.isenabled()
    assert gc.get_freeze_count() < PYTHONS_OWN


def test_nothing_is_searched_while_modules_are_imported():
    with importing():
        assert not gc.isenabled()
        left = cycle()
    assert gc.get_count()[0] < 100  # what was made is not among the young, which the next search would look at
    gc.collect()
    assert left() is None


def test_an_import_that_fails_changes_nothing():
    with pytest.raises(KeyError), importing():
        raise KeyError


def test_somebody_elses_choice_stays():
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_searches_leave_out_what_exists_until_the_end():
    old = cycle()
    with leaving_out_what_exists():
        young = cycle()
        gc.collect()
        assert young() is None
        assert old() is not None
    gc.collect()
    assert old() is None


@pytest.mark.parametrize(("frozen", "by_python"), [(0, True), (375, True), (5_000, False)])
def test_what_python_itself_leaves_out_is_nobodys_choice(frozen, by_python, monkeypatch):
    """Python 3.12 begins with 375 objects that searches leave out."""
    calls = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    with leaving_out_what_exists():
        pass
    assert calls == (["freeze", "unfreeze"] if by_python else [])
    monkeypatch.undo()


def test_an_interpreter_begins_with_less_than_that():
    code = "import gc; print(gc.get_freeze_count(), len(gc.get_objects()))"
    frozen, alive = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True).stdout.split()
    assert int(frozen) < PYTHONS_OWN < int(alive)


def test_what_somebody_else_froze_stays_frozen():
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with leaving_out_what_exists():
            assert gc.get_freeze_count() <= before
        assert gc.get_freeze_count() > 0.5 * before
    finally:
        gc.unfreeze()


def test_an_error_in_training_changes_nothing():
    with pytest.raises(KeyError), leaving_out_what_exists():
        raise KeyError
