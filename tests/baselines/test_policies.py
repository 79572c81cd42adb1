"""The control flow of each published policy: what is asked, in which order, what is searched, when it ends.

The model is a scripted server in a process of its own, the retriever BM25 over a few passages.
"""

from itertools import pairwise

import pytest

from dlm_rag.baselines import POLICIES
from dlm_rag.baselines import run as run_module
from dlm_rag.baselines.run import PROMPTS as POLICY_PROMPTS
from dlm_rag.baselines.run import BaselineContext, BaselineEngine, ChatClient, cut_sentence
from dlm_rag.config import Config, DecodeConfig, ModelConfig, RemoteConfig
from dlm_rag.questions import Question
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import build_query
from dlm_rag.tokenizer.prompts import PROMPTS
from tests.support.chat_server import server  # noqa: F401 - a fixture
from tests.support.passages import PASSAGES

QUESTION = Question("q1", "Where was the author of Emma born?")
TEXT = {name: f"{title}\n{text}" for name, title, text in PASSAGES}


@pytest.fixture
def answer(server, corpus_file):
    """The rollout of a question under a policy."""

    def run(policy, question=QUESTION, top_k=2, prompt="sardi", decode=None):
        config = Config(
            model=ModelConfig(path=server.url),
            remote=RemoteConfig(policy=policy),
            decode=decode or DecodeConfig(),
        )
        client = ChatClient("model.path", server.url, "DLM_RAG_MODEL_KEY")
        retriever = load_retriever(str(corpus_file), top_k=top_k)
        context = BaselineContext(client, retriever, config, PROMPTS[prompt])
        (rollout,) = BaselineEngine(context, {}).stream([question])
        return rollout

    return run


def searched(rollout):
    return [step.query for step in rollout.steps if step.retrieved]


@pytest.mark.slow
def test_no_retrieval_asks_once_and_shows_nothing(answer, server):
    server.say(["", ["Austen was born there. ### Steventon."]])
    rollout = answer("no_retrieval")
    (request,) = server.requests
    assert request["path"] == "/v1/chat/completions" and request["text"].endswith(QUESTION.question)
    assert "facts" not in request["text"].lower() and request["temperature"] == 0
    assert rollout.answer == "Steventon" and rollout.evidence == () and rollout.retrievals == 0
    assert rollout.usage == {
        "requests": 1, "prompt_tokens": len(request["text"].split()), "completion_tokens": 6,
        "cut_replies": 0,
    }  # fmt: skip
    assert rollout.forwards == rollout.tokens_committed == 6


@pytest.mark.slow
def test_static_shows_what_the_question_finds_in_the_prompt_that_is_named(answer, server):
    server.say(["", ["### Steventon"]])
    rollout = answer("static")
    (request,) = server.requests
    assert searched(rollout) == [QUESTION.question] and len(rollout.evidence) == 2
    facts = "\n".join(f"[{n}] {TEXT[name]}" for n, name in enumerate(rollout.evidence, start=1))
    assert request["text"].endswith(f"Question:\n{QUESTION.question}\n\nFacts:\n{facts}")
    server.say(["", ["Steventon."]])
    rollout = answer("static", prompt="flashrag")
    assert "Doc 1(Title: " in server.requests[0]["text"] and rollout.answer == "Steventon"


@pytest.mark.slow
def test_ircot_searches_with_each_sentence_and_reads_with_all_it_found(answer, server):
    thoughts = [
        "Emma was written by Jane Austen. She was born in Steventon.",
        "Thus, the author is Jane Austen.",
        "Jane Austen was born in Steventon.",
        "So the answer is: Steventon.\nQ: another",
    ]
    server.say(
        ["A: .*Jane Austen was born in Steventon\\.$", thoughts[3:]],
        ["A: .*Thus, the author is Jane Austen\\.$", thoughts[2:3]],
        ["A: Emma was written by Jane Austen\\.$", thoughts[1:2]],
        ["\nA:$", [thoughts[0], "Emma is by Austen. So the answer is: Steventon."]],
    )
    rollout = answer("ircot", top_k=1)
    requests = server.requests
    assert {r["path"] for r in requests} == {"/v1/completions"} and len(requests) == 5
    assert all(r["stop"] == ["\n"] and r["prompt"].startswith(POLICY_PROMPTS["ircot"]) for r in requests)
    first = "Emma was written by Jane Austen."
    assert searched(rollout) == [QUESTION.question, first, first, "Jane Austen was born in Steventon."], (
        "a conclusion is no query: the last fact is one again"
    )
    assert rollout.response == "Emma is by Austen. So the answer is: Steventon."
    assert rollout.answer == "Steventon"
    shown = pairwise(step.passage_ids for step in rollout.steps)
    assert all(later[: len(earlier)] == earlier for earlier, later in shown)
    facts = "\n\n".join("Wikipedia Title: " + TEXT[name] for name in rollout.evidence)
    assert requests[-1]["prompt"].endswith(f"\n\n\n{facts}\n\nQ: {QUESTION.question}\nA:"), "the reader"


@pytest.mark.slow
def test_ircot_ends_after_its_rounds_and_takes_the_reader_at_its_word(answer, server, monkeypatch):
    server.say(["", ["Nobody knows of it."]])
    rollout = answer("ircot")
    assert len(server.requests) == 8 + 1 and len(searched(rollout)) == 8
    assert rollout.answer == "Nobody knows of it"
    server.say(["", ["Nobody knows of it."]])
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "IRCOT_ROUNDS", 2)
        answer("ircot")
    assert len(server.requests) == 2 + 1
    server.say(["", [""]])
    assert answer("ircot").answer == "" and len(server.requests) == 1 + 1, "an empty thought ends the chain"


@pytest.mark.slow
def test_search_r1_puts_what_it_finds_into_the_reply(answer, server):
    think = "<think>Who wrote it?</think>\n<search> author of Emma </search> never read"
    server.say(
        ["</information>\n\n$", ["<think>Steventon.</think><answer> Steventon </answer> more"]],
        ["My previous action is invalid", [think]],
        ["Question: .*born\\?\n$", ["I wonder."]],
    )
    rollout = answer("search_r1", Question("q1", "Where was the author of Emma born"))
    first, second, third = requests = server.requests
    assert {r["path"] for r in requests} == {"/v1/chat/completions"}
    assert first["messages"] == [{"role": "user", "content": first["text"]}] and "born?\n" in first["text"]
    assert "continue_final_message" not in first and second["continue_final_message"] is True
    assert second["messages"][1]["content"].startswith(
        "I wonder.\nMy previous action is invalid. If I want"
    )
    assert third["add_generation_prompt"] is False
    facts = "\n".join(
        f"Doc {n}(Title: {TEXT[name]}".replace("\n", ") ")
        for n, name in enumerate(rollout.evidence, start=1)
    )
    assert third["messages"][1]["content"] == (
        second["messages"][1]["content"] + think.removesuffix(" never read")
        + f"\n\n<information>{facts}</information>\n\n"
    )  # fmt: skip
    assert searched(rollout) == ["author of Emma"] and rollout.steps[0].passage_ids == ()
    assert rollout.answer == "Steventon" and "<information>" not in rollout.response


@pytest.mark.slow
def test_search_r1_has_four_turns_and_one_without_a_search(answer, server):
    server.say(["", ["<search>Emma</search>"]])
    rollout = answer("search_r1")
    assert len(server.requests) == 5 and searched(rollout) == ["Emma"] * 4 and rollout.answer == ""
    server.say(["", [{"text": "<search>Emma", "finish": "length"}, "<answer>x</answer>"]])
    rollout = answer("search_r1")
    assert searched(rollout) == [] and rollout.answer == "x", "what was cut is no action"


@pytest.mark.slow
def test_each_search_finds_what_our_retriever_finds(answer, server, corpus_file):
    """Whatever the policy, a step's passages are those of the same text elsewhere in this program."""
    script = [
        ["</information>\n", ["<answer>x</answer>"]],
        ["inside <think>", ["<search>novel by Herbert</search>"]],
        ["", ["Steventon"]],
    ]
    retriever, asked = load_retriever(str(corpus_file), top_k=2), set()
    for policy in POLICIES:
        server.say(*script)
        rollout = answer(policy)
        assert not rollout.error, rollout.error
        held: list[str] = []
        for step in (step for step in rollout.steps if step.retrieved):
            (passages,) = retriever.search([build_query("question", step.query)])
            ids = [passage.id for passage in passages]
            held = list(dict.fromkeys((*held, *ids))) if policy in ("ircot", "search_r1") else ids
            assert list(step.passage_ids) == held
            assert all(rollout.passages[passage.id] == passage.text for passage in passages)
            asked.add((policy, step.query))
    assert {policy for policy, _ in asked} == {*POLICIES} - {"no_retrieval"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Emma is by Austen. She was born.", "Emma is by Austen."),
        (" The film was by Edward L. Cahn. He died.", " The film was by Edward L. Cahn."),
        ("Dr. Who met Mrs. Hill? Yes.", "Dr. Who met Mrs. Hill?"),
        ("Yes. It is so. And more", "Yes. It is so."),
        ("It cost 1.5 dollars", "It cost 1.5 dollars"),
        ("", ""),
    ],
)
def test_the_first_sentence(text, sentence):
    assert cut_sentence(text) == sentence
