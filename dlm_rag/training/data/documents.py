"""Documents to pre-train on: tokenised once, packed into sequences of one length, mixed by weight.

A file becomes one long array of token ids, each document followed by an end token. Sequence n is the
n-th stretch of that array; a row is what of one document lies in it, so that no token sees another
document, and packing leaves no padding. Everything follows from (seed, phase, number of the sequence):
nothing has to be saved to go on, and any process can make any sequence.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dlm_rag.config import TrainConfig
from dlm_rag.errors import ConfigError, CorpusError
from dlm_rag.files.build_once import build_once, make_folder_name
from dlm_rag.files.digest import digest_file
from dlm_rag.files.paths import expand_path, get_cache_folder, resolve_regular_file
from dlm_rag.files.record_readers import get_field, read_records
from dlm_rag.randomness import sample_permutation
from dlm_rag.tokenizer import Prompt, Tokenizer
from dlm_rag.training.data.examples import Example
from dlm_rag.training.noise import alpha, weigh_masked

MIXTURE_BLOCK_SEQUENCES = 1000  # sequences within which every source has its exact share
HELD_OUT_SEQUENCES = 8  # sequences of each source at its end, for validation; at most one in 20
MIN_MASK_TIME = 1e-3  # below it a token of a short row would count too much
GOLDEN_RATIO_STEP = 0.6180339887498949  # rows of a sequence get times spread by it


@dataclass(frozen=True)
class TokenFile:
    """A file of documents as token ids: (n,) of them, and where each document ends."""

    tokens: NDArray[np.uint32]
    ends: NDArray[np.int64]  # of each document, its end token included

    def count_sequences(self, length: int) -> int:
        """How many whole sequences of that length there are."""
        return len(self.tokens) // length

    def sequence_rows(self, number: int, length: int) -> list[list[int]]:
        """Sequence `number`, cut where documents end."""
        first, last = number * length, (number + 1) * length
        inside = self.ends[np.searchsorted(self.ends, first, "right") : np.searchsorted(self.ends, last)]
        return [part.tolist() for part in np.split(self.tokens[first:last], inside - first)]


def open_token_file(path: str | Path, tokenizer: Tokenizer, folder: str | None = None) -> TokenFile:
    """The token ids of a file, made at the first use and mapped into memory from then on.

    folder: where they are kept; None: where indexes are. Raises `CorpusError`.
    """
    path = resolve_regular_file(path, "file of documents", CorpusError)
    vocabulary = "plain text\n" + tokenizer.inner.backend_tokenizer.to_str()
    root = expand_path(folder, CorpusError) if folder else get_cache_folder()
    name = make_folder_name(path.stem, "tokens", digest_file(path), vocabulary)
    (end, *_) = sorted(tokenizer.end_ids)

    def build(scratch: Path) -> None:
        ends = [0]
        with (scratch / "tokens.bin").open("wb") as file:
            for place, record in read_records(path, CorpusError):
                _, text = get_field(record, "contents")
                if not isinstance(text, str) or not text.strip():
                    raise CorpusError(f"{place}: a document needs a 'text'")
                ids = np.array((*tokenizer.encode_uncached(text), end), np.uint32)
                file.write(ids.tobytes())
                ends.append(ends[-1] + len(ids))
        if len(ends) == 1:
            raise CorpusError(f"{path} holds no documents")
        np.save(scratch / "ends.npy", np.array(ends[1:], np.int64))

    built = build_once(root / name, build)
    return TokenFile(np.memmap(built / "tokens.bin", np.uint32, "r"), np.load(built / "ends.npy"))


class PackedDocuments:
    """The batches of a phase of pre-training: sequences of several sources, masked at random times."""

    def __init__(
        self, sources: dict[str, TokenFile], tokenizer: Tokenizer, train: TrainConfig, phase: str,
        shifted: bool,
    ) -> None:  # fmt: skip
        """Raises `ConfigError` for a mixture of unknown sources and for a source shorter than a sequence.

        shifted: the denoiser predicts a token from the row before it, so that every row needs one.
        """
        self._train, self._key = train, (train.seed, phase)
        self._per_step = train.batch_tokens // train.sequence_length
        (end, *_) = sorted(tokenizer.end_ids)
        self._prompt = Prompt((end,) if shifted else (), (), ())
        weights = train.mixture or dict.fromkeys(sources, 1.0)
        if unknown := sorted(set(weights) - set(sources)):
            raise ConfigError(f"mixture names '{unknown[0]}', which is none of {', '.join(sources)}")
        whole = sum(weights.values())
        if whole <= 0 or min(weights.values()) < 0:
            raise ConfigError("the shares of a mixture must not be negative, nor all of them 0")
        shares = {name: weight / whole for name, weight in weights.items() if weight}
        self._files = [sources[name] for name in shares]
        self._quotas = allocate_quotas(list(shares.values()), MIXTURE_BLOCK_SEQUENCES)
        counts = [file.count_sequences(train.sequence_length) for file in self._files]
        self._sequences = [n - min(HELD_OUT_SEQUENCES, n // 20) for n in counts]
        for name, quota, sequences in zip(shares, self._quotas, counts, strict=True):
            if not quota:
                raise ConfigError(
                    f"mixture: the share of '{name}' is below one sequence in {MIXTURE_BLOCK_SEQUENCES:,}"
                )
            if not sequences:
                raise ConfigError(
                    f"the documents '{name}' have fewer tokens than one sequence of sequence_length="
                    f"{train.sequence_length}"
                )

    def examples(self, step: int, items: Iterable[int]) -> list[Example]:
        """The rows of some of the sequences of a step."""
        offset = random.Random(f"times/{self._key}/{step}").random()
        found: list[Example] = []
        for item in items:
            number = step * self._per_step + item
            # One time in each of equal parts of the interval: they vary less than independent ones.
            time = (offset + item / self._per_step) % 1
            rng = np.random.default_rng([*map(ord, f"masks/{self._key}"), number])
            for row, ids in enumerate(self.sequence_rows(number)):
                found.append(self._mask(ids, (time + row * GOLDEN_RATIO_STEP) % 1, rng))
        return found

    def sequence_rows(self, number: int) -> list[list[int]]:
        """The rows of sequence `number` of the phase."""
        block, place = divmod(number, MIXTURE_BLOCK_SEQUENCES)
        order = sample_permutation((*self._key, block, "order"), MIXTURE_BLOCK_SEQUENCES).numpy()
        drawers = np.repeat(np.arange(len(self._quotas)), self._quotas)[order]  # the source of each
        source = int(drawers[place])
        drawn = block * self._quotas[source] + int((drawers[:place] == source).sum())
        epoch, index = divmod(drawn, self._sequences[source])
        shuffled = sample_permutation((*self._key, source, epoch), self._sequences[source])
        return self._files[source].sequence_rows(int(shuffled[index]), self._train.sequence_length)

    def held_out_examples(self) -> list[list[Example]]:
        """The rows of each sequence that is kept for validation, masked at times all over the interval."""
        length, rng = self._train.sequence_length, np.random.default_rng(0)
        times = ((n + 0.5) * GOLDEN_RATIO_STEP % 1 for n in count())
        return [
            [self._mask(ids, next(times), rng) for ids in file.sequence_rows(number, length)]
            for file, first in zip(self._files, self._sequences, strict=True)
            for number in range(first, file.count_sequences(length))
        ]

    def _mask(self, ids: list[int], time: float, rng: np.random.Generator) -> Example:
        at = torch.tensor(MIN_MASK_TIME + (1 - MIN_MASK_TIME) * time, dtype=torch.float64)
        hidden = rng.random(len(ids)) >= float(alpha(at))
        weight = float(weigh_masked(at))
        return Example(self._prompt, tuple(ids), tuple(hidden.tolist()), (), weight, float(len(ids)))


def allocate_quotas(shares: list[float], count: int) -> list[int]:
    """Whole numbers in proportion to `shares`, `count` together (largest remainders first)."""
    exact = [share * count for share in shares]
    found = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda n: found[n] - exact[n])
    for n in by_remainder[: count - sum(found)]:
        found[n] += 1
    return found
