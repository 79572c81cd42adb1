"""Pages of one file: their own style and script, their data, nothing from a network."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

from dlm_rag.errors import ConfigError

PAGE_FOLDER = Path(__file__).parent
PAGE_MARKER = "<!doctype html><!-- a page of dlm_rag -->"
OLD_PAGE_MARKER = "<!doctype html><!-- a trace page of dlm_rag -->"  # of 0.1
SKELETON = """{marker}
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
{body}</html>
"""


def render_html(
    title: str, body: str, style: str, scripts: Sequence[str] = (), record: Mapping[str, Any] | None = None,
    more: str = "",
) -> str:  # fmt: skip
    """A page that runs its own scripts alone, with a policy that says so.

    body: the element, its texts escaped. style, scripts: names of files here; colours.css comes before.
    record: what the scripts read. more: what the policy allows besides.
    """
    css, script = read_asset("colours.css") + read_asset(style), "\n".join(map(read_asset, scripts))
    allowed = f"default-src 'none'; style-src '{_csp_digest(css)}'"
    if scripts:
        # Escaped, no text ends the element that holds it (`</script>`), nor a line of script (U+2028).
        data = json.dumps(record, separators=(",", ":")).replace("<", "\\u003c")
        allowed += f"; script-src '{_csp_digest(script)}'{more}"
        parts = f'<script id="data" type="application/json">{data}</script>\n<script>{script}</script>\n'
        body = body.removesuffix("</body>\n") + parts + "</body>\n"
    return SKELETON.format(
        marker=PAGE_MARKER, policy=allowed, title=escape(title), style=css, body=body
    )  # fmt: skip


def read_asset(name: str) -> str:
    """The text of a file that lies beside this one."""
    return (PAGE_FOLDER / name).read_text(encoding="utf-8")


def _csp_digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def check_page_target(path: str) -> None:
    """Raises `ConfigError` for a file that exists and is not a page: it would be lost."""
    page = Path(path)
    if page.is_file() and page.stat().st_size:
        with page.open("rb") as file:
            begin = file.read(len(OLD_PAGE_MARKER))
        if not begin.startswith((PAGE_MARKER.encode(), OLD_PAGE_MARKER.encode())):
            raise ConfigError(f"html={path} is not a page of this program: choose another file")
