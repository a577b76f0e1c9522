"""What needs a GPU elsewhere, on a device that computes on the CPU: updates, resumed collectors, and waits for the device."""

import json
from pathlib import Path

from forked import run_script

SUPPORT = Path(__file__).parents[1] / "support"
WAITS = {"ppo": 4, "grpo": 5, "sampled": 4, "recomputed": 5, "two epochs": 7}
"""Waits of an iteration of control, and of an update of texts, in each pass of which transformers waits twice for its mask."""


TESTS = [
    ["tests/algorithms/test_devices.py", "test_every_objective", 35],
    ["tests/algorithms/test_devices.py", "test_ppo_and_every_credit", 23],
    ["tests/text/test_update.py", "test_an_update_is_that_of_the_cpu_on_every_device", 2],
    ["tests/collectors/test_torch_groups.py", "test_a_resumed_collector_goes_on_bit_for_bit", 1],
    ["tests/collectors/test_torch_vector.py", "test_a_resumed_collector_goes_on_bit_for_bit", 1],
]
"""Each with how many combinations of its parameters there are."""


def test_an_iteration_waits_a_few_times():
    lines = run_script(SUPPORT / "emulated_waits.py", *WAITS).splitlines()
    found = {kind: waits for line in lines if line.startswith("{") for kind, waits in json.loads(line).items()}
    assert {kind: sum(waits.values()) for kind, waits in found.items()} == WAITS, found


def test_tests_pass_on_that_device():
    words = [word for file, name, _ in TESTS for word in (file, name)]
    lines = run_script(SUPPORT / "emulated_tests.py", *words).splitlines()
    assert [json.loads(line) for line in lines if line.startswith("[")] == TESTS


def test_what_mixes_devices_or_waits_is_seen():
    code = """
import torch
from emulated import DEVICE, WAITS, EmulatedDevice
with EmulatedDevice():
    here, there = torch.arange(3.0), torch.arange(3.0, device=DEVICE)
    mixed = [
        lambda: here + there, lambda: here[there.long()], lambda: there.index_put((there.long(),), here), lambda: torch.stack([here[0], there[0]]),
    ]
    for mix in mixed:
        try:
            print("no error", mix())
        except RuntimeError as error:
            print(error)
    waits = [
        lambda: float(there[1]), lambda: there.tolist(), lambda: there.cpu(), lambda: here.to(DEVICE), lambda: there[there > 1],
        lambda: there[torch.tensor([1])], lambda: there.nonzero(), lambda: torch.tensor([1.0], device=DEVICE),
        lambda: bool((there > 5).any()), lambda: there.long().bincount(), lambda: torch.unique(there), lambda: there.copy_(here), lambda: here.copy_(there),
    ]
    free = [
        lambda: there + 1, lambda: there[1:], lambda: there * torch.tensor(2.0), lambda: here.to(DEVICE, non_blocking=True),
        lambda: torch.where(there > 1, there, 0.0), lambda: there[there.long()], lambda: torch.zeros(3, device=DEVICE) + there,
    ]
    for each in (waits, free):
        counts = []
        for wait in each:
            WAITS.clear()
            wait()
            counts.append(sum(WAITS.values()))
        print(counts)
"""
    *mixed, waits, free = run_script(code).splitlines()
    assert mixed == [
        *(f"{name} of tensors on ['cpu', 'emulated:0']" for name in ("add", "index", "index_put", "stack")),
    ]
    assert json.loads(waits) == [1] * 13
    assert json.loads(free) == [0] * 7
