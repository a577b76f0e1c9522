"""Recording and replaying, with a tape in the place of a CUDA graph."""

import gc
import warnings
import weakref

import pytest
import torch
from tape import Tape

from groupwise.engines.replay import WARM_UP, Replayed
from groupwise.errors import SlowPathWarning

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Counter:
    """Adds a number to a total, which stays where it is."""

    def __init__(self, device=CPU):
        self.number = torch.ones(3, device=device)
        self.total = torch.zeros(3, device=device)
        self.calls = 0

    def __call__(self):
        self.calls += 1
        self.total.add_(self.number * 2)
        return self.total + 1


@pytest.mark.parametrize(("device", "recorder"), [("cpu", None), ("cpu", False), ("cuda", False)])
def test_without_a_recorder_it_is_called_as_it_stands(device, recorder):
    counter = Counter()
    replayed = Replayed(counter, torch.device(device), name="counting", recorder=recorder)
    for call in range(6):
        assert torch.equal(replayed(), torch.full((3,), 2.0 * call + 3))
    assert counter.calls == 6
    assert not replayed.is_recorded


def test_replays_compute_what_calls_would():
    counter, tape = Counter(), Tape()
    replayed = Replayed(counter, CPU, name="counting", recorder=tape)
    for call in range(8):
        counter.number.fill_(call)  # what changes is read anew
        expected = counter.total + 2 * call + 1
        assert torch.equal(replayed(), expected)
    assert counter.calls == WARM_UP + 1  # those and the recording
    assert (tape.warm_ups, tape.replays) == (WARM_UP, 8 - WARM_UP)
    assert replayed.is_recorded


def test_random_numbers_are_those_of_calls():
    def drawn(recorder):
        generator = torch.Generator()
        replayed = Replayed(
            lambda: torch.rand(4, generator=generator), CPU, name="drawing", generators=[generator], recorder=recorder
        )
        return torch.stack([replayed().clone() for _ in [generator.manual_seed(5)] for _ in range(7)])

    assert torch.equal(drawn(Tape()), drawn(None))


def test_it_is_recorded_anew_where_storage_moves():
    counter, tape = Counter(), Tape()
    replayed = Replayed(counter, CPU, name="counting", recorder=tape)
    for _ in range(WARM_UP + 2):
        replayed([counter.number])
    assert tape.replays == 2
    counter.number = torch.full((3,), 10.0)
    before = counter.total.clone()
    replayed([counter.number])
    assert torch.equal(counter.total, before + 20)
    assert not replayed.is_recorded


def test_it_is_recorded_anew_for_another_part_of_the_same_storage():
    """A shorter rollout begins at the same address."""
    storage, seen = torch.ones(6), []

    class Sums:
        part = storage

        def total(self):
            seen.append(len(self.part))
            return self.part.sum()

    sums = Sums()
    replayed = Replayed(sums.total, CPU, name="summing", recorder=Tape())
    for _ in range(WARM_UP + 2):
        assert replayed([sums.part]) == 6
    sums.part = storage[:4]
    assert replayed([sums.part]) == 4
    known = weakref.ref(sums)
    gc.disable()
    try:
        del sums  # whose method is held weakly
        assert known() is None
    finally:
        gc.enable()


def test_what_cannot_be_recorded_is_called_and_says_why_once():
    class Refusing(Tape):
        def record(self, function, generators):
            raise RuntimeError("operation not permitted")

    counter = Counter()
    replayed = Replayed(counter, CPU, name="counting", recorder=Refusing())
    for _ in range(WARM_UP):
        replayed()
    with pytest.warns(SlowPathWarning, match="counting runs without a CUDA graph.*: operation not permitted"):
        replayed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replayed()
    assert torch.equal(counter.total, torch.full((3,), 2.0 * (WARM_UP + 2)))


def test_the_tape_notices_what_moves():
    """A function that leaves its state in another tensor each time cannot be replayed: the tape tells, as a graph would."""

    class Moving(Counter):
        def __call__(self):
            self.total = self.total + self.number
            return self.total + 0

    replayed = Replayed(Moving(), CPU, name="counting", recorder=Tape())
    found = [float(replayed()[0]) for _ in range(WARM_UP + 3)]
    assert found != [1.0 + call for call in range(WARM_UP + 3)]


@needs_gpu
def test_a_graph_computes_what_calls_would():
    device = torch.device("cuda")
    counter = Counter(device)
    replayed = Replayed(counter, device, name="counting")
    for call in range(8):
        counter.number.fill_(call)
        expected = counter.total + 2 * call + 1
        assert torch.equal(replayed(), expected)
    assert replayed.is_recorded
