"""The model `dlm_rag` of lm-evaluation-harness."""

import importlib
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from dlm_rag.cli import print_note
from dlm_rag.config.fields import replace_settings
from dlm_rag.config.sections import LikelihoodConfig
from dlm_rag.errors import ConfigError
from dlm_rag.evaluation.likelihood import LogLikelihood, Pair, estimate_log_likelihoods
from dlm_rag.machine import choose_device, choose_dtype
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.model.denoiser import load_denoiser
from dlm_rag.model.denoiser_config import EVIDENCE_LAYOUTS
from dlm_rag.tokenizer import Tokenizer

importlib.import_module("lm_eval.models")  # else ours would be the only one


@register_model("dlm_rag")
class HarnessModel(TemplateLM):
    """What the harness asks of a model. Raises `UserError`."""

    def __init__(
        self, pretrained: str, dtype: str = "auto", device: str | None = None, batch_size: Any = None,
        max_batch_size: Any = None, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        block_size, most = more.pop("block_size", None), more.pop("max_length", None)
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

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of plain text, after what the tokenizer puts before each text by itself."""
        begin = [] if add_special_tokens is False else self._tokenizer.inner.encode("")
        return [*begin, *self._tokenizer.encode_uncached(string)]

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """In nats, and whether it is greedy. The choices of a question have the same masks."""
        self._keys = [f"{request.task_name}/{request.doc_id}" for request in requests]
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        found = self._score([(context, continuation) for _, context, continuation in requests], self._keys)
        return [(each.nats, each.greedy) for each in found]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Of texts in nats, in windows of `max_length` tokens, each given the token before it."""
        pairs, owners = list[Pair](), list[int]()
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length - 1, 1)
            pairs += map(make_disjoint_window, windows)
            owners += [number] * (len(pairs) - len(owners))
        total = [0.0] * len(requests)
        for owner, found in zip(owners, self._score(pairs, range(len(pairs))), strict=True):
            total[owner] += found.nats
        return total

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Raises `ConfigError`."""
        raise ConfigError("tasks that generate ask a server, `dlm-rag serve`, not this model")

    def _score(self, pairs: Sequence[Pair], keys: Sequence[object]) -> list[LogLikelihood]:
        fitted = [(a[max(0, len(a) + len(b) - self.max_length) :], b) for a, b in pairs]
        found = estimate_log_likelihoods(self._denoiser, fitted, self.settings, keys)
        exact = sum(each.exact for each in found)
        bounds = f"{len(found) - exact} bounds, which do not tell whether a text is greedy"
        print_note(f"{len(found)} log-likelihoods: {exact} exact, {bounds}")
        return found
