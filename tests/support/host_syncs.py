"""Counts what would make Python wait for a GPU, in code that runs on a CPU."""

import traceback
from collections import Counter

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("tolist", "numpy", "cpu", "__array__")
"""Methods that copy to the host, which on a CPU are no operations."""
WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal")
"""Operations that read numbers, or have sizes that follow from numbers."""
INDEXES = ("index", "index_put", "index_put_")


class HostSyncs:
    """Waits by line of the library, in ``found``; ``total`` is their number.

    Tensors that were read are the host's, and so are those of Python's or NumPy's numbers, random orders, and results of these
    alone, until ``to`` moves them. A copy between the two waits unless it is ``non_blocking``.
    """

    def __init__(self):
        self.found = Counter()
        self._modes = _Reads(self), _Operations(self)
        self._host = {}
        self._reading = 0

    @property
    def total(self):
        return sum(self.found.values())

    def __enter__(self):
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error):
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def count(self, name, *tensors):
        """Count a wait for these tensors, unless they are the host's."""
        if self._reading or any(self.is_host(tensor) for tensor in tensors):
            return
        frames = [f for f in traceback.extract_stack() if "/groupwise/" in f.filename and "/tests/" not in f.filename]
        self.found[
            f"{frames[-1].filename.split('/groupwise/')[-1]}:{frames[-1].lineno} {name}" if frames else name
        ] += 1

    def keep(self, tree):
        """Note the tensors of a tree as the host's; they are kept, so that no other one gets their place."""
        leaves = torch.utils._pytree.tree_leaves(tree)
        self._host |= {_place(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}

    def is_host(self, tensor):
        return _place(tensor) in self._host


def _place(tensor):
    return tensor.untyped_storage().data_ptr()


class _Reads(TorchFunctionMode):
    def __init__(self, syncs):
        super().__init__()
        self.syncs = syncs

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name == "to" and self.syncs.is_host(args[0]):
            if not (kwargs or {}).get("non_blocking"):
                self.syncs.count("copy to the device")
            found = args[0].clone().to(*args[1:], **(kwargs or {}))
            self.syncs._host.pop(_place(found))
            return found
        if name not in READS:
            return func(*args, **(kwargs or {}))
        self.syncs.count(name, args[0])
        self.syncs._reading += 1
        try:
            found = func(*args, **(kwargs or {}))
        finally:
            self.syncs._reading -= 1
        if name == "cpu":
            found = found.clone()
            self.syncs.keep(found)
        return found


class _Operations(TorchDispatchMode):
    def __init__(self, syncs):
        super().__init__()
        self.syncs = syncs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, syncs = func.overloadpacket.__name__, self.syncs
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        host = [syncs.is_host(tensor) for tensor in tensors]
        indices = [index for index in args[1] if index is not None] if name in INDEXES else []
        if any(index.dtype == torch.bool or syncs.is_host(index) for index in indices):
            syncs.count("mask, or index of the host", args[0])
        elif name in WAITS or name.startswith(("unique", "_unique")):
            syncs.count(name, *tensors)
        elif (
            name == "copy_"
            and any(host)
            and not all(host)
            and not (kwargs or {}).get("non_blocking")
            and args[2:] != (True,)
        ):
            syncs.count("copy between host and device")
        found = func(*args, **(kwargs or {}))
        if name in ("randperm", "lift_fresh") or (host and all(host)):
            syncs.keep(found)
        return found
