import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from tensordict import TensorDict

from groupwise.data.rollout import TensorSpec, allocate
from groupwise.data.spaces import check_dtypes, is_batched, obs_spec, obs_to_tensor, space_kind
from groupwise.errors import DataError, UnsupportedSpaceError

BOX = spaces.Box(-1, 1, (3,), np.float32)
NESTED = spaces.Dict(
    {"pos": BOX, "more": spaces.Tuple((spaces.Discrete(4, start=2), spaces.Dict({"bits": spaces.MultiBinary((2, 2))})))}
)
LEAVES = {
    "float32": (BOX, (3,), torch.float32),
    "float64": (spaces.Box(-1, 1, (2, 2), np.float64), (2, 2), torch.float32),
    "scalar": (spaces.Box(-1, 1, ()), (), torch.float32),
    "image": (spaces.Box(0, 255, (36, 36, 3), np.uint8), (36, 36, 3), torch.uint8),
    "int16": (spaces.Box(-5, 5, (2,), np.int16), (2,), torch.int64),
    "uint16": (spaces.Box(0, 5, (2,), np.uint16), (2,), torch.int64),
    "bool": (spaces.Box(0, 1, (2,), np.bool_), (2,), torch.bool),
    "discrete": (spaces.Discrete(5, start=-2), (), torch.int64),
    "multi_discrete": (spaces.MultiDiscrete([[2, 3], [4, 5]]), (2, 2), torch.int64),
    "multi_binary": (spaces.MultiBinary(4), (4,), torch.int8),
}


class MyBox(spaces.Box):
    pass


class Box:
    """Has the name, but is no Gymnasium space."""


def test_space_kind_goes_by_gymnasium_class():
    assert space_kind(MyBox(0, 1)) == "box"
    assert space_kind(Box()) == "unsupported"
    assert space_kind(spaces.Text(3)) == "unsupported"
    assert [space_kind(s) for s in (NESTED, NESTED["more"])] == ["dict", "tuple"]


@pytest.mark.parametrize("name", LEAVES)
def test_leaf_spec_and_conversion(name):
    space, shape, dtype = LEAVES[name]
    space.seed(0)
    assert obs_spec(space) == TensorSpec(shape, dtype)
    one = space.sample()
    single = obs_to_tensor(space, one, batched=False)
    assert (single.shape, single.dtype) == (shape, dtype)
    np.testing.assert_allclose(single.numpy(), np.asarray(one), rtol=1e-6)
    batch = obs_to_tensor(space, np.stack([one, one]), batched=True)
    assert (batch.shape, batch.dtype) == ((2, *shape), dtype)


def test_nested_batch_from_a_vector_env():
    samples = [NESTED.sample() for _ in range(3)]
    batch = concatenate(NESTED, samples, create_empty_array(NESTED, 3))
    out = obs_to_tensor(NESTED, batch, batched=True)
    assert isinstance(out, TensorDict)
    assert out.batch_size == (3,)
    assert out["more", "1", "bits"].dtype == torch.int8
    assert out["more", "0"].tolist() == [int(s["more"][0]) for s in samples]
    # what the rollout allocates for the spec takes the observation as it is
    storage = allocate(obs_spec(NESTED), 3)
    storage.copy_(out)
    torch.testing.assert_close(storage["pos"], out["pos"])


def test_shares_memory_where_it_can():
    obs = np.zeros((4, 3), np.float32)
    tensor = obs_to_tensor(BOX, obs, batched=True)
    obs[0, 0] = 7
    assert tensor[0, 0] == 7


@pytest.mark.parametrize(
    "awkward", [lambda a: a[::-1], lambda a: a.T.copy().T, lambda a: np.broadcast_to(a[0], (4, 3))]
)
def test_awkward_memory_is_copied(awkward):
    obs = awkward(np.arange(12, dtype=np.float32).reshape(4, 3))
    np.testing.assert_array_equal(obs_to_tensor(BOX, obs, batched=True).numpy(), obs)


def test_read_only_needs_no_warning():
    obs = np.zeros((4, 3), np.float32)
    obs.flags.writeable = False
    assert obs_to_tensor(BOX, obs, batched=True).shape == (4, 3)


def test_lists_numbers_and_tensors_are_taken():
    assert obs_to_tensor(spaces.Discrete(3), 2, batched=False).item() == 2
    assert obs_to_tensor(BOX, [0.5, 0, 1], batched=False).tolist() == [0.5, 0.0, 1.0]
    assert obs_to_tensor(BOX, torch.ones(2, 3, dtype=torch.float64), batched=True).dtype == torch.float32


@pytest.mark.parametrize(
    "space",
    [spaces.Text(3), spaces.Sequence(BOX), spaces.Graph(BOX, None), spaces.Dict({"a": BOX, "b": spaces.Text(3)})],
)
def test_unsupported_says_what_to_do(space):
    with pytest.raises(UnsupportedSpaceError, match=r"supported: Box.*fix: wrap"):
        obs_spec(space)


def test_a_box_without_numbers_is_refused():
    with pytest.raises(UnsupportedSpaceError, match="is empty; fix: leave it out"):
        obs_spec(spaces.Dict({"a": BOX, "b": spaces.Box(-1, 1, (2, 0))}))


def test_keys_that_are_no_strings_are_refused():
    with pytest.raises(UnsupportedSpaceError, match="has the key 0, expected a string; fix: '0'"):
        obs_spec(spaces.Dict({"a": spaces.Dict({0: BOX})}))


def test_wrong_shape_names_leaf_and_expectation():
    with pytest.raises(DataError, match=r"obs has shape \[2\], expected \[3\] for one observation or \[B, 3\]"):
        obs_to_tensor(BOX, np.zeros(2), batched=False)
    wrong = NESTED.sample()
    wrong["more"][1]["bits"] = np.zeros(3, np.int8)
    with pytest.raises(DataError, match=r"obs\.more\.1\.bits has shape \[3\], expected \[2, 2\]"):
        obs_to_tensor(NESTED, wrong, batched=False)


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        ({"pos": np.zeros(3)}, "obs has no entry 'more'"),
        ({"pos": np.zeros(3), "more": (2,)}, r"obs\.more has no entry '1'"),
        (3, "obs is a int, expected a dictionary"),
        ({"pos": np.zeros(3), "more": (np.array("a"), 2)}, r"obs\.more\.0 has dtype <U1, expected numbers"),
        ({"pos": np.zeros(3), "more": ([[1], [2, 3]], 2)}, r"obs\.more\.0 is no array"),
    ],
)
def test_wrong_structure_is_named(obs, message):
    with pytest.raises(DataError, match=message):
        obs_to_tensor(NESTED, obs, batched=False)


def test_is_batched():
    assert not is_batched(BOX, np.zeros(3))
    assert is_batched(BOX, np.zeros((1, 3)))
    assert not is_batched(spaces.Discrete(2), 1)
    assert not is_batched(NESTED, NESTED.sample())
    assert is_batched(spaces.Tuple((spaces.Discrete(2),)), (np.array([0, 1]),))
    with pytest.raises(DataError, match=r"obs has shape \[1, 1, 3\]"):
        is_batched(BOX, np.zeros((1, 1, 3)))


PIXELS = spaces.Box(0, 255, (2,), np.uint8)
TRUTHS = spaces.Box(0, 1, (2,), np.bool_)


@pytest.mark.parametrize(
    ("space", "obs", "message"),
    [
        (PIXELS, np.array([0.5, 1.0]), "has dtype float64, expected uint8 for Box.*fix: return uint8"),
        (PIXELS, torch.tensor([0.0, 1.0]), "has dtype float32, expected uint8"),
        (PIXELS, np.array([7, 300]), "holds 300, expected 0 to 255"),
        (PIXELS, np.array([-1, 7]), "holds -1, expected 0 to 255"),
        (TRUTHS, np.array([0.4, 1.0]), "has dtype float64, expected bool"),
        (TRUTHS, np.array([0, 1]), "has dtype int64, expected bool"),
        (spaces.Box(-9, 9, (2,), np.int16), [40_000, 0], "holds 40000, expected -32768 to 32767"),
        (
            spaces.Box(0, 2**64 - 1, (1,), np.uint64),
            np.array([2**63], np.uint64),
            "holds 9223372036854775808, more than torch's",
        ),
        (spaces.Discrete(5), 2.7, "has dtype float64, expected int64"),
        (spaces.Discrete(5, start=2), 7, "holds 7, expected 2 to 6"),
        (spaces.MultiDiscrete([2, 3]), [1, 3], "holds 3, expected 0 to 2"),
        (spaces.MultiBinary(2), [0, 2], "holds 2, expected 0 to 1"),
    ],
)
def test_numbers_that_a_space_cannot_hold_are_refused(space, obs, message):
    with pytest.raises(DataError, match=f"obs {message}"):
        obs_to_tensor(space, obs, batched=False)
    with pytest.raises(DataError, match=f"obs {message}"):
        obs_to_tensor(space, torch.stack([obs, obs]) if torch.is_tensor(obs) else np.stack([obs, obs]), batched=True)


@pytest.mark.parametrize(
    ("space", "obs"),
    [
        (BOX, [1, 0, -1]),
        (BOX, np.array([0.5, 0.25, 0.0])),
        (PIXELS, np.array([0, 255])),
        (PIXELS, np.array([True, False])),
        (spaces.Discrete(5), np.uint8(4)),
        (spaces.MultiBinary(2), np.array([True, False])),
    ],
)
def test_numbers_that_a_space_can_hold_may_have_another_dtype(space, obs):
    np.testing.assert_array_equal(obs_to_tensor(space, obs, batched=False).numpy(), np.asarray(obs))


def test_dtypes_of_tensors_are_checked_without_their_numbers():
    spec = {
        "image": TensorSpec((2,), torch.uint8),
        "bits": TensorSpec((2,), torch.int8),
        "x": TensorSpec((), torch.float32),
    }
    fine = {
        "image": torch.zeros(3, 2, dtype=torch.uint8),
        "bits": torch.zeros(3, 2, dtype=torch.int64),
        "x": torch.ones(3).double(),
    }
    check_dtypes(spec, fine, "obs")
    for wrong in (torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64)):
        with pytest.raises(DataError, match=r"obs\.image has dtype torch\.\w+, expected torch\.uint8"):
            check_dtypes(spec, fine | {"image": wrong}, "obs")
    with pytest.raises(DataError, match=r"obs\.bits has dtype torch\.float32, expected torch\.int8"):
        check_dtypes(spec, fine | {"bits": torch.zeros(3, 2)}, "obs")
