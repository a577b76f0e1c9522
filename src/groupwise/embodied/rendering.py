"""Small images of MuJoCo scenes, fast enough in software that a policy can learn from them."""

import atexit
import os
import sys
import weakref
from ctypes.util import find_library
from importlib import import_module
from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt

from groupwise.errors import EnvError

Image = npt.NDArray[np.uint8]
"""[height, width, 3]."""


def use_egl_without_display() -> None:
    """Let MuJoCo environments of others draw without a display, unless the user chose how (``MUJOCO_GL``)."""
    has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform == "linux" and not has_display and find_library("EGL"):
        os.environ.setdefault("MUJOCO_GL", "egl")


class Renderer:
    """Draws the data of one model without shadows, reflections and anti-aliasing, most of a frame's cost on a CPU.

    One renderer serves any number of ``MjData`` of the model. ``close`` it, or drop it.

    Args:
        size: largest width and height in pixels.

    Raises:
        EnvError: OpenGL cannot be used.
    """

    def __init__(self, model: Any, size: int) -> None:
        self._model = model
        model.vis.quality.offsamples = 0
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = False
        self._option = mujoco.MjvOption()
        self._groups = self._option.geomgroup.copy()
        self._perturbation = mujoco.MjvPerturb()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._gl = _gl_context(size)
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._free = weakref.finalize(self, _free, self._gl, self._context)
        self._free.atexit = False
        atexit.register(self._free)  # after MuJoCo registered the end of OpenGL, so it runs before that

    def render(self, data: Any, camera: str, size: int, *, without: int | None = None) -> Image:
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
        viewport = mujoco.MjrRect(0, 0, size, size)
        mujoco.mjr_render(viewport, self._scene, self._context)
        image = np.empty((size, size, 3), np.uint8)
        mujoco.mjr_readPixels(image, None, viewport, self._context)
        return image[::-1]  # OpenGL counts rows from below

    def close(self) -> None:
        """Free the memory of OpenGL."""
        self._free()


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
