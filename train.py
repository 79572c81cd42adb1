"""Train a denoiser. Not part of this version: it arrives with the first model of our own."""

from dlm_rag.cli import parse, run
from dlm_rag.errors import ConfigError


def main(argv: list[str]) -> None:
    parse(__doc__ or "", argv, typed=False)
    raise ConfigError("this version cannot train yet; sample.py and evaluate.py decode public checkpoints")


if __name__ == "__main__":
    run(main)
