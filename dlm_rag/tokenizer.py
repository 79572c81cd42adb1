"""Text <-> ids, and the prompt: the instruction, the question, the facts, around them the chat.

The prompt is made of segments that are tokenized apart and put together again: a head (chat prefix,
instruction, question), one segment per fact, a tail (chat suffix). Segments break after line ends,
where the tokenizers of the public checkpoints break too, so the ids equal those of the whole text
(`tests/test_tokenizer.py` holds this on real passages).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.errors import CheckpointError
from dlm_rag.model.checkpoint import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTENT = "<<content>>"
REMEMBERED_TEXTS = 16384  # of passages, whose ids are kept: some 100 MB of texts of 100 words
REMEMBERED_HEADS = 1024  # of questions: each is asked about again while it is answered


@dataclass(frozen=True)
class PromptTemplate:
    """The texts around question and facts; a checkpoint of ours carries its own under `prompt`.

    The default is SARDI's. `head` has {question}; `fact` has {passage} and may have {number}, from 1.
    """

    head: str = (
        "Use ONLY the provided facts to answer the question.\n"
        'Think step-by-step, then provide the final answer after the "###" marker.\n\n'
        "Question:\n{question}\n\nFacts:\n"
    )
    fact: str = "[{number}] {passage}"
    tail: str = ""

    @property
    def numbered(self) -> bool:
        return "{number}" in self.fact

    @classmethod
    def read(cls, raw: dict[str, Any] | None, layout: str) -> PromptTemplate:
        """The template of a checkpoint, or the default one for its evidence layout.

        In `independent` a passage must not depend on its rank, so its facts carry no number. Raises
        `CheckpointError` for unknown keys, missing places, and numbered facts in `independent`.
        """
        if raw is None:
            return cls() if layout != "independent" else cls(fact="{passage}")
        if not isinstance(raw, dict) or not all(isinstance(text, str) for text in raw.values()):
            raise CheckpointError("the prompt template must hold texts: head, fact, tail")
        unknown = set(raw) - {item.name for item in fields(cls)}
        if unknown:
            raise CheckpointError(f"the prompt template has an unknown key '{min(unknown)}'")
        template = cls(**raw)
        if "{question}" not in template.head or "{passage}" not in template.fact:
            raise CheckpointError("the prompt template needs {question} in head, {passage} in fact")
        if layout == "independent" and template.numbered:
            raise CheckpointError(
                "the checkpoint's prompt numbers its facts, which evidence_layout=independent cannot "
                "do (a passage must not depend on its rank): use joint or prefix"
            )
        return template


@dataclass(frozen=True)
class Prompt:
    """Token ids of one prompt, segment by segment; its text is the segments in this order."""

    head: tuple[int, ...]
    facts: tuple[tuple[int, ...], ...]
    tail: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.head) + sum(map(len, self.facts)) + len(self.tail)

    @property
    def ids(self) -> list[int]:
        return [*self.head, *(i for fact in self.facts for i in fact), *self.tail]


class Tokenizer:
    """A Hugging Face tokenizer with a prompt template and the ids the decoder needs to know.

    Text of users and corpora is always plain text: a passage that holds "<|im_end|>" cannot end a
    turn, and one that holds the mask's name holds no mask.
    """

    def __init__(
        self,
        inner: PreTrainedTokenizerBase,
        mask_id: int,
        template: PromptTemplate | None = None,
        end_ids: tuple[int, ...] = (),
    ) -> None:
        self.inner = inner
        self.mask_id = mask_id
        self.template = template or PromptTemplate()
        prefix, suffix = self._chat()
        self._prefix = tuple(inner.encode(prefix, add_special_tokens=False))
        self._suffix = tuple(inner.encode(suffix + self.template.tail, add_special_tokens=False))
        self.special_ids = frozenset(inner.all_special_ids) | {mask_id}
        # The first token after the user's turn ends turns; it ends the response's turn as well.
        turn_end = self._suffix[:1] if self._suffix and self._suffix[0] in self.special_ids else ()
        eos = () if inner.eos_token_id is None else (inner.eos_token_id,)
        self.end_ids = frozenset({*end_ids, *eos, *turn_end})
        # With which training fills the canvas behind a response.
        self.end_id = eos[0] if eos else min(self.end_ids, default=None)
        texts = (self._decode([token]) for token in sorted(self.special_ids))
        self._special_texts = [text for text in texts if text]
        self.encode = lru_cache(maxsize=REMEMBERED_TEXTS)(self._encode)
        self._head = lru_cache(maxsize=REMEMBERED_HEADS)(self._encode)
        self.token_text = lru_cache(maxsize=65536)(self._token_text)

    @classmethod
    def from_pretrained(
        cls, path: str | Path | Checkpoint, evidence_layout: str | None = None
    ) -> Tokenizer:
        """The tokenizer and prompt of a checkpoint folder or hub id, for an evidence layout.

        Reads `tokenizer.json`, or the `vocab.json` and `merges.txt` of Dream; runs no code of the
        checkpoint. Raises `CheckpointError`.
        """
        checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
        if checkpoint.config.mask_token_id is None:
            raise CheckpointError(
                f"{checkpoint.folder} has no mask_token_id: it is an autoregressive model, to be "
                "adapted by training before it can denoise"
            )
        template = PromptTemplate.read(
            checkpoint.raw.get("prompt"), evidence_layout or checkpoint.config.evidence_layout
        )
        inner = read_tokenizer(checkpoint.folder)
        return cls(inner, checkpoint.config.mask_token_id, template, checkpoint.end_token_ids)

    def _chat(self) -> tuple[str, str]:
        if not self.inner.chat_template:
            return self.inner.bos_token or "", ""
        try:
            text = self.inner.apply_chat_template(
                [{"role": "user", "content": _CONTENT}], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # whatever a template of the checkpoint may raise
            raise CheckpointError(f"the chat template cannot be rendered: {error}") from None
        prefix, found, suffix = str(text).partition(_CONTENT)
        if not found:
            raise CheckpointError("the chat template does not show the user's message")
        return prefix, suffix

    def _decode(self, ids: list[int]) -> str:
        return str(self.inner.decode(ids, clean_up_tokenization_spaces=False))

    def _encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text; the names of special tokens in it are ordinary characters."""
        return tuple(self.inner.encode(text, add_special_tokens=False, split_special_tokens=True))

    def prompt(self, question: str, passages: list[str]) -> Prompt:
        """The prompt for a question and its evidence, passages in rank order, each stripped.

        A line break stands between numbered facts. Facts without a number all end with one, the
        last too, so that the ids of a passage do not depend on its rank.
        """
        facts = [
            self.template.fact.replace("{number}", str(number)).replace("{passage}", passage.strip())
            for number, passage in enumerate(passages, start=1)
        ]
        return Prompt(
            head=self._prefix + self._head(self.template.head.replace("{question}", question)),
            facts=tuple(
                self.encode(fact if number == len(facts) and self.template.numbered else f"{fact}\n")
                for number, fact in enumerate(facts, start=1)
            ),
            tail=self._suffix,
        )

    def query_text(self, ids: list[int]) -> str:
        """Text of ids with each special token, masks included, as a blank (SARDI's proxy response)."""
        text = self._decode(ids)
        for special in self._special_texts:
            text = text.replace(special, " ")
        return text

    def spans(self, ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
        """Text of ids, special tokens left out, not stripped; and the character range of each id.

        A character made of several tokens belongs to the last of them.
        """
        pieces = ["" if token in self.special_ids else self.token_text(token) for token in ids]
        kept = [token for token in ids if token not in self.special_ids]
        text = self._decode(kept)
        if "".join(pieces) == text:
            ends = list(accumulate(map(len, pieces)))
        else:
            prefixes = [[t for t in ids[: n + 1] if t not in self.special_ids] for n in range(len(ids))]
            ends = [len(self._whole(prefix)) for prefix in prefixes]
        return text, list(pairwise([0, *ends]))

    def _whole(self, ids: list[int]) -> str:
        """Text of ids without the character that is still incomplete at its end."""
        return self._decode(ids).rstrip("\ufffd")

    def _token_text(self, token: int) -> str:
        """The text of one token; bytes that are no whole character show as U+FFFD."""
        return self._decode([token])


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a checkpoint's folder; raises `CheckpointError`."""
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    try:
        if (folder / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(folder)
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            return Qwen2Tokenizer.from_pretrained(folder)
    except Exception as error:  # the loader raises many unrelated types, some of them bare
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {error}") from None
    raise CheckpointError(f"{folder} has no tokenizer: tokenizer.json is missing")
