"""`copy_words`: the words of a response are those of the question and the passages."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from dlm_rag.config import DecodeConfig
from dlm_rag.engine.copying import WordTable
from dlm_rag.engine.engine import resolve_settings
from dlm_rag.errors import ConfigError
from dlm_rag.questions import Question
from dlm_rag.tokenizer import Tokenizer
from tests.support.decoding import QUESTIONS, make_decoder, tokens_of
from tests.support.tiny_models import tiny_denoiser, tiny_tokenizer

LEFT_TO_RIGHT = {
    "commit_rule": "left_to_right", "max_new_tokens": 40, "commit_threshold": 0.05, "temperature": 1.0
}  # fmt: skip


def write_of_letters(decoder):
    """Makes the model write small letters and blanks alone."""
    plain = decoder.denoiser.compute_token_logits

    def read_out(hidden):
        logits = plain(hidden) / 3
        logits[:, [32, *range(97, 123)]] += 20
        return logits

    decoder.denoiser.compute_token_logits = read_out
    return decoder


def find_broken(response, texts):
    """The words that no text has, or has but for the signs after a word; by their letters."""
    known = {word for text in (*texts, "yes no unknown unclear") for word in text.split()}
    known |= {word.lstrip("\"'([{“‘«„") for word in known}
    known |= {word[:n] for word in known for n in range(1, len(word)) if not word[n].isalnum()}
    return [word for word in response.split()[1:-1] if word not in known]  # of these two, one may be cut


def test_words_of_the_evidence_are_not_broken_alone_and_in_a_batch(corpus_file, monkeypatch):
    found, broken = [], []
    monkeypatch.setattr("dlm_rag.engine.runner.LOGITS_CHUNK_POSITIONS", 30)  # of 40 a row
    for copies, size, most in ((False, 1, None), (True, 1, None), (True, 3, None), (True, 3, 2)):
        settings = LEFT_TO_RIGHT | {"copy_words": copies, "tokens_per_step": most}
        decoder = write_of_letters(make_decoder(corpus_file, **settings))
        rollouts = decoder.decode(QUESTIONS, batch_size=size, retrieval_interval=100)
        texts = [[r.question, *(r.passages[name] for name in r.steps[0].passage_ids)] for r in rollouts]
        found.append([tokens_of(rollout) for rollout in rollouts])
        broken.append([find_broken(r.response, own) for r, own in zip(rollouts, texts, strict=True)])
    assert any(broken[0]) and broken[1] == broken[3] == [[]] * len(QUESTIONS)
    assert found[1] == found[2] != found[0]
    assert any(len(step) > 1 for rollout in found[1] for step in rollout)


def take_two(proposals, context):
    return [*range(len(proposals.positions))][:2]


def test_a_rule_of_ones_own_commits_no_more_than_it_chose(corpus_file):
    own = LEFT_TO_RIGHT | {"commit_rule": f"{__name__}:take_two", "copy_words": True}
    rollout = write_of_letters(make_decoder(corpus_file, **own)).ask(QUESTIONS[0])
    assert {len(step) for step in tokens_of(rollout)[1:]} == {1, 2}


def write_blanks_and_letters(decoder):
    """Makes the model write a blank or a letter by what it says there more than elsewhere."""
    plain = decoder.denoiser.compute_token_logits

    def read_out(hidden):
        said = plain(hidden)
        logits, rest = torch.full_like(said, -50.0), said - said.mean(0)
        logits[:, 97:123] = rest[:, 97:123]
        logits[:, 32] = 9 * rest[:, 0].sign()
        return logits

    decoder.denoiser.compute_token_logits = read_out
    return decoder


def test_what_is_certain_is_written_at_once_and_changes_no_token(corpus_file):
    """Against the same decoder with a token a step: each choice is made after the same tokens."""
    sure, found = LEFT_TO_RIGHT | {"commit_threshold": 1.0, "temperature": 0.0}, []
    for limit in (1, None):
        decoder = make_decoder(corpus_file, copy_words=True, tokens_per_step=limit, **sure)
        decoder = write_blanks_and_letters(decoder)
        found.append(decoder.decode(QUESTIONS, batch_size=1, retrieval_interval=100))
    words = WordTable(decoder.tokenizer, 300)
    for slow, fast in zip(*found, strict=True):
        assert fast.forwards < slow.forwards
        assert [*chain(*tokens_of(fast))] == [*chain(*tokens_of(slow))]
        texts = [fast.question, *(fast.passages[name] for name in fast.steps[0].passage_ids)]
        written = []
        for step in tokens_of(fast)[:-1]:
            written += [token for _, token in step]
            assert words.find_certain(written, texts) is None


@pytest.mark.parametrize(
    ("written", "allowed"),
    [
        (" Be", "h"), (" Wain", "w"), ("so Mc", None), (" Ann", ". )"), (" J.", " ."), (" 27", " "),
        (" x", None), ("Be", None), (" O'", "B"), (" 東", None), (f" {'q' * 30}", None),
        (" ", " BAWwbJO2379ynu"), (" 7", "x"), (" 9", ":"), (" 9:1", "5"), (" 9:15", " "), (" 3", " ."),
        (" Ann-", " ."), (" [", " ."), (" 東.", None), (" x#", None), (" no-", "g"),
    ],
)  # fmt: skip
def test_what_may_follow_the_beginning_of_a_word(written, allowed):
    """By hand, in letters: what is asked for may follow, and no other letter."""
    text = "Billy, Behave: by (Wainwright) with Ann. Ann J. O'Brien, 27 June 9:15, 3. 3.4 東京7x都 <-no-go "
    text += "q" * 40
    words = WordTable(tiny_tokenizer(), 300)
    barred = words.find_barred([*written.encode()], [text])
    alone = ord(allowed) if allowed in ("h", "w", "B", "x", ":", "5", "g") else None
    assert words.find_certain([*written.encode()], [text]) == alone
    if allowed is None:
        assert not barred[48:123].any()
        return
    assert not barred[[*allowed.encode()]].any()
    letters = np.array([n for n in range(48, 123) if chr(n).isalnum() and chr(n) not in allowed])
    assert barred[letters].all()
    assert barred[32] == (" " not in allowed)


def titled_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.template = replace(tokenizer.template, answer="titled")
    return tokenizer


TITLED = ["Who made Anna Lee?", "Anna Lee (film)\nAnna Lee is by Bo Hart.", "Bo Hart\nBo Hart left Anna."]
TITLED += [f"Dune{' is' * 12}\nIt is so.", "Yo Yo Ma\nYo Yo Yo!", f"{'z' * 32}\nUp."]  # two too long


@pytest.mark.parametrize(
    ("written", "certain", "sure", "half", "marks"),
    [
        (" Bo", " ", " ", "", ""), (" Bo ", "H", "H", "", ""), (" Anna", None, "", " .", ""),
        (" Anna Lee", None, "", " ?", ""), (" Anna Lee (", "f", "f", "", ""),
        (" Anna Lee; Bo", " ", " ", "", ""), (" Bo Hart", None, "", " .", ";#"), (" Cy", None, "", "", ""),
        (" Dune", None, " ", "", ""), (" Yo Yo", None, "", " !", ""), (" zz", None, "z", "", ""),
        (" Bo ### Bo", None, " ", "", ""), (" Anna Lee ### Anna", None, " ", ".", ""),
        (" Dune ### Anna", None, "", " .", ""), (" Anna Lee (film)", None, "", "", ";#"),
        (" Dune ### Bo Hart", None, "\u0101", " .", ""), (" Dune ### Anna Lee", None, "", " ?", ""),
    ],
)  # fmt: skip
def test_a_title_goes_on_where_the_texts_leave_one_way(written, certain, sure, half, marks):
    """By hand, in letters; "\u0101" is the end."""
    words, ids = WordTable(titled_tokenizer(), 300), [*written.encode()]
    found = words._find_title_token(ids, TITLED)
    assert found == (None if certain is None else ord(certain))
    least = {chr(n): words.find_least_confidence(ids, n, TITLED) for n in (*range(128), 257)}
    for bound, signs in ((0.0, sure), (0.5, half), (0.3, marks)):
        assert {sign for sign, one in least.items() if one == bound} == {*signs}
    if certain is not None:
        assert np.flatnonzero(~words.find_barred(ids, TITLED)).tolist() == [found]


def test_a_response_begins_with_a_title_and_does_not_end_before_its_answer():
    """By hand: a title, or words of the question; what a passage alone has stands for its title."""
    words = WordTable(titled_tokenizer(), 300)

    def allowed(written, *more):
        return {chr(n) for n in np.flatnonzero(~words.find_barred([*written.encode()], [*TITLED, *more]))}

    assert allowed(" Anna Lee") == {*" ?;#"} and allowed(" Bo Hart") == {*";#"} == allowed(" left")
    assert allowed(" Bo ### x;", "x;yz") == {"y"} and allowed(" z", "Q\nza zb") == {*"ab"}  # else nothing
    for written in ("", " Bo; Bo", " C# Bo", " Bo ###", " Bo ### Hart"):
        assert words.find_barred([*written.encode()], TITLED)[257] == (written != " Bo ### Hart")
    assert [words.begin_title(ord(sign), TITLED) for sign in " l#q"] == [*map(ord, "  #q")]


def test_it_is_for_tokens_that_are_written_in_order_and_stay(corpus_file):
    for other in ({"commit_rule": "threshold"}, {"edit_threshold": 0.5}):
        with pytest.raises(ConfigError, match="copy_words"):
            make_decoder(corpus_file, copy_words=True, **(LEFT_TO_RIGHT | other))


def test_that_of_a_checkpoint_gives_way_to_what_a_request_sets(corpus_file):
    decoder = make_decoder(corpus_file)
    own = {"commit_rule": "left_to_right", "copy_words": True}
    decoder.denoiser.config = replace(decoder.denoiser.config, decode_settings=own)
    decoder.config = decoder.resolve_settings(DecodeConfig(max_new_tokens=12))
    assert decoder.config.copy_words and not decoder.config.given & own.keys()
    with decoder.new_engine(commit_rule="threshold") as engine:
        assert (engine.settings.commit_rule, engine.settings.copy_words) == ("threshold", False)
        engine.submit(Question("1", "Dune?"), decoder.config)
        engine.submit(Question("2", "Dune?"), engine.settings)
        assert [row.words is None for group in engine._groups for row in group] == [False, True]
    with pytest.raises(ConfigError, match="copy_words"):
        decoder.resolve_settings(decoder.config, commit_rule="threshold", copy_words=True)
    causal = tiny_denoiser(block_size=4, block_grid="canvas", causal_context=True).config
    causal = replace(causal, decode_settings={"mode": "autoregressive", "copy_words": True})
    for mode in (None, "autoregressive", "diffusion"):
        found = resolve_settings(DecodeConfig(mode=mode), causal)
        assert (found.mode, found.copy_words) == (mode or "autoregressive", mode != "diffusion")


def test_blanks_as_llama_writes_them_and_a_vocabulary_of_another_size():
    pieces = ["<unk>", "<mask>", "▁", *"aBehwynu", "▁B", "▁y", "▁n", "▁u", "▁Be", "<0xC3>"]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    merges = [*(("▁", letter) for letter in "Bynu"), ("▁B", "e")]
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Replace("▁", " ")
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, mask_token="<mask>"), 1)
    for size in (len(vocab) - 1, len(vocab) + 9):
        barred = WordTable(tokenizer, size).find_barred(tokenizer.encode("a Be"), ["Behw"])
        assert len(barred) == size and np.flatnonzero(~barred).tolist() == [vocab["h"]]
    tokenizer.template = replace(tokenizer.template, answer="titled")
    words, written = WordTable(tokenizer, len(vocab)), [vocab["▁Be"], vocab["▁"]]
    assert words.find_certain(written, ["Be  Be\nh"]) == vocab["▁Be"]  # not "h", as behind other blanks
