"""Environments whose steps MuJoCo Warp takes, all rows at once: a model in MJCF and a few hooks make a whole one.

The simulator's arrays and torch's tensors are the same memory, so nothing crosses the host. They are scratch: the state
of the rows is in tensors of its own, written into them before a step and copied out after it.

Source: MuJoCo Warp 4.0, https://mujoco.readthedocs.io/en/latest/mjwarp/index.html.
"""

import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.envs.torch_env import TorchGroupEnv
from groupwise.errors import EnvError, require_extra
from groupwise.functional.random import RowRandom

WarpState: TypeAlias = Mapping[str, Tensor]
"""States by name: ``qpos`` [N, nq], ``qvel`` [N, nv], ``qacc_warmstart`` [N, nv], ``act`` [N, na] if the model has
activations, the ``poses`` of the constructor, and what ``begin`` added; see ``WarpGroupEnv``."""

POSES = (
    "xpos",
    "xquat",
    "xmat",
    "xipos",
    "ximat",
    "geom_xpos",
    "geom_xmat",
    "site_xpos",
    "site_xmat",
)
"""What can be kept of bodies, geoms and sites, by the names of MuJoCo's ``mjData``."""


class WarpGroupEnv(TorchGroupEnv):
    """A MuJoCo model simulated by MuJoCo Warp in float32, as a ``TorchGroupEnv``. Needs the extra ``mujoco-warp``.

    Write what is particular about the task:

    - ``begin(random)``: ``qpos`` and ``qvel`` in which episodes begin, and whatever else stays with a row, such as a goal;
    - ``outcome(before, after, action)``: rewards [N] and whether each episode terminated [N];
    - ``observe(state)``: what the policy sees; unless you write it, ``qpos`` and ``qvel``;
    - ``control(state, action, random)``: the controls [N, nu]; unless you write it, the actions themselves.

    All of them get torch tensors, run for all N rows, and must be pure; see ``TorchGroupEnv``. What ``begin`` adds is
    carried from step to step; ``outcome`` cannot change it.

    A row that lost contacts or constraints because ``nconmax`` or ``njmax`` is too small gets the reward NaN, at which
    training stops; contacts share one array, so all rows get it then.

    Contacts are sorted and sums have a fixed order, so that members agree bit for bit on a GPU, too. Nothing waits for the
    device: steps are replayed as graphs that hold the solver's loop. On a GPU this is unproven, as none was at hand.

    Args:
        model: a path to MJCF, its text, or a ``mujoco.MjModel``.
        frame_skip: steps of the simulator in a step of the environment.
        observation_space: of a single row.
        action_space: of a single row; None: the ranges of the model's controls.
        poses: of ``POSES``, kept in the state as they are after the step, e.g. ``("site_xpos",)`` [N, nsite, 3].
        nconmax: contacts that there is room for, per row; None: MuJoCo Warp's own guess.
        njmax: rows of constraints that there is room for, per row (a contact with friction has 4 as a pyramid, a joint at
            its limit 1); None: MuJoCo Warp's own guess.

    Raises:
        MissingExtraError: MuJoCo Warp is not installed.
        EnvError: the model cannot be read or simulated, or an argument is out of range.
    """

    traceable = False

    def __init__(
        self,
        num_envs: int,
        *,
        env_id: str,
        model: Any,
        frame_skip: int,
        observation_space: spaces.Space,
        max_episode_steps: int | None,
        action_space: spaces.Space | None = None,
        poses: Sequence[str] = (),
        nconmax: int | None = None,
        njmax: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if unknown := [name for name in poses if name not in POSES]:
            raise EnvError(f"poses of {env_id} are {unknown}, expected some of {', '.join(POSES)}; fix: leave them out")
        for name, number in (("frame_skip", frame_skip), ("nconmax", nconmax), ("njmax", njmax)):
            if number is not None and number < 1:
                raise EnvError(f"{name} of {env_id} is {number}, expected 1 or more; fix: a larger one")
        self.model = load_model(model, env_id)
        self.frame_skip = frame_skip
        super().__init__(
            num_envs,
            env_id=env_id,
            observation_space=observation_space,
            action_space=control_space(self.model) if action_space is None else action_space,
            max_episode_steps=max_episode_steps,
            device=device,
        )
        self._poses = tuple(poses)
        self._worlds = Worlds(
            self.model,
            num_envs,
            self.device,
            env_id=env_id,
            frame_skip=frame_skip,
            poses=poses,
            nconmax=nconmax,
            njmax=njmax,
        )
        self._zeros = {
            name: torch.zeros(num_envs, size, device=device)
            for name, size in (("qacc_warmstart", self.model.nv), ("act", self.model.na))
            if size
        }

    @property
    def seconds(self) -> float:
        """That a step of the environment takes."""
        return float(self.model.opt.timestep * self.frame_skip)

    @abstractmethod
    def begin(self, random: RowRandom) -> WarpState:
        """``qpos`` [N, nq] and ``qvel`` [N, nv] in which episodes begin, and what else stays with a row, under other names."""

    @abstractmethod
    def outcome(
        self, before: WarpState, after: WarpState, action: Tensor
    ) -> tuple[Float[Tensor, " row"], Bool[Tensor, " row"]]:
        """Rewards and terminations of the step from ``before`` to ``after`` with the actions [N, ...]."""

    def control(self, state: WarpState, action: Tensor, random: RowRandom) -> Tensor:
        """The model's controls [N, nu] for a step."""
        return action

    def observe(self, state: WarpState) -> Any:
        """Observations [N, ...] of the states: positions, then velocities, unless you write it."""
        return torch.cat([state["qpos"], state["qvel"]], dim=1)

    def initial(self, random: RowRandom) -> WarpState:
        """What ``begin`` returns, with activations and the solver's warm start at zero."""
        state = dict(self.begin(random))
        self._check_begin(state)
        return state | self._zeros | self._worlds.poses(state["qpos"])

    def transition(self, state: WarpState, action: Tensor, random: RowRandom) -> tuple[WarpState, Tensor, Tensor]:
        """``frame_skip`` steps of the simulator with the same controls, and their outcome."""
        control = self.control(state, action, random)
        self._check_control(control)
        moved, lost = self._worlds.step(state, control)
        after = {**state, **moved, **self._worlds.poses(moved["qpos"])}
        reward, terminated = self.outcome(state, after, action)
        return after, reward.masked_fill(lost, torch.nan), terminated

    def _check_control(self, control: Tensor) -> None:
        wanted = [self.num_envs, self.model.nu]
        if list(control.shape) != wanted:
            raise EnvError(
                f"control of {self.env_id} returned {list(control.shape)}, expected {wanted}; fix: a number for each actuator"
            )

    def _check_begin(self, state: dict[str, Tensor]) -> None:
        wanted = {"qpos": (self.num_envs, self.model.nq), "qvel": (self.num_envs, self.model.nv)}
        got = {name: tuple(leaf.shape) for name, leaf in state.items() if name in wanted}
        if got != wanted:
            raise EnvError(f"begin of {self.env_id} returned {got}, expected {wanted}; fix: a row of each per episode")
        if taken := sorted({*state} & {*self._zeros, *self._poses}):
            raise EnvError(f"begin of {self.env_id} returned {taken}, which the state has already; fix: other names")


class Worlds:
    """The simulator's arrays for ``num_worlds`` copies of a model, as views of torch.

    Steps are recorded once and replayed by Warp, which takes a fiftieth of the time that Python needs to launch their
    kernels.

    Raises:
        MissingExtraError: MuJoCo Warp is not installed.
        EnvError: the model has what cannot be simulated, or cannot be put back.
    """

    def __init__(
        self,
        model: Any,
        num_worlds: int,
        device: torch.device,
        *,
        env_id: str,
        frame_skip: int,
        poses: Sequence[str],
        nconmax: int | None,
        njmax: int | None,
    ) -> None:
        self._wp, self._mjw = imported()
        refuse_hidden_state(model, env_id)
        self._frame_skip = frame_skip
        self._device = device
        self._where = self._wp.device_from_torch(device)
        self._recorded: dict[str, Any] = {}
        with self._wp.ScopedDevice(self._where):
            try:
                self._model = self._mjw.put_model(model)
                self._data = self._mjw.make_data(model, nworld=num_worlds, nconmax=nconmax, njmax=njmax)
            except (NotImplementedError, ValueError) as error:
                raise EnvError(
                    f"MuJoCo Warp does not take the model of {env_id}: {line(error)}; fix: the model"
                ) from error
            self._wp.synchronize_device()  # torch's stream knows nothing of Warp's
        self._lost = self._set_options()
        names = ["qpos", "qvel", "qacc_warmstart", *(["act"] if model.na else [])]
        self._state = {name: self._view(name) for name in names}
        self._poses = {name: self._view(name) for name in poses}
        self._ctrl, self._overflow = self._view("ctrl"), self._view("overflow")

    def step(
        self, state: WarpState, control: Float[Tensor, "row control"]
    ) -> tuple[dict[str, Tensor], Bool[Tensor, " row"]]:
        """The states after ``frame_skip`` steps, and the rows that lost contacts or constraints on the way."""
        for name, view in self._state.items():
            view.copy_(state[name])
        self._ctrl.copy_(control)
        self._overflow.zero_()
        self._launch(self._steps)
        lost = (self._overflow & self._lost) != 0
        return {name: view.clone() for name, view in self._state.items()}, lost

    def poses(self, qpos: Float[Tensor, "row position"]) -> dict[str, Tensor]:
        """Where bodies, geoms and sites are [N, count, ...]."""
        if not self._poses:
            return {}
        self._state["qpos"].copy_(qpos)
        self._launch(self._kinematics)
        return {name: view.clone() for name, view in self._poses.items()}

    def _steps(self) -> None:
        for _ in range(self._frame_skip):
            self._mjw.step(self._model, self._data)

    def _kinematics(self) -> None:
        self._mjw.kinematics(self._model, self._data)

    def _set_options(self) -> int:
        """The bits of ``overflow`` that say what was lost."""
        options, kinds = self._model.opt, self._mjw.OverflowType
        options.deterministic = int(self._mjw.DeterminismType.ALL)
        # where a graph cannot loop until all rows are solved, each solution takes as many rounds as the model allows
        options.graph_conditional = self._where.is_cpu or self._wp.is_conditional_graph_supported()
        # a solver that ran out of iterations lost nothing: its answer is less exact, as MuJoCo's would be
        lost = int(kinds.ALL & ~(kinds.ITERATIONS | kinds.LS_ITERATIONS))
        options.warn_overflow = lost
        return lost

    def _view(self, name: str) -> Tensor:
        view: Tensor = self._wp.to_torch(getattr(self._data, name))
        return view

    def _launch(self, function: Callable[[], None]) -> None:
        """What the function launches, on torch's current stream."""
        wp, name = self._wp, function.__name__
        on_cuda = self._device.type == "cuda"
        stream = wp.stream_from_torch(torch.cuda.current_stream(self._device)) if on_cuda else None
        if name not in self._recorded:
            with wp.ScopedDevice(self._where), wp.ScopedCapture() as whole:
                function()
            self._recorded[name] = whole.graph
        wp.capture_launch(self._recorded[name], stream=stream)


def imported() -> tuple[Any, Any]:
    """The modules of Warp and MuJoCo Warp. Warp logs warnings only, unless the caller imported it first.

    Raises:
        MissingExtraError: one is not installed.
    """
    for module in ("mujoco_warp", "warp"):
        require_extra(module, "mujoco-warp")
    ours = "warp" not in sys.modules
    import warp

    if ours:
        warp.config.log_level = warp.LOG_WARNING
    import mujoco_warp

    warp.init()
    return warp, mujoco_warp


def load_model(model: Any, env_id: str) -> Any:
    """A ``mujoco.MjModel`` from a path, from MJCF itself, or as it is.

    Raises:
        MissingExtraError: MuJoCo is not installed.
        EnvError: it is no model, or cannot be read.
    """
    require_extra("mujoco", "mujoco-warp")
    import mujoco

    if isinstance(model, mujoco.MjModel):
        return model
    if not isinstance(model, str | os.PathLike):
        raise EnvError(
            f"the model of {env_id} is a {type(model).__name__}, expected MJCF or a mujoco.MjModel; fix: a path or its text"
        )
    try:
        if isinstance(model, str) and model.lstrip().startswith("<"):
            return mujoco.MjModel.from_xml_string(model)
        return mujoco.MjModel.from_xml_path(str(Path(model)))
    except ValueError as error:
        raise EnvError(f"the model of {env_id} cannot be read: {line(error)}; fix: the MJCF, or its path") from error


def control_space(model: Any) -> spaces.Box:
    """The ranges of a model's controls, without bounds where they have no limits."""
    limited = model.actuator_ctrllimited.astype(bool)
    low = np.where(limited, model.actuator_ctrlrange[:, 0], -np.inf).astype(np.float32)
    high = np.where(limited, model.actuator_ctrlrange[:, 1], np.inf).astype(np.float32)
    return spaces.Box(low, high, dtype=np.float32)


def refuse_hidden_state(model: Any, env_id: str) -> None:
    """Refuse what remembers more than positions, velocities and activations: a row could not be put back.

    Raises:
        EnvError: the model has it; names it.
    """
    import mujoco

    asleep = model.opt.enableflags & mujoco.mjtEnableBit.mjENBL_SLEEP
    found = {
        "delays of actuators or sensors": model.nhistory,
        "plastic springs": model.nplastic,
        "flexible bodies": model.nflex,
        "bodies that fall asleep": asleep,
    }
    if names := [name for name, count in found.items() if count]:
        raise EnvError(
            f"the model of {env_id} has {', '.join(names)}, whose state is not kept, so members would not agree; "
            "fix: a model without"
        )


def line(error: Exception) -> str:
    """The message of an error in one line."""
    return " ".join(str(error).split())
