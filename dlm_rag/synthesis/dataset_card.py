"""The card of a folder of rows: what is in it, how it was made and filtered, how it is used."""

import json
from pathlib import Path
from typing import Any

from dlm_rag.energy.meter import format_energy, summarise_energy

TEMPLATE_DESCRIPTIONS = {
    "trace": "questions with a reasoning trace that was decoded, its supporting_ids the passages it cites",
    "what": "what a passage says that its title is",
    "complete": "a sentence of a passage with a name left out, to be completed",
    "chain2": "a sentence with the name of another passage left out, asked what that is",
    "chain3": "the same, one passage further on",
    "paraphrase": "questions in other words, all else as it was",
    "faq": "passages as questions and answers",
    "table": "passages as a table",
}


def render_dataset_card(folder: Path, counts: dict[str, int], note: dict[str, Any]) -> str:
    """The Markdown of README.md; note: what rows.json says."""
    stamp, parts = note.get("stamp", {}), note.get("energy", [])
    made, rest = [], []
    for key, n in counts.items():
        side, _, name = key.partition(": ")
        if side in ("rows", "held out"):
            made.append(f"| {name} | {side} | {n:,} | {TEMPLATE_DESCRIPTIONS.get(name, '')} |")
        elif side in ("left out", "spent"):
            rest.append(f"\n| {key} | {n:,} |")
    energy = format_energy(summarise_energy(parts), str(parts[-1].get("reason"))) if parts else ""
    depends_on = json.dumps(note["depends_on"], indent=2, ensure_ascii=False).replace("\n", "\n    ")
    return f"""\
# {folder.resolve().name}: rows to train on

Made by `{stamp.get("command", "dlm-rag synthesize")}` of {counts["sources"]:,} sources, \
{stamp.get("date", "")}, commit {stamp.get("commit", "unknown")}.

| template | for | rows | what it is |
|---|---|---|---|
{chr(10).join(made) or "| none | | 0 | |"}

`rows` are to be trained on; `held out` ones are in held_out/: no passage of theirs is in a row.

| left out, or spent | |
|---|---|{"".join(rest)}

{energy and f"{energy}.{chr(10) * 2}"}    dlm-rag train data.questions={folder} data.corpus=FILE ...

What the rows depend on:

    {depends_on}
"""
