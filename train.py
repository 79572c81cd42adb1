"""Train a denoiser: `python train.py --help`; the program is `dlm_rag.commands.train`."""

from dlm_rag.cli import run_program
from dlm_rag.commands.train import main

if __name__ == "__main__":
    run_program(main)
