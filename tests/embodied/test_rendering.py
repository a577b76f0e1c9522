import math

import numpy as np
import pytest

mujoco = pytest.importorskip("mujoco")

from groupwise.embodied.torch_sim import Renderer  # noqa: E402

pytestmark = pytest.mark.contrib

SCENE = """
<mujoco>
  <statistic extent="2"/>
  <asset><mesh name="ball" vertex="{vertices}"/></asset>
  <worldbody>
    <light pos="0 -2 2" dir="0 1 -1"/>
    <camera name="front" pos="0 -{distance} 0" xyaxes="1 0 0 0 0 1"/>
    <geom {ball} rgba="1 0 0 1"/>
  </worldbody>
</mujoco>
"""


def scene(ball, distance):
    """A ball of 0.1 m, with 39,996 faces where it is a mesh."""
    number = np.arange(20_000)
    height = 1 - (2 * number + 1) / len(number)
    around = math.pi * (1 + math.sqrt(5)) * number
    ring = np.sqrt(1 - height**2)
    points = 0.1 * np.stack([ring * np.cos(around), ring * np.sin(around), height], axis=1)
    vertices = " ".join(f"{value:.6f}" for value in points.flatten())
    return mujoco.MjModel.from_xml_string(SCENE.format(vertices=vertices, ball=ball, distance=distance))


def picture(model, size):
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    renderer = Renderer(model, size)
    drawn = renderer.render(data, "front").astype(int)
    renderer.close()
    return drawn


@pytest.mark.parametrize(("distance", "size"), [(0.5, 64), (0.3, 64), (0.5, 240)])
def test_a_fine_mesh_looks_as_the_ball_that_it_describes(distance, size):
    mesh = picture(scene('type="mesh" mesh="ball"', distance), size)
    ball = picture(scene('type="sphere" size="0.1"', distance), size)
    assert (ball[..., 0] > 50).mean() > 0.1
    rim = 4 * 2 * math.pi * size / 64  # about as many pixels
    assert (np.abs(mesh - ball).max(axis=-1) > 40).sum() < rim
    assert np.abs(mesh - ball).mean() < 3


def test_the_model_keeps_its_meshes():
    model = scene('type="mesh" mesh="ball"', 0.5)
    before = model.mesh_facenum.copy(), model.mesh_face.copy(), model.mesh_vert.copy()
    picture(model, 16)
    for old, new in zip(before, (model.mesh_facenum, model.mesh_face, model.mesh_vert), strict=True):
        assert np.array_equal(old, new)
    assert before[0].tolist() == [39996]
