"""A comparison as tables of texts, for the terminal and the page."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from groupwise.comparison.methods import setting
from groupwise.comparison.results import (
    Comparison,
    EnvironmentResult,
    Improvement,
    MethodResult,
    Overall,
    figure,
    shown,
)


class Table(NamedTuple):
    """Rows of texts."""

    title: str
    """Empty where the table belongs to the one before."""
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(found: Comparison) -> Iterator[Table]:
    """Of each environment its methods, its improvements and what differs in the settings; then all environments together."""
    for one in found.environments:
        heads = (
            "method",
            "runs",
            f"final {one.score}, IQM",
            "mean",
            "least",
            "mean over training",
            one.unit,
            "seconds",
            "MiB",
        )
        yield Table(one.environment, heads, tuple(map(_row, one.methods)))
        yield from _improvements(one.improvements)
        yield from _settings(one)
    if found.overall is not None:
        yield from _overall(found.overall)


def _row(result: MethodResult) -> tuple[str, ...]:
    return (
        result.method,
        str(len(result.seeds)),
        shown(result.iqm),
        figure(result.mean),
        figure(result.least),
        shown(result.mean_height),
        f"{result.env_steps:,.0f}",
        "-" if result.seconds is None else f"{result.seconds:.1f}",
        "-" if result.memory_mib is None else f"{result.memory_mib:.0f}",
    )


def _settings(found: EnvironmentResult) -> Iterator[Table]:
    methods = tuple(result.method for result in found.methods)
    rows = tuple(
        (name, *(setting(values[method]) if method in values else "-" for method in methods))
        for name, values in found.settings.items()
    )
    if rows:
        yield Table("", ("setting", *methods), rows)


def _overall(found: Overall) -> Iterator[Table]:
    rows = tuple((method.method, shown(method.iqm), figure(method.mean)) for method in found.methods)
    yield Table(f"all environments, normalised: {', '.join(found.reference)}", ("method", "IQM", "mean"), rows)
    yield from _improvements(found.improvements)


def _improvements(pairs: Sequence[Improvement]) -> Iterator[Table]:
    rows = tuple((f"{pair.method} > {pair.other}", shown(pair.probability, "{:.2f}".format)) for pair in pairs)
    if rows:
        yield Table("", ("probability that a run is better", "P"), rows)
