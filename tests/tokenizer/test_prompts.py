"""Prompts by name and from files: where question and passages stand, and how the answer is read."""

import pytest

from dlm_rag.errors import CheckpointError, ConfigError
from dlm_rag.evidence.prompt_segments import ContextBudget, check_prompt_room
from dlm_rag.questions import Question
from dlm_rag.tokenizer.prompts import PROMPTS, PromptTemplate, load_prompt
from tests.support.tiny_models import tiny_tokenizer

QUESTION, PASSAGES = "Who wrote it?", ["Emma\nEmma is a novel.", "Dune\nDune is by {question}."]


@pytest.mark.parametrize("layout", ["joint", "independent"])
@pytest.mark.parametrize("name", PROMPTS)
def test_question_and_passages_stand_once_in_order(name, layout):
    tokenizer = tiny_tokenizer(load_prompt(name, layout))
    prompt = tokenizer.build_prompt(QUESTION, PASSAGES)
    text = bytes(prompt.ids).decode()
    assert text.count(QUESTION) == 1
    places = [text.index(part) for part in ("Emma is a novel.", "Dune is by {question}.")]
    assert places == sorted(places) and "Dune" in bytes(prompt.facts[1]).decode()
    turned = tokenizer.build_prompt(QUESTION, PASSAGES[::-1])
    assert (turned.facts == prompt.facts[::-1]) == (
        layout == "independent" or "{number}" not in PROMPTS[name].fact
    )


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_file_holds_the_fields_of_a_template(tmp_path, suffix):
    path = tmp_path / f"own.{suffix}"
    path.write_text('{"head": "Q: {question}\\n", "fact": "{passage}", "chat": false, "answer": "whole"}')
    found = load_prompt(str(path), "independent")
    assert found == PromptTemplate("Q: {question}\n", "{passage}", chat=False, answer="whole")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{head: x}", CheckpointError), ("{question: x}", CheckpointError), ("[1]", CheckpointError),
        ("{chat: 3}", CheckpointError), ("{answer: bold}", CheckpointError), ("{a: [", ConfigError),
        ("{head: '{question}', foot: '{question}'}", CheckpointError), ("{fact: none}", CheckpointError),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(tmp_path, text, error):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(error):
        load_prompt(str(tmp_path / "own.yaml"), "joint")
    with pytest.raises(ConfigError, match="nearest: 'flashrag'"):
        load_prompt("flash_rag", "joint")


def test_a_prompt_must_leave_room_for_evidence():
    room = ContextBudget("joint", 80, 19, 8)
    fits, fills = (PromptTemplate("x" * n + "{question}", "{passage}") for n in (59, 60))
    check_prompt_room([], tiny_tokenizer(fits), room)
    with pytest.raises(ConfigError):
        check_prompt_room([], tiny_tokenizer(fills), room)


FERRY = "Who directed Night Ferry?"
ASKED = [
    ("Who directed **Night Ferry**?", FERRY), ("Who directed `Night Ferry`?", FERRY),
    ("Who directed <i>_Night Ferry_</i>?", FERRY), ("Who directed &quot;Night&nbsp;Ferry&quot;?", FERRY),
    ("🎬 Who directed [[Night Ferry]]?", FERRY), ("WHO DIRECTED NIGHT FERRY?", FERRY.lower()),
    ("What is M*A*S*H?", "What is M*A*S*H?"), ("Is A* or B* far?", "Is A* or B* far?"),
    ("NASA?", "NASA?"), ("What is 2 * 3 * 4?", "What is 2 * 3 * 4?"), ("AT&amp;T?", "AT&T?"),
]  # fmt: skip


@pytest.mark.parametrize(("question", "shown"), ASKED)
def test_a_model_that_names_titles_reads_a_plain_question(question, shown):
    template = PromptTemplate(head="{question}", fact="{passage}", answer="titled")
    assert template.write_question(Question("1", question).question)[0] == shown
