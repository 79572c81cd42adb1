"""Output files, run folders, training runs, worlds, stamps."""

from bad_inputs import ASK, Case

CASES = [
    Case("an answers file that is a folder", f"{ASK} --out model", "cannot be written"),
]
