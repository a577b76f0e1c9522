"""The Fetch tasks of gymnasium-robotics (``FetchPush-v4``, ``FetchPickAndPlace-v4``, ``FetchReach-v4``, ...).

Importing this module registers them and makes them run on current versions of MuJoCo.
"""

from contextlib import redirect_stderr
from io import StringIO
from types import SimpleNamespace

import mujoco
from packaging.version import Version

with redirect_stderr(StringIO()):  # at every import it prints a note on tasks of another robot
    import gymnasium_robotics  # noqa: F401
from gymnasium_robotics.utils import mujoco_utils

from groupwise.embodied.torch_sim import use_egl_without_display

use_egl_without_display()

if Version(mujoco.__version__) >= Version("3.12"):
    # Enums no longer equal NumPy's integers there, so mujoco_utils finds the type of no joint.
    _joints = SimpleNamespace(**{name: int(kind) for name, kind in mujoco.mjtJoint.__members__.items()})
    mujoco_utils.mujoco = SimpleNamespace(**{**vars(mujoco), "mjtJoint": _joints})
