"""The notebook of docs/python.md runs in a kernel, from its first cell to its last."""

from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "python_api.ipynb"

pytestmark = [pytest.mark.xdist_group("python api"), pytest.mark.timeout(400)]


def results(notebook: Any) -> list[str]:
    """The values of the cells' last expressions, as text."""
    found = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output["data"]["text/plain"] for output in found if output["output_type"] == "execute_result"]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="the extra `dev` brings a kernel and a client for notebooks")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is stored without outputs"
    client.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    values = results(notebook)
    assert "array([1.], dtype=float32)" in values and "'the callback watch returned STOP'" in values
    (table,) = (value for value in values if "eval/reward_mean" in value)
    assert [line.split()[1] for line in table.splitlines()[1:]] == [str(step) for step in range(9)]
    (rewards,) = (tmp_path / "runs" / "python-sort" / "inputs").glob("rewards-*.py")
    assert "def right_digits" in rewards.read_text()
    shown = "".join(
        output.get("text", "") or output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    assert "step 8/8" in shown and "\r" not in shown, "progress is plain lines"
