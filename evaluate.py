"""Score a denoiser: `python evaluate.py --help`; the program is `dlm_rag.commands.evaluate`."""

from dlm_rag.commands.evaluate import main
from dlm_rag.program import run

if __name__ == "__main__":
    run(main)
