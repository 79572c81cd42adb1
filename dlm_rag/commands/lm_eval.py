"""Run lm-evaluation-harness on a checkpoint: tasks of multiple choice and perplexity, by log-likelihoods.

    dlm-rag lm-eval --model_args pretrained=DIR_OR_HUB_ID --tasks arc_easy,hellaswag
    dlm-rag lm-eval --model_args pretrained=DIR,samples=32,seed=1 --tasks wikitext --batch_size 64

Needs `pip install 'dlm_rag[lm-eval]'`. All flags are the harness's own. --model_args takes pretrained,
dtype, device and block_size (as settings of `model`), max_length (tokens), and samples, seed and mode.
--batch_size is the number of rows per forward pass; the harness's default of 1, and auto, mean 32.
"""

import importlib
import sys

from dlm_rag.errors import ConfigError


def main(argv: list[str]) -> None:
    try:
        from lm_eval.__main__ import cli_evaluate

        importlib.import_module("dlm_rag.evaluation.harness")  # registers the model `dlm_rag`
    except ImportError:
        raise ConfigError("the harness is not installed: pip install 'dlm_rag[lm-eval]'") from None
    words = argv[argv[:1] == ["run"] :]
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words = ["run", "--model", "dlm_rag", *words]
    sys.argv = ["dlm-rag lm-eval", *words]
    cli_evaluate()
