"""nccl4py's calls that weights take, and servers in the same process: what rank 0 sends lies in a queue for the other ranks."""

import itertools
import queue
import sys
import threading
from collections import defaultdict
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch

SECONDS = 5.0


class Link:
    """A communicator, as rank 0 and the others have it."""

    def __init__(self):
        self.joined, self.aborted, self.sent = threading.Event(), threading.Event(), queue.Queue()

    def allreduce(self, tensor, out, op, *, stream):
        assert op == "sum"
        self._put(tensor, out, stream)

    def broadcast(self, tensor, out, root, *, stream):
        assert root == 0
        self._put(tensor, out, stream)

    def take(self):
        return self.sent.get(timeout=SECONDS)

    def abort(self):
        self.aborted.set()

    def _put(self, tensor, out, stream):
        assert out is tensor
        assert stream == Stream.cuda_stream
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        self.sent.put(tensor.clone())


class Stream:
    """A stream of a GPU that there is not."""

    cuda_stream = 7

    def __init__(self, device):
        self.waited = False

    def wait_stream(self, other):
        assert other == "default"
        self.waited = True

    def synchronize(self):
        assert self.waited


class Exchange:
    """All communicators, by their unique ids."""

    def __init__(self, monkeypatch):
        self.links = defaultdict(Link)
        self.fault = None
        numbers = itertools.count(1)
        package, core = ModuleType("nccl"), ModuleType("nccl.core")
        package.__spec__ = ModuleSpec("nccl", None)
        core.SUM = "sum"
        core.get_unique_id = lambda: SimpleNamespace(as_bytes=next(numbers).to_bytes(128, "big"))
        core.Communicator = SimpleNamespace(init=self._init)
        monkeypatch.setitem(sys.modules, "nccl", package)
        monkeypatch.setitem(sys.modules, "nccl.core", core)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())

    def _init(self, ranks, rank, unique):
        assert (ranks, rank) == (3, 0)
        if self.fault:
            raise RuntimeError(self.fault)
        link = self.links[unique.as_bytes]
        assert link.joined.wait(SECONDS)
        return link
