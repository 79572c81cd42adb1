"""Outcomes for the folder of rows."""

from dlm_rag.synthesis.rows_folder import SourceOutcome

SETTINGS = {"synthesis.method": "corpus"}


def make_outcome(place, rows=2):
    """Returns what became of a source: so many rows, every second one held out, and one left out."""
    made = [
        {"id": f"s{place}#{n}", "question": f"Who is {place} of {n}?", "response": "### x",
         "template": "what", "held_out": n % 2 == 1}
        for n in range(rows)
    ]  # fmt: skip
    return SourceOutcome(place, f"s{place}", made, {"left out: not linked": 1, "writer: requests": 10})
