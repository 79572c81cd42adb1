"""What `dlm-rag synthesize` is told, and the folders it is to write into."""

import json

from bad_inputs import Case

TRACES = "synthesize --model model --corpus corpus.jsonl --questions questions.jsonl decode.canvas_length=8"
CORPUS = "synthesize synthesis.kind=corpus --corpus corpus.jsonl"
WRITER = "synthesize synthesis.kind=writer synthesis.writer=http://127.0.0.1:1/v1 synthesis.writer_model=m"
NOTE = json.dumps({"depends_on": {"synthesis.kind": "traces"}})
UNTITLED = '{"id": "a", "contents": "x"}\n'

CASES = [
    Case("no folder for rows", TRACES, "synthesis needs --out FOLDER"),
    Case("rows to standard output", f"{TRACES} --out -", "synthesis needs --out FOLDER"),
    Case("rows with a trace", f"{TRACES} --out rows --trace t.jsonl", "synthesis has no use for trace"),
    Case("a kind of rows that is none", f"{TRACES} --out rows synthesis.kind=trace", "nearest: 'traces'"),
    Case(
        "traces without questions",
        "synthesize --model model --corpus corpus.jsonl --out rows",
        "need --questions",
    ),
    Case(
        "traces by an answer that is not known",
        f"{TRACES} --out rows",
        "'n0' has no golden_answers: set synthesis.keep=evidence",
        {"questions.jsonl": '{"id": "n0", "question": "Who?"}'},
    ),
    Case(
        "traces by hops that are not known",
        f"{TRACES} --out rows synthesis.known_hops=true",
        "question 'n0' has no hops",
    ),
    Case(
        "a model for rows of a corpus",
        f"{CORPUS} --out rows --model model",
        "model.path has no effect with synthesis.kind=corpus",
    ),
    Case(
        "a filter for rows of a corpus",
        f"{CORPUS} --out rows synthesis.keep=evidence",
        "synthesis.keep has no effect with",
    ),
    Case("rows of no corpus", "synthesize synthesis.kind=corpus --out rows", "needs --corpus FILE"),
    Case(
        "rows of a corpus and questions",
        f"{CORPUS} --out rows --questions questions.jsonl",
        "reads no questions",
    ),
    Case(
        "workers where nothing is decoded",
        f"{CORPUS} --out rows workers=2",
        "workers= decode traces, and synthesis.kind=corpus decodes none",
    ),
    Case(
        "rows of a corpus without titles",
        f"{CORPUS} --out rows",
        "has no titles that stand for one",
        {"corpus.jsonl": UNTITLED},
    ),
    Case("a share beyond 1", f"{CORPUS} --out rows synthesis.held_out=1.5", "held_out=1.5 is out of range"),
    Case(
        "a writer without a name",
        "synthesize synthesis.kind=writer synthesis.writer=http://x/v1 --out rows",
        "kind=writer needs writer=URL and writer_model=NAME",
    ),
    Case(
        "a writer that is no URL",
        f"{WRITER} --out rows synthesis.writer=localhost",
        "writer=localhost is no URL",
    ),
    Case(
        "a writer of another kind",
        f"{CORPUS} --out rows synthesis.writer=http://x/v1",
        "has no effect with kind=corpus",
    ),
    Case(
        "a writer that does not answer",
        f"{WRITER} --questions questions.jsonl --out rows",
        "synthesis.writer=http://127.0.0.1:1/v1 does not list its models",
    ),
    Case(
        "paraphrases of a corpus",
        f"{WRITER} --corpus corpus.jsonl --out rows",
        "template=paraphrase needs --questions",
    ),
    Case(
        "a table of questions",
        f"{WRITER} --questions questions.jsonl --out rows synthesis.template=table",
        "template=table needs --corpus, and not --questions",
    ),
    Case(
        "a folder of somebody else's",
        f"{CORPUS} --out mine",
        "mine holds 'thesis.tex', which is of no rows",
        {"mine/thesis.tex": "x"},
    ),
    Case(
        "a folder of other rows",
        f"{CORPUS} --out rows",
        ("out=rows holds rows with", "choose another --out"),
        {"rows/rows.json": NOTE},
    ),
    Case("rows into a file", f"{CORPUS} --out corpus.jsonl", "out=corpus.jsonl cannot be a folder"),
    Case(
        "an evaluation set that is not there",
        f"{CORPUS} --out rows synthesis.against=nope.jsonl",
        "nope.jsonl",
    ),
    Case(
        "an evaluation set with a bad line",
        f"{CORPUS} --out rows synthesis.against=questions.jsonl,bad.jsonl",
        "bad.jsonl, line 1: there is no 'question'",
        {"bad.jsonl": '{"id": "a"}'},
    ),
]
