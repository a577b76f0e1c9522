"""What stands for a GPU on which waiting is an error."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoWaiting(TorchDispatchMode):
    """Refuses operations that make Python wait for a device, or send it numbers from Python."""

    WAITS = (
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "nonzero",
        "masked_select",
        "equal",
        "lift_fresh",
        "repeat_interleave",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.WAITS, name
        assert not name.startswith(("unique", "_unique")), name
        if name in ("index", "index_put", "index_put_"):
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), name
        device = (kwargs or {}).get("device")
        assert name != "_to_copy" or device in (None, args[0].device), f"copies to {device}"
        return func(*args, **(kwargs or {}))
