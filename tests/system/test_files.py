import json
import os
import sys
from pathlib import Path

import pytest

from groupwise import system as files

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links and FIFOs")


def test_a_file_is_replaced_whole_and_nothing_else_stays(tmp_path: Path):
    path = tmp_path / "a.json"
    for data in (b"first", b"second"):
        files.write(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        files.write(path, b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_links_are_replaced_and_neither_created_over_nor_appended_to_nor_read(tmp_path: Path):
    (tmp_path / "mine").write_text("mine")
    os.symlink("mine", tmp_path / "a")
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "a", b"new")
    with pytest.raises(OSError, match="symbolic link"):
        files.appending(tmp_path / "a")
    with pytest.raises(ValueError, match="it is a link"):
        files.read(tmp_path / "a", 10)
    assert files.read(tmp_path / "a", 10, follow=True) == b"mine"
    files.write(tmp_path / "a", b"new")
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "a").is_symlink()


def test_only_regular_files_within_the_limit_are_read(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "four").write_bytes(b"1234")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises((ValueError, IsADirectoryError), match=r"no regular file|Is a directory"):
            files.read(path, 10)
    assert files.read(tmp_path / "four", 4) == b"1234"
    with pytest.raises(ValueError, match=r"it has 4 bytes, more than the limit of 3"):
        files.read(tmp_path / "four", 3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"[" * 201 + b"]" * 201, "nested deeper than 200 levels"),
        (b"[" * 100_000 + b"]" * 100_000, "nested deeper than 200 levels"),
        (b"[" + b"1," * files.MAX_VALUES + b"1]", "more than 2,000,000 values"),
        (b"9" * 5_000, "4300 digits"),
        (b'{"a": 1, "a": 2}', "the key 'a' comes twice"),
        (b'"\xff"', "invalid start byte"),
        (b"{", "Expecting"),
        (b"", "Expecting"),
    ],
    ids=["deep", "deeper", "values", "digits", "twice", "bytes", "cut", "empty"],
)
def test_json_that_is_refused(text: bytes, why: str):
    with pytest.raises(ValueError, match=why):
        files.parse_json(text)
    deep = b"[" * files.MAX_DEPTH + b"]" * files.MAX_DEPTH
    assert files.parse_json(deep) == json.loads(deep)


@pytest.mark.parametrize(
    ("target", "leads_out"), [("inside", False), ("../run/inside", False), ("..", True), ("/etc", True), ("a", False)]
)
def test_links_that_lead_out_are_found_at_any_depth(tmp_path: Path, target: str, leads_out: bool):
    folder = tmp_path / "run"
    (folder / "b" / "c").mkdir(parents=True)
    (folder / "inside").touch()
    link = folder / "a"
    os.symlink(target, link)
    assert files.link_out_of(folder) == (link if leads_out else None)
    link.unlink()
    deep = folder / "b" / "c" / "a"
    os.symlink("../../../elsewhere", deep)
    assert files.link_out_of(folder) == deep
    assert files.link_out_of(folder, without="b") is None
