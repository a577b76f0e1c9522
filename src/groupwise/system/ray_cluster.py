"""The Ray cluster that work goes to. Needs the extra ``ray``."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def connected() -> Iterator[None]:
    """Connects this process to the cluster of ``RAY_ADDRESS`` or of this machine, else to a new one on this machine.

    A process that is connected already stays so; a connection that is made here ends.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
