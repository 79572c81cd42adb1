"""Output files, run folders, training runs, worlds, stamps."""

import os

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
TRAIN = "train train.steps=1 --out run"

CASES = [
    Case("an answers file that is a folder", f"{ASK} --out model", "cannot be written: Is a directory"),
    Case("an answers file that is -", f"{ASK} --out -", "leave --out out for answers on standard output"),
    Case("a trace that is -", f"{ASK} --trace -", "a trace needs a file"),
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
]
