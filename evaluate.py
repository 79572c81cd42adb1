"""Score a denoiser: `python evaluate.py --help`; the program is `dlm_rag.commands.evaluate`."""

from dlm_rag.cli import run_program
from dlm_rag.commands.evaluate import main

if __name__ == "__main__":
    run_program(main)
