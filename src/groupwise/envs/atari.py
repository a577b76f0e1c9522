"""Seeds of sticky actions in the Arcade Learning Environment."""

import struct
from typing import Any

import numpy as np

from groupwise.errors import EnvError, installing

# Layout of the serialised state: six integers, the length of the console's part, that part, two integers. The
# console's part ends with a flag, the length of the generator's part and the generator as std::mt19937 prints it.
_CONSOLE_AT = 28
_TAIL = 8
_RNG_FLAG = bytes.fromhex("b2fab1fa")


def reseed_ale(ale: Any, seed: int) -> None:
    """Let sticky actions follow from ``seed`` (below 2**32) from now on, as if the game had been loaded with it.

    With the probability ``repeat_action_probability``, a frame repeats the action of the one before.

    Raises:
        EnvError: the state has an unknown layout.
    """
    if ale.getFloat("repeat_action_probability") == 0:
        return
    from ale_py import ALEState

    _, words, position, *_ = np.random.RandomState(seed).get_state(legacy=True)
    text = " ".join(map(str, [*words.tolist(), position])).encode()  # type: ignore[union-attr]
    machine: bytes = ale.cloneState(include_rng=True).serialize()
    (console,) = struct.unpack_from("<I", machine, _CONSOLE_AT - 4)
    at = machine.rfind(_RNG_FLAG) + 8
    if _CONSOLE_AT + console + _TAIL == len(machine) and at >= _CONSOLE_AT + 8:
        (length,) = struct.unpack_from("<I", machine, at - 4)
        if at + length + _TAIL == len(machine):
            part = machine[_CONSOLE_AT : at - 4] + struct.pack("<I", len(text)) + text
            ale.restoreState(
                ALEState(machine[: _CONSOLE_AT - 4] + struct.pack("<I", len(part)) + part + machine[-_TAIL:])
            )
            return
    raise EnvError(
        f"the serialised Atari state of {len(machine)} bytes is not laid out as in ale-py 0.12; fix: "
        f"{installing('atari')}"
    )
