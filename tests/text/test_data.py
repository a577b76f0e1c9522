"""Examples from every kind of file and object, what is wrong with bad ones, and the order they are taken in."""

import csv
import json
import random

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import DataError, GroupwiseError
from groupwise.text.collector import shuffled
from groupwise.text.task import Example, demonstration, gym_examples, load_examples, without_overlap

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": 'say "a,\u2028b"', "answer": "é"}]
EXAMPLES = [Example("1+1=", {"answer": "2"}), Example('say "a,\u2028b"', {"answer": "é"})]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]


def write_parquet(rows, path):
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "marked"])  # that some editors begin files with
def test_every_kind_of_file_has_the_same_examples(tmp_path, mark):
    texts = {"a.jsonl": "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n"}
    texts |= {"a.json": json.dumps(ROWS), "a.csv": 'prompt,answer\n1+1=,2\n"say ""a,\u2028b""",é\n'}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(mark + text.encode())
    write_parquet(ROWS, tmp_path / "A.PARQUET")
    for name in (*texts, "A.PARQUET"):
        assert load_examples(tmp_path / name) == load_examples(str(tmp_path / name)) == EXAMPLES


@pytest.mark.parametrize("wrap", [list, tuple, iter, datasets.Dataset.from_list, pd.DataFrame])
def test_every_kind_of_object_has_the_same_examples(wrap):
    assert load_examples(wrap(ROWS)) == EXAMPLES
    assert load_examples(["a", "b"]) == [Example("a", {}), Example("b", {})]
    assert load_examples(["a"], prompt_column="question") == [Example("a", {})]
    missing = pd.DataFrame([{"prompt": "a", "answer": "1"}, {"prompt": "b"}])
    assert load_examples(missing) == [Example("a", {"answer": "1"}), Example("b", {"answer": None})]


CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "add"}}]}


def test_messages_before_the_answer_of_a_tool_and_empty_calls_are_read():
    answered = [MESSAGES[0], CALL, {"role": "tool", "content": "2"}]
    begun = [MESSAGES[0], {"role": "assistant", "content": "Well", "tool_calls": []}]
    assert [len(example.prompt) for example in load_examples([{"prompt": answered}, {"prompt": begun}])] == [3, 2]


def test_messages_survive_parquet_with_its_empty_fields(tmp_path):
    named = [{"role": "user", "content": "hi", "name": None}]
    write_parquet([{"prompt": MESSAGES, "level": 1}, {"prompt": named, "level": None}], tmp_path / "a.parquet")
    first, second = load_examples(tmp_path / "a.parquet")
    assert first == Example(tuple(MESSAGES), {"level": 1})
    assert second == Example(({"role": "user", "content": "hi"},), {"level": None})


def test_messages_of_apis_are_read():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    given = [
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1="}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "add them"},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
    ]
    [(prompt, *_)] = load_examples([{"prompt": given}])
    assert prompt[0] == {"role": "user", "content": "1+1=", "name": "ann"}
    assert prompt[1] == {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "add them"}
    assert prompt[2] == given[2]


@pytest.mark.parametrize(
    "made", [lambda rows: datasets.Dataset.from_list(rows).with_format("numpy"), lambda rows: frame_of(rows)]
)
def test_lists_that_became_arrays_are_lists(made):
    rows = [{"prompt": MESSAGES, "completion": [{"role": "assistant", "content": "2"}], "tags": ["a", "b"]}]
    [example] = load_examples(made(rows))
    assert example.prompt == tuple(MESSAGES)
    assert demonstration(example).turns == ({"role": "assistant", "content": "2"},)
    assert [*example.columns["tags"]] == ["a", "b"]


def frame_of(rows):
    """As pandas reads it from Parquet."""
    return pa.Table.from_pylist(rows).to_pandas()


def test_a_data_frames_lists_stay_lists():
    [example] = load_examples(frame_of([{"prompt": "1", "reward_model": {"answers": ["2", "3"]}}]))
    assert example.columns == {"reward_model": {"answers": ["2", "3"]}}


def test_texts_of_any_length_are_read(tmp_path):
    limit, text = csv.field_size_limit(), "a " * 70_000
    (tmp_path / "a.csv").write_text(f'prompt,answer\n"{text}",1\n')
    assert load_examples(tmp_path / "a.csv") == [Example(text, {"answer": "1"})]
    assert csv.field_size_limit() == limit


def test_another_prompt_column_and_columns_that_rows_lack():
    found = load_examples([{"question": "a", "x": 1}, {"question": "b", "y": 2}], prompt_column="question")
    assert found == [Example("a", {"x": 1, "y": None}), Example("b", {"x": None, "y": 2})]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "the data has no examples; fix"),
        ([{"question": "a", "prompts_": "b"}], "no column 'prompt'; it has 'prompts_', 'question'"),
        ([{"prompt": "a"}, 3], r"the data, example 1: got 3, no columns or text"),
        ([{"prompt": 3}], "example 0: prompt = 3: expected a text or a list of messages"),
        ([{"prompt": None}], "example 0: prompt = None"),
        ([{"prompt": []}], r"example 0: prompt = \[\]"),
        ([{"prompt": ["a"]}], "example 0: message = 'a': expected the texts role and content"),
        ([{"prompt": [{"role": "user"}]}], "message = {'role': 'user'}"),
        ([{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}], "expected the texts role and content"),
        ([{"prompt": [MESSAGES[0], CALL]}], "example 0: the last message has tool_calls, .*fix: add the tool's answer"),
        ([{"prompt": "a"}, {"prompt": MESSAGES}], "some prompts of the data are texts and some are messages"),
        ({"train": [], "test": []}, r"the data: expected .*; got {'train': .*, or one part of a mapping"),
        (3, "the data: expected a path or a list of examples; got 3"),
        ("a.txt", r"data = 'a.txt': expected a file that ends in .jsonl, .json, .csv or .parquet"),
        ("none.jsonl", "'none.jsonl': there is no such file of prompts"),
    ],
)
def test_bad_data_are_named(source, message):
    with pytest.raises(DataError, match=message):
        load_examples(source)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "a"}\n\n{"prompt": ', r"a\.jsonl, line 3: Expecting value"),
        ("a.jsonl", b"\n", r"a\.jsonl has no examples"),
        ("a.json", b'{"prompt": "a"}', r"a\.json: expected .* list of examples; got {'prompt': 'a'}"),
        ("a.json", b"[1", r"a\.json, Expecting ',' delimiter: line 1 column 3"),
        ("a.csv", b"prompt,answer\n1,2\n1\n", r"a\.csv, near line 3: not as many fields as columns"),
        ("a.csv", b"prompt,answer\n1,2,3\n", r"a\.csv, near line 2: not as many fields as columns"),
        ("a.csv", b'prompt,answer\n"1"x,2\n', r"a\.csv, .*; fix: "),
        ("a.csv", b"prompt,answer\n", r"a\.csv has no examples"),
        ("a.csv", b"prompt,answer,answer\n1,2,3\n", r"a\.csv, 'answer' comes twice"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "b", "prompt": "c"}', r"a\.jsonl, line 2: 'prompt' comes twice"),
        ("a.json", b'[{"prompt": "a", "x": {"y": 1, "y": 2}}]', r"a\.json, 'y' comes twice"),
        ("a.parquet", b"nothing", r"a\.parquet, .*; fix: write it again"),
        ("a.jsonl", b"\xff\xfe", r"a\.jsonl, 'utf-8' codec can't decode .*; fix: .*UTF-8"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_examples(tmp_path / name)


def test_a_number_that_is_none_is_absent(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": NaN}\n{"prompt": "b", "answer": 5.0}\n')
    assert [one.columns["answer"] for one in load_examples(tmp_path / "a.jsonl")] == [None, 5.0]


def test_gym_data_are_always_the_same_and_both_parts_share_no_prompt():
    first = gym_examples("reasoning-gym:chain_sum", size=20)
    assert len(first) == 20
    assert set(first[0].columns) == {"task", "answer", "metadata"}
    assert first[0].columns["task"] == "chain_sum"
    assert first == gym_examples("chain_sum", size=20)
    # the library itself draws item i from seed + i: neighbouring seeds have nearly all items in common
    large = {"min_digits": 5, "max_digits": 5}
    train, held_out = (gym_examples("products", size=100, part=part, kwargs=large) for part in ("train", "eval"))
    assert without_overlap(train, held_out) == train


def test_gym_mistakes_get_the_nearest_name(monkeypatch):
    for task, kwargs, message in [
        ("chain_sums", {}, "unknown reasoning-gym task 'chain_sums': did you mean 'chain_sum'"),
        ("chain_sum", {"max_term": 2}, "data_kwargs of reasoning-gym:chain_sum: .*'max_term'.*; fix: .*max_terms"),
        ("chain_sum", {"seed": 2}, "data_kwargs .*'seed'"),
    ]:
        with pytest.raises(GroupwiseError, match=message):
            gym_examples(task, size=3, kwargs=kwargs)
    monkeypatch.setattr("groupwise.errors.find_spec", lambda _: None)
    with pytest.raises(GroupwiseError, match="'reasoning_gym' is not installed"):
        gym_examples("chain_sum", size=3)


@pytest.mark.filterwarnings("ignore:.*in the evaluation data")
def test_overlap_sees_through_white_space_and_forms():
    train = [Example(text, {}) for text in ("a  b\n", "c", "a b c")]
    assert without_overlap(train, [Example("a b", {}), Example("d", {})]) == train[1:]
    user, system = (Example(({"content": " a b", "role": role},), {}) for role in ("user", "system"))
    assert without_overlap([user, train[1]], [Example("a b", {})]) == [train[1]]
    assert without_overlap(train, [user]) == train[1:]
    assert without_overlap([user], [system]) == [user]


@given(size=st.integers(1, 30), seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_every_epoch_has_every_example_once(size, seed, epoch):
    assert sorted(shuffled(size, seed, epoch)) == list(range(size))


def test_epochs_and_seeds_are_shuffled_differently_and_nothing_else_matters():
    first, second = shuffled(50, 0, 0), shuffled(50, 0, 1)
    assert len({tuple(order) for order in (first, second, shuffled(50, 1, 0), range(50))}) == 4
    random.seed(3)
    shuffled.cache_clear()
    assert shuffled(50, 0, 1) == second
    # recorded: a run that is resumed by a later version takes the same prompts
    assert shuffled(6, 0, 0) + shuffled(6, 0, 1) == [4, 5, 2, 1, 0, 3, 3, 2, 4, 0, 5, 1]
