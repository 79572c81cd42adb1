"""Documents to pre-train on: tokenised once, packed into sequences of one length.

A file becomes one long array of token ids, each document followed by an end token. Sequence n is the n-th
stretch of that array; a row is what of one document lies in it, so that packing leaves no padding.
Everything follows from (seed, number of the sequence).
"""

import itertools
import logging
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlm_rag.config import TrainConfig
from dlm_rag.errors import ConfigError, CorpusError
from dlm_rag.files.build_once import build_once, make_folder_name
from dlm_rag.files.paths import digest_file, expand_path, get_cache_folder, resolve_regular_file
from dlm_rag.files.record_readers import get_field, read_records
from dlm_rag.randomness import pick_shuffled
from dlm_rag.tokenizer import Prompt, Tokenizer
from dlm_rag.training.batches import Example, mask_at_time

log = logging.getLogger(__name__)

DOCUMENT_LAYOUT = "joint"  # evidence layout of rows without evidence
HELD_OUT_SEQUENCES = 8  # sequences of each file at its end, for validation; at most one in 20
MOST_LOST_SHARE = 0.05  # of the tokens, at the ends of files, without a word about it
GOLDEN_RATIO_STEP = 0.6180339887498949  # rows of a sequence get times spread by it


class TokenFile(NamedTuple):
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
    name = make_folder_name(path.stem, "tokens", digest_file(path), vocabulary, sorted(tokenizer.end_ids))
    end = min(tokenizer.end_ids)

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
    """The batches of pre-training: sequences of all files, shuffled, masked at random times."""

    def __init__(
        self, files: Sequence[TokenFile], tokenizer: Tokenizer, train: TrainConfig, shifted: bool
    ) -> None:
        """Raises `ConfigError` for files without a whole sequence."""
        self._files, self._train, length = files, train, train.sequence_length
        self._per_step = train.batch_tokens // length
        # Where the denoiser predicts a token from the one before it, every row needs one in front.
        self._prompt = Prompt((min(tokenizer.end_ids),) if shifted else (), (), ())
        counts = [file.count_sequences(length) for file in files]
        self._kept = [count - min(HELD_OUT_SEQUENCES, count // 20) for count in counts]
        self._ends = np.cumsum(self._kept)  # of the files, in sequences to train on
        if not self._ends[-1]:
            raise ConfigError(f"the files have fewer tokens than one sequence of sequence_length={length}")
        total = sum(len(file.tokens) for file in files)
        if (lost := total - length * sum(counts)) > MOST_LOST_SHARE * total:
            said = "%s of %s tokens are not trained on: a sequence of %s is of one file: join short files"
            log.warning(said, f"{lost:,}", f"{total:,}", f"{length:,}")
        if counts == self._kept:
            log.warning("no file has 20 sequences of %s tokens: none is held out", f"{length:,}")

    def examples(self, step: int, items: Iterable[int]) -> list[Example]:
        """The rows of some of the sequences of a step."""
        seed = self._train.seed
        offset = random.Random(f"times/{seed}/{step}").random()
        found: list[Example] = []
        for item in items:
            number = step * self._per_step + item
            # One time in each of equal parts of the interval: they vary less than independent ones.
            time = (offset + item / self._per_step) % 1
            rng = np.random.default_rng([*map(ord, f"masks/{seed}"), number])
            for row, ids in enumerate(self.sequence_rows(number)):
                found.append(mask_at_time(self._prompt, ids, (time + row * GOLDEN_RATIO_STEP) % 1, rng))
        return found

    def sequence_rows(self, number: int) -> list[list[int]]:
        """The rows of sequence `number` of the run."""
        at = pick_shuffled(range(self._ends[-1]), number, self._train.seed, "documents")
        file = int(np.searchsorted(self._ends, at, "right"))
        first = int(self._ends[file - 1]) if file else 0
        return self._files[file].sequence_rows(at - first, self._train.sequence_length)

    def held_out_examples(self) -> list[list[Example]]:
        """The rows of each sequence that is kept for validation, masked at times all over the interval."""
        length, rng = self._train.sequence_length, np.random.default_rng(0)
        times = ((n + 0.5) * GOLDEN_RATIO_STEP % 1 for n in itertools.count())
        return [
            [mask_at_time(self._prompt, ids, next(times), rng) for ids in file.sequence_rows(n, length)]
            for file, kept in zip(self._files, self._kept, strict=True)
            for n in range(kept, file.count_sequences(length))
        ]
