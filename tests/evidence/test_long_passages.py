"""What of a passage is read that is longer than a passage may be."""

import pytest

from dlm_rag import Tokenizer
from dlm_rag.evidence.prompt_segments import ContextBudget, fit_passages, skip_to_relevant
from dlm_rag.tokenizer.prompts import PROMPTS, PromptTemplate
from tests.support.paths import ROOT
from tests.support.tiny_models import tiny_tokenizer

QUESTION = "Who directed The Silver Lamp?"
FILLER = "The house has three floors and a garden. "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(ROOT / "dlm_rag" / "shipped" / "model")


@pytest.mark.parametrize("title", ["", "The Silver Lamp\n"])
@pytest.mark.parametrize("before", [0, 3, 40, 400])
def test_the_part_about_the_question_is_kept(tokenizer, title, before):
    fact = "It was Ada Quill who directed it. "
    text = title + FILLER * before + fact + FILLER * 40
    kept, skipped = skip_to_relevant(tokenizer, text, QUESTION, 120)
    read = tokenizer.decode_with_offsets(tokenizer.encode(kept)[:120])[0]
    assert "Ada Quill" in read and kept.startswith(title)
    assert kept.removeprefix(title) in text  # cut, not rewritten
    assert bool(skipped) == (kept != text)


def test_a_text_that_fits_stays_as_it_is(tokenizer):
    text = "  A title\n" + FILLER + "It was directed by Ada Quill.\n"
    assert skip_to_relevant(tokenizer, text, QUESTION, len(tokenizer.encode(text))) == (text, 0)


def test_of_equal_parts_the_first_is_read(tokenizer):
    text = "A title\n" + FILLER * 100
    assert skip_to_relevant(tokenizer, text, QUESTION, 50) == (text, 0)


@pytest.mark.parametrize(
    "fact", [PROMPTS["sardi"].fact, PROMPTS["flashrag"].fact, "<{title}>{text}</{number}>"]
)
def test_a_shortened_passage_is_read_without_what_the_template_writes(fact):
    tokenizer = tiny_tokenizer(PromptTemplate("{question}\n", fact))
    passages = {"a": "Emma\nA novel.", "b": "Dover\nDover is a town in Kent, é.", "c": "Bees"}
    prompt = tokenizer.build_prompt("?", [*passages.values()])
    first, second = map(len, prompt.facts[:2])
    found = []
    for kept in range(1, second):
        room = ContextBudget("joint", len(prompt.head) + first + kept + 1, 1, 99)
        evidence = fit_passages(tokenizer, "?", passages, room)
        text = evidence.texts.get("b", "")
        shown = tokenizer.decode_with_offsets(list(evidence.prompt.facts[1]))[0]
        assert passages["b"].startswith(text) and text.partition("\n")[2] in shown and evidence.texts["a"]
        assert evidence.cut["passages_dropped"] == len(evidence.dropped) == 2 - bool(text)
        lost = sum(map(len, prompt.facts)) - sum(map(len, evidence.prompt.facts))
        assert evidence.cut["tokens"] == lost and evidence.cut["passages_shortened"] == bool(text)
        found.append(text)
    assert found == sorted(found, key=len) and found[0] == "" and found[-1] == passages["b"]
    assert {"", *(passages["b"][: n + 1] for n in range(8, len(passages["b"])))} <= {*found}
