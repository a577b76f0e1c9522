"""Demonstrations on disk: what is written is read back, and LeRobot's way of reading finds it."""

import io
import json
import os

import numpy as np
import pandas as pd
import pytest
import torch
from gymnasium import spaces
from PIL import Image, UnidentifiedImageError

from groupwise.data.spaces import obs_to_tensor
from groupwise.embodied import lerobot
from groupwise.embodied.lerobot import Column, Demonstration, from_arrow, read_demos, write_demos
from groupwise.errors import DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.contrib

ACTIONS = spaces.Box(-1, 1, (2,), np.float32)
PARTS = {
    "image": spaces.Box(0, 255, (2, 3, 4, 3), np.uint8),
    "depth": spaces.Box(0, 255, (3, 4, 1), np.uint8),
    "grid": spaces.Box(-9, 9, (2, 3), np.float64),
    "instruction": spaces.Box(0, 255, (8,), np.uint8),
    "proprio": spaces.Box(-9, 9, (1,), np.float32),
    "count": spaces.Discrete(5),
    "inner": spaces.Dict(speed=spaces.Box(-9, 9, (3,), np.float32)),
}
EVERYTHING = spaces.Dict(PARTS)


def random_demo(steps, seed, text="go"):
    generator = np.random.default_rng(seed)
    obs = {
        "image": generator.integers(0, 256, (steps, 2, 3, 4, 3), dtype=np.uint8),
        "depth": generator.integers(0, 256, (steps, 3, 4, 1), dtype=np.uint8),
        "grid": generator.normal(size=(steps, 2, 3)),
        "instruction": np.tile(np.frombuffer(text.encode().ljust(8, b"\0"), np.uint8), (steps, 1)),
        "proprio": generator.normal(size=(steps, 1)).astype(np.float32),
        "count": generator.integers(0, 5, steps),
        "inner": {"speed": generator.normal(size=(steps, 3))},
    }
    action = generator.uniform(-1, 1, (steps, 2)).astype(np.float32)
    obs = obs_to_tensor(EVERYTHING, obs, batched=True)
    return Demonstration(obs, action, generator.normal(size=steps).astype(np.float32), True, text)


def write(folder, demos, space=EVERYTHING):
    write_demos(folder, space, ACTIONS, 20, demos)
    return folder


DEMOS = [random_demo(3, 0), random_demo(2, 1, "stöp"), random_demo(1, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("demos"), DEMOS)


def test_what_was_written_is_read_back(folder):
    found = read_demos(folder, EVERYTHING)
    torch.testing.assert_close(found.obs.to_dict(), torch.cat([demo.obs for demo in DEMOS]).to_dict(), rtol=0, atol=0)
    np.testing.assert_array_equal(found.action, np.concatenate([demo.action for demo in DEMOS]))
    np.testing.assert_array_equal(found.reward, np.concatenate([demo.reward for demo in DEMOS]))
    assert found.episode.tolist() == [0, 0, 0, 1, 1, 2]


def test_an_instruction_that_does_not_fit_is_named(folder):
    shorter = spaces.Dict(PARTS | {"instruction": spaces.Box(0, 255, (4,), np.uint8)})
    with pytest.raises(
        DataError, match=r"tasks.parquet: 'stöp' has 5 bytes, and 'instruction' of the environment takes 4; fix: "
    ):
        read_demos(folder, shorter)


def test_the_files_are_those_of_the_format(folder):
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "data/chunk-000/file-000.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
    ]
    info = json.loads((folder / "meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["video_path"]) == ("v3.0", 20, None)
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 6, 2)
    assert info["splits"] == {"train": "0:3"}
    image = {"dtype": "image", "shape": [3, 4, 3], "names": ["height", "width", "channels"]}
    assert info["features"]["observation.images.image_1"] == image
    assert info["features"]["observation.state"] == {"dtype": "float32", "shape": [1], "names": None}


def test_the_episodes_say_where_their_steps_are(folder):
    pq = pytest.importorskip("pyarrow.parquet")
    found = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pydict()
    episodes = {"length": [3, 2, 1], "dataset_from_index": [0, 3, 5], "dataset_to_index": [3, 5, 6]}
    episodes["tasks"] = [["go"], ["stöp"], ["go"]]
    assert {name: found[name] for name in episodes} == episodes
    assert pq.ParquetFile(folder / "data/chunk-000/file-000.parquet").num_row_groups == 3
    found = pq.read_table(folder / "data/chunk-000/file-000.parquet").to_pydict()
    data = {"frame_index": [0, 1, 2, 0, 1, 0], "index": list(range(6)), "task_index": [0, 0, 0, 1, 1, 0]}
    data["next.done"] = data["next.success"] = [False, False, True, False, True, True]
    assert {name: found[name] for name in data} == data
    np.testing.assert_allclose(found["timestamp"], [0, 0.05, 0.1, 0, 0.05, 0])


def test_huggingface_datasets_read_the_columns_as_lerobot_declares_them(folder):
    """LeRobot passes these features to ``Dataset.from_parquet``: its rule from shape and dtype to a feature."""
    datasets = pytest.importorskip("datasets")
    features = {}
    for name, feature in json.loads((folder / "meta/info.json").read_text())["features"].items():
        dtype, shape = feature["dtype"], tuple(feature["shape"])
        if dtype == "image":
            features[name] = datasets.Image()
        elif shape == (1,):
            features[name] = datasets.Value(dtype)
        elif len(shape) == 1:
            features[name] = datasets.Sequence(length=shape[0], feature=datasets.Value(dtype))
        else:
            features[name] = datasets.Array2D(shape=shape, dtype=dtype)
    file = str(folder / "data/chunk-000/file-000.parquet")
    found = datasets.Dataset.from_parquet(file, features=datasets.Features(features), cache_dir=str(folder / "cache"))
    np.testing.assert_array_equal(np.asarray(found[3]["observation.images.image_0"]), DEMOS[1].obs["image"][0, 0])
    np.testing.assert_allclose(found[3]["observation.grid"], DEMOS[1].obs["grid"][0], rtol=1e-6)
    np.testing.assert_array_equal(found[3]["action"], DEMOS[1].action[0])
    tasks = pytest.importorskip("pandas").read_parquet(folder / "meta/tasks.parquet")
    assert (tasks.index.tolist(), tasks["task_index"].tolist()) == (["go", "stöp"], [0, 1])


def test_statistics_are_those_of_all_steps(folder):
    stats = json.loads((folder / "meta/stats.json").read_text())
    actions = np.concatenate([demo.action for demo in DEMOS]).astype(np.float64)
    for name in ("mean", "std", "max"):
        np.testing.assert_allclose(stats["action"][name], getattr(actions, name)(axis=0))
    pixels = np.concatenate([demo.obs["image"][:, 1] for demo in DEMOS]) / 255
    found = np.array(stats["observation.images.image_1"]["mean"])
    assert found.shape == (3, 1, 1)
    np.testing.assert_allclose(found[:, 0, 0], pixels.mean(axis=(0, 1, 2)))
    assert stats["observation.images.image_1"]["count"] == [6]


def test_a_box_alone_is_the_state_and_a_tuple_is_read_back(tmp_path):
    demo = Demonstration(torch.ones(2, 4), np.zeros((2, 2), np.float32), np.zeros(2, np.float32), None, "X")
    space = spaces.Box(-1, 1, (4,), np.float32)
    write(tmp_path / "demos", [demo], space)
    features = json.loads((tmp_path / "demos/meta/info.json").read_text())["features"]
    assert "observation.state" in features
    assert "next.success" not in features, "the environment does not say"
    assert read_demos(tmp_path / "demos", space).obs.shape == (2, 4)
    pair = spaces.Tuple((spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)))
    obs = obs_to_tensor(pair, (np.ones((2, 2)), np.array([1, 2])), batched=True)
    write(tmp_path / "pair", [demo._replace(obs=obs)], pair)
    assert read_demos(tmp_path / "pair", pair).obs["1"].tolist() == [1, 2]


def numbers_demo(space, steps=2):
    obs = obs_to_tensor(
        space, {key: np.stack([part.sample() for _ in range(steps)]) for key, part in space.items()}, batched=True
    )
    return Demonstration(obs, np.zeros((steps, 2), np.float32), np.zeros(steps, np.float32), None, "go")


def test_entries_of_one_shape_are_columns_of_their_own_or_refused(tmp_path):
    part = spaces.Box(-1, 1, (3,), np.float32)
    space = spaces.Dict(proprio=part, state=part, more=part)
    demo = numbers_demo(space)
    found = read_demos(write(tmp_path / "a", [demo], space), space)
    for key in space:
        assert torch.equal(found.obs[(key,)], demo.obs[(key,)])
    alike = spaces.Dict({"a.b": part, "a": spaces.Dict(b=part)})
    with pytest.raises(DataError, match=r"two entries of the observation would be the column 'observation\.a\.b'"):
        write(tmp_path / "b", [], alike)


def test_files_of_lerobots_script_are_read(tmp_path):
    """An index of pandas without a name, states in float64, and rows in any order."""
    space = spaces.Dict(proprio=spaces.Box(-1, 1, (3,), np.float32))
    demos = [numbers_demo(space, 3), numbers_demo(space, 2)]
    folder = write(tmp_path / "demos", demos, space)
    pd.DataFrame({"task_index": [0]}, index=["go"]).to_parquet(folder / "meta/tasks.parquet")
    file = folder / "data/chunk-000/file-000.parquet"
    table = pd.read_parquet(file)
    table["observation.state"] = [state.astype(np.float64) for state in table["observation.state"]]
    table.iloc[[4, 1, 3, 0, 2]].to_parquet(file, index=False)
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"]["observation.state"]["dtype"] = "float64"
    (folder / "meta/info.json").write_text(json.dumps(info))
    found = read_demos(folder, space)
    assert torch.equal(found.obs[("proprio",)], torch.cat([demo.obs[("proprio",)] for demo in demos]))
    assert found.episode.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Dict(PARTS | {"proprio": spaces.Box(-9, 9, (2,), np.float32)}), r"'observation.state' as float32 of shape \[1\], .* float32 of shape \[2\]"),
        (spaces.Dict(PARTS | {"touch": spaces.Box(-9, 9, (2,), np.float32)}), "'observation.touch' as nothing"),
        (spaces.Dict(PARTS | {"image": spaces.Box(0, 255, (1, 3, 5, 3), np.uint8)}), r"image_0' as image of shape \[3, 4, 3\]"),
    ],
)  # fmt: skip
def test_other_observations_are_refused(folder, space, message):
    with pytest.raises(DataError, match=message):
        read_demos(folder, space)


def without_feature(folder, name):
    info = write(folder, DEMOS) / "meta" / "info.json"
    tree = json.loads(info.read_text())
    del tree["features"][name]
    info.write_text(json.dumps(tree))


@pytest.mark.parametrize("name", ["action", "episode_index", "task_index"])
def test_columns_that_are_missing_are_named(name, tmp_path):
    without_feature(tmp_path, name)
    with pytest.raises(DataError, match=f"has no column '{name}'"):
        read_demos(tmp_path, EVERYTHING)


@pytest.mark.parametrize("name", ["observation.state", "next.reward", "action"])
def test_columns_that_only_the_description_has_are_named(name, tmp_path):
    file = write(tmp_path, DEMOS) / "data/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(file).drop_columns(name), file)
    with pytest.raises(DataError, match=f"has no column '{name}'"):
        read_demos(tmp_path, EVERYTHING)


def test_there_are_no_rewards_where_nobody_recorded_them(tmp_path):
    without_feature(tmp_path, "next.reward")
    assert read_demos(tmp_path, EVERYTHING).reward is None


@pytest.mark.parametrize("name", ["data/chunk-000/file-000.parquet", "meta/tasks.parquet"])
def test_files_that_were_cut_are_damaged(name, tmp_path):
    file = write(tmp_path, DEMOS) / name
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match="is damaged"):
        read_demos(tmp_path, EVERYTHING)


def picture(size, mode="RGB"):
    Image.new(mode, size).save(data := io.BytesIO(), "PNG")
    return {"bytes": data.getvalue(), "path": None}


DAMAGED = "is damaged"
LISTS, PICTURES = pa.list_(pa.float32()), pa.struct([("bytes", pa.binary()), ("path", pa.string())])
IMAGE = "observation.images.image_0"


@pytest.mark.parametrize(
    ("name", "values", "kind", "message"),
    [
        ("episode_index", [None] * 6, pa.int64(), "episode_index is int64 with 6 nulls, expected whole numbers"),
        ("episode_index", ["0"] * 6, pa.string(), "episode_index is string with 0 nulls, expected"),
        ("frame_index", [0.5] * 6, pa.float64(), "frame_index is double"),
        ("task_index", [9] * 6, pa.int64(), DAMAGED),
        ("action", [None] * 6, LISTS, DAMAGED),
        ("action", [[1, 2, 3], [1]] * 3, LISTS, DAMAGED),
        ("observation.grid", [None] * 6, LISTS, DAMAGED),
        ("next.reward", ["1"] * 5 + ["a"], pa.string(), DAMAGED),
        (IMAGE, [None] * 6, PICTURES, DAMAGED),
        (IMAGE, [{"bytes": None, "path": None}] * 6, PICTURES, DAMAGED),
        (IMAGE, [{"bytes": None, "path": "a.png"}] * 6, PICTURES, r"outside the table, such as 'a\.png', .*fix: embed"),
        (IMAGE, [{"bytes": b"PNG", "path": "/etc/passwd"}] * 6, PICTURES, DAMAGED),
        (IMAGE, [{"bytes": picture((4, 3))["bytes"][:-30], "path": None}] * 6, PICTURES, DAMAGED),
        (IMAGE, [picture((20_000, 9_000), "1")] * 6, PICTURES, DAMAGED),
        (IMAGE, [picture((4, 3), "RGBA")] * 6, PICTURES, r"\(3, 4, 'RGBA'\), expected \(3, 4, 'RGB'\)"),
        (IMAGE, [picture((4, 3), "P")] * 6, PICTURES, r"\(3, 4, 'P'\), expected"),
        (IMAGE, [picture((3, 4))] * 6, PICTURES, r"\(4, 3, 'RGB'\), expected"),
    ],
)
def test_columns_of_other_values_are_refused(name, values, kind, message, tmp_path):
    file = write(tmp_path, DEMOS) / "data/chunk-000/file-000.parquet"
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.column_names.index(name), name, pa.array(values, kind)), file)
    with pytest.raises(DataError, match=message):
        read_demos(tmp_path, EVERYTHING)


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        (None, []),
        ("observation.grid", {"dtype": "float32"}),
        ("action", {"shape": [2]}),
        ("action", {"dtype": "object", "shape": [2]}),
        ("action", {"dtype": "float32", "shape": [3]}),
    ],
)
def test_descriptions_of_another_form_are_refused(name, feature, tmp_path):
    info = write(tmp_path, DEMOS) / "meta" / "info.json"
    tree = json.loads(info.read_text())
    tree["features"] = feature if name is None else tree["features"] | {name: feature}
    info.write_text(json.dumps(tree))
    with pytest.raises(DataError, match=DAMAGED):
        read_demos(tmp_path, EVERYTHING)


def test_equal_steps_without_end_are_refused_before_they_are_read(tmp_path, monkeypatch):
    file = write(tmp_path, DEMOS) / "data/chunk-000/file-000.parquet"
    table = pq.read_table(file)
    pq.write_table(table.take([0] * 200_000), file, compression="zstd")
    monkeypatch.setattr(pq, "read_table", None)
    monkeypatch.setattr(lerobot, "SMALL", 1_000_000)
    with pytest.raises(DataError, match=r"it has [\d,]+ values, more than the limit of [\d,]+\); fix: record again"):
        read_demos(tmp_path, EVERYTHING)


def test_an_interrupted_recording_is_no_dataset(tmp_path):
    def demos():
        yield DEMOS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, demos())
    with pytest.raises(DataError, match="holds no demonstrations"):
        read_demos(tmp_path, EVERYTHING)


@pytest.mark.parametrize("name", ["meta/info.json", "meta/tasks.parquet", "data/chunk-000/file-000.parquet", "data"])
def test_files_of_a_stranger_are_no_links_and_no_pipes(tmp_path, name):
    folder = write(tmp_path / "demos", DEMOS)
    (folder / name).rename(tmp_path / "mine")
    (folder / name).symlink_to(tmp_path / "mine")
    with pytest.raises(DataError, match=f"{name} is a link out of the demonstrations; fix: "):
        read_demos(folder, EVERYTHING)
    if name != "data":
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(DataError, match="it is no regular file"):
            read_demos(folder, EVERYTHING)


def test_a_picture_is_a_png_or_jpeg():
    """Pillow runs Ghostscript for EPS."""
    picture = Image.new("RGB", (4, 3))
    column = Column("image", (3, 4, 3))
    for kind in ("PNG", "JPEG", "EPS"):
        picture.save(data := io.BytesIO(), kind)
        values = pa.array([{"bytes": data.getvalue(), "path": None}])
        if kind == "EPS":
            with pytest.raises(UnidentifiedImageError):
                from_arrow(values, column)
        else:
            assert from_arrow(values, column).shape == (1, 3, 4, 3)
