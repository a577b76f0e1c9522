"""What notebooks show of a run."""

from html import escape
from secrets import token_hex

from markupsafe import Markup
from matplotlib.figure import Figure

from groupwise.report.curve import curve_figure, to_png
from groupwise.report.folder import RunFolder
from groupwise.report.page.figures import learning_curve
from groupwise.report.page.group_health import diagnose
from groupwise.report.page.health import WORDS
from groupwise.report.page.page import answer, render, subject, words_of


class Curve(Figure):
    """A figure that a notebook shows, also one that did not import pyplot."""

    def _repr_png_(self) -> bytes:
        return to_png(self)


class Frame:
    """A page, which a notebook shows in a frame."""

    def __init__(self, page: str) -> None:
        self.page = page

    def _repr_html_(self) -> str:
        # without the base, links inside the page would lead to the notebook
        page = self.page.replace("<head>", '<head>\n<base href="about:srcdoc">', 1)
        style = "width: 100%; height: 45rem; border: 0"
        return f'<iframe srcdoc="{escape(page)}" title="Page of the run" style="{style}"></iframe>'


def plot(folder: RunFolder) -> Figure:
    """The learning curve of a run."""
    config, metrics = folder.read_config(), folder.read_metrics()
    unit, score, _ = words_of(config)
    title = f"{_title(folder)}, seed {config['seed']}"
    return curve_figure(metrics, title, unit, score, size=(7.0, 4.2), kind=Curve)


def to_html(folder: RunFolder) -> str:
    """A short version of the run's page, in HTML."""
    config, metrics = folder.read_config(), folder.read_metrics()
    unit, score, sample = words_of(config)
    learned = answer(metrics, score, sample)
    curve = learning_curve(metrics, (unit, score), f"r{token_hex(8)}") if metrics else ""  # unique in the notebook
    row = Markup("<li>{}: <b>{}</b> {} {}</li>")
    sick = [row.format(WORDS[f.verdict], f.title, f.text, f.advice) for f in diagnose(folder) if f.verdict != "good"]
    parts = Markup("<p><b>{}</b>, seed {}, {}</p><p>Did it learn? <b>{}.</b> {}</p>").format(
        _title(folder), config["seed"], folder.path, learned.word, learned.text
    )
    return parts + Markup('<div style="max-width: 40rem">{}</div><ul>{}</ul>').format(curve, Markup().join(sick))


def explore(folder: RunFolder) -> Frame:
    """The page of a run, with the explorer of its groups."""
    return Frame(render(folder))


def _title(folder: RunFolder) -> str:
    config = folder.read_config()
    return f"{subject(config, folder.read_summary())}, {config['algorithm']['name']}"
