"""What the config says a run begins with: a fresh architecture and tokenizer, or a checkpoint's."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from dlm_rag.config import Config
from dlm_rag.config.generation import DECODE_NAMES, RETRIEVAL_NAMES, list_given
from dlm_rag.data.synthetic_world import make_world, make_world_question
from dlm_rag.errors import CheckpointError, ConfigError
from dlm_rag.evidence.prompt_segments import check_finished_blocks
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.evidence_layouts import EVIDENCE_LAYOUTS
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.tokenizer import Tokenizer, add_mask_token, load_tokenizer
from dlm_rag.tokenizer.prompts import PromptTemplate, load_prompt
from dlm_rag.training.data.examples import LONG_QUESTION_TOKENS
from dlm_rag.training.initial_weights import InitialModel

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


DEFAULT_PROMPT_TEMPLATE = PromptTemplate(head="{question}\n", fact="{passage}")
SIZE_FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")


def open_initial_model(config: Config) -> InitialModel:
    """What the config says the run begins with; raises `UserError` before any weight is read."""
    path = config.model.path
    origin = _make_fresh_model(config) if path is None else _open_base_model(config, path)
    shape = origin.config
    check_finished_blocks(shape, shape.finished_block_context, shape.evidence_layout)
    if shape.block_size and shape.predicts_next_block and shape.finished_block_context == "no_evidence":
        raise ConfigError(
            "finished_block_context=no_evidence cannot be trained on a model that predicts the next token: "
            "set decode.finished_block_context=recompute"
        )
    return origin


def _open_base_model(config: Config, path: str) -> InitialModel:
    base, train = open_checkpoint(path, config.model.block_size), config.train
    if base.config.adapter is not None:
        raise ConfigError(
            f"{base.folder} denoises from uniform noise, and only decodes here: train another model"
        )
    inner, own = load_tokenizer(base.folder), base.config
    mask_id = own.mask_token_id
    if mask_id is None:
        if train.objective in ("sft", "rl"):
            raise ConfigError(
                f"{base.folder} is an autoregressive model: train it with train.objective=pretrain first"
            )
        mask_id = add_mask_token(inner)
        own = replace(own, shifted=True, causal_context=False, block_size=None)
    if mask_id > max(own.vocab_size, len(inner)):  # a row would be made for every id below it
        raise CheckpointError(
            f"the mask token in {base.folder} has the id {mask_id}, but the model {own.vocab_size}: "
            "the tokenizer belongs to another model"
        )
    vocabulary = max(own.vocab_size, mask_id + 1)
    shape = make_training_shape(config, replace(own, vocab_size=vocabulary, mask_token_id=mask_id))
    if config.prompt is None:
        template = PromptTemplate.from_checkpoint(base.raw_config.get("prompt"), shape.evidence_layout)
    else:
        template = load_prompt(config.prompt, shape.evidence_layout)
    tokenizer = Tokenizer(inner, mask_id, template, base.end_token_ids, vocabulary)
    return InitialModel(shape, tokenizer, base, train.seed, train.lora_rank)


def make_training_shape(config: Config, own: DenoiserConfig) -> DenoiserConfig:
    """An architecture with what training gives it: layout, lengths, room for long contexts.

    Raises `ConfigError` for a model that is not trained here.
    """
    train, decode, block = config.train, config.decode, config.model.block_size
    block = own.block_size if block is None else block or None
    if own.causal_context:
        raise ConfigError(
            "this model predicts the first token of a block from the text before it, and only decodes "
            "here: train another model"
        )
    canvas = decode.max_new_tokens or own.canvas_length
    retrieval = list_given(config.retrieval, RETRIEVAL_NAMES)
    own = own.add_settings(list_given(decode, DECODE_NAMES), **retrieval)
    return replace(
        own,
        evidence_layout=config.model.evidence_layout or "independent",
        passage_length=train.passage_length,
        canvas_length=canvas,
        block_length=own.block_length if decode.block_length is None else decode.block_length,
        block_size=block,
        finished_block_context=decode.finished_block_context or own.finished_block_context,
    )


def _make_fresh_model(config: Config) -> InitialModel:
    train, corpus = config.train, config.data.corpus
    if train.lora_rank:
        raise ConfigError("lora_rank needs a checkpoint: set model.path, or lora_rank=0")
    # Heads of 32 suit small models, of 64 a GPU's kernels.
    head_dim = 64 if train.hidden_size >= 1024 and train.hidden_size % 64 == 0 else 32
    heads = train.hidden_size // head_dim
    own = DenoiserConfig(
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        qk_norm=True,
        tie_word_embeddings=True,
        **{name: getattr(train, name) for name in SIZE_FIELDS},
    )
    # Positions for the question, the canvas, and all passages if they follow one another.
    layout = EVIDENCE_LAYOUTS[config.model.evidence_layout or "independent"]
    room = (1 if layout.separate_passages else config.retrieval.top_k) * train.passage_length
    room += 2 * LONG_QUESTION_TOKENS + (config.decode.max_new_tokens or own.canvas_length)
    if train.objective not in ("sft", "rl"):
        room = max(room, train.sequence_length + 1)
    own = replace(own, vocab_size=train.vocab_size, mask_token_id=0, max_position_embeddings=room)
    texts: Iterable[str] = iterate_world_texts(train.seed)
    if corpus is not None:
        passages = open_corpus(corpus, config.retrieval.index_dir)
        every = -(-len(passages) // MAX_TOKENIZER_PASSAGES)
        texts = (passages[row].text for row in range(0, len(passages), every))
    tokenizer = Tokenizer(train_tokenizer(texts, train.vocab_size), 0, DEFAULT_PROMPT_TEMPLATE, (1,))
    shape = make_training_shape(config, own)
    return InitialModel(shape, tokenizer, None, train.seed, 0)
