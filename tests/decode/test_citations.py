"""Citations: only passages that were in context when the words were written, and that hold them."""

from dlm_rag.decode.rollout import cite_passages

RESPONSE = "Emma was written by Jane. Jane was born in Bath. ### Bath"
TEXTS = {
    "emma": "Emma is a novel by Jane Austen.",
    "jane": "Jane Austen lived in Bath, where she was born.",
    "bath": "Bath is a city.",
}
QUESTION = "Where was the author of Emma born?"


def by_characters(evidence, steps=None, response=RESPONSE, question=QUESTION):
    """One token a character; the first sentence at step 1, the second at 2, the answer at 3."""
    spans = [(n, n + 1) for n in range(len(response))]
    steps = steps or [1] * 25 + [2] * 24 + [3] * 8
    assert len(steps) == len(response)
    return cite_passages(response, spans, steps, lambda step: evidence[step - 1], TEXTS, question)


def test_each_sentence_and_the_answer_are_cited_with_their_step():
    cited = by_characters([["emma"], ["jane", "emma"], ["jane"]])
    assert [(unit["kind"], unit["text"]) for unit in cited] == [
        ("reasoning", "Emma was written by Jane."),
        ("reasoning", "Jane was born in Bath."),
        ("answer", "Bath"),
    ]
    assert cited[0]["passages"] == [{"id": "emma", "step": 1, "words": ["emma", "jane"]}]
    assert cited[0]["unsupported"] == ["written"]
    assert cited[1]["passages"] == [{"id": "jane", "step": 2, "words": ["jane", "born", "bath"]}]
    assert cited[2]["passages"] == [{"id": "jane", "step": 3, "words": ["bath"]}]


def test_a_passage_that_was_not_in_context_is_never_cited():
    cited = by_characters([["bath"], ["emma"], []])
    assert cited[0]["passages"] == [] and cited[2]["passages"] == []
    assert cited[2]["unsupported"] == ["bath"]
    assert [p["id"] for p in cited[1]["passages"]] == ["emma"], "it holds Jane; what holds Bath was gone"


def test_a_passage_must_be_there_for_every_token_of_the_word():
    steps = [1] * 53 + [1, 2, 2, 2]
    cited = by_characters([["jane"], ["bath", "jane"]], steps)
    assert [p["id"] for p in cited[2]["passages"]] == ["jane"], "bath came after the first letter"
    assert cited[2]["passages"][0]["step"] == 2


def test_a_second_passage_is_cited_only_for_words_that_are_not_in_the_question():
    evidence = [["jane", "emma", "bath"]] * 3
    assert [p["id"] for p in by_characters(evidence)[0]["passages"]] == ["emma"]
    asked = by_characters([["bath", "emma"]] * 3)[1]["passages"]
    assert [(p["id"], p["words"]) for p in asked] == [("emma", ["jane"]), ("bath", ["bath"])]
    known = by_characters([["bath", "emma"]] * 3, question="Where was Jane born?")[1]["passages"]
    assert [p["id"] for p in known] == ["bath"], "Jane is in the question and needs no further source"


def test_words_compare_alike_however_their_accents_are_encoded():
    import unicodedata

    response, passage = (unicodedata.normalize(form, "Amélie") for form in ("NFD", "NFC"))
    spans = [(n, n + 1) for n in range(len(response))]
    cited = cite_passages(response, spans, [1] * len(response), lambda _: ["a"], {"a": passage}, "Who?")
    assert cited[0]["passages"][0]["words"] == ["amélie"] and cited[0]["unsupported"] == []


TITLED = {
    "emma": "Emma (novel)\nEmma is a novel by Jane Austen, first published in 1815.",
    "jane": "Jane Austen\nJane Austen was born in Steventon in 1775.",
    "year": "1775\nIn 1775 Jane Austen was born in Steventon, and others elsewhere.",
}


def cite_titled(response, evidence=("year", "emma", "jane"), steps=None):
    spans = [(n, n + 1) for n in range(len(response))]
    steps = steps or [1] * len(response)
    cited = cite_passages(response, spans, steps, lambda _: evidence, TITLED, QUESTION, "titled")
    return [(each["text"], each["kind"], [p["id"] for p in each["passages"]]) for each in cited]


def test_a_model_that_names_its_passages_is_cited_from_these_alone():
    assert cite_titled(" Emma; Jane Austen ### Steventon") == [
        ("Emma", "reasoning", ["emma"]),
        ("Jane Austen", "reasoning", ["jane"]),
        ("Steventon", "answer", ["jane"]),  # though another passage ranks before it
    ]
    assert cite_titled("Jane Austen", ["emma"]) == [("Jane Austen", "reasoning", ["emma"])]
    assert cite_titled("1775 ### Steventon")[-1] == ("Steventon", "answer", ["year"])
    assert cite_titled("Emma ### Steventon")[-1] == ("Steventon", "answer", [])
    assert cite_titled("Jane ### Steventon") == [("Jane", "reasoning", []), ("Steventon", "answer", [])]
    assert cite_titled("### unknown") == [("unknown", "answer", [])]
