"""The whole state of an Arcade Learning Environment, including what its own clone leaves out.

``cloneState(include_rng=True)`` holds the console, the game's score keeping and the generator of sticky actions, but
not the action that sticks: with probability ``repeat_action_probability`` a frame repeats the action that the frame
before had. Nothing shows that action, so it is found by trial: let it stick, and see which action leads to the same
machine. Nor does it hold how far the machine came within a frame, and which pixels the frame before left on the screen.
So a machine plays some frames from the state before it is put there.
"""

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from groupwise.errors import EnvError, installing

# Layout of the serialised state: six integers, the length of the console's part, that part, two integers. The
# console's part ends with a flag, the length of the generator's part and the generator as std::mt19937 prints it.
_CONSOLE_AT = 28
_TAIL = 8
_NOOP = 0
_RNG_FLAG = bytes.fromhex("b2fab1fa")
_WORDS = 624
# Generators whose next draws are all 0 (every action sticks) and all just below 1 (none does): the words that
# MT19937's tempering turns into 0 and into 2**32 - 1.
_STICKS = b"0 " * _WORDS + b"624"
_MOVES = b"316513203 " * _WORDS + b"0"


class AleState(NamedTuple):
    """State that puts another machine with the same game into the same place. Picklable."""

    machine: bytes
    held: int
    """The action that sticks."""


def capture_ale(ale: Any) -> AleState:
    """The state of an ``ALEInterface``, which is left in it, with an old screen until the next frame.

    In some games a reset stops within a frame. The clone does not hold how far it came, so there the frame that
    follows is another one than without the capture.

    Raises:
        EnvError: the sticky action cannot be found, or the layout of the state is unknown.
    """
    machine = ale.cloneState(include_rng=True).serialize()
    _repeated(ale, machine, 1)  # half a frame from before ends here
    state = AleState(machine, _NOOP if _stickiness(ale) == 0 else _held_action(ale, machine))
    restore_ale(ale, state)
    return state


def restore_ale(ale: Any, state: AleState) -> None:
    """Put an ``ALEInterface`` with the same game into a captured state. Its screen follows with the next frame."""
    _hold(ale, state.machine, state.held)  # half a frame from before ends here
    _hold(ale, state.machine, state.held, frames=3)  # two screens take turns, the first of them began on an old one
    _load(ale, state.machine)


def reseed_ale(ale: Any, seed: int) -> None:
    """Let sticky actions follow from ``seed`` (below 2**32) from now on, as if the game had been loaded with it."""
    if _stickiness(ale) == 0:
        return
    _, words, position, *_ = np.random.RandomState(seed).get_state(legacy=True)
    text = " ".join(map(str, [*words.tolist(), position]))  # type: ignore[union-attr]
    _load(ale, _with_generator(ale.cloneState(include_rng=True).serialize(), text.encode()))


def repeats_ahead(machine: bytes, stickiness: float) -> int:
    """The number of the next frames that repeat the action of the one before, by the machine's own draws."""
    numbers = np.array(machine[_generator_at(machine) : -_TAIL].split(), dtype=np.uint32)
    generator = np.random.MT19937(0)
    key: npt.NDArray[np.uint32] = numbers[:-1]
    generator.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": int(numbers[-1])}}
    repeats = 0
    while generator.random_raw() / 2**32 < stickiness:
        generator.random_raw()  # the second player's draw
        repeats += 1
    return repeats


def _stickiness(ale: Any) -> float:
    return float(ale.getFloat("repeat_action_probability"))


def _load(ale: Any, machine: bytes) -> None:
    from ale_py import ALEState

    ale.restoreState(ALEState(machine))


def _held_action(ale: Any, machine: bytes) -> int:
    """The action that sticks, up to actions that make no difference while the machine's own draws repeat it."""
    frames = max(1, repeats_ahead(machine, _stickiness(ale)))
    expected = _repeated(ale, machine, frames)
    for action in ale.getLegalActionSet():
        _hold(ale, machine, action.value)
        if _repeated(ale, machine, frames) == expected:
            return int(action.value)
    _load(ale, machine)
    raise EnvError(
        "the action that the Atari machine repeats (sticky actions) cannot be read; fix: make the environment with "
        "repeat_action_probability=0, or without continuous=True"
    )


def _hold(ale: Any, machine: bytes, action: int, *, frames: int = 1) -> None:
    """Make ``action`` the one that sticks; leaves the machine some frames later."""
    from ale_py import Action

    _load(ale, _with_generator(machine, _MOVES))
    for _ in range(frames):
        ale.act(Action(action))


def _repeated(ale: Any, machine: bytes, frames: int) -> list[bytes]:
    """The machine after each frame that repeats the sticky action."""
    from ale_py import Action

    _load(ale, _with_generator(machine, _STICKS))
    found = []
    for _ in range(frames):
        ale.act(Action.NOOP)
        found.append(ale.cloneState(include_rng=False).serialize())
    return found


def _with_generator(machine: bytes, text: bytes) -> bytes:
    """The serialised state with another generator in it."""
    at = _generator_at(machine)
    console = machine[_CONSOLE_AT : at - 4] + struct.pack("<I", len(text)) + text
    return machine[: _CONSOLE_AT - 4] + struct.pack("<I", len(console)) + console + machine[-_TAIL:]


def _generator_at(machine: bytes) -> int:
    """Where the generator's text begins."""
    (console,) = struct.unpack_from("<I", machine, _CONSOLE_AT - 4)
    at = machine.rfind(_RNG_FLAG) + 8
    if _CONSOLE_AT + console + _TAIL == len(machine) and at >= _CONSOLE_AT + 8:
        (length,) = struct.unpack_from("<I", machine, at - 4)
        if at + length + _TAIL == len(machine):
            return at
    raise EnvError(
        f"the serialised Atari state of {len(machine)} bytes is not laid out as in ale-py 0.12; fix: "
        f"{installing('atari')}"
    )
