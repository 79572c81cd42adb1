"""Text to ids and back, and the prompt: chat prefix, instruction, question, facts, chat suffix.

The prompt is made of segments that are tokenized apart and put together again: a head (chat prefix,
instruction, question), one segment per fact, a tail (chat suffix). With the prompt `sardi` they break
after line ends, where the tokenizers of the public checkpoints break too, so the ids equal those of the
whole text (`tests/tokenizer/test_tokenizer.py` holds this on real passages). In `flashrag` and `search_r1`
a fact meets foot or head within a line, and the tokens there may be others.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.errors import CheckpointError, QuestionError, translate_failures
from dlm_rag.files.hub import read_checkpoint_json
from dlm_rag.tokenizer import prompts

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

    from dlm_rag.model.checkpoint import Checkpoint

MAX_GROWTH_FACTOR = 1000  # of a text in a normalizer or decoder, of which every replacement may double it
_MARK = re.compile(r"\W?(<(?!0x)[^<>]{2,}>|\[[^][]{2,}\])")  # <|turn|>, [INST]; <0x0A> is a byte
LAST_LATIN_LETTER = 0x24F  # of Latin Extended-B
TEXT_CACHE_SIZE = 16384  # of passages and questions, whose ids are kept: some 100 MB of texts of 100 words


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


def does_think(raw: Mapping[str, Any]) -> bool:
    """Whether a chat template is asked for a turn with thoughts: not Qwen3's, as Tiny-A2D is published; of
    an export of ours the config says what it was trained with."""
    return bool(raw.get("thinks", "prompt" in raw or raw["model_type"] not in ("qwen3", "a2d-qwen3")))


class Tokenizer:
    """A Hugging Face tokenizer with a prompt template and the ids the decoder needs to know.

    Text of users and corpora is always plain text: a passage that holds "<|im_end|>" cannot end a
    turn, and one that holds the mask's name holds no mask. vocabulary: how many ids the denoiser
    has; a text that has others is refused, None for no such bound. thinks: False asks a chat template
    for a turn without thoughts. Raises `CheckpointError`.
    """

    def __init__(
        self, inner: PreTrainedTokenizerBase, mask_id: int, template: prompts.PromptTemplate | None = None,
        end_ids: tuple[int, ...] = (), vocabulary: int | None = None, thinks: bool = True,
    ) -> None:  # fmt: skip
        self.inner, self.mask_id, self._vocabulary = inner, mask_id, vocabulary
        self.template, self.thinks = template or prompts.PromptTemplate(), thinks
        backend = inner.backend_tokenizer
        if backend.id_to_token(mask_id) is None:
            raise CheckpointError(f"mask_token_id={mask_id} is not a token of the tokenizer")
        if getattr(backend.model, "dropout", None):
            raise CheckpointError("the tokenizer drops merges at random: set its dropout to null")
        prefix, suffix = inner.bos_token or "", ""
        if self.template.chat:
            how = {} if thinks else {"enable_thinking": False}
            prefix, suffix = prompts.render_chat_affixes(inner, **how)
        try:
            encode = partial(inner.encode, add_special_tokens=False)
            self._prefix = self._encode_checked(encode, prefix)
            self._suffix = self._encode_checked(encode, suffix + self.template.tail)
        except QuestionError as error:
            raise CheckpointError(f"around the user's message: {error}") from None
        added = backend.get_added_tokens_decoder().items()
        special = {token for token, item in added if item.special}
        self.special_ids = frozenset({*inner.all_special_ids, *special, mask_id} - {None})
        # The first token after the user's turn ends turns; it ends the response's turn as well.
        turn_end = self._suffix[:1] if self.special_ids.intersection(self._suffix[:1]) - {mask_id} else ()
        eos = () if inner.eos_token_id is None else (inner.eos_token_id,)
        self.end_ids = frozenset({*end_ids, *eos, *turn_end})
        if vocabulary is not None and max(self.end_ids, default=0) >= vocabulary:
            raise CheckpointError(f"the tokenizer's end token is not among the model's {vocabulary} ids")
        if mask_id in self.end_ids:
            raise CheckpointError(f"mask_token_id={mask_id} is a token that ends texts as well")
        # Pieces of the vocabulary that nobody declares, and by which the chat template marks turns.
        chat = {*self._prefix, *self._suffix}
        marks = {token for token in chat if _MARK.fullmatch(backend.id_to_token(token) or "")}
        self._plain = PlainTextEncoder(backend, self.end_ids | {mask_id}, frozenset(marks))
        # Training fills the canvas after a response with it.
        self.end_id = eos[0] if eos else min(self.end_ids, default=None)
        texts = (self._decode([token]) for token in sorted(self.special_ids))
        self._special_texts = [text for text in texts if text]
        self.encode = lru_cache(maxsize=TEXT_CACHE_SIZE)(self.encode_uncached)
        self._has_warned = False  # of a script that is spelled
        # Bytes that are no whole character show as U+FFFD.
        self.token_text = lru_cache(maxsize=65536)(lambda token: self._decode([token]))

    @classmethod
    def from_pretrained(
        cls, path: str | Path | Checkpoint, evidence_layout: str | None = None, prompt: str | None = None
    ) -> Tokenizer:
        """The tokenizer and prompt of a checkpoint folder or hub id, for an evidence layout.

        prompt: as in `prompts.load_prompt`. Runs no code of the checkpoint. Raises `CheckpointError`.
        """
        from dlm_rag.model.checkpoint import open_checkpoint  # brings torch, which a trace does not need

        checkpoint = open_checkpoint(path) if isinstance(path, str | Path) else path
        config = checkpoint.config
        autoregressive = config.decode_modes == ("autoregressive",)
        if config.mask_token_id is None and not autoregressive:
            raise CheckpointError(f"{checkpoint.folder} has no mask_token_id")
        layout = evidence_layout or config.evidence_layout
        template = prompts.load_prompt(prompt, layout, checkpoint.raw_config.get("prompt"))
        inner = load_tokenizer(checkpoint.folder)
        if template.chat and not inner.chat_template and checkpoint.raw_config["model_type"] != "dlm_rag":
            log.warning("%s has no chat template: prompts are plain text", checkpoint.folder)
        mask_id = add_mask_token(inner) if config.mask_token_id is None else config.mask_token_id
        thinks = does_think(checkpoint.raw_config)
        return cls(inner, mask_id, template, checkpoint.end_token_ids, config.vocab_size, thinks)

    def _decode(self, ids: list[int]) -> str:
        return str(self.inner.decode(ids, clean_up_tokenization_spaces=False))

    def encode_uncached(self, text: str) -> tuple[int, ...]:
        """Ids of plain text; the names of tokens in it are ordinary characters. `encode` remembers them.

        Raises `QuestionError` where the tokenizer fails, or the denoiser does not have an id.
        """
        return self._encode_checked(self._plain.encode, text)

    def _encode_checked(self, encode: Callable[[str], list[int]], text: str) -> tuple[int, ...]:
        with translate_failures(QuestionError, "the tokenizer fails"):
            ids = tuple(encode(text))
        if self._vocabulary is not None and ids and max(ids) >= self._vocabulary:
            raise QuestionError(
                f"the tokenizer gives the id {max(ids)}, but the model has {self._vocabulary}: it "
                "belongs to another model"
            )
        return ids

    @property
    def reads_system_prompts(self) -> bool:
        """Whether the model follows instructions: its prompt is within a chat template."""
        return self.template.chat and bool(self.inner.chat_template)

    def build_prompt(self, question: str, passages: list[str], system: str = "") -> Prompt:
        """The prompt for a question and its evidence, passages in rank order, each stripped.

        A system prompt is the beginning of the user's message, as templates without that role have it.
        A line break stands between numbered facts. Facts without a number all end with one, the
        last too, so that the ids of a passage do not depend on its rank. Raises `QuestionError`.
        """
        template = self.template
        asked, foot_text = template.write_question(question)
        head, foot = map(self.encode, (f"{system}\n\n{asked}" if system else asked, foot_text))
        if not head and not foot:
            raise QuestionError("the tokenizer makes no tokens of the question")
        if not self._has_warned and self.spells_letters(question):
            self._has_warned = True
            log.warning("this model's tokenizer spells the question letter by letter: expect no answers")
        facts = template.write_facts(passages)
        return Prompt(self._prefix + head, tuple(map(self.encode, facts)), foot + self._suffix)

    def spells_letters(self, text: str) -> bool:
        """Whether most letters are not Latin and take a token or more each: a script it hardly knows."""
        letters = [char for char in text if char.isalpha()]
        foreign = [char for char in letters if ord(char) > LAST_LATIN_LETTER]
        return 2 * len(foreign) > len(letters) and len(self.encode("".join(foreign))) >= len(foreign)

    def query_text(self, ids: list[int]) -> str:
        """Text of ids with each special token, masks included, as a blank (SARDI's proxy response)."""
        text = self._decode(ids)
        for special in self._special_texts:
            text = text.replace(special, " ")
        return text

    def decode_with_offsets(self, ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
        """Text of ids, special tokens left out, not stripped; and the character range of each id."""
        pieces = ["" if token in self.special_ids else self.token_text(token) for token in ids]
        text = self._decode([token for token in ids if token not in self.special_ids])
        ends = list(accumulate(map(len, pieces)))
        if "".join(pieces) != text:  # a character of several tokens belongs to the last of them
            prefixes = [[t for t in ids[: n + 1] if t not in self.special_ids] for n in range(len(ids))]
            ends = [len(self._decode(prefix).rstrip("\ufffd")) for prefix in prefixes]
        return text, list(pairwise([0, *ends]))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a checkpoint's folder; raises `CheckpointError`."""
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).exists():
            read_checkpoint_json(folder / name)  # says which of the files it is
    with translate_failures(CheckpointError, f"the tokenizer in {folder} cannot be read"):
        if (folder / "tokenizer.json").is_file():
            found = PreTrainedTokenizerFast.from_pretrained(folder)
        elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            found = Qwen2Tokenizer.from_pretrained(folder)
        else:
            raise CheckpointError(f"{folder} has no tokenizer: tokenizer.json is missing")
    if not found.chat_template and (folder / prompts.CHAT_TEMPLATE_FILE).is_file():
        found.chat_template = prompts.read_chat_template(folder / prompts.CHAT_TEMPLATE_FILE)
    return found


def add_mask_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of a tokenizer's mask token, which is added where it has none."""
    if tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    return int(tokenizer.mask_token_id)


class PlainTextEncoder:
    """Makes of a text the ids that a tokenizer makes of it, but never one of those in `meaning`.

    Added tokens are left out altogether. Where the vocabulary itself has pieces that mean something (the
    mask, the end of a turn) and a text has one, it is read again by a vocabulary without them: what is not
    there cannot be found.

    These are the ids in `control` (mask, ends) and `marks` (of a chat template) and all added tokens:
    special or not, but for white space and single characters, which are text, and for what unknown
    characters become. Raises `CheckpointError` where the mask or an end is that unknown token, or a
    single character, and for other tokenizers than those of byte pairs, which all public families have.
    """

    def __init__(self, full: tokenizers.Tokenizer, control: frozenset[int], marks: frozenset[int]) -> None:
        from tokenizers import Tokenizer
        from tokenizers.models import BPE

        if not isinstance(full.model, BPE):
            raise CheckpointError(f"the tokenizer is {type(full.model).__name__}: only BPE is read")
        self._plain = Tokenizer(full.model)
        for part in ("normalizer", "decoder"):
            if _max_growth_factor(getattr(full, part)) > MAX_GROWTH_FACTOR:
                raise CheckpointError(
                    f"the tokenizer's {part} makes texts more than {MAX_GROWTH_FACTOR} times as long: "
                    "mend it"
                )
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(full, part) is not None:
                setattr(self._plain, part, getattr(full, part))
        added = {
            token
            for token, item in full.get_added_tokens_decoder().items()
            if item.special or not (item.content.replace("▁", " ").isspace() or len(item.content) == 1)
        }
        unknown = full.model.token_to_id(full.model.unk_token or "")
        self.meaning = (control | marks | added) - {unknown}
        for token in control:
            piece = self._plain.id_to_token(token)
            if piece is not None and (token == unknown or len(piece) == 1):
                made_of = "unknown characters" if token == unknown else "a single character"
                raise CheckpointError(
                    f"the token '{piece}' is the model's mask or an end, and what the tokenizer makes of "
                    f"{made_of}: no text is safe"
                )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if not self.meaning.isdisjoint(ids):
            ids = self._without_meaning.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _without_meaning(self) -> tokenizers.Tokenizer:
        """Built for the first text that needs it: a large vocabulary takes seconds."""
        from tokenizers import Tokenizer

        pieces = {self._plain.id_to_token(token) for token in self.meaning}
        everything = json.loads(self._plain.to_str())
        model = everything["model"]
        start = len(model["continuing_subword_prefix"] or "")
        model["vocab"] = {piece: n for piece, n in model["vocab"].items() if piece not in pieces}
        model["merges"] = [(a, b) for a, b in model["merges"] if pieces.isdisjoint({a, b, a + b[start:]})]
        return Tokenizer.from_str(json.dumps(everything))


def _max_growth_factor(rule: Any) -> float:
    """How many times as long a text may become by the replacements of a normalizer or decoder."""
    growth, parts = 1.0, [json.loads(rule.__getstate__()) if rule else {}]
    for part in parts:  # those of a sequence are parts, too
        parts += part.get("normalizers", part.get("decoders", []))
        written = len(part.get("content") or part.get("prepend") or "")
        read = len((part.get("pattern") or {}).get("String", ""))  # an expression may match nothing
        growth *= max(1.0, written / read if read else 1 + written)
    return growth
