"""Calls tests with the emulated device, for all their parameters: ``emulated_tests.py FILE NAME FILE NAME ...``."""

import itertools
import json
import sys

from emulated import DEVICE, EmulatedDevice
from scripts import load


def call(file, name):
    """Returns for how many combinations of parameters."""
    test = getattr(load(file), name)
    names, cases, count = [], [], 0
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            several = not isinstance(mark.args[0], str)
            names += mark.args[0] if several else [mark.args[0]]
            cases.append([case if several else (case,) for case in mark.args[1]])
    with EmulatedDevice():
        for parts in itertools.product(*cases):
            arguments = dict(zip(names, itertools.chain(*parts), strict=True))
            try:
                test(device=DEVICE, **arguments)
            except BaseException:
                print(file, name, arguments, file=sys.stderr)
                raise
            count += 1
    return count


for file, name in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    print(json.dumps([file, name, call(file, name)]))
