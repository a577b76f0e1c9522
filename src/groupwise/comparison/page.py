"""A comparison as one file of HTML that needs no network and no scripts."""

from pathlib import Path

from groupwise.comparison.plot import comparison_figure
from groupwise.comparison.results import Comparison
from groupwise.comparison.tables import tables
from groupwise.report.page.figures import svg
from groupwise.report.page.page import style, templates
from groupwise.system import files


def write_page(found: Comparison, out: Path) -> None:
    """Write curves, intervals, tables and notes to ``out``."""
    names = ", ".join(one.environment for one in found.environments)
    picture = svg(lambda: comparison_figure(found), f"Curves and final scores of the methods on {names}", "comparison")
    page = templates(__package__).get_template("comparison.html")
    text = page.render(names=names, picture=picture, tables=[*tables(found)], notes=found.notes, style=style())
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write(out, text.encode())
