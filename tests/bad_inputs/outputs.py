"""Output files, run folders, training runs, worlds, stamps."""

import os
from pathlib import Path

from bad_inputs import ASK, ASK_MODEL, Case

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
TRAIN = "train train.steps=1 --out run"
EVALUATE = (
    "evaluate --model model --corpus corpus.jsonl --questions questions.jsonl decode.canvas_length=8"
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
    Case("an answers file that is a folder", f"{ASK} --out model", "cannot be written: Is a directory"),
    Case("an answers file that is a loop", f"{ASK} --out a", "Too many levels", {"a": loop}),
    Case("a trace that is a loop", f"{ASK} --trace a", "Too many levels", {"a": loop}),
    Case("a corpus that is a loop", f"{ASK_MODEL} --corpus a", "Too many levels", {"a": loop}),
    Case("an answers file of no folder", f"{ASK} --out no/a.jsonl", ("No such file", "make its folder")),
    Case("an answers file with the name of a folder", f"{ASK} --out answers/", "it is the name of a folder"),
    Case("an answers file of nobody", f"{ASK} --out '~nobody-here/a'", "no such home folder"),
    Case("a trace that is the stamp", f"{ASK} --out a --trace a.run.json", "trace and the stamp of out"),
    Case("a trace that is the lock", f"{ASK} --out a --trace a.lock", "trace and the lock of out"),
    Case("a trace that is the answers by another name", f"{ASK} --out a --trace b", "are the same file",
         {"a": "", "b": lambda path: os.link(path.with_name("a"), path)}),
    Case("a stamp that is a folder", f"{ASK} --out a", "a.run.json is there and is no file",
         {"a.run.json/x": ""}),
    Case("a stamp that is a pipe", f"{ASK} --out a", "a.run.json is there and is no file",
         {"a": ANSWER, "a.run.json": os.mkfifo}),
    Case("a lock that is a folder", f"{ASK} --out a", "a.lock is there and is no file", {"a.lock/x": ""}),
    Case("scores of somebody else", f"{EVALUATE} --out .", "was not written by evaluate",
         {"scores.json": '{"mine": 1}'}),
    Case("scores that are a list", f"{EVALUATE} --out .", "not written by evaluate", {"scores.json": "[1]"}),
    Case("scores nested beyond measure", f"{EVALUATE} --out .", "not written by evaluate",
         {"scores.json": "[" * 100_000}),
    Case("scores of a choice that is a list", f"{EVALUATE} --out .", "not written by evaluate",
         {"scores.json": '{"settings": {}, "chosen": []}'}),
    Case("scores that are a pipe", f"{EVALUATE} --out .", "scores.json cannot be written: it is no regular",
         {"scores.json": os.mkfifo}),
    Case("a run whose lock is a folder", TRAIN, "cannot be locked by run/train.lock", {"run/train.lock/x": ""}),
    Case("a run whose checkpoints are a file", f"{TRAIN} --resume", "run/checkpoints is a file and must be",
         {"run/checkpoints": "x"}),
    Case("a run whose model is a file", TRAIN, "run/model is a file and must be a folder", {"run/model": "x"}),
    Case("an answers file that is -", f"{ASK} --out -", "leave --out out for answers on standard output"),
    Case("a trace that is -", f"{ASK} --trace -", "all else needs a file"),
    Case("a page that is -", f"{ASK} --html -", "all else needs a file"),
    Case("a page of no folder", f"{ASK} --html no/page.html", ("html=no/page.html cannot be written", "make its folder")),
    Case("a page that is the trace", f"{ASK} --trace a --html a", "trace and html are the same file"),
    Case("a page that is the answers", f"{ASK} --out a --trace t --html a", "out and html are the same file"),
    Case("a page that is the lock", f"{ASK} --out a --trace t --html a.lock", "html and the lock of out"),
    Case("a page over something else", f"{ASK} --html model/config.json", "is no page of this program"),
    Case("a page of answers without their traces", f"{ASK} --out a --html page.html", "add --trace FILE"),
    Case("guesses without a trace", f"{ASK} guesses=true", "no effect without a trace or a page"),
    Case("guesses of a training run", f"{TRAIN} guesses=true", "training has no use for guesses"),
    Case("a page of an evaluation", f"{EVALUATE} --out run --html page.html", "make it of a trace with dlm-rag page"),
    Case("a page of a training run", f"{TRAIN} --html page.html", "training has no use for html"),
    Case("a page of a trace that is not there", PAGE, "trace 't.jsonl' was not found"),
    Case("a page of a folder", "page model --html page.html", "trace 'model' was not found"),
    Case("a page of no trace", "page --html page.html", ("the following arguments are required: TRACE", "--help")),
    Case("a page of no name", "page t.jsonl", "the following arguments are required: --html", {"t.jsonl": DECODED}),
    Case("a page of nobody", "page t.jsonl --html '~nobody-here/p'", "no such home folder", {"t.jsonl": DECODED}),
    Case("a page of questions", "page questions.jsonl --html page.html", "questions.jsonl, line 1: this is no line"),
    Case("a page of a trace without questions", PAGE, "t.jsonl holds no question that is finished", {"t.jsonl": ""}),
    Case("a page of a position off the canvas", PAGE, "the line of question 'q1' is none of a decode",
         {"t.jsonl": DECODED.replace('"committed": []', f'"committed": {WRITTEN}')}),
    *(
        Case(f"a page of {what}", PAGE, ("t.jsonl, line 1: this is no line of a trace", key), {"t.jsonl": decoded(*change)})
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
        Case(f"a page of {what}", PAGE, "the line of question 'q1' is none of a decode", {"t.jsonl": decoded(*change)})
        for what, *change in (
            ("a canvas of 10^9", '"canvas_length": 2', '"canvas_length": 1000000000'),
            ("a canvas below nothing", '"canvas_length": 2', '"canvas_length": -2'),
            ("a step out of turn", '"step": 0', '"step": 7'),
        )
    ),
    Case("a page of three traces", "page t.jsonl u.jsonl v.jsonl --html page.html", "one trace or 2, not 3"),
    Case("a page of one trace twice", "page t.jsonl t.jsonl --html page.html", "t.jsonl is named twice",
         {"t.jsonl": DECODED}),
    Case("a page in the place of its trace", "page t.jsonl --html t.jsonl", "html and trace t.jsonl are the same file",
         {"t.jsonl": DECODED}),
    Case("a page in the place of something else", "page t.jsonl --html questions.jsonl",
         "html=questions.jsonl holds something that is no page of this program", {"t.jsonl": DECODED}),
    Case("a page of two traces of other questions", "page t.jsonl u.jsonl --html page.html",
         "the traces t and u have no question in common",
         {"t.jsonl": DECODED, "u.jsonl": DECODED.replace("Who?", "Why?")}),
    Case("an answers file that is a device", f"{ASK} --out /dev/null", "it is no regular file"),
    Case("an answers file that is a full device", f"{ASK} --out /dev/full", "it is no regular file"),
    Case("an answers file that is a pipe", f"{ASK} --out pipe", "no regular file", {"pipe": os.mkfifo}),
    Case("a trace that is a pipe", f"{ASK} --trace pipe", "no regular file", {"pipe": os.mkfifo}),
    Case("an answers file of a long name", f"{ASK} --out {'a' * 300}", "File name too long"),
    Case("no room for the stamp's name", f"{ASK} --out {'a' * 250}", "File name too long"),
    *(
        Case(
            f"a stamp {what}",
            f"{ASK} --out a.jsonl",
            "without a readable a.jsonl.run.json beside it",
            {"a.jsonl": ANSWER, "a.jsonl.run.json": stamp},
        )
        for what, stamp in STAMPS.items()
    ),
    Case("a run to resume that is not there", f"{TRAIN} --resume", "run holds no run to go on with"),
    Case(
        "a run to resume in a folder of something else",
        f"{TRAIN} --resume",
        "run holds no run to go on with",
        {"run/notes.txt": "mine"},
    ),
    Case("a run into a folder of something else", TRAIN, "holds 'notes.txt'", {"run/notes.txt": "mine"}),
    Case("a run into a folder of a run", TRAIN, "add --resume to go on", {"run/metrics.jsonl": "{}\n"}),
    Case("a run into a file", TRAIN, "cannot be a folder", {"run": "mine"}),
    Case(
        "a checkpoint of an older format",
        f"{TRAIN} --resume",
        "step-00000001 is of format 1",
        {"run/checkpoints/step-00000001/state.json": '{"state": {}}'},
    ),
    Case(
        "a world over another corpus",
        "dlm_rag.data.world --seed 1 --passages 100 --per-hop 1 --out .",
        "corpus.jsonl is there and holds something else",
    ),
    Case("a world of no seed", "dlm_rag.data.world --out w", "arguments are required: --seed"),
    Case("a world of a word", "dlm_rag.data.world --seed x --out w", "--seed 'x' is not a whole number"),
    Case("a world of few passages", "dlm_rag.data.world --seed 1 --passages 99 --out w", "from 100 to 1000000"),
    Case("a world of many passages", "dlm_rag.data.world --seed 1 --passages 1000001 --out w", "from 100 to 1000000"),
    Case("a world of too many questions", "dlm_rag.data.world --seed 1 --passages 100 --per-hop 1000000000 --out w",
         "a world of 100 has no 1000000000 questions of 1 hops"),
    Case("a world of no questions", "dlm_rag.data.world --seed 1 --per-hop 0 --out w", "--per-hop '0'"),
    Case("a world of nobody", "dlm_rag.data.world --seed 1 --out '~nobody-here/w'", "no such home folder"),
    Case("a world in -", "dlm_rag.data.world --seed 1 --out -", "--out needs the name of a folder"),
    Case("a world over a pipe", "dlm_rag.data.world --seed 1 --passages 100 --per-hop 1 --out w",
         "corpus.jsonl is there and holds something else", {"w/corpus.jsonl": os.mkfifo}),
    Case("a world in a file", "dlm_rag.data.world --seed 1 --out w", "cannot hold a world", {"w": "mine"}),
    Case(
        "control characters in a name",
        f"{ASK} --questions '\x1b[2J\x07.jsonl'",
        "questions file ' [2J .jsonl' was not found",
    ),
    Case(
        "control characters in an id",
        f"{ASK_MODEL} --corpus odd.jsonl",
        "the id ' [2J ' occurs a second time",
        {"odd.jsonl": '{"id": "\\u001b[2J\\u202e", "text": "x"}\n' * 2},
    ),
]  # fmt: skip
