"""Documents: packed without padding, following from the number of the sequence."""

from collections import Counter

import pytest

from dlm_rag.config import TrainConfig
from dlm_rag.errors import ConfigError, CorpusError
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.training.documents import PackedDocuments, open_token_file
from tests.support.passages import write_jsonl_file
from tests.support.tiny_models import byte_tokenizer, tiny_tokenizer

TEXTS = [f"document {n}: " + "word " * (n % 7) for n in range(200)]


@pytest.fixture
def source(tmp_path):
    path = write_jsonl_file(tmp_path / "web.jsonl", [{"text": text} for text in TEXTS])
    return open_token_file(path, tiny_tokenizer(), str(tmp_path / "cache"))


def test_tokens_are_made_again_for_another_end(tmp_path):
    path = write_jsonl_file(tmp_path / "web.jsonl", [{"text": "a"}])
    for end in (258, 256):
        tokenizer = Tokenizer(byte_tokenizer(("<stop>",)), mask_id=257, template=None, end_ids=(end,))
        read = open_token_file(path, tokenizer, str(tmp_path / "cache"))
        assert read.tokens[-1] == min(tokenizer.end_ids) == end


def train_settings(**settings):
    return TrainConfig(**({"objective": "pretrain", "sequence_length": 64, "batch_tokens": 256} | settings))


def test_the_sequences_are_the_file_without_padding_and_a_row_lies_in_one_document(source):
    rows = [row for n in range(source.count_sequences(64)) for row in source.sequence_rows(n, 64)]
    whole = [token for row in rows for token in row]
    expected = [token for text in TEXTS for token in (*text.encode(), 257)]
    assert whole == expected[: len(whole)] and len(expected) - len(whole) < 64
    assert not any(257 in row[:-1] for row in rows), "an end token is the last of its row"


def pack(source, shifted=False, **settings):
    return PackedDocuments([source], tiny_tokenizer(), train_settings(**settings), shifted)


def test_every_sequence_comes_once_an_epoch(source):
    documents = pack(source)
    count = int(documents._ends[-1])
    for epoch in range(2):
        drawn = [documents.sequence_rows(epoch * count + n) for n in range(count)]
        assert sorted(drawn) == sorted(source.sequence_rows(n, 64) for n in range(count))
    held = [list(example.target) for rows in documents.held_out_examples() for example in rows]
    last = [row for n in range(count, source.count_sequences(64)) for row in source.sequence_rows(n, 64)]
    assert held == last and count < source.count_sequences(64), "what is held out is never drawn"


def test_the_sequences_of_all_files_are_shuffled_together(tmp_path):
    files = []
    for name, count in (("a", 10), ("b", 30)):
        path = write_jsonl_file(tmp_path / f"{name}.jsonl", [{"text": name * 50} for _ in range(count)])
        files.append(open_token_file(path, tiny_tokenizer(), str(tmp_path)))
    documents = PackedDocuments(files, tiny_tokenizer(), train_settings(), False)
    whole = sum(file.count_sequences(64) for file in files) - len(documents.held_out_examples())
    drawn = [chr(documents.sequence_rows(n)[0][0]) for n in range(whole)]
    kept = {name: file.count_sequences(64) for name, file in zip("ab", files, strict=True)}
    kept["b"] -= len(documents.held_out_examples())
    assert Counter(drawn) == kept and drawn != sorted(drawn)


def test_tokens_that_no_sequence_holds_are_counted(tmp_path, caplog):
    files = []
    for name, count in (("a", 2), ("b", 1)):
        path = write_jsonl_file(tmp_path / f"{name}.jsonl", [{"text": name * 39} for _ in range(count)])
        files.append(open_token_file(path, tiny_tokenizer(), str(tmp_path)))
    PackedDocuments(files, tiny_tokenizer(), train_settings(), False)
    assert "56 of 120 tokens are not trained on" in caplog.text and "none is held out" in caplog.text


def test_batches_follow_from_the_step_whoever_makes_them(source):
    ours, theirs = pack(source), pack(source)
    theirs.examples(0, range(4))
    assert ours.examples(3, range(4)) == [e for n in range(4) for e in theirs.examples(3, [n])]
    assert ours.examples(3, range(4)) != ours.examples(4, range(4))


def test_the_weights_are_those_of_the_nelbo(source):
    """1 / t with t of tokens masked on average: the loss of a constant 1 nat is 1 nat a token."""
    documents = pack(source, batch_tokens=64 * 64)
    rows = [e for step in range(40) for e in documents.examples(step, range(64))]
    per_token = sum(e.weight * sum(e.masked) for e in rows) / sum(e.divisor for e in rows)
    assert per_token == pytest.approx(1, abs=0.03)
    assert all(e.divisor == len(e.target) for e in rows)


def test_a_shifted_denoiser_gets_a_row_before_every_first_token(source):
    documents = pack(source, shifted=True)
    assert {example.prompt.ids[0] for example in documents.examples(0, range(4))} == {257}


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        (['{"text": "a"}', "no json"], "line 2: the line is not JSON"),
        (['{"txt": "a"}'], "line 1: .*'text'"),
        ([], "holds no documents"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, lines, match):
    path = tmp_path / "web.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(CorpusError, match=match):
        open_token_file(path, tiny_tokenizer(), str(tmp_path / "cache"))
    with pytest.raises(CorpusError, match="was not found"):
        open_token_file(tmp_path / "nothing.jsonl", tiny_tokenizer())


def test_a_file_too_short_is_an_error(source):
    with pytest.raises(ConfigError, match="fewer tokens than one .*sequence_length=8192"):
        pack(source, sequence_length=8192, batch_tokens=8192)
