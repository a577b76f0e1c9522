from pathlib import Path

import pytest

from groupwise.planning.gpus import GPUS, Assumptions

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", GPUS)
def test_the_page_has_the_data_sheet(name):
    gpu = GPUS[name]
    rates = f"{gpu.bf16 / 1e12:g} TFLOP/s | {gpu.float32 / 1e12:g} TFLOP/s | {gpu.bandwidth / 1e12:.2f} TB/s"
    assert (
        f"| `{name}` | {gpu.memory / 1e9:g} GB | {rates} | {gpu.link / 1e9:g} GB/s | [{gpu.title}]({gpu.source}) |"
        in PAGE
    )


def test_the_page_has_the_assumptions():
    assumed = Assumptions()
    for row in (
        f"| rate | {assumed.mfu:.0%} of".replace("%", " %"),
        f"| bandwidth | {assumed.bandwidth:.0%} of".replace("%", " %"),
        f"| launch of an operation | {assumed.launch * 1e6:g} µs |",
        f"beyond {assumed.per_machine} GPUs {assumed.network / 1e9:g} GB/s",
        f"| disk | {assumed.disk / 1e9:g} GB/s |",
        f"launches {assumed.operations} operations a layer and step",
    ):
        assert row in PAGE
