"""The published policies of when to retrieve, over plain requests; their prompts are in prompts.yaml.

All search the same index with the same retriever, `retrieval.top_k` passages at a time, and differ in when,
with what, and in which passages a prompt shows. Numbers are those of the publications named.
"""

import re
from math import exp
from pathlib import Path

import yaml

from dlm_rag.baselines.run import BaselineRun
from dlm_rag.text import normalize_whitespace

# Passages as each prompt shows them.
IRCOT_FACT, FLARE_FACT = "Wikipedia Title: {title}\n{text}", "[{number}]: {passage}"
SEARCH_R1_FACT = "Doc {number}(Title: {title}) {text}"
IRCOT_ROUNDS, IRCOT_PASSAGES, IRCOT_TOKENS = 8, 15, 256
FLARE_THRESHOLD, FLARE_MASK_THRESHOLD, FLARE_AHEAD, FLARE_TOKENS = 0.8, 0.4, 64, 256
SEARCH_R1_TURNS, SEARCH_R1_TOKENS, SEARCH_R1_PASSAGES = 4, 500, 10**6
PROMPTS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text("utf-8"))
MIN_SENTENCE_CHARS = 5
# Not after an initial or a title: "Edward L. Cahn".
_SENTENCE_END = re.compile(r"(?<!\b[A-Z])(?<!\b[MDS][rt])(?<!\bMrs)[.?!](?=\s)")
_REASONING = re.compile(r"thus\b|so\b|that is,|therefore|hence", re.IGNORECASE)
_ACTION_TAG = re.compile(r"<(search|answer)>")


def find_action(text: str, closed: bool = True) -> tuple[str, str] | None:
    """Returns the first search or answer of a text and its content; closed=False: the first left open."""
    last_close = {kind: text.rfind(f"</{kind}>") for kind in ("search", "answer")}
    for tag in _ACTION_TAG.finditer(text):
        if (last_close[tag[1]] >= tag.end()) == closed:
            stop = text.find(f"</{tag[1]}>", tag.end()) if closed else len(text)
            return tag[1], text[tag.end() : stop]
    return None


def cut_sentence(text: str) -> str:
    """The text up to the end of its first sentence of at least `MIN_SENTENCE_CHARS` characters."""
    ends = (found.end() for found in _SENTENCE_END.finditer(text))
    return text[: next((end for end in ends if end >= MIN_SENTENCE_CHARS), len(text))]


def answer_directly(run: BaselineRun) -> None:
    """No retrieval."""
    run.respond(run.ask_template().text, run.answer_form)


def answer_static(run: BaselineRun) -> None:
    """One search, with the question; then the answer."""
    run.search(run.question)
    answer_directly(run)


def answer_ircot(run: BaselineRun) -> None:
    """IRCoT (Trivedi et al. 2023, arXiv 2212.10509, sections 3 and 4).

    A search with the question, then with each new sentence of the chain of thought that is no mere
    conclusion; passages add up to 15. The chain ends at "answer is", or after 8 sentences; then a reader
    writes a chain of its own with all passages.
    """

    def think(written: str) -> str:
        facts = "\n\n".join(run.write_facts(IRCOT_FACT, run.evidence))
        prompt = f"{PROMPTS['ircot']}\n\n\n{facts}\n\nQ: {run.question}\nA: {written}"
        return run.complete(prompt.rstrip(), stop=["\n"], max_tokens=IRCOT_TOKENS).text.strip()

    chain: list[str] = []
    for _ in range(IRCOT_ROUNDS):
        facts = [sentence for sentence in chain if not _REASONING.match(sentence)]
        run.search(facts[-1] if facts else run.question, keep=IRCOT_PASSAGES)
        sentence = cut_sentence(think(" ".join(chain)))
        chain.append(sentence)
        if not sentence or "answer is" in sentence:
            break
    response = think("")
    run.respond(response, "marked" if "answer is" in response else "whole")


def answer_flare(run: BaselineRun) -> None:
    """FLARE direct (Jiang et al. 2023, arXiv 2305.06983, section 3.2), as the authors set it for 2Wiki.

    A search with the question; then sentence by sentence: where a token of the next one has a probability
    of 0.8 or less, a search with the sentence, less its tokens of 0.4 or less, and the sentence is written
    anew with what that finds. Passages of the last search stay, as in the authors' program.
    """
    run.search(run.question)
    written, tokens, finished = "", 0, False
    while tokens < FLARE_TOKENS and not finished:
        sentence, query, count, finished = _look_ahead(run, written)
        if query:
            run.search(query)
            sentence, _, count, finished = _look_ahead(run, written)
        written, tokens = written + sentence, tokens + count
    run.respond(written)


def _look_ahead(run: BaselineRun, written: str) -> tuple[str, str, int, bool]:
    """The next sentence, its query ("" where it is sure of itself), its tokens, whether it is the last."""
    facts = "\n".join(map(normalize_whitespace, run.write_facts(FLARE_FACT, run.evidence)))
    ranked = f"Search results ranked based on relevance in descending order:\n{facts}"
    prompt = f"{PROMPTS['flare']}\n\n{ranked}\nQuestion: {run.question}\nAnswer:{written}"
    ahead = run.complete(prompt, stop=["\n\n"], max_tokens=FLARE_AHEAD, log_probs=True)
    sentence, begin, kept = cut_sentence(ahead.text), 0, []
    for token in ahead.tokens:
        if begin >= len(sentence):
            break
        kept.append(token)
        begin += len(token.text)
    sure = [exp(token.log_prob) for token in kept]
    masked = (t.text if p > FLARE_MASK_THRESHOLD else " " for t, p in zip(kept, sure, strict=True))
    query = normalize_whitespace("".join(masked)) if any(p <= FLARE_THRESHOLD for p in sure) else ""
    ended = ahead.finish_reason != "length" and len(sentence) == len(ahead.text)
    return sentence, query, len(kept), ended or not sentence.strip()


def answer_search_r1(run: BaselineRun) -> None:
    """Search-R1's loop (Jin et al. 2025, arXiv 2503.09516, algorithm 1), of trained and other models.

    The model writes until it closes a search or an answer; what a search finds is put into its reply, which
    goes on. After 4 turns it has one more, whose search is not made.
    """
    asked = run.question.strip()
    asked += "?" * (not asked.endswith("?"))
    message = PROMPTS["search_r1"].replace("{question}", asked) + "\n"
    dialogue, replies = "", ""
    for turn in range(SEARCH_R1_TURNS + 1):
        reply = run.chat(message, dialogue, stop=["</search>", "</answer>"], max_tokens=SEARCH_R1_TOKENS)
        text, left_open = reply.text, find_action(reply.text, closed=False)
        if left_open and reply.finish_reason == "stop":  # servers leave out what stopped them
            text += f"</{left_open[0]}>"
        replies, action = replies + text, find_action(text)
        if turn == SEARCH_R1_TURNS or (action and action[0] == "answer"):
            break
        dialogue += text
        if action:
            found = run.search(action[1].strip(), keep=SEARCH_R1_PASSAGES)
            facts = "\n".join(run.write_facts(SEARCH_R1_FACT, found))
            dialogue += f"\n\n<information>{facts}</information>\n\n"
        else:
            dialogue += f"\n{PROMPTS['search_r1_invalid']}\n"
    run.respond(replies)
