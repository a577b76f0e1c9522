"""GPUs by their data sheets, and how much of these numbers training reaches. Imports no torch."""

from typing import NamedTuple


class GPU(NamedTuple):
    """One GPU. FLOP/s are dense, without sparsity."""

    title: str
    memory: float
    """Bytes."""
    bf16: float
    """FLOP/s of bfloat16 products that are summed in float32."""
    float32: float
    """FLOP/s of float32 products; torch uses no TF32 by default."""
    bandwidth: float
    """Bytes per second to and from memory."""
    link: float
    """Bytes per second to the other GPUs of a machine, in one direction."""
    source: str


_NVIDIA = "https://www.nvidia.com/en-us/"
GPUS = {
    "a100": GPU("A100 SXM", 80e9, 312e12, 19.5e12, 2.039e12, 300e9, f"{_NVIDIA}data-center/a100/"),
    "h100": GPU("H100 SXM", 80e9, 989e12, 67e12, 3.35e12, 450e9, f"{_NVIDIA}data-center/h100/"),
    "h200": GPU("H200 SXM", 141e9, 989e12, 67e12, 4.8e12, 450e9, f"{_NVIDIA}data-center/h200/"),
    "b200": GPU("B200 SXM", 180e9, 2250e12, 80e12, 8e12, 900e9, f"{_NVIDIA}data-center/dgx-b200/"),
    "l40s": GPU("L40S", 48e9, 362e12, 91.6e12, 864e9, 32e9, f"{_NVIDIA}data-center/l40s/"),
    "rtx4090": GPU("RTX 4090", 24e9, 165e12, 82.6e12, 1.008e12, 32e9, f"{_NVIDIA}geforce/graphics-cards/40-series/"),
}
"""By the name that ``groupwise plan --gpu`` takes."""


class Assumptions(NamedTuple):
    """What the data sheets do not say. ``docs/planning.md`` compares the defaults with published runs."""

    usable: float = 0.9
    """Share of the memory that tensors may take; the rest is CUDA's, and gaps between tensors."""
    mfu: float = 0.4
    """Share of the peak FLOP/s that matrix products reach."""
    bandwidth: float = 0.7
    """Share of the peak bandwidth that decoding reaches."""
    launch: float = 5e-6
    """Seconds to launch an operation, which the model's own decoding waits for."""
    operations: int = 20
    """Operations of a layer in a decoding step."""
    network: float = 50e9
    """Bytes per second and GPU between machines, in one direction: 400 Gbit/s."""
    per_machine: int = 8
    """GPUs of a machine."""
    disk: float = 1e9
    """Bytes per second to write, and to read, the weights for servers."""
    server_memory: float = 0.9
    """Share of a server's GPU that vLLM takes, by default."""
