"""Run lm-evaluation-harness on a checkpoint: tasks of multiple choice and perplexity, by log-likelihoods.

    dlm-rag lm-eval --model_args pretrained=DIR_OR_HUB_ID --tasks arc_easy,hellaswag
    dlm-rag lm-eval --model_args pretrained=DIR,samples=32,seed=1 --tasks wikitext --batch_size 64

Needs `pip install 'dlm_rag[lm-eval]'`. All flags are the harness's own. --model_args takes pretrained,
dtype, device and block_size (as settings of `model`), max_length (tokens), and samples, seed and mode.
--batch_size is the number of rows per forward pass; the harness's default of 1, and auto, mean 32.
"""

import importlib
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

from dlm_rag.cli import print_note
from dlm_rag.config.fields import replace_settings
from dlm_rag.config.sections import LikelihoodConfig
from dlm_rag.errors import ConfigError
from dlm_rag.machine import choose_device, choose_dtype

Tokens = list[int]


class HarnessModel:
    """What the harness asks of a model, beside its own `TemplateLM`. Raises `UserError`."""

    cache_hook: Any

    def __init__(
        self, pretrained: str, dtype: str = "auto", device: str | None = None, batch_size: Any = None,
        **more: Any,
    ) -> None:  # fmt: skip
        from dlm_rag.model.checkpoint import open_checkpoint
        from dlm_rag.model.denoiser import load_denoiser
        from dlm_rag.model.denoiser_config import EVIDENCE_LAYOUTS
        from dlm_rag.tokenizer import Tokenizer

        super().__init__()
        block_size, most, _ = (
            more.pop(key, None) for key in ("block_size", "max_length", "max_batch_size")
        )
        rows = {} if batch_size in (None, 1, "1", "auto") else {"batch_size": batch_size}
        self.settings = replace_settings(LikelihoodConfig(), **rows, **more)
        self._device = choose_device(device or "auto")
        checkpoint = open_checkpoint(str(pretrained), block_size)
        self._tokenizer, shape = Tokenizer.from_pretrained(checkpoint), checkpoint.config
        self._denoiser = load_denoiser(checkpoint, self._device, choose_dtype(dtype, self._device))
        before = shape.passage_length * EVIDENCE_LAYOUTS[shape.evidence_layout].separate_passages
        room = shape.max_position_embeddings - before - (shape.block_size or 1)
        self.max_length = min(most or room, room)

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text."""
        return self._tokenizer.end_id

    @property
    def prefix_token_id(self) -> int | None:
        """The token that stands for an empty context."""
        begin = self._tokenizer.inner.bos_token_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> Tokens:
        """Ids of plain text, after what the tokenizer puts before each text by itself."""
        begin = [] if add_special_tokens is False else self._tokenizer.inner.encode("")
        return [*begin, *self._tokenizer.encode_uncached(string)]

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """In nats, and whether it is greedy. The choices of a question have the same masks."""
        self._keys = [f"{request.task_name}/{request.doc_id}" for request in requests]
        return cast(Any, super()).loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Tokens, Tokens]], **more: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        answers = [(each.nats, each.greedy) for each in self._score(pairs, self._keys)]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of texts in nats, in windows of `max_length` tokens, each given the token before it."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        pairs, owners = list[tuple[Tokens, Tokens]](), list[int]()
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length - 1, 1)
            pairs += map(make_disjoint_window, windows)
            owners += [number] * (len(pairs) - len(owners))
        total = [0.0] * len(requests)
        for owner, found in zip(owners, self._score(pairs, range(len(pairs))), strict=True):
            total[owner] += found.nats
        return total

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Raises `ConfigError`."""
        raise ConfigError(
            "tasks that generate ask a server, `dlm-rag serve` (docs/how-to/evaluate.md), not this model"
        )

    def _score(self, pairs: Sequence[tuple[Tokens, Tokens]], keys: Sequence[object]) -> list[Any]:
        from dlm_rag.evaluation.likelihood import estimate_log_likelihoods

        fitted = [(a[max(0, len(a) + len(b) - self.max_length) :], b) for a, b in pairs]
        found = estimate_log_likelihoods(self._denoiser, fitted, self.settings, keys)
        exact = sum(each.exact for each in found)
        bounds = "bounds, of texts of which it is not told whether they are greedy"
        print_note(f"{len(found)} log-likelihoods: {exact} exact, {len(found) - exact} {bounds}")
        return found


@cache
def register_model() -> type:
    """The class that the harness knows as `dlm_rag` from now on; raises `ImportError` without it."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model

    importlib.import_module("lm_eval.models")  # else ours would be the only one
    made: type = register_model("dlm_rag")(type("DlmRagModel", (HarnessModel, TemplateLM), {}))
    return made


def main(argv: list[str]) -> None:
    try:
        from lm_eval.__main__ import cli_evaluate

        register_model()
    except ImportError:
        raise ConfigError("the harness is not installed: pip install 'dlm_rag[lm-eval]'") from None
    words = argv[argv[:1] == ["run"] :]
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words = ["run", "--model", "dlm_rag", *words]
    sys.argv = ["dlm-rag lm-eval", *words]
    cli_evaluate()
