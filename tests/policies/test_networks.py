import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from groupwise.config.policy import PolicyCfg
from groupwise.data.rollout import allocate
from groupwise.data.spaces import obs_spec, obs_to_tensor
from groupwise.policies.actor_critic import MLP, ObsEncoder, image_layout, orthogonal

CFG = PolicyCfg()


def encode(space, obs):
    return ObsEncoder(space, CFG)(obs_to_tensor(space, obs, batched=False))


@pytest.mark.parametrize(("rows", "columns"), [(3, 5), (5, 3), (4, 4)])
def test_orthogonal(rows, columns):
    layer = orthogonal(nn.Linear(columns, rows), gain=2.0)
    weight = layer.weight if rows <= columns else layer.weight.T
    # rows (or columns) of length 2, at right angles
    torch.testing.assert_close(weight @ weight.T, 4 * torch.eye(min(rows, columns)), atol=1e-5, rtol=0)
    assert not layer.bias.any()
    assert orthogonal(nn.Linear(2, 2, bias=False)).bias is None


def test_mlp_layers_and_gains():
    mlp = MLP(4, PolicyCfg(hidden_sizes=(8, 6)), 3, gain=0.01)
    assert [tuple(p.shape) for p in mlp.parameters()] == [(8, 4), (8,), (6, 8), (6,), (3, 6), (3,)]
    # an orthogonal 3x6 matrix times 0.01 has singular values 0.01, hidden ones sqrt(2)
    torch.testing.assert_close(torch.linalg.svdvals(mlp.head.weight), torch.full((3,), 0.01))
    torch.testing.assert_close(torch.linalg.svdvals(mlp.hidden[0].weight), torch.full((4,), math.sqrt(2)))
    assert mlp(torch.zeros(2, 5, 4)).shape == (2, 5, 3)


@pytest.mark.parametrize(
    ("activation", "module"), [("tanh", nn.Tanh), ("relu", nn.ReLU), ("elu", nn.ELU), ("silu", nn.SiLU)]
)
def test_mlp_is_the_usual_sequence(activation, module):
    mlp = MLP(4, PolicyCfg(activation=activation), 3)
    x = torch.randn(5, 4)
    expected = nn.Sequential(mlp.hidden[0], module(), mlp.hidden[1], module(), mlp.head)(x)
    torch.testing.assert_close(mlp(x), expected)


def test_mlp_without_head_or_hidden_layers():
    assert MLP(4, CFG).num_outputs == 64
    assert MLP(4, PolicyCfg(hidden_sizes=()))(torch.ones(4)).tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((84, 84, 3), (3, 84, 84, False)),
        ((4, 84, 84), (4, 84, 84, True)),
        ((7, 7, 7), (7, 7, 7, False)),
        ((84, 84), None),
    ],
)
def test_image_layout(shape, layout):
    assert image_layout(spaces.Box(0, 255, shape, np.uint8)) == layout
    assert image_layout(spaces.Box(0, 1, shape, np.float32)) is None


@pytest.mark.parametrize(
    ("size", "features"),
    [(size, 512) for size in ((36, 36), (84, 84), (96, 37))] + [(size, 128) for size in ((7, 7), (10, 5), (35, 35))],
)
def test_images_of_any_size_from_7_have_a_network_by_their_size(size, features):
    space = spaces.Box(0, 255, (3, *size), np.uint8)
    assert ObsEncoder(space, CFG)(torch.zeros(2, *space.shape)).shape == (2, features)


def test_channel_axis_does_not_matter():
    last = spaces.Box(0, 255, (40, 36, 3), np.uint8)
    first = spaces.Box(0, 255, (3, 40, 36), np.uint8)
    a, b = ObsEncoder(last, CFG), ObsEncoder(first, CFG)
    b.load_state_dict(a.state_dict())
    image = torch.randint(0, 256, (2, 5, 40, 36, 3), dtype=torch.uint8)
    assert a(image).shape == (2, 5, 512)
    torch.testing.assert_close(b(image.movedim(-1, -3)), a(image), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(a(image[0, 0]), a(image)[0, 0], atol=1e-5, rtol=1e-4)


def test_image_is_scaled_to_one():
    encoder = ObsEncoder(spaces.Box(0, 255, (8, 8, 3), np.uint8), CFG)
    white = torch.full((1, 8, 8, 3), 255, dtype=torch.uint8)
    torch.testing.assert_close(encoder(white), encoder.encoders[0].network(torch.ones(1, 3, 8, 8)))


@pytest.mark.parametrize("first", [True, False])
def test_images_are_scaled_by_their_own_bounds(first):
    shape = (2, 8, 8) if first else (8, 8, 2)
    board = torch.randint(0, 2, (3, *shape), dtype=torch.uint8)
    encoder = ObsEncoder(spaces.Box(0, 1, shape, np.uint8), CFG)
    image = board.float() if first else board.float().movedim(-1, -3)
    torch.testing.assert_close(encoder(board), encoder.encoders[0].network(image))
    # each element has bounds of its own
    low = np.zeros(shape, np.uint8)
    low[1] = 4
    encoder = ObsEncoder(spaces.Box(low, low + 2, dtype=np.uint8), CFG)
    expected = encoder.encoders[0].network(image / 2)
    torch.testing.assert_close(encoder(board + torch.from_numpy(low)), expected)
    assert not encoder.state_dict().keys() & {"encoders.0.low", "encoders.0.span"}, "weights of before still fit"


def test_bytes_and_images_are_divided_by_255_bit_for_bit():
    for shape in ((5,), (4, 40, 40)):
        encoder = ObsEncoder(spaces.Box(0, 255, shape, np.uint8), CFG).encoders[0]
        pixels = torch.randint(0, 256, (3, *shape), dtype=torch.uint8)
        assert torch.equal(encoder.scaled(pixels.float()), pixels.float() / 255)


def test_leaves_by_hand():
    assert encode(spaces.Box(-9, 9, (2, 2)), [[1, 2], [3, 4]]).tolist() == [1, 2, 3, 4]
    assert encode(spaces.Box(-9, 9, ()), 5.0).tolist() == [5]
    assert encode(spaces.Box(-9, 9, (2,), np.int32), [5, -6]).tolist() == [5, -6]
    assert encode(spaces.Box(0, 255, (2,), np.uint8), [0, 255]).tolist() == [0, 1]
    assert encode(spaces.Box(0, 1, (2,), np.uint8), [0, 1]).tolist() == [0, 1]
    assert encode(spaces.Box(2, 6, (2, 2), np.uint8), [[2, 3], [4, 6]]).tolist() == [0, 0.25, 0.5, 1]
    bounds = np.array([[0, 10], [7, 0]], np.uint8), np.array([[1, 14], [7, 255]], np.uint8)
    assert encode(spaces.Box(*bounds, dtype=np.uint8), [[1, 11], [7, 255]]).tolist() == [1, 0.25, 0, 1]
    assert encode(spaces.Discrete(3), 2).tolist() == [0, 0, 1]
    assert encode(spaces.Discrete(3, start=-1), -1).tolist() == [1, 0, 0]
    assert encode(spaces.MultiDiscrete([2, 3], start=[0, 5]), [1, 5]).tolist() == [0, 1, 1, 0, 0]
    assert encode(spaces.MultiDiscrete([[2], [2]]), [[1], [0]]).tolist() == [0, 1, 1, 0]
    assert encode(spaces.MultiBinary(3), [1, 0, 1]).tolist() == [1, 0, 1]


def test_number_out_of_range_encodes_as_zeros():
    assert ObsEncoder(spaces.Discrete(3), CFG)(torch.tensor(7)).tolist() == [0, 0, 0]


def test_nested_features_follow_the_space():
    # Gymnasium sorts the names of a Dict
    space = spaces.Dict({"b": spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(1))), "a": spaces.Box(-1, 1, (2,))})
    obs = {"a": np.array([0.5, -0.5], np.float32), "b": (1, np.array([1], np.int8))}
    assert encode(space, obs).tolist() == [0.5, -0.5, 0, 1, 1]
    assert ObsEncoder(space, CFG).num_features == 5


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (3,)),
        spaces.Discrete(3),
        spaces.Dict({"a": spaces.Discrete(3), "i": spaces.Box(0, 255, (40, 40, 3), np.uint8)}),
    ],
)
def test_any_leading_dimensions(space):
    encoder = ObsEncoder(space, CFG)
    assert encoder(allocate(obs_spec(space), 2, 5)).shape == (2, 5, encoder.num_features)
    assert encoder(allocate(obs_spec(space))).shape == (encoder.num_features,)
