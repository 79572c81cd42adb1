"""Output files, run folders, training runs, worlds, stamps."""

import os
from pathlib import Path

from tests.bad_inputs import SAMPLE_COMMAND, SAMPLE_WITH_MODEL, BadInputCase

ANSWER = '{"id": "q1", "question": "Who wrote Emma?", "response": "x"}\n'
STAMPS = {
    "a list": "[]",
    "empty": "",
    "not JSON": "{",
    "not UTF-8": b"\xff",
    "nested beyond measure": "[" * 100_000,
    "without what the answers depend on": '{"machines": []}',
    "of answers that depend on a list": '{"answers_depend_on": []}',
    "of machines that are a text": '{"answers_depend_on": {}, "machines": "cpu"}',
    "of machines that are texts": '{"answers_depend_on": {}, "machines": ["cpu"]}',
}
DECODED = (  # a line of a trace of version 1
    '{"id": "q1", "question": "Who?", "prompt_layout": "joint", "canvas_length": 2, "response": "x", "steps": '
    '[{"step": 0, "query": "Who?", "passage_ids": ["a"], "retrieved": true, "committed": [], "seconds": {}}]}\n'
)
WRITTEN = '[{"position": 9, "token_id": 1, "token": "x", "confidence": 0.5}]'
PAGE = "page t.jsonl --html page.html"
TRAIN = "train train.max_steps=1 --out run"
EVALUATE = (
    "evaluate --model model --corpus corpus.jsonl --questions questions.jsonl decode.max_new_tokens=8"
    " retrieval.top_k=1"
)


def loop(path: Path) -> None:
    """A link to itself."""
    path.symlink_to(path.name)


def decoded(old: str, new: str) -> str:
    """A line of a trace with one token, changed in one place."""
    line = DECODED.replace('"committed": []', f'"committed": {WRITTEN}'.replace("9", "0"))
    assert line.count(old) == 1
    return line.replace(old, new)


CASES = [
    BadInputCase("an answers file that is a folder", f"{SAMPLE_COMMAND} --out model", "cannot be written: Is a directory"),
    BadInputCase("an answers file that is a loop", f"{SAMPLE_COMMAND} --out a", "Too many levels", {"a": loop}),
    BadInputCase("a trace that is a loop", f"{SAMPLE_COMMAND} --trace a", "Too many levels", {"a": loop}),
    BadInputCase("a corpus that is a loop", f"{SAMPLE_WITH_MODEL} --corpus a", "Too many levels", {"a": loop}),
    BadInputCase("an answers file of no folder", f"{SAMPLE_COMMAND} --out no/a.jsonl", ("No such file", "make its folder")),
    BadInputCase("an answers file with the name of a folder", f"{SAMPLE_COMMAND} --out answers/", "it is the name of a folder"),
    BadInputCase("an answers file of nobody", f"{SAMPLE_COMMAND} --out '~nobody-here/a'", "no such home folder"),
    BadInputCase("a trace that is the stamp", f"{SAMPLE_COMMAND} --out a --trace a.run.json", "trace and the stamp of out"),
    BadInputCase("a trace that is the lock", f"{SAMPLE_COMMAND} --out a --trace a.lock", "trace and the lock of out"),
    BadInputCase("a trace that is the answers by another name", f"{SAMPLE_COMMAND} --out a --trace b", "are the same file",
         {"a": "", "b": lambda path: os.link(path.with_name("a"), path)}),
    BadInputCase("a stamp that is a folder", f"{SAMPLE_COMMAND} --out a", "a.run.json exists and is not a file",
         {"a.run.json/x": ""}),
    BadInputCase("a stamp that is a pipe", f"{SAMPLE_COMMAND} --out a", "a.run.json exists and is not a file",
         {"a": ANSWER, "a.run.json": os.mkfifo}),
    BadInputCase("a lock that is a folder", f"{SAMPLE_COMMAND} --out a", "a.lock exists and is not a file", {"a.lock/x": ""}),
    BadInputCase("scores of somebody else", f"{EVALUATE} --out .", "was not written by evaluate",
         {"scores.json": '{"mine": 1}'}),
    BadInputCase("scores that are a list", f"{EVALUATE} --out .", "not written by evaluate", {"scores.json": "[1]"}),
    BadInputCase("scores nested beyond measure", f"{EVALUATE} --out .", "not written by evaluate",
         {"scores.json": "[" * 100_000}),
    BadInputCase("scores of a choice that is a list", f"{EVALUATE} --out .", "not written by evaluate",
         {"scores.json": '{"settings": {}, "chosen": []}'}),
    BadInputCase("scores that are a pipe", f"{EVALUATE} --out .", "scores.json cannot be written: it is no regular",
         {"scores.json": os.mkfifo}),
    BadInputCase("a run whose lock is a folder", TRAIN, "cannot be locked by run/train.lock", {"run/train.lock/x": ""}),
    BadInputCase("a run whose checkpoints are a file", f"{TRAIN} --resume", "run/checkpoints is a file and must be",
         {"run/checkpoints": "x"}),
    BadInputCase("a run whose model is a file", TRAIN, "run/model is a file and must be a folder", {"run/model": "x"}),
    BadInputCase("an answers file that is -", f"{SAMPLE_COMMAND} --out -", "leave --out out for answers on standard output"),
    BadInputCase("a trace that is -", f"{SAMPLE_COMMAND} --trace -", "all else needs a file"),
    BadInputCase("a page that is -", f"{SAMPLE_COMMAND} --html -", "all else needs a file"),
    BadInputCase("a page of no folder", f"{SAMPLE_COMMAND} --html no/page.html", ("html=no/page.html cannot be written", "make its folder")),
    BadInputCase("a page that is the trace", f"{SAMPLE_COMMAND} --trace a --html a", "trace and html are the same file"),
    BadInputCase("a page that is the answers", f"{SAMPLE_COMMAND} --out a --trace t --html a", "out and html are the same file"),
    BadInputCase("a page that is the lock", f"{SAMPLE_COMMAND} --out a --trace t --html a.lock", "html and the lock of out"),
    BadInputCase("a page over something else", f"{SAMPLE_COMMAND} --html model/config.json", "is not a page of this program"),
    BadInputCase("a page of answers without their traces", f"{SAMPLE_COMMAND} --out a --html page.html", "add --trace FILE"),
    BadInputCase("guesses without a trace", f"{SAMPLE_COMMAND} record_provisional=true", "record_provisional=true has no effect"),
    BadInputCase("guesses of a training run", f"{TRAIN} record_provisional=true", "record_provisional has no effect here"),
    BadInputCase("a page of an evaluation", f"{EVALUATE} --out run --html page.html", "html has no effect here"),
    BadInputCase("a page of a training run", f"{TRAIN} --html page.html", "html has no effect here"),
    BadInputCase("a page of a trace that is not there", PAGE, "trace 't.jsonl' was not found"),
    BadInputCase("a page of a folder", "page model --html page.html", "trace 'model' was not found"),
    BadInputCase("a page of no trace", "page --html page.html", ("the following arguments are required: TRACE", "--help")),
    BadInputCase("a page of no name", "page t.jsonl", "the following arguments are required: --html", {"t.jsonl": DECODED}),
    BadInputCase("a page of nobody", "page t.jsonl --html '~nobody-here/p'", "no such home folder", {"t.jsonl": DECODED}),
    BadInputCase("a page of questions", "page questions.jsonl --html page.html", "questions.jsonl, line 1: this is no line"),
    BadInputCase("a page of a trace without questions", PAGE, "t.jsonl holds no question that is finished", {"t.jsonl": ""}),
    BadInputCase("a page of a position off the canvas", PAGE, "the line of question 'q1' is not from a decode",
         {"t.jsonl": DECODED.replace('"committed": []', f'"committed": {WRITTEN}')}),
    *(
        BadInputCase(f"a page of {what}", PAGE, ("t.jsonl, line 1: this is no line of a trace", key), {"t.jsonl": decoded(*change)})
        for what, key, *change in (
            ("a token that is a number", "steps.0.committed.0.token:", '"x", "conf', '1, "conf'),
            ("a confidence that is NaN", "NaN", "0.5", "NaN"),
            ("a confidence that is infinite", "Infinity", "0.5", "-Infinity"),
            ("a confidence beyond all numbers", "Infinity", "0.5", "1e999"),
            ("a position that is a truth", "steps.0.committed.0.position:", '"position": 0', '"position": true'),
            ("positions that are truths", "steps.0.remasked.0:", '"seconds"', '"remasked": [true], "seconds"'),
            ("a step that is a text", "steps.0.step:", '"step": 0', '"step": "x"'),
            ("citations that are numbers", "citations.0:", '"steps"', '"citations": [5], "steps"'),
            ("citations without words", "citations.0.passages.0.words:", '"steps"',
             '"citations": [{"text": "", "kind": "answer", "unsupported": [], "passages": [{"id": "a", "step": 0}]}], "steps"'),
            ("a question without steps", "steps:", '"steps"', '"stops"'),
            ("settings that are a list", "settings:", '"steps"', '"settings": [], "steps"'),
            ("guesses that are a number", "steps.0.guesses:", '"seconds"', '"guesses": 5, "seconds"'),
        )
    ),
    *(
        BadInputCase(f"a page of {what}", PAGE, "the line of question 'q1' is not from a decode", {"t.jsonl": decoded(*change)})
        for what, *change in (
            ("a canvas of 10^9", '"canvas_length": 2', '"canvas_length": 1000000000'),
            ("a canvas below nothing", '"canvas_length": 2', '"canvas_length": -2'),
            ("a step out of turn", '"step": 0', '"step": 7'),
        )
    ),
    BadInputCase("a page of three traces", "page t.jsonl u.jsonl v.jsonl --html page.html", "one trace or 2, not 3"),
    BadInputCase("a page of one trace twice", "page t.jsonl t.jsonl --html page.html", "t.jsonl is named twice",
         {"t.jsonl": DECODED}),
    BadInputCase("a page in the place of its trace", "page t.jsonl --html t.jsonl", "html and trace t.jsonl are the same file",
         {"t.jsonl": DECODED}),
    BadInputCase("a page in the place of something else", "page t.jsonl --html questions.jsonl",
         "html=questions.jsonl is not a page of this program", {"t.jsonl": DECODED}),
    BadInputCase("a page of two traces of other questions", "page t.jsonl u.jsonl --html page.html",
         "the traces t and u have no question in common",
         {"t.jsonl": DECODED, "u.jsonl": DECODED.replace("Who?", "Why?")}),
    BadInputCase("an answers file that is a device", f"{SAMPLE_COMMAND} --out /dev/null", "it is no regular file"),
    BadInputCase("an answers file that is a full device", f"{SAMPLE_COMMAND} --out /dev/full", "it is no regular file"),
    BadInputCase("an answers file that is a pipe", f"{SAMPLE_COMMAND} --out pipe", "no regular file", {"pipe": os.mkfifo}),
    BadInputCase("a trace that is a pipe", f"{SAMPLE_COMMAND} --trace pipe", "no regular file", {"pipe": os.mkfifo}),
    BadInputCase("an answers file of a long name", f"{SAMPLE_COMMAND} --out {'a' * 300}", "File name too long"),
    BadInputCase("no room for the stamp's name", f"{SAMPLE_COMMAND} --out {'a' * 250}", "File name too long"),
    *(
        BadInputCase(
            f"a stamp {what}",
            f"{SAMPLE_COMMAND} --out a.jsonl",
            "without a readable a.jsonl.run.json beside it",
            {"a.jsonl": ANSWER, "a.jsonl.run.json": stamp},
        )
        for what, stamp in STAMPS.items()
    ),
    BadInputCase("a run to resume that is not there", f"{TRAIN} --resume", "run holds no run to go on with"),
    BadInputCase(
        "a run to resume in a folder of something else",
        f"{TRAIN} --resume",
        "run holds no run to go on with",
        {"run/notes.txt": "mine"},
    ),
    BadInputCase("a run into a folder of something else", TRAIN, "holds 'notes.txt'", {"run/notes.txt": "mine"}),
    BadInputCase("a run into a folder of a run", TRAIN, "add --resume to go on", {"run/metrics.jsonl": "{}\n"}),
    BadInputCase("a run into a file", TRAIN, "cannot be a folder", {"run": "mine"}),
    BadInputCase(
        "a checkpoint of an older format",
        f"{TRAIN} --resume",
        "step-00000001 has format 1",
        {"run/checkpoints/step-00000001/state.json": '{"state": {}}'},
    ),
    BadInputCase(
        "a world over another corpus",
        "dlm_rag.data.synthetic_world --seed 1 --passages 100 --per-hop 1 --out .",
        "corpus.jsonl exists with other content",
    ),
    BadInputCase("a world of no seed", "dlm_rag.data.synthetic_world --out w", "arguments are required: --seed"),
    BadInputCase("a world of a word", "dlm_rag.data.synthetic_world --seed x --out w", "--seed 'x' is not a whole number"),
    BadInputCase("a world of few passages", "dlm_rag.data.synthetic_world --seed 1 --passages 99 --out w", "from 100 to 1000000"),
    BadInputCase("a world of many passages", "dlm_rag.data.synthetic_world --seed 1 --passages 1000001 --out w", "from 100 to 1000000"),
    BadInputCase("a world of too many questions", "dlm_rag.data.synthetic_world --seed 1 --passages 100 --per-hop 1000000000 --out w",
         "a world of 100 has no 1000000000 questions of 1 hops"),
    BadInputCase("a world of no questions", "dlm_rag.data.synthetic_world --seed 1 --per-hop 0 --out w", "--per-hop '0'"),
    BadInputCase("a world of nobody", "dlm_rag.data.synthetic_world --seed 1 --out '~nobody-here/w'", "no such home folder"),
    BadInputCase("a world in -", "dlm_rag.data.synthetic_world --seed 1 --out -", "--out needs the name of a folder"),
    BadInputCase("a world over a pipe", "dlm_rag.data.synthetic_world --seed 1 --passages 100 --per-hop 1 --out w",
         "corpus.jsonl exists with other content", {"w/corpus.jsonl": os.mkfifo}),
    BadInputCase("a world in a file", "dlm_rag.data.synthetic_world --seed 1 --out w", "cannot hold a world", {"w": "mine"}),
    BadInputCase(
        "control characters in a name",
        f"{SAMPLE_COMMAND} --questions '\x1b[2J\x07.jsonl'",
        "questions file ' [2J .jsonl' was not found",
    ),
    BadInputCase(
        "control characters in an id",
        f"{SAMPLE_WITH_MODEL} --corpus odd.jsonl",
        "the id ' [2J ' occurs a second time",
        {"odd.jsonl": '{"id": "\\u001b[2J\\u202e", "text": "x"}\n' * 2},
    ),
]  # fmt: skip
