"""Takes pictures of a page in headless Chromium: one place of it, or a trace playing.

    dlm-rag page trace.jsonl --html page.html
    python docs/picture.py page.html docs/images/real.webp    # all steps of the first question
    python docs/picture.py page.html docs/images/page-middle.png --place '#step=4'

A picture is as high as the page. Needs Chromium, and the repository for the driver of its tests.
"""

import base64
import io
import sys
from pathlib import Path

from PIL import Image

from dlm_rag.cli import run_program
from dlm_rag.commands.arguments import CommandParser
from dlm_rag.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.headless_chromium import HeadlessChromium

STEP_MS, LAST_MS = 900, 4000  # how long a step is shown, and the last one
SUFFIXES = (".png", ".webp")


def take_picture(browser: HeadlessChromium, width: int, height: int) -> Image.Image:
    """What the browser shows, of so many pixels."""
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    data = browser.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)[
        "data"
    ]
    return Image.open(io.BytesIO(base64.b64decode(data)))


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "")
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path, help="a .png of one place, a .webp of all steps")
    parser.add_argument("--place", default="", help="as `#question=2&step=7`")
    parser.add_argument("--width", type=int, default=1280, help="in pixels")
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args(argv)
    if given.picture.suffix not in SUFFIXES or not given.page.is_file():
        raise ConfigError(
            f"{given.page} is to be a page, {given.picture} a picture: {' or '.join(SUFFIXES)}"
        )
    with HeadlessChromium() as browser:
        browser.open(given.page, given.place, width=given.width, height=720, dark=given.dark)
        plays = given.picture.suffix == ".webp"
        last = browser.run("page.last") if plays else 0
        if plays:
            browser.run(f"page.go({last})")  # when the page is highest
        height = browser.run("document.documentElement.scrollHeight")
        frames = []
        for step in range(last + 1):
            if plays:
                browser.run(f"page.go({step})")
            frames.append(take_picture(browser, given.width, height))
    if plays:
        playing = {"append_images": frames[1:], "duration": [STEP_MS] * last + [LAST_MS], "loop": 0}
        frames[0].save(given.picture, quality=75, method=6, save_all=True, **playing)
    else:
        frames[0].convert("RGB").quantize(256).save(given.picture, optimize=True)


if __name__ == "__main__":
    run_program(main)
