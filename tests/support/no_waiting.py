"""What stands for a GPU on which waiting is an error."""

from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class NoWaiting:
    """Refuses what makes Python wait for a device, or sends it numbers from Python or NumPy."""

    def __enter__(self):
        with ExitStack() as stack:
            stack.enter_context(patch.object(torch, "from_numpy", _refused("from_numpy")))
            stack.enter_context(_Methods())
            stack.enter_context(_Operations())
            self._stack = stack.pop_all()

    def __exit__(self, *error):
        return self._stack.__exit__(*error)


class _Methods(TorchFunctionMode):
    """Methods of tensors that copy to the host, which on a CPU are no operations."""

    WAITS = ("tolist", "numpy", "cpu", "__array__")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        assert name not in self.WAITS, name
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    WAITS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "lift_fresh")
    WAITS += ("repeat_interleave",)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.WAITS, name
        assert not name.startswith(("unique", "_unique")), name
        if name in ("index", "index_put", "index_put_"):
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), name
        device = (kwargs or {}).get("device")
        assert name != "_to_copy" or device in (None, args[0].device), f"copies to {device}"
        return func(*args, **(kwargs or {}))


def _refused(name):
    def refuse(*args, **kwargs):
        raise AssertionError(name)

    return refuse
