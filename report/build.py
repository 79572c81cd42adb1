"""Makes report/report.pdf from the stored results: python report/build.py [report.pdf]

Needs typst (`pip install 'dlm_rag[docs]'`). What the report cites and the results lack stops it.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dlm_rag.cli import run_program
from dlm_rag.commands.arguments import CommandParser
from dlm_rag.errors import ConfigError
from report.figures import draw_all

FOLDER = Path(__file__).parent


def build(target: Path | None, **export: Any) -> Any:
    """Writes the figures and the report; without a target returns its bytes (of each page, for pictures).

    export: as of `typst.compile`, such as format="png". Raises `ConfigError` where typst is missing.
    """
    try:
        import typst
    except ModuleNotFoundError as error:
        raise ConfigError("the report needs typst: pip install 'dlm_rag[docs]'") from error
    draw_all(FOLDER / "build")
    source, root = FOLDER / "report.typ", FOLDER.parent
    return typst.compile(source, output=target, root=root, ignore_system_fonts=True, **export)


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "")
    parser.add_argument("pdf", nargs="?", type=Path, default=FOLDER / "report.pdf", help="where it goes")
    build(parser.parse_args(argv).pdf)


if __name__ == "__main__":
    run_program(main)
