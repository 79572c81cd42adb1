"""The prompt in segments against the whole text, and text that tries to be more than text."""

import json

import pytest

from dlm_rag.errors import CheckpointError
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.tokenizer.prompts import PromptTemplate
from tests.support.paths import ROOT
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser, tiny_tokenizer


@pytest.mark.parametrize("name", ["tiny-dream", "tiny-llada"])
def test_segments_give_the_ids_of_the_whole_text_on_real_passages(golden, real, name):
    tokenizer = Tokenizer.from_pretrained(golden / "checkpoints" / name)
    passages = open_corpus(real / "2wikimultihopqa" / "corpus.jsonl")
    for start in range(0, 210, 7):
        texts = [passage.text for passage in passages[start : start + 7]]
        question = f"Who is “Zoë” ({start})?"
        facts = "\n".join(f"[{n}] {text.strip()}" for n, text in enumerate(texts, start=1))
        content = (
            "Use ONLY the provided facts to answer the question.\n"
            'Think step-by-step, then provide the final answer after the "###" marker.\n\n'
            f"Question:\n{question}\n\nFacts:\n{facts}"
        )
        whole = tokenizer.inner.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=True
        )
        assert tokenizer.build_prompt(question, texts).ids == whole["input_ids"]


def test_a_folder_with_vocab_and_merges_reads_like_one_with_tokenizer_json(golden, tmp_path):
    """Dream's own folder has no tokenizer.json and names a tokenizer class of its own code."""
    source = golden / "checkpoints" / "tiny-dream"
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    code = {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}
    settings |= {"tokenizer_class": "DreamTokenizer", "auto_map": code}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("config.json", "model.safetensors", "generation_config.json", "special_tokens_map.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    ours, theirs = Tokenizer.from_pretrained(tmp_path), Tokenizer.from_pretrained(source)
    for text in ("Who wrote “Emma” in 1815?", "naïve café\n\n  x  1,234"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.end_ids == theirs.end_ids and ours.mask_id == theirs.mask_id
    assert ours.build_prompt("a", ["b"]).ids == theirs.build_prompt("a", ["b"]).ids


def test_spans_cover_the_text_also_where_a_character_has_several_tokens():
    tokenizer = tiny_tokenizer()
    ids = [*"aé€".encode(), 256, *b"z"]
    text, spans = tokenizer.decode_with_offsets(ids)
    assert text == "aé€z"
    assert spans == [(0, 1), (1, 1), (1, 2), (2, 2), (2, 2), (2, 3), (3, 3), (3, 4)]


def test_template_is_data_of_the_checkpoint_and_is_checked():
    assert PromptTemplate.from_checkpoint(None, "joint").numbers_facts
    assert not PromptTemplate.from_checkpoint(None, "independent").numbers_facts
    for raw, layout, says in (
        ({"haed": "{question}"}, "joint", "haed"), ({"head": 3}, "joint", "must hold texts"),
        ({"head": "x"}, "joint", "needs {question} once"),
        ({"fact": "[{number}] {passage}"}, "independent", "must not depend on its rank"),
        ({"fact": "{number}. {passage}"}, "parallel", "must not depend on its rank"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=says):
            PromptTemplate.from_checkpoint(raw, layout)


def test_braces_in_a_question_are_only_braces():
    tokenizer = tiny_tokenizer(PromptTemplate(head="Q {question} {json}\n", fact="{passage}"))
    prompt = tokenizer.build_prompt("{number} {0}", ["{question}"])
    assert bytes(prompt.ids) == b"Q {number} {0} {json}\n{question}\n"


def test_an_autoregressive_checkpoint_is_no_denoiser_yet(tmp_path):
    tiny_denoiser(mask_token_id=None).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no mask_token_id"):
        Tokenizer.from_pretrained(open_checkpoint(tmp_path))


def test_a_broken_tokenizer_is_named(tmp_path):
    tiny_denoiser().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("Who directed Night Ferry?", False),
        ("Qui a écrit « Les Misérables » à Liège ?", False),
        ("1, 2 + 3?", False),
        ("Who wrote 紅樓夢, a novel?", False),  # most letters are read
        ("亚洲最长的河流是什么？", True),
        ("भारत की राजधानी क्या है?", True),
    ],
)
def test_a_script_that_is_spelled_letter_by_letter_is_said(text, spelled):
    tokenizer = Tokenizer.from_pretrained(ROOT / "dlm_rag" / "shipped" / "model")
    assert tokenizer.spells_letters(text) == spelled
