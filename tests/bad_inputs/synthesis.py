"""What `dlm-rag synthesize` is told, and the folders it is to write into."""

import json

from tests.bad_inputs import BadInputCase

TRACES = (
    "synthesize --model model --corpus corpus.jsonl --questions questions.jsonl decode.max_new_tokens=8"
)
CORPUS = "synthesize synthesis.method=corpus --corpus corpus.jsonl"
WRITER = (
    "synthesize synthesis.method=writer synthesis.writer_url=http://127.0.0.1:1/v1 synthesis.writer_model=m"
)
NOTE = json.dumps({"depends_on": {"synthesis.method": "traces"}})
UNTITLED = '{"id": "a", "contents": "x"}\n'

CASES = [
    BadInputCase("no folder for rows", TRACES, "synthesis needs --out FOLDER"),
    BadInputCase("rows to standard output", f"{TRACES} --out -", "synthesis needs --out FOLDER"),
    BadInputCase("rows with a trace", f"{TRACES} --out rows --trace t.jsonl", "trace has no effect here"),
    BadInputCase(
        "a kind of rows that is none", f"{TRACES} --out rows synthesis.method=trace", "nearest: 'traces'"
    ),
    BadInputCase(
        "traces without questions",
        "synthesize --model model --corpus corpus.jsonl --out rows",
        "need --questions",
    ),
    BadInputCase(
        "traces by an answer that is not known",
        f"{TRACES} --out rows",
        "'n0' has no golden_answers: set synthesis.filter=evidence",
        {"questions.jsonl": '{"id": "n0", "question": "Who?"}'},
    ),
    BadInputCase(
        "traces by hops that are not known",
        f"{TRACES} --out rows synthesis.known_hops=true",
        "question 'n0' has no hops",
    ),
    BadInputCase(
        "a model for rows of a corpus",
        f"{CORPUS} --out rows --model model",
        "model.path has no effect here",
    ),
    BadInputCase(
        "a filter for rows of a corpus",
        f"{CORPUS} --out rows synthesis.filter=evidence",
        "synthesis.filter=evidence has no effect",
    ),
    BadInputCase(
        "rows of no corpus", "synthesize synthesis.method=corpus --out rows", "needs --corpus FILE"
    ),
    BadInputCase(
        "rows of a corpus and questions",
        f"{CORPUS} --out rows --questions questions.jsonl",
        "reads no questions",
    ),
    BadInputCase(
        "workers where nothing is decoded",
        f"{CORPUS} --out rows workers=2",
        "workers has no effect here",
    ),
    BadInputCase(
        "rows of a corpus without titles",
        f"{CORPUS} --out rows",
        "has no titles that stand for one",
        {"corpus.jsonl": UNTITLED},
    ),
    BadInputCase("a share beyond 1", f"{CORPUS} --out rows synthesis.held_out=1.5", "held_out=1.5 must be"),
    BadInputCase(
        "a writer without a name",
        "synthesize synthesis.method=writer synthesis.writer_url=http://x/v1 --out rows",
        "synthesis.method=writer needs synthesis.writer_url=URL and synthesis.writer_model=NAME",
    ),
    BadInputCase(
        "a writer that is no URL",
        f"{WRITER} --out rows synthesis.writer_url=localhost",
        "synthesis.writer_url=localhost",
    ),
    BadInputCase(
        "a writer of another kind",
        f"{CORPUS} --out rows synthesis.writer_url=http://x/v1",
        "synthesis.writer_url=http://x/v1 has no effect",
    ),
    BadInputCase(
        "a writer that does not answer",
        f"{WRITER} --questions questions.jsonl --out rows",
        "synthesis.writer_url=http://127.0.0.1:1/v1 does not list its models",
    ),
    BadInputCase(
        "paraphrases of a corpus",
        f"{WRITER} --corpus corpus.jsonl --out rows",
        "template=paraphrase needs --questions",
    ),
    BadInputCase(
        "a table of questions",
        f"{WRITER} --questions questions.jsonl --out rows synthesis.template=table",
        "template=table needs --corpus, and not --questions",
    ),
    BadInputCase(
        "a folder of somebody else's",
        f"{CORPUS} --out mine",
        "mine holds 'thesis.tex', which is of no rows",
        {"mine/thesis.tex": "x"},
    ),
    BadInputCase(
        "a folder of other rows",
        f"{CORPUS} --out rows",
        ("out=rows holds rows with", "choose another --out"),
        {"rows/rows.json": NOTE},
    ),
    BadInputCase("rows into a file", f"{CORPUS} --out corpus.jsonl", "out=corpus.jsonl cannot be a folder"),
    BadInputCase(
        "an evaluation set that is not there",
        f"{CORPUS} --out rows synthesis.decontaminate_against=nope.jsonl",
        "nope.jsonl",
    ),
    BadInputCase(
        "an evaluation set with a bad line",
        f"{CORPUS} --out rows synthesis.decontaminate_against=questions.jsonl,bad.jsonl",
        "bad.jsonl, line 1: there is no 'question'",
        {"bad.jsonl": '{"id": "a"}'},
    ),
]
