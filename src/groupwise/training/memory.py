"""Memory: how much a run took; running out of it, found out at the start, and told with what to lower."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.data.tokens import TextRow, text_rollout
from groupwise.errors import OutOfMemoryError
from groupwise.policies.configs import SamplingCfg

_ON_CPU = "can't allocate memory"
"""What torch says where the system refuses; Linux mostly grants it and ends the process later."""

_KINDS = 7
"""Tokens that the rehearsal is made of; every vocabulary has as many."""


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


@contextmanager
def naming(settings: str) -> Iterator[None]:
    """Within it, an error of torch's about memory becomes ours, with the settings to lower.

    Raises:
        OutOfMemoryError: in place of torch's.
    """
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and _ON_CPU not in str(error):
            raise
        raise OutOfMemoryError(f"out of memory; fix: lower {settings}") from error


def rehearse(
    algorithm: BaseAlgorithm,
    *,
    longest_prompt: int,
    sampling: SamplingCfg,
    num_rows: int,
    group_size: int,
    num_turns: int | None = None,
    context: int | None = None,
) -> None:
    """Try the largest micro-batch that training can come to: every completion as long as it may be.

    Args:
        num_rows: completions in one rollout, ``group_size`` of each prompt.
        num_turns: of a completion, each as long as it may be. None: it has no turns.
        context: tokens that the model has positions for. None: no limit.

    Raises:
        OutOfMemoryError: there is not enough.
    """
    length = sampling.max_new_tokens * (num_turns or 1)
    if context is not None:
        length = min(length, context - longest_prompt)
    # of one token alone, a cache would have no order
    varied = [place % _KINDS for place in range(longest_prompt + length + 1)]
    row = TextRow(
        varied[:longest_prompt],
        varied[:length],
        [0.0] * length,
        0.0,
        terminated=False,
        group=0,
        turn=None if num_turns is None else [place // sampling.max_new_tokens for place in range(length)],
        support=None if sampling.top_k is None else [[0] * sampling.top_k] * length,
        eos_barred=[False] * length if sampling.min_new_tokens else None,
    )
    size = algorithm.cfg.micro_batch_size
    at_once = num_rows if size is None else min(num_rows, size // length + 1)
    # siblings part with their first token, so that they share the prompt and no more; other groups' prompts are shorter
    rows = [
        row._replace(
            group=i // group_size,
            prompt=row.prompt[min(i // group_size, 1, longest_prompt - 1) :],
            completion=varied[i % 2 : i % 2 + length],
        )
        for i in range(at_once)
    ]
    with naming("algorithm.micro_batch_size, or sampling.max_new_tokens"):
        algorithm.rehearse(text_rollout(rows, device=algorithm.policy.device))
