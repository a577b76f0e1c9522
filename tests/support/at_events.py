"""Callbacks of one event."""

import gc
import itertools
import shutil
import weakref

import groupwise as gw


def on(event, do):
    """A callback that calls ``do(trainer, ...)`` at ``on_<event>``."""
    return type("On", (gw.Callback,), {f"on_{event}": lambda self, *args: do(*args)})()


def interrupt_after(iteration):
    """A callback that interrupts training after an iteration."""
    return on("iteration_end", lambda trainer, *_: trainer.interrupt() if trainer.iteration == iteration else None)


def copies(run_dir, to):
    """Copies a run folder at its second checkpoint, as if training had been killed then: a file that is written can vanish."""
    count = itertools.count(1)
    return on("checkpoint", lambda *_: shutil.copytree(run_dir, to) if next(count) == 2 else None)


def fail(error):
    """A function that raises it."""

    def do(*args):
        raise error

    return do


def is_freed(train):
    """Whether ``train(callbacks)`` leaves nothing of a run in a reference cycle, which would hold its memory for a while."""
    found = []
    note = on(
        "training_start", lambda trainer: found.append([weakref.ref(trainer), weakref.ref(trainer.algorithm.policy)])
    )
    gc.collect()
    gc.disable()
    try:
        train([note])
        del note
        (kept,) = found
        return [one() for one in kept] == [None, None]
    finally:
        gc.enable()
