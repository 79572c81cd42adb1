"""Answer questions: `python sample.py --help`; the program is `dlm_rag.commands.sample`."""

from dlm_rag.commands.sample import main
from dlm_rag.program import run

if __name__ == "__main__":
    run(main)
