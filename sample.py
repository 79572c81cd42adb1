"""Answer questions: `python sample.py --help`; the program is `dlm_rag.commands.sample`."""

from dlm_rag.cli import run_program
from dlm_rag.commands.sample import main

if __name__ == "__main__":
    run_program(main)
