"""`copy_words`: a word that begins as one of the question or the passages goes on as there."""

import numpy as np
import pytest

from dlm_rag.engine.copying import WordTable
from dlm_rag.errors import ConfigError
from tests.support.decoding import QUESTIONS, make_decoder, tokens_of
from tests.support.tiny_models import tiny_tokenizer

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
    """The words that begin as words of the texts do, and then go on or end otherwise; by their letters."""
    known, broken = {word for text in texts for word in text.split()}, []
    known |= {word.lstrip("\"'([{“‘«„") for word in known}
    for word in response.split(" ")[1:-1]:  # the first has no blank before it, the last may be cut
        for n in range(1, len(word) + 1):
            after = {w[n : n + 1] for w in known if w.startswith(word[:n])}
            ends = any(not letter.isalnum() for letter in after)
            if after and not (ends if n == len(word) else word[n] in after):
                broken.append(word)
                break
    return broken


def test_words_of_the_evidence_are_not_broken_alone_and_in_a_batch(corpus_file):
    found, broken = [], []
    for copies, size in ((False, 1), (True, 1), (True, 3)):
        decoder = write_of_letters(make_decoder(corpus_file, copy_words=copies, **LEFT_TO_RIGHT))
        rollouts = decoder.decode(QUESTIONS, batch_size=size, retrieval_interval=100)
        texts = [[r.question, *(r.passages[name] for name in r.steps[0].passage_ids)] for r in rollouts]
        found.append([tokens_of(rollout) for rollout in rollouts])
        broken.append([find_broken(r.response, own) for r, own in zip(rollouts, texts, strict=True)])
    assert any(broken[0]) and broken[1] == [[]] * len(QUESTIONS)
    assert found[1] == found[2] != found[0]
    assert any(len(step) > 1 for rollout in found[1] for step in rollout)


@pytest.mark.parametrize(
    ("written", "allowed"),
    [
        (" Be", "h"), (" Wain", "w"), ("so Mc", None), (" Ann", ". )"), (" J.", " ."), (" 27", " "),
        (" x", None), ("Be", None), (" O'", "B"),
    ],
)  # fmt: skip
def test_what_may_follow_the_beginning_of_a_word(written, allowed):
    """By hand, in letters: what is asked for may follow, and no other letter."""
    text = "Billy, Behave: by (Wainwright) with Ann. Ann J. O'Brien, 27 June"
    barred = WordTable(tiny_tokenizer()).find_barred([*written.encode()], [text])
    if allowed is None:
        assert barred is None
        return
    assert not barred[[*allowed.encode()]].any()
    letters = np.array([n for n in range(48, 123) if chr(n).isalnum() and chr(n) not in allowed])
    assert barred[letters].all()
    assert barred[32] == (" " not in allowed)


def test_it_is_for_tokens_that_are_written_in_order_and_stay(corpus_file):
    make_decoder(corpus_file, copy_words=True, **LEFT_TO_RIGHT)
    for other in ({"commit_rule": "threshold"}, {"edit_threshold": 0.5}):
        with pytest.raises(ConfigError, match="copy_words"):
            make_decoder(corpus_file, copy_words=True, **(LEFT_TO_RIGHT | other))
