"""No text becomes a token with a meaning, however that was added; all else stays as it is."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from dlm_rag import Decoder, Denoiser, load_retriever
from dlm_rag.config import DecodeConfig
from dlm_rag.errors import CheckpointError, QuestionError
from dlm_rag.model.families import FAMILIES, find_family
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.tokenizer.prompts import PromptTemplate
from tests.support.passages import write_jsonl_file
from tests.support.properties import hypothesis_settings
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser

MASK, END = "<mask>", "<end>"
WORDS = "who wrote Emma a b < > ask <m k> m s k e n d </s> |".split()


def byte_level():
    """Byte pairs that can spell the mask by merges, and find it whole."""
    alphabet = json.loads(byte_tokenizer().backend_tokenizer.to_str())["model"]["vocab"]
    parts = ["<m", "as", "<mas", "k>", MASK, "<e", "nd", "nd>", END, f"{MASK}a", "wr"]
    merges = [("<", "m"), ("a", "s"), ("<m", "as"), ("k", ">"), ("<mas", "k>"), ("<", "e"), ("n", "d")]
    merges += [("nd", ">"), ("<e", "nd>"), (MASK, "a"), ("w", "r")]
    vocabulary = alphabet | {part: 256 + n for n, part in enumerate(parts)}
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return backend


ADDED = {
    "in the vocabulary alone": [],
    "special": [AddedToken(name, special=True) for name in (MASK, END, "<|im_end|>")],
    "not special": [
        AddedToken(MASK), AddedToken(END, normalized=True), AddedToken("<tool>", normalized=True)
    ],
    "stripping": [
        AddedToken(MASK, lstrip=True, rstrip=True, special=True), AddedToken(END, lstrip=True),
        AddedToken("ask>", single_word=True),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def made():
    """How it was added -> our tokenizer, one each."""
    found = {}
    for added, tokens in ADDED.items():
        backend = byte_level()
        backend.add_tokens(tokens)
        inner = PreTrainedTokenizerFast(tokenizer_object=backend)
        mask, end = backend.token_to_id(MASK), backend.token_to_id(END)
        found[added] = Tokenizer(inner, mask, PromptTemplate("{question}", "{passage}"), (end,))
    return found


MARKERS = [MASK, END, "<|im_end|>", "<tool>", "ask>", "<MASK>", "＜mask＞", f" {MASK} ", f"{MASK}a", "<ma"]
PARTS = st.sampled_from([*MARKERS, *WORDS, " ", "\n", "é", "\0"]) | st.text(max_size=3)
TEXTS = st.lists(PARTS).map("".join)


@pytest.mark.parametrize("added", ADDED)
@given(text=TEXTS)
@hypothesis_settings(60)
def test_no_text_becomes_a_token_with_a_meaning(made, added, text):
    tokenizer = made[added]
    control = {tokenizer.mask_id, *tokenizer.end_ids}
    assert control <= tokenizer._plain.meaning
    assert not tokenizer._plain.meaning & set(tokenizer.encode_uncached(text))
    for prompt in (tokenizer.build_prompt("who", [text, "a"]), tokenizer.build_prompt(f"{text}?", ["a"])):
        assert not tokenizer._plain.meaning & set(prompt.ids)


@pytest.mark.parametrize("added", ADDED)
@given(
    text=st.lists(st.sampled_from([*WORDS[:5], " ", "\n", "é", "日"]) | st.text("abcdehorw \n", max_size=3))
)
@hypothesis_settings(30)
def test_text_without_markers_is_encoded_as_by_the_whole_tokenizer(made, added, text):
    tokenizer, text = made[added], "".join(text)
    assert list(tokenizer.encode_uncached(text)) == tokenizer.inner.encode(text, add_special_tokens=False)


def test_the_whole_tokenizers_do_make_tokens_of_markers(made):
    """What the tests above hold is not so by itself."""
    for tokenizer in made.values():
        ids = tokenizer.inner.encode(f"a {MASK} b", add_special_tokens=False)
        assert tokenizer.mask_id in ids


def test_white_space_and_characters_that_were_added_stay_text():
    backend = byte_level()
    backend.add_tokens([AddedToken("é"), AddedToken("  ")])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), 260)
    assert bytes(tokenizer.encode_uncached("é  é")) == "é  é".encode()


def test_runs_of_blanks_that_were_added_as_gemma_writes_them_keep_their_tokens():
    pieces = ["<mask>", "<end>", "▁", "▁▁", "▁▁▁", "a", "b"]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, [("▁", "▁"), ("▁▁", "▁")]))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in pieces[3:5]])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), 0, end_ids=(1,))
    for text in ("a b", "a  b", "a   b"):
        assert [*tokenizer.encode_uncached(text)] == tokenizer.inner.encode(text)
        assert len(tokenizer.encode_uncached(text)) == 3


@pytest.mark.parametrize(
    ("change", "mask", "says"),
    [
        ({"unk_token": MASK}, 260, "what the tokenizer makes of unknown characters"),
        ({"dropout": 0.5}, 260, "drops merges at random"),
        ({}, ord("a"), "'a' is the model's mask .* a single character"),
        ({}, 999, "mask_token_id=999 is not a token"),
        ({"type": "Unigram", "vocab": [["<unk>", 0.0], [MASK, 0.0]]}, 1, "Unigram: only BPE is read"),
    ],
)
def test_a_tokenizer_that_no_text_is_safe_with_is_refused(change, mask, says):
    raw = json.loads(byte_level().to_str())
    raw["model"] |= change
    inner = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(json.dumps(raw)))
    with pytest.raises(CheckpointError, match=says):
        Tokenizer(inner, mask)


def test_special_tokens_that_nobody_declares_are_left_out_of_answers():
    backend = byte_tokenizer().backend_tokenizer
    backend.add_special_tokens(["<|turn|>"])
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="<mask>", eos_token="<end>")
    turn = backend.token_to_id("<|turn|>")
    assert turn not in inner.all_special_ids, "else this test shows nothing"
    tokenizer = Tokenizer(inner, 256)
    assert tokenizer.decode_with_offsets([*b"Austen", turn])[0] == "Austen"
    assert tokenizer.query_text([*b"a", turn, *b"b"]) == "a b"


def test_one_question_that_the_tokenizer_fails_at_fails_alone(tmp_path):
    """The letter ß has an id that the model does not have."""
    raw = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    raw["model"]["vocab"]["Ã"] = 9000
    tiny_denoiser().save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(json.dumps(raw))).save_pretrained(tmp_path)
    lines = [{"id": "a", "contents": "Emma is a novel."}, {"id": "b", "contents": "The Spaß is a passage."}]
    corpus = write_jsonl_file(tmp_path / "corpus.jsonl", lines)
    decoder = Decoder(
        Denoiser.from_pretrained(tmp_path), load_retriever(corpus, top_k=1),
        Tokenizer.from_pretrained(tmp_path), DecodeConfig(max_new_tokens=8),
    )  # fmt: skip
    asked = decoder.decode(["Emma, a novel", "Straße?", "passage"])
    assert [bool(rollout.error) for rollout in asked] == [False, True, True]
    assert "gives the id 9000, but the model has 258" in asked[1].error
    assert asked[0].tokens_committed == 8


def test_a_pattern_that_panics_is_an_error_of_its_question():
    """Patterns that go astray end by themselves: the library gives up after so many steps, and panics."""
    from tokenizers import Regex

    backend = byte_tokenizer().backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("(a+)+$"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), 256)
    assert tokenizer.encode("Emma")
    with pytest.raises(QuestionError, match="the tokenizer fails: .*retry-limit"):
        tokenizer.encode("a" * 40 + "b")


def test_what_marks_a_turn_is_no_text_though_nobody_declares_it():
    """A piece of the vocabulary as any other, but for the chat template that has it."""
    raw = json.loads(byte_level().to_str())
    turn = raw["model"]["vocab"]["<|turn|>"] = len(raw["model"]["vocab"])
    inner = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(json.dumps(raw)))
    for template, marked in (("<|turn|>{{ messages[0].content }}", True), (None, False)):
        inner.chat_template = template
        tokenizer = Tokenizer(inner, 260, PromptTemplate("{question}", "{passage}"), (264,))
        assert (turn in tokenizer.build_prompt("who", []).ids) == marked
        assert (turn in tokenizer.encode("<|turn|>")) != marked


QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</tool_call>")
ROLES = ("<|endoftext|>", "<role>", "</role>", "<|role_end|>")
SPECIAL = {  # of the public tokenizers: the mask, what ends texts, what else has a meaning
    "dlm_rag": ("<mask>", "<end>"), "sdar": ("<|MASK|>", *QWEN, "<|fim_middle|>"),
    "llada": ("<|mdm_mask|>", "<|endoftext|>", "<|eot_id|>", "<|start_header_id|>", "[gMASK]"),
    "Dream": ("<|mask|>", *QWEN, "<|beginoftext|>"), "sdar_moe": ("<|MASK|>", *QWEN),
    "Fast_dLLM_Qwen": ("|<MASK>|", *QWEN), "qwen3": ("<|mask|>", *QWEN),
    "diffusion_gemma": ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|image|>"),
    "llama": ("<|mask|>", "<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>"),
    "qwen2": ("<|mask|>", *QWEN), "lladamoe": ("<|mask|>", *ROLES), "llada2_moe": ("<|mask|>", *ROLES),
    "nemotron_labs_diffusion": ("<SPECIAL_100>", "</s>", "<s>", "[INST]", "[/INST]"),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_no_text_becomes_a_special_token_of_any_family(family):
    """Byte pairs, as all public ones are, that find whole what was added, in text that spells it too."""
    names = SPECIAL[family.removeprefix("a2d-")]
    assert find_family({"model_type": family}).mask_token in (None, names[0])
    backend = byte_tokenizer().backend_tokenizer
    backend.add_tokens([AddedToken(name, special=n < 3) for n, name in enumerate(names)])
    ids = [backend.token_to_id(name) for name in names]
    inner = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer = Tokenizer(inner, ids[0], PromptTemplate("{question}", "{passage}"), (ids[1],))
    text = f"who {' '.join(names)} wrote{names[0]}\n{''.join(names)}"
    assert set(ids) <= set(inner.encode(text)), "else this test shows nothing"
    prompt = tokenizer.build_prompt(text, [text, names[1]])
    for found in (tokenizer.encode(text), prompt.ids):
        assert set(ids).isdisjoint(found) and max(found) < 256
