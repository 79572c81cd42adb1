"""Takes the pictures of docs/page.md: the shipped model on two questions of its world.

python sample.py --trace static.jsonl guesses=true decode.query=question
python sample.py --trace interleaved.jsonl guesses=true
python profiling/page_pictures.py static.jsonl interleaved.jsonl docs/
"""

import tempfile
from pathlib import Path

from browser import Browser
from PIL import Image

from dlm_rag.commands.words import Parser
from dlm_rag.page.record import Run, read_runs
from dlm_rag.page.write import write_page
from dlm_rag.program import run

COLOURS = 256  # of a picture, which make it a third as large
ALONE, BESIDE = "q301", "q300"  # four hops each


def main(argv: list[str]) -> None:
    parser = Parser(__doc__ or "")
    parser.add_argument("static", type=Path)
    parser.add_argument("interleaved", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(argv)
    static, interleaved = read_runs([given.static, given.interleaved])
    with tempfile.TemporaryDirectory() as scratch, Browser() as browser:
        page = Path(scratch) / "page.html"

        def take(name: str, step: int | str, width: int, height: int, dark: bool = False) -> None:
            browser.open(page, f"#step={step}", width=width, height=height, dark=dark)
            browser.picture(page.with_suffix(".png"))
            with Image.open(page.with_suffix(".png")) as taken:
                few = taken.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
                few.save(given.folder / name, optimize=True)

        write_page(page, [only(interleaved, ALONE)])
        for name, step in {"start": 0, "middle": 4, "end": 8}.items():
            take(f"page-{name}.png", step, 1280, 800)
        write_page(page, [only(static, BESIDE), only(interleaved, BESIDE)])
        take("page-two.png", 3, 1440, 800, dark=True)


def only(of: Run, question: str) -> Run:
    """The run with one question of it."""
    return Run(of.name, of.header, [rollout for rollout in of.rollouts if rollout.id == question])


if __name__ == "__main__":
    run(main)
