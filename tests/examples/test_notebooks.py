"""Every notebook runs as a user would run it, with a small budget, and shows its pictures."""

import re
from pathlib import Path

import pytest
from quick_python import quick_python

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("ipywidgets")

NOTEBOOKS = Path(__file__).parents[2] / "examples/notebooks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "pictures"), [("control", 1_000, {"image/png", "image/gif"}), ("text", 500, set())]
)
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own
def test_a_notebook_runs_and_shows_its_run(name, steps, pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parent), prepend=":")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = re.sub(r"total_steps=[\d_]+", f"total_steps={steps}", cell.source).replace('"none"', '"auto"')
    client = nbclient.NotebookClient(notebook, resources={"metadata": {"path": tmp_path}})
    with quick_python() as python:
        client.create_kernel_manager()
        client.km.kernel_spec.argv[0] = str(python)
        client.execute()
    assert f"{steps}/{steps}" in str([widget.get("outputs") for widget in client.widget_state.values()])  # the panel
    shown = [output["data"] for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert pictures <= {kind for data in shown for kind in data}
    html = "".join(data.get("text/html", "") for data in shown)
    assert "Did it learn?" in html
    assert '<table border="1" class="dataframe">' in html
    assert "explorer" in html.rpartition("<iframe")[2]


@pytest.mark.parametrize("name", ["control", "text"])
def test_a_notebook_is_committed_with_its_pictures_and_without_errors(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    kinds = [kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert "text/html" in kinds
    assert all(output.output_type != "error" for cell in notebook.cells for output in cell.get("outputs", []))
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < 400_000
