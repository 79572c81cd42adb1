"""Train a denoiser: `python train.py --help`; the program is `dlm_rag.commands.train`."""

from dlm_rag.commands.train import main
from dlm_rag.program import run

if __name__ == "__main__":
    run(main)
