"""Small images of MuJoCo scenes, fast enough in software that a policy can learn from them."""

import atexit
import copy
import os
import sys
import weakref
from ctypes.util import find_library
from importlib import import_module
from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int

from groupwise.errors import EnvError

Image = npt.NDArray[np.uint8]
"""[height, width, 3]."""


def use_egl_without_display() -> None:
    """Let MuJoCo environments of others draw without a display, unless the user chose how (``MUJOCO_GL``)."""
    has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform == "linux" and not has_display and find_library("EGL"):
        os.environ.setdefault("MUJOCO_GL", "egl")


class Renderer:
    """Draws pictures of one model without shadows, reflections and anti-aliasing, most of a frame's cost on a CPU.

    What a picture would not show of the meshes is left out, too. One renderer serves any number of ``MjData`` of the model.
    ``close`` it, or drop it.

    Args:
        size: width and height of the pictures, in pixels.

    Raises:
        EnvError: OpenGL cannot be used.
    """

    def __init__(self, model: Any, size: int) -> None:
        self._model = model
        model.vis.quality.offsamples = 0
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        self._size = size
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = False
        self._option = mujoco.MjvOption()
        self._groups = self._option.geomgroup.copy()
        self._perturbation = mujoco.MjvPerturb()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._gl = _gl_context(size)
        self._context = mujoco.MjrContext(_simplified(model, size), mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._free = weakref.finalize(self, _free, self._gl, self._context)
        self._free.atexit = False
        atexit.register(self._free)  # after MuJoCo registered the end of OpenGL, so it runs before that

    def render(self, data: Any, camera: str, *, without: int | None = None) -> Image:
        """The picture [size, size, 3] of a camera of the model.

        Args:
            without: a group of geoms to leave out.
        """
        self._option.geomgroup[:] = self._groups
        if without is not None:
            self._option.geomgroup[without] = 0
        self._camera.fixedcamid = self._model.camera(camera).id
        mujoco.mjv_updateScene(
            self._model,
            data,
            self._option,
            self._perturbation,
            self._camera,
            mujoco.mjtCatBit.mjCAT_ALL,
            self._scene,
        )
        self._gl.make_current()
        viewport = mujoco.MjrRect(0, 0, self._size, self._size)
        mujoco.mjr_render(viewport, self._scene, self._context)
        image = np.empty((self._size, self._size, 3), np.uint8)
        mujoco.mjr_readPixels(image, None, viewport, self._context)
        return image[::-1]  # OpenGL counts rows from below

    def close(self) -> None:
        """Free the memory of OpenGL."""
        self._free()


def _simplified(model: Any, size: int) -> Any:
    """A copy of the model for pictures [size, size], with fewer faces: vertices in one cell of a grid are drawn as one.

    A cell is about a tenth of a pixel at the distance ``model.stat.extent``, and at most a 32nd of the mesh: cameras may be
    close to what is small.
    """
    simplified = copy.copy(model)
    for mesh in np.flatnonzero(model.mesh_facenum):
        first, vertex = model.mesh_faceadr[mesh], model.mesh_vertadr[mesh]
        faces = slice(first, first + model.mesh_facenum[mesh])
        vertices = model.mesh_vert[vertex : vertex + model.mesh_vertnum[mesh]]
        cell = min(model.stat.extent / (8 * size), float(np.ptp(vertices, axis=0).max()) / 32)
        corners, kept = _merged(vertices, model.mesh_face[faces], cell)
        fewer = slice(first, first + len(kept))
        simplified.mesh_facenum[mesh] = len(kept)
        simplified.mesh_face[fewer] = corners
        simplified.mesh_facenormal[fewer] = model.mesh_facenormal[faces][kept]
        simplified.mesh_facetexcoord[fewer] = model.mesh_facetexcoord[faces][kept]
    return simplified


def _merged(
    vertices: Float[np.ndarray, "vertex 3"], faces: Int[np.ndarray, "face 3"], cell: float
) -> tuple[Int[np.ndarray, "kept 3"], Int[np.ndarray, " kept"]]:
    """The faces with corners in three cells, each corner moved to the first vertex of its cell; and their numbers."""
    _, first, group = np.unique(np.floor(vertices / cell), axis=0, return_index=True, return_inverse=True)
    corners = first[group.reshape(-1)][faces]
    kept = np.flatnonzero((corners != np.roll(corners, 1, axis=1)).all(axis=1))
    return corners[kept], kept


def _gl_context(size: int) -> Any:
    """A current OpenGL context: that of ``MUJOCO_GL``, else EGL on Linux and MuJoCo's own choice elsewhere."""
    default = "egl" if sys.platform == "linux" else "cgl" if sys.platform == "darwin" else "glfw"
    backend = os.environ.get("MUJOCO_GL", "").lower() or default
    try:
        context = import_module(f"mujoco.{backend}").GLContext(size, size)
        context.make_current()
    except Exception as error:  # each backend has its own kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise EnvError(
            f"no images, since OpenGL cannot be used by {backend!r} ({reason}); fix: apt-get install libegl1 "
            "libegl-mesa0 libgl1-mesa-dri, or MUJOCO_GL=osmesa with libosmesa6, or learn from states "
            "(env.kwargs.obs='state')"
        ) from error
    return context


def _free(gl: Any, context: Any) -> None:
    gl.make_current()
    context.free()
    gl.free()
