"""The state of an Arcade Learning Environment, as a start that several machines share.

``cloneState(include_rng=True)`` holds the console, the game's score keeping and the generator of sticky actions. It does
not hold the action that sticks: with probability ``repeat_action_probability`` a frame repeats the action that the frame
before had. Nor does it hold how far the machine came within a frame, and which pixels the frame before left on the screen.
So a machine plays some frames without an action from the state before it is put there.
"""

import struct
from typing import Any

import numpy as np

from groupwise.errors import EnvError, installing

# Layout of the serialised state: six integers, the length of the console's part, that part, two integers. The
# console's part ends with a flag, the length of the generator's part and the generator as std::mt19937 prints it.
_CONSOLE_AT = 28
_TAIL = 8
_RNG_FLAG = bytes.fromhex("b2fab1fa")
_WORDS = 624
# A generator whose next draws are all just below 1, so that no action sticks: the word that MT19937's tempering turns
# into 2**32 - 1.
_MOVES = b"316513203 " * _WORDS + b"0"


def capture_ale(ale: Any) -> bytes:
    """The state of an ``ALEInterface``, which is put there, so that no action sticks any longer.

    In some games a reset stops within a frame. The clone does not hold how far it came, so there the frame that
    follows is another one than without the capture.

    Raises:
        EnvError: the layout of the state is unknown.
    """
    machine: bytes = ale.cloneState(include_rng=True).serialize()
    restore_ale(ale, machine)
    return machine


def restore_ale(ale: Any, machine: bytes) -> None:
    """Put an ``ALEInterface`` with the same game into a captured state. Its screen follows with the next frame."""
    from ale_py import Action

    # half a frame from before ends in the first; two screens take turns, and the next of them began on an old one
    for frames in (1, 3):
        _load(ale, _with_generator(machine, _MOVES))
        for _ in range(frames):
            ale.act(Action.NOOP)
    _load(ale, machine)


def reseed_ale(ale: Any, seed: int) -> None:
    """Let sticky actions follow from ``seed`` (below 2**32) from now on, as if the game had been loaded with it."""
    if ale.getFloat("repeat_action_probability") == 0:
        return
    _, words, position, *_ = np.random.RandomState(seed).get_state(legacy=True)
    text = " ".join(map(str, [*words.tolist(), position]))  # type: ignore[union-attr]
    _load(ale, _with_generator(ale.cloneState(include_rng=True).serialize(), text.encode()))


def _load(ale: Any, machine: bytes) -> None:
    from ale_py import ALEState

    ale.restoreState(ALEState(machine))


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
    raise EnvError(f"an Atari state of {len(machine)} bytes is not as in ale-py 0.12; fix: {installing('atari')}")
