"""The chat template of a checkpoint, rendered by a process that has little time, memory and room.

A template is a program that somebody else wrote. Jinja's sandbox keeps it from the machine, not from
endless loops; this file is therefore run as a script of its own, which imports nothing of this package.
"""

import json
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

RENDER_CPU_SECONDS = 2  # of a processor; a machine that does much else may take longer
RENDER_TIMEOUT_SECONDS = 10
RENDER_MEMORY_BYTES = 512 << 20
MAX_RENDERED_CHARS = 100_000
# What templates are told of the date, on all days the same: the answers must not depend on it. It is the
# date that Llama's templates fall back to.
TEMPLATE_DATE = (2024, 7, 26)


@lru_cache(maxsize=64)
def render_chat_template(template: str, values: str) -> str:
    """The text of a Jinja template as `transformers` renders it; `values`: a JSON object of its variables.

    Raises `ValueError`, with the reason, for a template that fails or takes too much of anything.
    """
    from importlib.util import find_spec

    specs = (find_spec(name) for name in ("jinja2", "markupsafe"))
    places = {Path(str(spec.origin)).parents[1] for spec in specs if spec is not None}
    task = {"template": template, "values": json.loads(values), "places": sorted(map(str, places))}
    # The script may write no more than its limit into the file, whatever it does.
    with tempfile.TemporaryFile() as out:
        try:
            subprocess.run(
                [sys.executable, "-I", "-S", __file__], input=json.dumps(task).encode(), stdout=out,
                stderr=subprocess.DEVNULL, env={}, cwd="/", timeout=RENDER_TIMEOUT_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ValueError(f"it takes more than {RENDER_TIMEOUT_SECONDS} seconds") from None
        out.seek(0)
        written = out.read()
    if not written:
        raise ValueError(
            f"it takes more than {RENDER_CPU_SECONDS} seconds or {RENDER_MEMORY_BYTES >> 20} MiB of memory"
        )
    found: dict[str, str] = json.loads(written)
    if "error" in found:
        raise ValueError(found["error"])
    return found["text"]


def _confine() -> None:
    import resource

    for limit, most in (
        (resource.RLIMIT_CPU, RENDER_CPU_SECONDS),
        (resource.RLIMIT_AS, RENDER_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 10 * MAX_RENDERED_CHARS),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))


def _environment() -> Any:
    """As that of `transformers`, without what is random, and with one date for all days."""
    from datetime import datetime

    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, which marks what the model writes, for training; here it marks nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(x: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.filters.pop("random")
    environment.globals.pop("lipsum")
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime(*TEMPLATE_DATE).strftime
    return environment


def _main() -> None:
    task = json.load(sys.stdin.buffer)
    _confine()
    sys.path += task["places"]
    try:
        text = _environment().from_string(task["template"]).render(task["values"])
        if len(text) > MAX_RENDERED_CHARS:
            raise ValueError(f"it makes more than {MAX_RENDERED_CHARS} characters")
        found = {"text": text}
    except MemoryError:
        found = {"error": f"it takes more than {RENDER_MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:  # whatever a template may raise
        found = {"error": (str(error).strip().splitlines() or [type(error).__name__])[0][:500]}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    _main()
