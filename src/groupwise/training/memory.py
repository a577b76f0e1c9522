"""How much memory a run took."""

import re
import sys
from pathlib import Path

import torch


def peak_memory(device: torch.device) -> dict[str, float]:
    """The most memory so far, in MiB, as the summary tells it.

    ``peak_memory_mib``: resident, of this process, whatever ran in it before, without workers that step environments; absent
    where the system does not say. ``peak_gpu_memory_mib``: what torch took for tensors, on a GPU.
    """
    found = {}
    if (resident := _peak_resident()) is not None:
        found["peak_memory_mib"] = round(resident / 2**20, 1)
    if device.type == "cuda":
        found["peak_gpu_memory_mib"] = round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    return found


def _peak_resident() -> int | None:
    """Bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux; its ru_maxrss counts what started this process, too
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
        return None if found is None else int(found[1]) * 1024
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None
