"""`dlm-rag data` against a hub on this machine, by the public client; and evaluations by name."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlm_rag.commands import evaluate
from dlm_rag.errors import ConfigError
from dlm_rag.questions import read_questions
from tests.support.commands import model  # noqa: F401
from tests.support.fake_hub import FakeHub, serve_hub
from tests.support.passages import PASSAGES

FLASHRAG, WIKI, SARDI = "RUC-NLPIR/FlashRAG_datasets", "PeterJinGo/wiki-18-corpus", "pauljngr/sardi-data"


def lines(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def multi_hop(count, *kinds):
    """FlashRAG's lines over the passages of the tests."""
    return lines(
        {
            "id": f"dev_{n}",
            "question": f"Who wrote Emma, number {n}?",
            "golden_answers": ["Jane Austen"],
            "metadata": {
                "type": kinds[n % len(kinds)],
                "supporting_facts": {"title": ["Emma", "Jane Austen"], "sent_id": [0, 0]},
                "context": {"title": ["Emma", "Dune"], "sentences": [["A novel."], ["Sand.", "Much."]]},
            },
        }
        for n in range(count)
    )


def single_hop(count):
    return lines(
        {"id": f"test_{n}", "question": f"Who? {n}", "golden_answers": ["x"]} for n in range(count)
    )


def make_hub() -> FakeHub:
    wiki = lines(
        {"id": str(n), "contents": f'"{title}"\n{text}'} for n, (_, title, text) in enumerate(PASSAGES)
    )
    questions = {
        "README.md": b"# cards",
        "hotpotqa/dev.jsonl": multi_hop(3, "bridge", "comparison"),
        "hotpotqa/train.jsonl": single_hop(1),
        "2wikimultihopqa/dev.jsonl": multi_hop(4, "compositional", "bridge_comparison"),
        "bamboogle/test.jsonl": single_hop(2),
        "nq/test.jsonl": single_hop(1003),
        "nq/dev.jsonl": single_hop(1),
    }
    return FakeHub({FLASHRAG: questions, WIKI: {"wiki-18.jsonl.gz": gzip.compress(wiki)}})


@pytest.fixture
def hub():
    with serve_hub(make_hub()) as served:
        yield served


def call(hub, folder, *words, offline=False):
    """`dlm-rag data` in a process of its own, which asks the hub of this machine."""
    hubs = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": str(int(offline)), "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        [sys.executable, "-m", "dlm_rag", "data", *words], cwd=folder, env=os.environ | hubs,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def found_files(folder: Path) -> set[str]:
    """Without the notes of the hub's client."""
    files = (path.relative_to(folder) for path in (folder / "data").rglob("*") if path.is_file())
    return {str(path) for path in files if ".cache" not in path.parts}


def fetched(hub) -> list[str]:
    return [
        path.rpartition("/resolve/")[2][41:]
        for method, path in hub.asked
        if method == "GET" and "/resolve/" in path
    ]


@pytest.mark.slow
def test_what_is_fetched_is_said_before(hub, tmp_path):
    code, out, err = call(hub, tmp_path, "get", "hotpotqa", "2wiki", "bamboogle", "wiki18")
    assert code == 0, err
    wanted = ["hotpotqa/dev.jsonl", "2wikimultihopqa/dev.jsonl", "bamboogle/test.jsonl", "wiki-18.jsonl.gz"]
    assert fetched(hub) == wanted, "one split of each, nothing else of the repository"
    for name in wanted:
        repository = WIKI if "wiki-18" in name else FLASHRAG
        assert (tmp_path / "data" / name).read_bytes() == hub.files[repository][name]
        assert f"data/{name}" in out and hub.revision(repository)[:12] in out
    assert out.index("to fetch:") < out.index("is there") and "has 3 questions, 7,405 were published" in err
    hub.asked.clear()
    hub.files[FLASHRAG]["hotpotqa/dev.jsonl"] = multi_hop(5, "bridge")
    assert call(hub, tmp_path, "get", "hotpotqa", "wiki18")[0] == 0 and fetched(hub) == []


@pytest.mark.slow
def test_the_first_thousand_are_lines_of_the_whole(hub, tmp_path):
    assert call(hub, tmp_path, "get", "--split", "flashrag_1000", "nq")[0] == 0
    whole, first = (tmp_path / "data/nq" / name for name in ("test.jsonl", "test.first_1000.jsonl"))
    assert whole.read_bytes().startswith(first.read_bytes())
    assert [q.id for q in read_questions(first)] == [f"test_{n}" for n in range(1000)]


@pytest.mark.slow
def test_offline_what_is_here_is_enough(hub, tmp_path):
    assert call(hub, tmp_path, "get", "bamboogle")[0] == 0
    hub.asked.clear()
    code, _, err = call(hub, tmp_path, "get", "bamboogle", offline=True)
    assert code == 0 and not hub.asked, err
    code, _, err = call(hub, tmp_path, "get", "2wiki", offline=True)
    assert code == 2 and "HF_HUB_OFFLINE is set" in err


def gate(hub):
    hub.status[FLASHRAG] = (403, "GatedRepo")


BAD = {
    "gated": (gate, "get hotpotqa", "is gated: ask for access there"),
    "missing file": (
        lambda hub: hub.files[FLASHRAG].pop("nq/test.jsonl"),
        "get nq",
        "has no nq/test.jsonl",
    ),
    "unknown name": (lambda hub: None, "get hotpotq", "nearest: 'hotpotqa'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD)
def test_what_goes_wrong_is_a_sentence_and_leaves_nothing(hub, tmp_path, case):
    spoil, words, says = BAD[case]
    spoil(hub)
    code, _, err = call(hub, tmp_path, *words.split())
    assert code == 2 and says in err and "Traceback" not in err and err.count("error: ") == 1
    assert not (tmp_path / "data").exists() or not found_files(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bamboogle/test.jsonl", ".cache/huggingface/download/x.lock"])
def test_links_and_pipes_are_not_written_through(hub, tmp_path, name):
    """Where the hub's client or this program writes."""
    (mine := tmp_path / "mine").write_text("mine")
    path = tmp_path / "data" / name
    path.parent.mkdir(parents=True)
    if path.suffix == ".lock":
        os.mkfifo(path)
    else:
        path.symlink_to(mine)
    code, _, err = call(hub, tmp_path, "get", "bamboogle")
    assert code == 2 and "is no regular file" in err and "Traceback" not in err
    assert mine.read_text() == "mine" and not fetched(hub)


@pytest.mark.slow
@pytest.mark.parametrize(
    "headers", [{"X-Repo-Commit": "\x1b[31m"}, {"X-Linked-Etag": "../../x"}, {"X-Linked-Size": "9" * 400}]
)
def test_odd_headers_of_a_hub_are_a_sentence(hub, tmp_path, headers):
    hub.headers = headers
    code, out, err = call(hub, tmp_path, "get", "bamboogle")
    assert code == 2 and "Traceback" not in err and err.count("error: ") == 1
    assert "\x1b" not in out + err


@pytest.mark.slow
def test_blank_lines_have_an_end(hub, tmp_path):
    hub.files[FLASHRAG]["bamboogle/test.jsonl"] = b"\n" * 20_000_000
    code, _, err = call(hub, tmp_path, "get", "bamboogle")
    assert code == 2 and "1,000,000 blank lines" in err


@pytest.fixture
def laid_out(tmp_path, monkeypatch):
    """The files of `data get` without cards, as the hub's own client leaves them too."""
    for files in make_hub().files.values():
        for name, data in files.items():
            path = tmp_path / "data" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DLM_RAG_CACHE", str(tmp_path / "cache"))
    return tmp_path


def evaluate_by_name(checkpoint, *words, out="runs"):
    common = ["--model", str(checkpoint), "decode.max_new_tokens=6", "retrieval.top_k=2"]
    evaluate.main([*words, *common, "--out", out])


@pytest.mark.slow
def test_a_data_set_by_name_is_scored_by_titles(laid_out, model, capsys):  # noqa: F811
    for name, count, group in (("hotpotqa", 3, "bridge"), ("2wiki", 4, "4 hops")):
        evaluate_by_name(
            model, "--dataset", name, "--corpus", "wiki18", "--compare", "static,oracle", out=name
        )
        record = json.loads(Path(f"{name}/scores.json").read_text())
        assert group in record["questions"]
        assert record["questions"]["all"] == count and record["questions_of"] == f"{name}, search_r1"
        assert record["f1_rule"] == "hotpotqa"
        assert record["recall_by"] == {"id": 0, "title": count}
        recall = {key: s["groups"]["all"]["recall_last"]["mean"] for key, s in record["settings"].items()}
        assert recall["oracle"] == 1.0 and recall["static"] > 0, "by title, on quoted titles"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--dataset musique --corpus wiki18", "`dlm-rag data get musique` brings it"),
        ("--dataset nq --questions q.jsonl --corpus wiki18", "leave --questions out"),
        ("--dataset bamboogle --corpus wiki18 --compare static,oracle", "'test_0' has no supporting_ids"),
        ("--corpus context", "--questions FILE"),
    ],
)
def test_a_name_without_its_files_says_what_brings_them(laid_out, model, words, says):  # noqa: F811
    with pytest.raises(ConfigError, match=says):
        evaluate_by_name(model, *words.split())
    assert not Path("runs").exists()
