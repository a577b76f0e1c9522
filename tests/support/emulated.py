"""A device of its own type, for which the CPU computes: what waits for it, or mixes it with the CPU, is seen."""

import traceback
from collections import Counter
from unittest.mock import patch

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "emulated"
READS = (
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "allclose",
    "nonzero",
    "masked_select",
    "repeat_interleave",
    "bincount",
)
"""Operations that read numbers, or have sizes that follow from numbers."""
INDEXES = ("index", "index_put", "index_put_")
WAITS: Counter[str] = Counter()
"""How often Python waited for the device, by line of the library and operation."""


class Module(backend_registration._DummyBackendModule):
    """Answers to what torch asks a device."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]

    def synchronize(self, device=None):
        """Nothing runs behind Python's back."""


_PARTS = Module(), backend_registration._DummyPrivateUse1Hook(), backend_registration._DummyDeviceGuard()
backend_registration._setup_privateuseone_for_python_backend(NAME, *_PARTS)  # torch itself does not keep them
torch.__future__.set_swap_module_params_on_conversion(True)  # parameters become tensors of another class
DEVICE = torch.device(NAME, 0)


class EmulatedTensor(torch.Tensor):
    """A tensor of the device; its numbers are in ``raw``."""

    @staticmethod
    def __new__(cls, raw):
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        tensor = torch.Tensor._make_wrapper_subclass(cls, raw.size(), **layout, device=DEVICE)
        tensor.raw = raw
        return tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.tolist:  # which torch refuses subclasses
            return args[0].cpu().tolist()
        if func is torch.Tensor.new_tensor:
            return _tensor(args[1], **{"dtype": args[0].dtype, "device": DEVICE} | (kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


class _Generator(torch.Generator):
    """A generator of the CPU, for either device: operations do not tell for which it was made."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


def _tensor(data, *, device=None, make=torch.tensor, **settings):
    """``torch.tensor``, which no mode sees."""
    return make(data, **settings).to(device or "cpu")


class EmulatedDevice(TorchDispatchMode):
    """Within it tensors can be made on the device, and moved to it."""

    def __enter__(self):
        self._patch = patch.multiple(torch, Generator=_Generator, tensor=_tensor)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def compute(func, args, kwargs):
    """The result of an operation, computed on the CPU; a ``RuntimeError`` if it mixes the devices."""
    asked = kwargs.get("device")
    tensors = [*_tensors(args), *_tensors(kwargs.values())]
    there = [tensor for tensor in tensors if isinstance(tensor, EmulatedTensor)]
    if not there and (asked is None or asked.type != NAME):
        return func(*args, **kwargs)
    if torch.is_inference_mode_enabled():  # otherwise operations come in their parts
        with EmulatedDevice():
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
    name = func.overloadpacket.__name__
    takes_numbers = name not in ("stack", "cat")  # of the CPU: tensors without dimensions
    here = [one for one in tensors if not isinstance(one, EmulatedTensor) and not (takes_numbers and one.dim() == 0)]
    is_there = bool(there) if asked is None else asked.type == NAME
    if name == "_to_copy":
        if is_there != bool(there) and (there or not kwargs.get("non_blocking")):  # who reads it must wait for it
            _wait(f"copy to {asked}")
    elif name == "copy_":
        is_there = isinstance(args[0], EmulatedTensor)
        if len(there) == 1 and not kwargs.get("non_blocking") and args[2:] != (True,):
            _wait("copy between devices")
    elif (
        name in INDEXES and isinstance(args[0], EmulatedTensor) and not any(one is args[2] for one in here if args[2:])
    ):
        if any(index is not None and index.dtype == torch.bool for index in args[1]):
            _wait(f"{name} by a mask")
        elif here:
            _wait(f"{name} by numbers of the CPU")
    elif there and here:
        raise RuntimeError(f"{name} of tensors on {sorted({str(tensor.device) for tensor in tensors})}")
    elif there and (name in READS or name.startswith(("unique", "_unique"))) and "output_size" not in kwargs:
        _wait(name)

    own = {id(tensor.raw): tensor for tensor in there}

    def to_device(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return own[id(leaf)] if id(leaf) in own else EmulatedTensor(leaf)

    args = _mapped(_raw, args)
    kwargs = {key: _mapped(_raw, value) for key, value in kwargs.items()}
    if is_there and asked is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    result = func(*args, **kwargs)
    with torch.inference_mode(False):  # inference tensors of subclasses cannot be written into
        return _mapped(to_device, result) if is_there else result


def _tensors(values):
    """Those among arguments of an operation, which are in lists at most."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _mapped(function, value):
    return type(value)(_mapped(function, part) for part in value) if type(value) in (list, tuple) else function(value)


def _raw(leaf):
    return leaf.raw if isinstance(leaf, EmulatedTensor) else leaf


def _wait(what):
    frames = [
        frame
        for frame in traceback.extract_stack()
        if "/groupwise/" in frame.filename and "/tests/" not in frame.filename
    ]
    file, line = (frames[-1].filename.rpartition("/groupwise/")[2], frames[-1].lineno) if frames else ("tests", 0)
    WAITS[f"{file}:{line} {what}"] += 1
