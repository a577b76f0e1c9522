"""Calls a test with the emulated device, for all its parameters: ``emulated_tests.py FILE NAME``."""

import itertools
import sys

from emulated import DEVICE, EmulatedDevice
from scripts import load

test = getattr(load(sys.argv[1]), sys.argv[2])
names, cases = [], []
for mark in getattr(test, "pytestmark", ()):
    if mark.name == "parametrize":
        several = not isinstance(mark.args[0], str)
        names += mark.args[0] if several else [mark.args[0]]
        cases.append([case if several else (case,) for case in mark.args[1]])
count = 0
with EmulatedDevice():
    for parts in itertools.product(*cases):
        arguments = dict(zip(names, itertools.chain(*parts), strict=True))
        try:
            test(device=DEVICE, **arguments)
        except BaseException:
            print(arguments, file=sys.stderr)
            raise
        count += 1
print(count)
