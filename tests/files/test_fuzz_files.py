"""Files changed at random, whoever reads them: a sentence or an answer, soon, and nothing lost."""

import json
import re
import shutil
import signal
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlm_rag.cli import describe_expected_error
from dlm_rag.commands.sample import page as page_command
from dlm_rag.decode.trace_file import AnswersFile
from dlm_rag.evaluation.metrics import SCORE_METRICS
from dlm_rag.evaluation.tables import build_result_table, read_result
from dlm_rag.questions import read_questions
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import build_query
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.training.checkpoints import scan_checkpoints
from dlm_rag.training.metrics_logger import is_number, read_metrics
from tests.support.pages import make_two_hop_rollout, write_trace
from tests.support.passages import PASSAGES, write_jsonl_file
from tests.support.properties import hypothesis_settings
from tests.support.results import make_stamp
from tests.support.traces import HEADER

MOST_SECONDS = 20
SCALARS = st.sampled_from(
    [None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, -(10**9), 0.5, 1e308, float("nan"), float("inf"),
     float("-inf"), "", "x", "0", "\0", "\ud800", "../x", "/etc/passwd", "a" * 10_000, [], {}, [[]], [None],
     {"a": 1}, [5], ["x"]]
)  # fmt: skip
NESTED = st.sampled_from(["<5 deep>", "<150 deep>", "<700 deep>", "<3000 deep>"])
VALUES = SCALARS | st.integers() | st.floats() | st.text(max_size=3) | NESTED
# Where in a document, and what is done there: another value, a key taken away, a key twice.
PLACES = st.lists(st.integers(0, 50), max_size=7)
CHANGES = st.lists(
    st.tuples(PLACES, st.sampled_from(["put", "drop", "twice", "add"]), VALUES), min_size=1, max_size=3
)
PUT = [b"[" * 3000, b"\0", b"\xff", b"\n", b"{}", b"9" * 400, b"NaN", b'""']
BYTES = st.tuples(st.floats(0, 1), st.integers(0, 60), st.binary(max_size=8) | st.sampled_from(PUT))


class Twice(str):
    """A key that is written another time beside the one that is there."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def changed(document, changes):
    """A document with changes in some of its places."""
    holder = [document]
    for path, what, value in changes:
        value = deepcopy(value)
        node, key = holder, 0
        for step in path:
            inner = node[key]
            if not isinstance(inner, dict | list) or not inner:
                break
            keys = list(inner) if isinstance(inner, dict) else range(len(inner))
            node, key = inner, keys[step % len(keys)]
        if what == "drop" and node is not holder:
            del node[key]
        elif what == "twice" and isinstance(node, dict):
            node[Twice(key)] = value
        elif what == "add" and isinstance(node, list) and node is not holder:
            node.append(value)
        else:
            node[key] = value
        if not isinstance(holder[0], dict | list):
            break
    return holder[0]


def as_text(value) -> bytes:
    nested = re.compile(r'"<(\d+) deep>"')
    text = nested.sub(lambda found: "[" * int(found[1]) + "]" * int(found[1]), json.dumps(value))
    return text.encode()


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A folder of everything that is read, as the programs leave it."""
    folder = tmp_path_factory.mktemp("good")
    write_trace(folder / "trace.jsonl", make_two_hop_rollout())
    file = AnswersFile(folder / "answers.jsonl", folder / "traced.jsonl")
    file.open_run(make_stamp(), HEADER)
    file.append(make_two_hop_rollout())
    file.close()
    passages = [{"id": i, "title": t, "contents": c} for i, t, c in PASSAGES]
    corpus = write_jsonl_file(folder / "corpus.jsonl", passages)
    load_retriever(corpus, top_k=2, index_dir=str(folder / "index"))
    estimate = {"mean": 0.5, "low": 0.1, "high": 0.9}
    metrics = dict.fromkeys(SCORE_METRICS, estimate)
    setting = {"groups": {"all": metrics}, "stamp": {"versions": {"torch": "1"}, "date": "2026"}}
    scores = {
        "questions": {"all": 3}, "settings": {"a": setting, "a+b=1": setting}, "swept": {"b": ["1"]},
        "first_minus": {"a+b=1": {"all": metrics}}, "command": "evaluate",
    }  # fmt: skip
    (folder / "scores").mkdir()
    (folder / "scores" / "scores.json").write_text(json.dumps(scores))
    asked = {"id": "a", "question": "Who?", "answers": ["x"], "supporting_ids": ["emma"], "hops": 2}
    write_jsonl_file(folder / "questions.jsonl", [asked, asked | {"id": "b"}])
    (folder / "questions.json").write_text(json.dumps({"data": [asked]}))
    step = {"loss": 0.5, "rows": 2, "supervised_tokens": 3, "seconds": 1.0, "exact_match": 0.5}
    step |= {"stage_seconds": {"data": 0.1}}
    write_jsonl_file(folder / "metrics.jsonl", [{"step": n} | step for n in range(3)])
    assert len(read_metrics(folder / "metrics.jsonl")) == 3
    record = {"format": 3, "settings": {}, "files": {}}
    state = {"step": 5, "task": {"epoch": 1}}
    checkpoint = folder / "run" / "checkpoints" / "step-00000005"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(record | {"state": state}))
    return folder


def read_page(folder: Path) -> None:
    page_command([str(folder / "trace.jsonl"), "--html", str(folder / "page.html")])


def go_on_answering(folder: Path) -> None:
    file = AnswersFile(folder / "answers.jsonl", folder / "traced.jsonl")
    try:
        file.open_run(make_stamp(), HEADER)
        file.add_energy({"seconds": 1.0})
    finally:
        file.close()


def search(folder: Path) -> None:
    retriever = load_retriever(folder / "corpus.jsonl", top_k=2, index_dir=str(folder / "index"))
    (found,) = retriever.search([build_query("question", "who wrote dune")])
    assert found[0].id == "dune", "what is damaged is built again"


def show_results(folder: Path) -> None:
    build_result_table(read_result(folder / "scores"))


def ask(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        for question in read_questions(folder / name):
            assert isinstance(question.question, str) and question.question.strip()

    return read


def read_passages(folder: Path) -> None:
    for passage in open_corpus(folder / "corpus.jsonl", folder / "fresh"):
        assert isinstance(passage.text, str)


def read_steps(folder: Path) -> None:
    for metrics in read_metrics(folder / "metrics.jsonl"):  # which are summed up and drawn
        assert sum(value for value in metrics.values() if is_number(value)) is not None


READERS: dict[str, Callable[[Path], None]] = {
    "trace.jsonl": read_page,
    "answers.jsonl": go_on_answering,
    "traced.jsonl": go_on_answering,
    "answers.jsonl.run.json": go_on_answering,
    "scores/scores.json": show_results,
    "questions.jsonl": ask("questions.jsonl"),
    "questions.json": ask("questions.json"),
    "corpus.jsonl": read_passages,
    "index/*/bm25-*/rows.npy": search,
    "index/*/offsets/offsets.npy": search,
    "metrics.jsonl": read_steps,
    "run/checkpoints/*/state.json": lambda folder: scan_checkpoints(folder / "run"),
}
OF_JSON = [name for name in READERS if name.endswith((".json", ".jsonl"))]
WRITTEN = ("page.", "fresh", "index")


def copied(good: Path, tmp_path: Path, name: str) -> tuple[Path, Path]:
    folder = tmp_path / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    (path,) = folder.glob(name)
    return folder, path


def hangs(*_) -> None:
    raise TimeoutError(f"no answer within {MOST_SECONDS} seconds")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its path, but for what is written anew in any case."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(WRITTEN)}


def check(folder: Path, read: Callable[[Path], None]) -> None:
    """Reads: what is wrong is said in a sentence, soon, and then all is as it was."""
    before = contents(folder)
    old = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        read(folder)
    except Exception as error:
        said = describe_expected_error(error)
        if not said or isinstance(error, TimeoutError):
            raise
        assert len(said) < 1500
        after = contents(folder)
        assert all(after.get(name, b"").startswith(data) for name, data in before.items())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_the_files_that_are_changed_are_read(good, tmp_path):
    for name, read in READERS.items():
        read(copied(good, tmp_path, name)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_JSON)
@given(line=st.integers(0, 20), changes=CHANGES)
@hypothesis_settings(10)
def test_any_value_at_any_place_of_a_document(good, tmp_path, name, line, changes):
    folder, path = copied(good, tmp_path, name)
    whole = path.read_bytes()
    parts = whole.splitlines(keepends=True) if name.endswith(".jsonl") else [whole]
    at = line % len(parts)
    parts[at] = as_text(changed(json.loads(parts[at]), changes)) + b"\n"
    path.write_bytes(b"".join(parts))
    check(folder, READERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
@given(change=BYTES)
@hypothesis_settings(5)
def test_any_bytes_at_any_place_of_a_file(good, tmp_path, name, change):
    folder, path = copied(good, tmp_path, name)
    start, cut, put = change
    whole = path.read_bytes()
    at = int(start * len(whole))
    path.write_bytes(whole[:at] + put + whole[at + cut :])
    check(folder, READERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_such_file(good, tmp_path, name):
    for kind in ("gone", "empty", "a folder", "a link to itself", "a device"):
        folder, path = copied(good, tmp_path, name)
        path.unlink()
        if kind == "empty":
            path.touch()
        elif kind == "a folder":
            path.mkdir()
        elif kind != "gone":
            path.symlink_to("/dev/null" if kind == "a device" else path.name)
        check(folder, READERS[name])
