"""The notebook of the examples runs from its first cell to its last."""

import shutil

import pytest

from tests.pages.transcripts import ROOT


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what a kernel's libraries warn of is not ours
def test_the_notebook_runs(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is stored without what it printed"
    where = {"metadata": {"path": str(tmp_path / "examples")}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    html = [
        output.data.get("text/html", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "data" in output
    ]
    assert any("pressure" in page and "background" in page for page in html), "the colored text"
    assert notebook.cells[-1].outputs[0].text == "True\n", "removed as if it had never been there"
    assert (tmp_path / "examples" / "held-out.parquet").stat().st_size > 1000
