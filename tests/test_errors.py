import pickle

import pytest

from groupwise.errors import UnknownNameError, nearest
from groupwise.serving import RefusedError


@pytest.mark.parametrize(("count", "end"), [(60, "w58, w59"), (200, "w181, w182, ...")])
def test_a_long_list_of_known_names_is_cut(count, end):
    names = [f"w{i:02d}" for i in range(count)]
    assert str(UnknownNameError("word", "QQQ", names)).endswith(end)


def test_nearest_is_the_end_of_a_message_or_nothing():
    assert nearest("learning_rat", ["gamma", "learning_rate"]) == "; did you mean 'learning_rate'?"
    assert nearest("qqq", ["gamma", "learning_rate"]) == ""


@pytest.mark.parametrize("error", [UnknownNameError("word", "a", ["b"]), RefusedError("no", 404)])
def test_errors_go_to_other_processes(error):
    error.add_note("more")
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there), vars(there)) == (type(error), str(error), vars(error))
