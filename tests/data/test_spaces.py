import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from tensordict import TensorDict

from groupwise.data.rollout import TensorSpec, allocate
from groupwise.data.spaces import is_batched, obs_spec, obs_to_tensor, space_kind
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
        ({"pos": np.zeros(3), "more": (1,)}, r"obs\.more has no entry '1'"),
        (3, "obs is a int, expected a dictionary"),
        ({"pos": np.zeros(3), "more": (np.array("a"), 1)}, r"obs\.more\.0 has dtype <U1, expected numbers"),
        ({"pos": np.zeros(3), "more": ([[1], [2, 3]], 1)}, r"obs\.more\.0 is no array"),
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
