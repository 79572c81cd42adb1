"""Takes the pictures of docs/page.md: the shipped model on two questions of its world.

python sample.py --trace static.jsonl record_provisional=true decode.query_policy=question
python sample.py --trace interleaved.jsonl record_provisional=true
python profiling/page_screenshots.py static.jsonl interleaved.jsonl docs/
"""

import tempfile
from pathlib import Path

from headless_chromium import HeadlessChromium
from PIL import Image

from dlm_rag.cli import run_program
from dlm_rag.commands.cli_args import CommandParser
from dlm_rag.page.record import TraceRun, read_trace_runs
from dlm_rag.page.write import write_page

PALETTE_SIZE = 256  # of a picture, which make it a third as large
ALONE, BESIDE = "q301", "q300"  # four hops each


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "")
    parser.add_argument("static", type=Path)
    parser.add_argument("interleaved", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(argv)
    static, interleaved = read_trace_runs([given.static, given.interleaved])
    with tempfile.TemporaryDirectory() as scratch, HeadlessChromium() as browser:
        page = Path(scratch) / "page.html"

        def take(name: str, step: int | str, width: int, height: int, dark: bool = False) -> None:
            browser.open(page, f"#step={step}", width=width, height=height, dark=dark)
            browser.save_screenshot(page.with_suffix(".png"))
            with Image.open(page.with_suffix(".png")) as taken:
                few = taken.convert("RGB").quantize(PALETTE_SIZE, dither=Image.Dither.NONE)
                few.save(given.folder / name, optimize=True)

        write_page(page, [select_question(interleaved, ALONE)])
        for name, step in {"start": 0, "middle": 4, "end": 8}.items():
            take(f"page-{name}.png", step, 1280, 800)
        write_page(page, [select_question(static, BESIDE), select_question(interleaved, BESIDE)])
        take("page-two.png", 3, 1440, 800, dark=True)


def select_question(of: TraceRun, question: str) -> TraceRun:
    """The run with one question of it."""
    return TraceRun(of.name, of.header, [rollout for rollout in of.rollouts if rollout.id == question])


if __name__ == "__main__":
    run_program(main)
