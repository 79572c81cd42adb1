"""Writes docs/notebooks/*.ipynb from the tutorials that are also notebooks, so that both say the same.

    python docs/build_notebooks.py            # after a change of one of these tutorials

Blocks ```bash and blocks with title="FILE" become cells that run; so does a comment <!-- notebook ... -->,
which the page does not show. All else is text.
"""

import json
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
NOTEBOOKS = {"own_documents": "own-documents", "first_experiment": "first-experiment"}
INSTALL = """\
import importlib.util

SOURCE = "../.."  # this checkout; elsewhere the address of yours: "git+https://HOST/OWNER/dlm_rag"
if importlib.util.find_spec("dlm_rag") is None:
    %pip install --quiet {SOURCE}"""
RUN = re.compile(
    r"^```bash\n(?P<bash>.*?)\n```$"
    r'|^```\w+ title="(?P<file>[^"]+)"\n(?P<content>.*?)\n```$'
    r"|^<!-- notebook\n(?P<python>.*?)\n-->$",
    re.MULTILINE | re.DOTALL,
)


def list_cells(page: str) -> list[tuple[str, str]]:
    """The cells of a page: kind (markdown or code) and source."""
    page = re.sub(r"\]\((?!\.\./|https?:)([\w-]+\.md)", r"](../tutorials/\1", page)
    heading, page = page.split("\n\n", 1)
    cells, folders, end = [("markdown", heading), ("code", INSTALL)], {"."}, 0
    for found in RUN.finditer(page):
        cells.append(("markdown", page[end : found.start()].strip()))
        if found["bash"]:
            source = f"%%bash\n{found['bash']}"
        elif found["file"]:
            folder = str(Path(found["file"]).parent)
            if folder not in folders:
                cells.append(("code", f"%mkdir -p {folder}"))
                folders.add(folder)
            source = f"%%writefile {found['file']}\n{found['content']}"
        else:
            source = found["python"]
        cells.append(("code", source))
        end = found.end()
    return [cell for cell in [*cells, ("markdown", page[end:].strip())] if cell[1]]


def build_notebook(page: str) -> str:
    """The notebook of a page, as JSON."""
    cells = []
    for number, (kind, source) in enumerate(list_cells(page)):
        cell = {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": source.splitlines(True),
        }
        cells.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for notebook, tutorial in NOTEBOOKS.items():
        page = (DOCS / "tutorials" / f"{tutorial}.md").read_text()
        (DOCS / "notebooks" / f"{notebook}.ipynb").write_text(build_notebook(page))
