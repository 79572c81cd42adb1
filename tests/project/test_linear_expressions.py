"""Every regular expression takes time in proportion to the text that it is given, whoever wrote it."""

import importlib
import pkgutil
import re
import signal
import time
from functools import partial
from math import inf

import pytest

import dlm_rag
from dlm_rag import answer_forms, text
from dlm_rag.baselines.run import cut_sentence, find_action
from dlm_rag.evaluation.metrics import compute_exact_match
from dlm_rag.serving.conversation import make_question_stand_alone

# What strangers would send to an expression that tries again from every position.
FILLERS = (
    " ", "\n", " \n", "a", "A", "7", "_", ".", "!", "#", "-", "'", '"', "*", "(", "[", "{", "<", "a ", "A ",
    "Aa ", "a.", "a-", "A\u2019", ". ", "?\n", "``\u0060\n", "<answer>", "<search>", "<think>", "</think>",
    "<search>a</answer>", "\\boxed{", "\\text{", "{'text'", "answer is ", "answer is\n", "answer to ",
    "Answer: ",
    "the final ", "question: ", "(a (", "[1] ", '"answer": "', "\u0301", "\u4e2d",
)  # fmt: skip
ENDS = ("x", "</search>", '"')
SHORT, LONG = 10_000, 100_000
SUSPICIOUS_SECONDS = 0.005  # for the short text: only then is the long one tried
MOST_SECONDS = 1.0  # after which an expression is stopped
# Expressions that are only tried at the beginning of a text.
ANCHORED = set(
    """
_SETTING _CONFIDENCES _MODEL_URL _HUB_ID _KEY ENTRY_NAME SCRATCH_NAME TYPE_LABEL _WORKERS _NESTED _LAST_WORD
_PARAMETER _QUOTED_TITLE _ANSWER_LINE _NO_ANSWER _STEP _SECTION_NAME _QUESTION_LABEL _JSON_VALUE
_BLANK_OR_MARKUP _BEFORE_MARK
""".split()
)


def list_expressions():
    found = {}
    for module in pkgutil.walk_packages(dlm_rag.__path__, "dlm_rag."):
        if module.name.endswith("__main__"):
            continue
        try:
            members = vars(importlib.import_module(module.name))
        except ModuleNotFoundError:  # an optional package
            continue
        for name, value in members.items():
            parts = value if isinstance(value, tuple | list) else [value]
            for number, part in enumerate(parts):
                part = getattr(part, "__self__", part)
                if isinstance(part, re.Pattern) and isinstance(part.pattern, str):
                    found.setdefault(part.pattern, (f"{module.name}.{name}.{number}", part))
    return dict(found.values())


def stop(*_):
    raise TimeoutError


def measure(expression, text, anchored=False):
    """Seconds for all that the expression finds in a text; infinity where it is stopped."""
    old = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    begin = time.thread_time()
    try:
        for _ in () if anchored else expression.finditer(text):
            pass
        expression.match(text), expression.fullmatch(text)
        return time.thread_time() - begin
    except TimeoutError:
        return inf
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old)


def find_slow_filler(expression, anchored=False):
    """Returns a filler of which ten times as much takes over 30 times as long; None where there is none."""
    for filler in FILLERS:
        for end in ENDS:
            short, long = ((filler * size)[:size] + end for size in (SHORT, LONG))
            if (taken := measure(expression, short, anchored)) < SUSPICIOUS_SECONDS:
                continue
            if taken < inf:
                taken = min(taken, *(measure(expression, short, anchored) for _ in range(2)))
            if taken > 0.03:
                return filler, end, taken
            if taken > SUSPICIOUS_SECONDS and measure(expression, long, anchored) > 30 * taken:
                return filler, end, taken
    return None


READERS = {
    "answer": answer_forms.find_answer,
    "whole answer": partial(answer_forms.find_answer, form="whole"),
    "titles": lambda said: text.find_named_passages(said, {"1": said}, said),
    "sentences": text.find_sentence_spans,
    "content words": lambda said: text.content_words(said, 0, len(said)),
    "names": text.extract_names,
    "title": text.get_title_line,
    "short title": text.strip_disambiguation,
    "normalised answer": lambda said: compute_exact_match(said, ["x"]),
    "action of Search-R1": find_action,
    "open action of Search-R1": partial(find_action, closed=False),
    "sentence of a baseline": cut_sentence,
    "turns": lambda said: make_question_stand_alone([("user", said), ("user", said)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_what_reads_a_text_is_linear(name):
    """Several expressions together, each from where the last one has ended."""
    read = READERS[name]
    for filler in FILLERS:
        texts = [(filler * size)[:size] + "x" for size in (SHORT, LONG)]
        # Where other work slows one reading, the next one counts.
        tries = ([measure_reading(read, each) for each in texts] for _ in range(3))
        assert any(long < max(0.3, 30 * short) for short, long in tries), filler


def measure_reading(read, given):
    """Seconds of the processor for one reading."""
    begin = time.thread_time()
    read(given)
    return time.thread_time() - begin


@pytest.mark.slow
def test_every_expression_is_linear():
    slow = {}
    for name, each in list_expressions().items():
        if found := find_slow_filler(each, name.split(".")[-2] in ANCHORED):
            slow[name] = found
    assert not slow


@pytest.mark.parametrize("pattern", [r"\s*#", r"<answer>(.*?)</answer>", r"(?:\s+|#)*"])
def test_one_that_is_not_linear_is_found(pattern):
    assert find_slow_filler(re.compile(pattern, re.DOTALL))
