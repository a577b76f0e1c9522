"""What stands for a CUDA graph on a CPU: operations on tensors at fixed addresses, recorded once and played again."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape:
    """A recorder for ``Replayed``. As with a graph, recording leaves everything as it was, and a replay computes again
    what was recorded, from and to the addresses of then, whatever Python has done since.
    """

    def __init__(self):
        self.replays = 0
        self.warm_ups = 0
        self.num_operations = 0

    def warm_up(self, function):
        self.warm_ups += 1
        return function()

    def record(self, function, generators):
        states = [generator.get_state() for generator in generators]
        with _Recording() as recording:
            out = function()
        recording.undo()
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        self.num_operations = len(recording.operations)

        def replay():
            self.replays += 1
            recording.play()

        return replay, out


class _Recording(TorchDispatchMode):
    def __enter__(self):
        self.operations, self._saved, self._made = [], {}, {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {place(t): t for t in tensors((args, kwargs))}
        for key, tensor in given.items():
            if key not in self._made and key not in self._saved:
                self._saved[key] = (tensor, tensor.untyped_storage().clone())
        out = func(*args, **kwargs)
        new = [t for t in tensors(out) if place(t) not in given]
        self._made.update((place(t), t) for t in new)
        self.operations.append((func, args, kwargs, out))
        return out

    def undo(self):
        for tensor, storage in self._saved.values():
            tensor.untyped_storage().copy_(storage)

    @torch.inference_mode()  # what was made in it may only be written in it
    def play(self):
        for func, args, kwargs, out in self.operations:
            given = {place(t) for t in tensors((args, kwargs))}
            found = func(*args, **kwargs)
            for old, new in zip(tensors(out), tensors(found), strict=True):
                if place(old) not in given:
                    old.copy_(new)


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def place(tensor):
    return tensor.untyped_storage().data_ptr()
