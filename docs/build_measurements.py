"""Writes docs/measurements/*.md from the results stored in docs/measurements/results/*.yaml.

    python docs/build_measurements.py
    python docs/build_measurements.py --add runs/x --page world --title TITLE --what SENTENCE

--add stores the table of an evaluation (its folder or scores.json) as an entry first. Fails where a file or
setting that a result depends on has changed since it was measured; `python docs/measure_again.py` measures
it again.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from dlm_rag.cli import run_program
from dlm_rag.commands.arguments import CommandParser
from dlm_rag.errors import ConfigError, suggest_nearest, summarize_error
from dlm_rag.evaluation.tables import build_result_table, read_result

FOLDER = Path(__file__).parent / "measurements"
PAGES = {
    "world": ("The invented world", "The shipped model on questions about its invented world."),
    "reader": ("Real text", "SmolLM2-135M with our adapter."),
    "retrieval": ("Retrieval", "What BM25, dense and hybrid search find, and what they cost."),
    "engine": ("The engine", "What each mechanism of the decode engine saves."),
    "training": ("Training", "Seeds, recovery, plans and synthesized rows."),
    "reinforcement": ("Reinforcement learning", "The denoiser trained with a reward."),
    "precision": ("Precision", "Answers, tokens and time in low precision."),
    "gpu": ("GPUs", "What has run on a GPU, one NVIDIA H200 at a time."),
    "devices": ("Servers and workers", "The HTTP server, Ray workers, and links between machines."),
}
NEEDED = ("title", "what", "command", "machine", "date")
ORDER = (*NEEDED, "commit", "seed", "hidden", "table", "columns", "rows", "notes")  # hidden: on no page

INDEX_HEAD = """\
# Measurements

Each figure is stored in `results/` with its command, machine, date and, where known, commit and seed; a
program that was removed is at that commit. More tables, which the report shows, are in `results/`.
Brackets are 95 % intervals over questions or, for speed, ranges over rounds.
"""

Entry = dict[str, Any]


def read_entries(page: str, folder: Path = FOLDER) -> list[Entry]:
    """The entries of results/PAGE.yaml. Raises `ConfigError` for a key or a value that cannot be shown."""
    file = folder / "results" / f"{page}.yaml"
    try:
        entries = yaml.safe_load(file.read_text())
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {summarize_error(error)}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{file}: not a list of entries, each with {', '.join(NEEDED)}")
    for number, entry in enumerate(entries, 1):
        check_entry(entry, f"{file}, entry {number} ({entry.get('title', 'without a title')})")
    anchors = [make_anchor(entry["title"]) for entry in entries]
    for entry, anchor in zip(entries, anchors, strict=True):
        if anchors.count(anchor) > 1:
            raise ConfigError(f"{file}: two entries are called {entry['title']!r}: rename one")
    return entries


def check_entry(entry: Entry, place: str) -> None:
    """Raises `ConfigError` where a key is unknown or missing, or a value has the wrong form."""
    for key in entry:
        if key not in ORDER:
            raise ConfigError(f"{place}: unknown key {key!r}{suggest_nearest(str(key), ORDER)}")
    for key in NEEDED:
        if key not in entry:
            raise ConfigError(f"{place}: {key} is missing")
    commands = list_commands(entry)
    texts = [entry[key] for key in ("title", "what", "machine", "date", "commit", "notes") if key in entry]
    if not commands or not all(isinstance(text, str) and text.strip() for text in [*commands, *texts]):
        raise ConfigError(f"{place}: title, what, command, machine, date, commit and notes are texts")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"]):
        raise ConfigError(f"{place}: date {entry['date']!r} is not like '2026-11-26'")
    columns, rows = entry.get("columns", []), entry.get("rows", [])
    grid = [columns, *rows] if isinstance(rows, list) else [None]
    if not all(isinstance(row, list) and all(isinstance(cell, str) for cell in row) for row in grid):
        raise ConfigError(f"{place}: columns is a list of texts, rows a list of such lists: quote numbers")
    if bool(columns) != bool(rows) or any(len(row) != len(columns) for row in rows):
        raise ConfigError(f"{place}: every row needs {len(columns)} cells, one for each column")


def list_commands(entry: Entry) -> list[str]:
    """The commands of an entry, which may be one text."""
    command = entry["command"]
    return command if isinstance(command, list) else [command]


def make_anchor(title: str) -> str:
    """The anchor that MkDocs gives a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title, flags=re.ASCII).strip().lower())


def render_row(cells: list[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def render_entry(entry: Entry, usual_machine: str) -> str:
    """An entry in Markdown: what, table, notes, date, and the machine if it is not the usual one."""
    parts = [f"## {entry['title']}", entry["what"].strip()]
    if entry.get("rows"):
        rule = ["---"] * len(entry["columns"])
        parts.append("\n".join(map(render_row, [entry["columns"], rule, *entry["rows"]])))
    parts += [entry["notes"].strip()] if "notes" in entry else []
    machine = "" if entry["machine"] == usual_machine else f"{entry['machine']}; "
    parts.append(f"*{machine}{entry['date']}*")
    return "\n\n".join(parts) + "\n"


def render_pages(folder: Path = FOLDER) -> dict[str, str]:
    """All pages by file name; one without an entry to show is left out."""
    made = "<!-- Made by docs/build_measurements.py from results/{}.yaml. -->\n"
    pages, index = {}, [made.format("*"), INDEX_HEAD]
    for page, (title, about) in PAGES.items():
        entries = read_entries(page, folder)
        shown = [entry for entry in entries if not entry.get("hidden")]
        store = f"[results/{page}.yaml](results/{page}.yaml)"
        if shown:
            machine = Counter(entry["machine"] for entry in shown).most_common(1)[0][0]
            about_runs = f"{about} Commands: {store}. Machine, unless noted: {machine}.\n"
            rendered = [render_entry(entry, machine) for entry in shown]
            pages[f"{page}.md"] = "\n".join([made.format(page), f"# {title}\n", about_runs, *rendered])
        where = f"[{title}]({page}.md): {about}" if shown else f"{title}: {about} In {store}."
        index.append(f"- {where}")
    return {"index.md": "\n".join(index) + "\n", **pages}


def dump_entry(entry: Entry) -> str:
    """An entry as YAML, a row of its table a line. Every value is JSON, which YAML reads."""
    lines = []
    for key in sorted(entry, key=ORDER.index):
        value = entry[key]
        if isinstance(value, list) and key != "columns":
            lines += [f"{key}:", *(f"  - {json.dumps(item, ensure_ascii=False)}" for item in value)]
        else:
            lines.append(f"{key}: {json.dumps(value, ensure_ascii=False)}")
    return "- " + "\n  ".join(lines) + "\n"


def make_entry(result: Path, title: str, what: str) -> Entry:
    """The entry of an evaluation that `dlm-rag evaluate` left in a folder."""
    stored = read_result(result)
    stamp, table = next(iter(stored.settings.values())).stamp, build_result_table(stored)
    if not (command := stored.command):
        raise ConfigError(f"{result} does not say by which command it was made: add the entry by hand")
    entry = {"title": title, "what": what, "command": command, "machine": str(stamp.get("device"))}
    entry |= {"date": str(stamp.get("date"))[:10], "commit": str(stamp.get("commit"))}
    return entry | {"seed": stamp.get("seed"), "columns": list(table.headings), "rows": table.rows}


def main(argv: list[str]) -> None:
    """Adds an entry where one is named, and writes all pages."""
    parser = CommandParser(__doc__ or "")
    parser.add_argument("--add", type=Path, metavar="RESULT", help="folder of evaluate's --out")
    parser.add_argument("--page", choices=PAGES, help="where the entry goes")
    parser.add_argument("--title", help="its heading")
    parser.add_argument("--what", help="what was measured and what it shows, in one sentence")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the pages, with results/ inside")
    given = parser.parse_args(argv)
    if given.add:
        if not (given.page and given.title and given.what):
            raise ConfigError("--add needs --page, --title and --what")
        entry = make_entry(given.add, given.title, given.what)
        check_entry(entry, str(given.add))
        with (given.folder / "results" / f"{given.page}.yaml").open("a") as file:
            file.write("\n" + dump_entry(entry))
    for name, text in render_pages(given.folder).items():
        (given.folder / name).write_text(text)
    if given.folder == FOLDER:
        from docs.measure_again import check_inputs

        check_inputs()


if __name__ == "__main__":
    run_program(main)
