"""What of a prompt fits into the context, and what is cut by a fixed rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.evidence_layouts import EVIDENCE_LAYOUTS
from dlm_rag.questions import Question
from dlm_rag.text import content_words, find_sentence_spans, split_words
from dlm_rag.tokenizer import Prompt, Tokenizer


@dataclass(frozen=True)
class ContextBudget:
    """How evidence is laid out and what must hold it next to the canvas; lengths in tokens."""

    layout: str
    context_length: int
    canvas_length: int
    passage_length: int

    @classmethod
    def from_config(
        cls, shape: DenoiserConfig, layout: str | None = None, canvas: int | None = None
    ) -> "ContextBudget":
        """The room in a denoiser's context; by default with its own layout and canvas."""
        return cls(
            layout or shape.evidence_layout, shape.max_position_embeddings, canvas or shape.canvas_length,
            shape.passage_length,
        )  # fmt: skip


@dataclass(frozen=True)
class Truncation:
    """What of the evidence did not fit into the context."""

    tokens: int = 0
    passages_shortened: int = 0
    passages_dropped: int = 0


def truncate_evidence(prompt: Prompt, room: ContextBudget) -> tuple[Prompt, Truncation]:
    """The prompt with as much evidence as the context holds, and what was cut.

    Passages keep their tokens in rank order until the context is full; the one that crosses the end is
    shortened, later ones are dropped. Where they are separate, each is shortened to `passage_length`. What
    is dropped leaves an empty fact. Raises `QuestionError` when the question alone does not fit.
    """
    left = room.context_length - len(prompt.head) - len(prompt.tail) - room.canvas_length
    if EVIDENCE_LAYOUTS[room.layout].separate_passages:
        left -= room.passage_length
        facts = [fact[: room.passage_length] for fact in prompt.facts]
    else:
        facts = []
        for fact in prompt.facts:
            facts.append(fact[: max(0, left - sum(map(len, facts)))])
    if left < 0:
        raise QuestionError(
            f"the question is {-left} tokens too long: the context of {room.context_length} must hold it "
            f"and the canvas of {room.canvas_length}"
        )
    lost = [len(fact) - len(kept) for fact, kept in zip(prompt.facts, facts, strict=True)]
    shortened = sum(1 for kept, n in zip(facts, lost, strict=True) if n and kept)
    cut = Truncation(sum(lost), shortened, sum(1 for kept in facts if not kept))
    return Prompt(prompt.head, tuple(facts), prompt.tail), cut


def check_prompt_room(tokenizer: Tokenizer, room: ContextBudget) -> None:
    """Raises `ConfigError` for a prompt of which the shortest question leaves no room for evidence."""
    if EVIDENCE_LAYOUTS[room.layout].separate_passages:
        return  # which have a room of their own
    left = room.context_length - room.canvas_length - len(tokenizer.build_prompt("?", []))
    if left <= 0:
        raise ConfigError(
            f"the prompt leaves no room for evidence: it is {1 - left} tokens too long for a context of "
            f"{room.context_length} with a response of {room.canvas_length}"
        )


def measure_longest_prompt(questions: Sequence[Question], tokenizer: Tokenizer, room: ContextBudget) -> int:
    """Tokens of the longest prompt; raises `QuestionError` where no question at all fits.

    One that does not fit among others that do is recorded as failed once it is asked.
    """
    check_prompt_room(tokenizer, room)
    lengths, error = [0], None
    for question in questions:
        try:
            prompt, _ = truncate_evidence(tokenizer.build_prompt(question.question, []), room)
            lengths.append(len(prompt.ids))
        except QuestionError as too_long:
            error = error or QuestionError(f"question '{question.id}': {too_long}")
    if error is not None and len(lengths) == 1:
        raise error
    return max(lengths)


@dataclass(frozen=True)
class Evidence:
    """Passages in a prompt that fits, and what became of each."""

    prompt: Prompt
    texts: dict[str, str]  # by id, in rank order: what of each passage is in the prompt
    dropped: tuple[str, ...]  # ids of the passages without a place, which rank after all others
    truncation: Truncation


def fit_passages(
    tokenizer: Tokenizer, question: str, passages: Mapping[str, str], room: ContextBudget, system: str = ""
) -> Evidence:
    """The prompt for a question and its passages (id -> text as found, in rank order).

    They are cut by rank. A passage without a place still shapes the
    prompt: the one before it is not the last fact, which alone has no line break after it where facts are
    numbered. Where passages are separate, one that is longer than a passage may be begins at the sentence
    that `skip_to_relevant` finds. Raises `QuestionError` when the question alone does not fit.
    """
    skipped: dict[str, int] = {}
    if EVIDENCE_LAYOUTS[room.layout].separate_passages:
        found = {
            name: skip_to_relevant(tokenizer, text, question, room.passage_length)
            for name, text in passages.items()
        }
        passages = {name: text for name, (text, _) in found.items()}
        skipped = {name: tokens for name, (_, tokens) in found.items() if tokens}
    prompt = tokenizer.build_prompt(question, list(passages.values()), system)
    fitted, cut = truncate_evidence(prompt, room)
    if skipped:
        facts = zip(passages, prompt.facts, fitted.facts, strict=True)
        shortened = sum(1 for name, fact, kept in facts if kept and (name in skipped or kept != fact))
        cut = Truncation(cut.tokens + sum(skipped.values()), shortened, cut.passages_dropped)
    texts = {
        name: text if kept == fact else tokenizer.decode_with_offsets(list(kept))[0]
        for (name, text), fact, kept in zip(passages.items(), prompt.facts, fitted.facts, strict=True)
        if kept
    }
    return Evidence(fitted, texts, tuple(name for name in passages if name not in texts), cut)


@lru_cache(maxsize=4096)  # a passage stays in the evidence of a question for several steps
def skip_to_relevant(tokenizer: Tokenizer, text: str, question: str, length: int) -> tuple[str, int]:
    """Returns a text without the sentences that stand before those about the question, and their tokens.

    A text of at most `length` tokens stays as it is. Of a longer one, the part of `length` tokens stays
    that has most content words of the question, of equals the first; its title line is kept before it.
    """
    if len(tokenizer.encode(text)) <= length:
        return text, 0
    title, _, body = text.partition("\n") if "\n" in text else ("", "", text)
    asked = {word for word, _ in content_words(question, 0, len(question))} - {*split_words(title)}
    spans = find_sentence_spans(body)
    held = [asked & {*split_words(body[start:stop])} for start, stop in spans]
    lengths = [len(tokenizer.encode(body[start:stop])) for start, stop in spans]
    room, best, most = length - len(tokenizer.encode(title)), 0, -1
    for first in range(len(spans)):
        left, found = room, set[str]()
        for words, tokens in zip(held[first:], lengths[first:], strict=True):
            if tokens > left:
                break
            left, found = left - tokens, found | words
        if len(found) > most:
            best, most = first, len(found)
    if not best:
        return text, 0
    kept = body[spans[best][0] :].lstrip()
    return f"{title}\n{kept}" if title else kept, sum(lengths[:best])


def keep_shorter_texts(texts: dict[str, str], more: Mapping[str, str]) -> None:
    """Takes texts up; of a passage cut twice the shorter stays, which makes for a safe citation."""
    for name, text in more.items():
        texts[name] = min(texts.get(name, text), text, key=len)
