"""Run notebooks: by nbclient in a kernel of their own where it is installed, else cell by cell in this process.

python examples/notebooks.py examples/first_steps.ipynb
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any


def cells(path: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    found = json.loads(path.read_text())["cells"]
    return ["".join(each["source"]) for each in found if each["cell_type"] == "code"]


def run_cells(path: Path) -> dict[str, Any]:
    """Run the code of a notebook as one module, and return its names; lines of an error are those of its cell."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, text in enumerate(cells(path), 1):
        exec(compile(text, f"{path.name}, code cell {number}", "exec"), names)
    return names


def run_in_kernel(path: Path) -> None:
    """Run a notebook as Jupyter does; the file stays as it is."""
    nbclient, nbformat = (importlib.import_module(name) for name in ("nbclient", "nbformat"))
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=where).execute()


def main() -> None:
    kernel = all(map(importlib.util.find_spec, ("nbclient", "nbformat", "ipykernel")))
    for word in sys.argv[1:]:
        path = Path(word).resolve()
        if kernel:
            run_in_kernel(path)
        else:
            os.chdir(path.parent)
            run_cells(path)
        print(f"{len(cells(path))} cells, {'in a kernel' if kernel else 'in one process'}")


if __name__ == "__main__":
    main()
