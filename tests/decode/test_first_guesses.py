"""What somebody who knows Hugging Face types first, by guess: it works, or says the right name."""

import copy
import math
from pathlib import Path

import pytest
import torch
import transformers

import dlm_rag
from dlm_rag import DecodeConfig, Decoder, Denoiser, Question, Tokenizer, load_retriever
from dlm_rag.errors import UserError
from tests.support.tiny_diffusion_gemma import write_tiny_gemma
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser, write_autoregressive_checkpoint

TEXTS = ["Emma is a novel by Jane Austen.", "Bees make honey.", "Kellerup is a town on a fjord."]
BEIR = [{"_id": "d1", "text": "x"}, {"text": None}]
DICTS = [{"text": text, "title": f"t{n}"} for n, text in enumerate(TEXTS)]
ASKED = "Who wrote Emma?"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a tiny checkpoint, a folder of notes and a file of passages."""
    folder = tmp_path_factory.mktemp("first")
    tiny_denoiser(max_position_embeddings=2048, canvas_length=8).save_pretrained(
        folder / "model", eos_token_id=257
    )
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "notes").mkdir()
    (folder / "notes" / "a.md").write_text("# Emma\n\nEmma is a novel by Jane Austen.\n")
    (folder / "corpus.jsonl").write_text('{"id": "1", "contents": "Emma is a novel."}\n')
    return folder


@pytest.fixture(scope="module")
def decoder(home):
    return dlm_rag.load(home / "model", corpus=TEXTS)


@pytest.fixture(scope="module")
def rollout(decoder):
    return decoder.ask(ASKED)


class Table:  # what pandas' tables have
    columns = ("text",)

    def to_dict(self, form):
        return [{"text": text} for text in TEXTS]


class Document:  # of LangChain
    def __init__(self, text):
        self.page_content, self.metadata = text, {"title": "notes"}


def load(home, **settings):
    return dlm_rag.load(str(home / "model"), **settings)


GUESSES = {
    "load, a list of texts": lambda home, d, r: load(home, corpus=TEXTS).ask(ASKED).steps,
    "load, a list of dicts": lambda home, d, r: load(home, corpus=DICTS).ask(ASKED).steps,
    "load, a file": lambda home, d, r: load(home, corpus=str(home / "corpus.jsonl")).ask(ASKED).steps,
    "load, documents of LangChain": lambda home, d, r: (
        load(home, corpus=[Document(text) for text in TEXTS]).retriever.corpus[1].title == "notes"
    ),
    "load, texts by their ids": lambda home, d, r: (
        [p.id for p in load(home, corpus={"a": TEXTS[0], "b": TEXTS[1]}).retriever.corpus] == ["a", "b"]
    ),
    "load, an id by another name": lambda home, d, r: (
        load(home, corpus=[{"docid": "d7", "text": TEXTS[0], "contents": ""}]).retriever.corpus[0].id
        == "d7"
    ),
    "load, one dict": lambda home, d, r: load(home, corpus=DICTS[0]).retriever.corpus[0].title == "t0",
    "load, dicts with page_content": lambda home, d, r: load(home, corpus=[{"page_content": TEXTS[0]}]),
    "load, columns": lambda home, d, r: (
        len(load(home, corpus={"text": TEXTS}).retriever.corpus) == len(TEXTS)
    ),
    "load, a folder": lambda home, d, r: load(home, corpus=home / "notes").ask(ASKED).steps,
    "load, a retriever": lambda home, d, r: load(home, corpus=d.retriever).retriever is d.retriever,
    "load, settings": lambda home, d, r: (
        load(home, corpus=TEXTS, top_k=2, commit_threshold=0.8).config.commit_threshold == 0.8
    ),
    "load, dtype and device": lambda home, d, r: (
        load(home, corpus=TEXTS, dtype="bfloat16", device="cpu").denoiser.dtype == torch.bfloat16
    ),
    "load, what ships": lambda home, d, r: (
        len(dlm_rag.load("./dlm_rag/shipped/model/").retriever.corpus) == 2000
    ),
    "Decoder.from_pretrained": lambda home, d, r: Decoder.from_pretrained(
        str(home / "model"), corpus=TEXTS, dtype="float32", device="cpu"
    ),
    "Denoiser.from_pretrained": lambda home, d, r: (
        Denoiser.from_pretrained(str(home / "model"), dtype="bfloat16", device="cpu").dtype
        == torch.bfloat16
    ),
    "Tokenizer.from_pretrained": lambda home, d, r: Tokenizer.from_pretrained(str(home / "model")),
    "calling it": lambda home, d, r: d(ASKED).steps,
    "decode, a text": lambda home, d, r: len(d.decode(ASKED)) == 1,
    "decode, texts": lambda home, d, r: len(d.decode([ASKED, "Who?"])) == 2,
    "decode, a question": lambda home, d, r: d.decode(Question("7", ASKED))[0].id == "7",
    "ask, a dict": lambda home, d, r: d.ask({"question": ASKED, "_id": 0}).id == "0",
    "decode, dicts": lambda home, d, r: [x.id for x in d.decode([{"text": ASKED}, "a?"])] == ["q1", "q2"],
    "decode, a generator": lambda home, d, r: len(d.decode(text for text in (ASKED, "a?"))) == 2,
    "ask, settings": lambda home, d, r: d.ask(ASKED, max_new_tokens=4).canvas_length == 4,
    "stream, texts": lambda home, d, r: (
        [x.id for x in d.stream(["a?", "b?"], batch_size=1)] == ["q1", "q2"]
    ),
    "DecodeConfig": lambda home, d, r: Decoder(
        d.denoiser, d.retriever, d.tokenizer, DecodeConfig(commit_threshold=0.8)
    ),
    "search, a text": lambda home, d, r: d.retriever.search("honey")[0].text == TEXTS[1],
    "search, texts": lambda home, d, r: (
        [found[0].text for found in d.retriever.search(["honey", "fjord"])] == TEXTS[1:]
    ),
    "load_retriever, texts": lambda home, d, r: load_retriever(TEXTS, top_k=1).search("honey"),
    "load_retriever, a folder": lambda home, d, r: load_retriever(str(home / "notes")).search("Emma"),
    "load_retriever, a table": lambda home, d, r: len(load_retriever(Table()).corpus) == 3,
    "Question, one answer": lambda home, d, r: Question("1", "x", "Jane") == Question("1", "x", ["Jane"]),
    "ask, a table": lambda home, d, r: d.decode(Table())[1].question == "Bees make honey.",
    "load_retriever, BEIR": lambda home, d, r: [p.id for p in load_retriever(BEIR).corpus] == ["d1"],
    "keys that are numbers": lambda home, d, r: load_retriever([{"text": "x", 1: 2, "title": math.nan}]),
    "abstained": lambda home, d, r: r.abstained is False and r.closest == [],
    "to_dict": lambda home, d, r: r.to_dict()["question"] == ASKED,
    "to_rows": lambda home, d, r: [row["step"] for row in r.to_rows()] == [*range(len(r.steps))],
    "repr of a rollout": lambda home, d, r: ASKED in repr(r) and len(repr(r)) < 200,
    "print of a rollout": lambda home, d, r: str(r) == (r.answer or r.response),
    "types": lambda home, d, r: (Path(dlm_rag.__file__).parent / "py.typed").is_file(),
}


@pytest.mark.parametrize("guess", GUESSES.values(), ids=GUESSES)
def test_a_first_guess_works(home, decoder, rollout, guess):
    assert guess(home, decoder, rollout)


ELSEWHERE = {
    "generate of the decoder": (lambda d, r: d.generate(ASKED), "ask"),
    "generate of the model": (lambda d, r: d.denoiser.generate(ASKED), "dlm_rag.load"),
    "pipeline": (lambda d, r: dlm_rag.pipeline, "dlm_rag.load"),
    "retrieve": (lambda d, r: d.retriever.retrieve(ASKED), "search"),
    "text of a rollout": (lambda d, r: r.text, "response"),
    "a list for a model": (lambda d, r: dlm_rag.load(TEXTS), "load(corpus=...)"),
    "a text for a corpus": (lambda d, r: load_retriever(TEXTS[0]), "corpus=[text]"),
    "a list for a retriever": (lambda d, r: Decoder(d.denoiser, TEXTS, d.tokenizer), "load_retriever"),
    "an open file": (lambda d, r: load_retriever(open(__file__)), "give a file"),  # noqa: PTH123, SIM115
    "columns that differ": (lambda d, r: load_retriever({"text": TEXTS, "id": ["a"]}), "in length"),
    "k of a search": (lambda d, r: d.retriever.search(ASKED, k=1), "top_k"),
    "page_content": (lambda d, r: d.retriever.search("honey")[0].page_content, "use text"),
    "metadata": (lambda d, r: d.retriever.search("honey")[0].metadata, "title"),
    "device": (lambda d, r: d.device, "denoiser.device"),
    "ainvoke": (lambda d, r: d.ainvoke(ASKED), "ask(question)"),
    "logprobs": (lambda d, r: r.logprobs, "log_prob"),
    "eval": (lambda d, r: d.eval(), "as it is"),
    "deepcopy": (lambda d, r: copy.deepcopy(d), "share it"),
    "decoder.to": (lambda d, r: d.to("cuda"), "device="),
    "a setting of the retriever": (lambda d, r: d.decode([ASKED], top_k=2), "no setting 'top_k'"),
    "a setting misspelled": (lambda d, r: d.decode([ASKED], comit_threshold=1), "'commit_threshold'"),
    "torch_dtype": (lambda d, r: dlm_rag.load("x", TEXTS, torch_dtype="bfloat16"), "'dtype'"),
    "a dtype": (lambda d, r: Denoiser.from_pretrained("dlm_rag/shipped/model", dtype="half"), "float16"),
    "no corpus": (lambda d, r: dlm_rag.load("x"), "x"),
    "a corpus of numbers": (lambda d, r: load_retriever([1, 2]), "passage 1"),
    "ask, several": (lambda d, r: d.ask([[ASKED]]), "decode()"),
    "ask, nothing": (lambda d, r: d.ask(None), "question 1 is NoneType"),
    "ask, a dict of another kind": (lambda d, r: d.ask({"topic": ASKED}), "no 'question'"),
    "search, nothing": (lambda d, r: d.retriever.search(None), "NoneType"),
    "a corpus that is a number": (lambda d, r: load_retriever(corpus=3), "list of texts"),
    "a corpus of bytes": (lambda d, r: load_retriever(corpus=b"Emma"), "list of texts"),
    "invoke": (lambda d, r: d.invoke(ASKED), "ask"),
    "cuda": (lambda d, r: d.cuda(), "device="),
    "source_documents": (lambda d, r: r.source_documents, "passages"),
    "UserError at the top": (lambda d, r: dlm_rag.UserError, "dlm_rag.errors.UserError"),
    "train at the top": (lambda d, r: dlm_rag.train, "dlm-rag train"),
    "load_in_8bit": (lambda d, r: dlm_rag.load("x", TEXTS, load_in_8bit=True), "'quantize'"),
    "an empty corpus": (lambda d, r: load_retriever([]), "no passages"),
    "a list of files": (lambda d, r: load_retriever([__file__]), "a list of files"),
    "half of a character": (lambda d, r: load_retriever(["\ud800"]), "half of a character"),
    "search, a dict": (lambda d, r: d.retriever.search({"query": ASKED}), "a query is dict"),
    "an empty model": (lambda d, r: dlm_rag.load("", TEXTS), "empty"),
    "no text": (lambda d, r: Question("q", None), "NoneType"),
    "no effect": (lambda d, r: dlm_rag.load("x", TEXTS, abstain="never", answer_threshold=0.9), "abstain"),
    "none here": (lambda d, r: d.ask(ASKED, answer_threshold=0.9), "decode.abstain=never"),
    "schedule": (lambda d, r: d.ask(ASKED, schedule="rounded"), "steps_per_block"),
    "model": (lambda d, r: dlm_rag.load("x", TEXTS, embedding_model="y"), "retrieval.method"),
    "timeout": (lambda d, r: load_retriever(TEXTS, timeout=3), "retrieval.url"),
    "top_k": (lambda d, r: dlm_rag.load("dlm_rag/shipped/model", d.retriever, top_k=1), "no effect"),
}


@pytest.mark.parametrize(("guess", "said"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_is_not_offered_says_the_right_name(decoder, rollout, guess, said):
    with pytest.raises((UserError, AttributeError)) as caught:
        guess(decoder, rollout)
    assert said in str(caught.value)


def test_a_layout_that_the_model_was_not_trained_with_is_said(home, decoder, capsys):
    load(home, corpus=decoder.retriever, evidence_layout="independent")
    assert "the model was trained with joint" in capsys.readouterr().err
    load(home, corpus=decoder.retriever, evidence_layout="joint")
    assert "trained with" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        (
            "masked",
            {"cache_dtype": "int8"},
            "engine.cache_dtype=int8 has no effect with evidence_layout=joint",
        ),
        ("masked", {"store": "kept"}, "engine.store=kept has no effect"),
        ("gemma", {"quantize": "int8"}, "model.quantize=int8 has no effect on a model that denoises"),
        ("gemma", {"device_map": "cuda:0"}, "model.device_map=cuda:0"),
        ("gemma", {"prefix_cache_gib": 0.5}, "engine.prefix_cache_gib=0.5"),
        ("gemma", {"evidence_layout": "independent"}, "model.evidence_layout=independent"),
        ("qwen", {"block_size": 32}, "model.block_size has no effect on an autoregressive model"),
    ],
    ids=str,
)
def test_load_refuses_settings_that_the_model_does_not_read(home, tmp_path, model, settings, says):
    folder = home / "model"
    if model == "gemma":
        folder = write_tiny_gemma(tmp_path)
    elif model == "qwen":
        kinds = transformers.Qwen2Config, transformers.Qwen2ForCausalLM
        folder = write_autoregressive_checkpoint(tmp_path, *kinds)[0]
    with pytest.raises(UserError, match=says):
        dlm_rag.load(folder, corpus=TEXTS, device="cpu", **settings)
