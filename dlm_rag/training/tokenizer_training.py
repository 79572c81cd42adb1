"""The tokenizer of our own models: byte-level BPE learned on training worlds, or on passages.

A blank is put before every text and after every line break, so that a name has the same tokens at the
head of a passage and in the middle of a sentence: it can be copied token by token.
"""

import random
from collections.abc import Iterable, Iterator

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from dlm_rag.data.synthetic_world import make_world, make_world_question
from dlm_rag.retrieval.corpus import Corpus

MAX_TOKENIZER_PASSAGES = 100_000  # that a tokenizer is learned from, at most
MASK_TOKEN, END_TOKEN = "<mask>", "<end>"
_WORD_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Ids 0 and 1 are the mask and the end token; the rest, all bytes among them, is learned from texts."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(" "), normalizers.Replace("\n", "\n ")])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[MASK_TOKEN, END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token=MASK_TOKEN, eos_token=END_TOKEN)


def iterate_corpus_texts(corpus: Corpus) -> Iterator[str]:
    """The texts of at most `MAX_TOKENIZER_PASSAGES` passages, from all over the corpus."""
    yield from (
        corpus[row].text for row in range(0, len(corpus), -(-len(corpus) // MAX_TOKENIZER_PASSAGES))
    )


def iterate_world_texts(seed: int, worlds: int = 60) -> Iterator[str]:
    """Passages, questions and responses of `worlds` small training worlds."""
    for number in range(worlds):
        world = make_world(seed * 1_000_003 - 1 - number, "train", 150)
        rng = random.Random(f"vocabulary/{seed}/{number}")
        for entity in world.entities:
            yield f"{entity.name}\n{world.contents[entity.id]}"
        for _ in range(150):
            question = make_world_question(rng, world, rng.choice((1, 2, 3, 4)), training=True)
            if question is not None:
                yield question.question
                yield question.reasoning
