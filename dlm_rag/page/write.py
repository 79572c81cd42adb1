"""The page as one file: our own style and script, and the traces as JSON that no text breaks out of."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from dlm_rag.errors import ConfigError
from dlm_rag.files.atomic import write_text_atomic
from dlm_rag.page.record import TraceRun, build_page_record

PAGE_FOLDER = Path(__file__).parent
PAGE_MARKER = "<!doctype html><!-- a trace page of dlm_rag -->"


def write_page(path: Path, runs: Sequence[TraceRun]) -> None:
    """Writes the page of one run, or of two side by side, atomically; raises as `build_page_record`
    does.
    """
    write_text_atomic(path, render_page(runs))


def render_page(runs: Sequence[TraceRun]) -> str:
    """The text of the page; a browser runs its own script alone and loads nothing."""
    return _render_html(build_page_record(runs))


def render_live_page(keyed: bool) -> str:
    """The page of a server, with a form to ask it; keyed: whether it needs a key."""
    form = _read_asset("live.html").replace("@hidden@", "" if keyed else "hidden")
    empty: dict[str, Any] = {"names": [""], "settings": [[]], "left_out": 0, "questions": []}
    return _render_html(empty, form, ("page.js", "live.js"), "; connect-src 'self'")


def _render_html(
    record: Mapping[str, Any], form: str = "", scripts: Sequence[str] = ("page.js",), more: str = ""
) -> str:
    """The page of a record; more: what its policy allows besides its own style and script."""
    style, script = _read_asset("page.css"), "\n".join(map(_read_asset, scripts))
    # Escaped, no text ends the element that holds it (`</script>`), nor a line of script (U+2028).
    data = json.dumps(record, separators=(",", ":")).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; style-src '{_csp_digest(style)}'; script-src '{_csp_digest(script)}'{more}"
    )
    page = _read_asset("page.html")
    places = {"policy": policy, "form": form, "style": style, "script": script, "data": data}
    # The data last: what looks like a place for something else is a text in there.
    for place, text in places.items():
        page = page.replace(f"@{place}@", text, 1)
    return f"{PAGE_MARKER}\n{page}"


def _read_asset(name: str) -> str:
    return (PAGE_FOLDER / name).read_text(encoding="utf-8")


def _csp_digest(text: str) -> str:
    """As a content security policy names what it lets through."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def check_page_target(path: str) -> None:
    """Raises `ConfigError` for a file that exists and is not a page: it would be lost."""
    page = Path(path)
    if page.is_file() and page.stat().st_size:
        with page.open("rb") as file:
            if file.read(len(PAGE_MARKER)) != PAGE_MARKER.encode():
                raise ConfigError(f"html={path} is not a page of this program: choose another file")
