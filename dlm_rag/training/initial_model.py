"""What the config says a run begins with: a fresh architecture and tokenizer, or a checkpoint's."""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from dlm_rag.config import Config
from dlm_rag.config.ineffective_settings import check_checkpoint_effects
from dlm_rag.data.synthetic_world import make_world, make_world_question
from dlm_rag.decode.settings import resolve_settings
from dlm_rag.errors import CheckpointError, ConfigError
from dlm_rag.evidence.prompt_segments import check_finished_blocks
from dlm_rag.model.checkpoint import Checkpoint, open_checkpoint
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.evidence_layouts import EVIDENCE_LAYOUTS
from dlm_rag.retrieval.corpus import Corpus, open_corpus
from dlm_rag.tokenizer import PromptTemplate, Tokenizer, load_tokenizer
from dlm_rag.training.data.examples import LONG_QUESTION_TOKENS
from dlm_rag.training.initial_weights import InitialModel
from dlm_rag.training.tasks import find_task

# By setting: the values that go with uniform noise, the one to set first.
SUPPORTED_OF_MODEL = {"evidence_layout": ("prefix", None), "attn_implementation": ("sdpa", "auto")}
SUPPORTED_OF_PHASE = {
    "objective": ("sft",), "trainable": ("all", None), "parallel": ("ddp", "single"),
    "activation_checkpointing": ("full", "none"), "lora_rank": (0,),
}  # fmt: skip


def check_noise_settings(config: Config, checkpoint: Checkpoint | None) -> None:
    """Raises `ConfigError` for settings that do not go with how the model is noised.

    checkpoint: what the run begins with; None or one without `noise` is a model of masks.
    """
    uniform = checkpoint is not None and checkpoint.config.noise is not None
    for train in config.train.get_phase_configs().values():
        check_checkpoint_effects("train", train, {"noise": "uniform" if uniform else "mask"})
        if checkpoint is not None and uniform:
            _check_supported(train, SUPPORTED_OF_PHASE, checkpoint)
    if checkpoint is not None and uniform:
        resolve_settings(config.decode, checkpoint.config)  # validation decodes
        _check_supported(config.model, SUPPORTED_OF_MODEL, checkpoint)


def _check_supported(settings: object, supported: Mapping[str, tuple[object, ...]], of: Checkpoint) -> None:
    for name, values in supported.items():
        if (value := getattr(settings, name)) not in values:
            raise ConfigError(
                f"{name}={value} is not supported by {of.folder}, a model of uniform noise: set "
                f"{name}={values[0]}, or leave it out"
            )


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


DEFAULT_PROMPT_TEMPLATE = PromptTemplate(head="{question}\n", fact="{passage}")
SIZE_FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim", "intermediate_size")
ADDED_MASK_TOKEN = "<|mask|>"  # for tokenizers that have none


def open_initial_model(config: Config) -> InitialModel:
    """What the config says the run begins with; raises `UserError` before any weight is read."""
    path = config.model.path
    origin = _fresh_model(config) if path is None else _from_checkpoint(config, path)
    if origin.config.noise is None:
        _check_blocks(config, origin.config)
    return origin


def _check_blocks(config: Config, shape: DenoiserConfig) -> None:
    """Raises `ConfigError` for what cannot be trained where some tokens are hidden from others."""
    check_finished_blocks(shape, shape.finished_block_context, shape.evidence_layout)
    if not shape.block_size and not shape.attention_patterns:
        return
    phases = config.train.get_phase_configs().values()
    if any(train.context_parallel > 1 for train in phases):
        raise ConfigError(
            "context_parallel needs a model whose tokens all see each other: set context_parallel=1"
        )
    if shape.attention_patterns and any(
        t.pointer_loss_weight or t.final_pointer_loss_weight for t in phases
    ):
        raise ConfigError("pointer_loss_weight: this model's layers hide tokens by a pattern; set it to 0")
    if shape.shifted and shape.finished_block_context == "no_evidence":
        raise ConfigError(
            "finished_block_context=no_evidence cannot be trained on a model that predicts the next token: "
            "set decode.finished_block_context=recompute"
        )


def _from_checkpoint(config: Config, path: str) -> InitialModel:
    checkpoint = open_checkpoint(path, config.model.block_size)
    train, own = config.train, checkpoint.config
    check_noise_settings(config, checkpoint)
    inner = load_tokenizer(checkpoint.folder)
    mask_id = own.mask_token_id
    if mask_id is None:
        first = next(iter(train.get_phase_configs().values()))
        if not find_task(first).opens_causal_attention:
            raise ConfigError(
                f"{checkpoint.folder} is an autoregressive model: begin with a phase of objective=adapt"
            )
        if inner.mask_token is None:
            inner.add_special_tokens({"mask_token": ADDED_MASK_TOKEN})
        mask_id = int(inner.mask_token_id)
    if mask_id > max(own.vocab_size, len(inner)):  # a row would be made for every id below it
        raise CheckpointError(
            f"the mask token in {checkpoint.folder} has the id {mask_id}, but the model {own.vocab_size}: "
            "the tokenizer belongs to another model"
        )
    vocabulary = max(own.vocab_size, mask_id + 1)
    shape = make_training_shape(config, replace(own, vocab_size=vocabulary, mask_token_id=mask_id))
    template = PromptTemplate.from_checkpoint(checkpoint.raw_config.get("prompt"), shape.evidence_layout)
    tokenizer = Tokenizer(inner, mask_id, template, checkpoint.end_token_ids, vocabulary)
    return InitialModel(
        shape, tokenizer, checkpoint, train.seed, train.lora_rank, train.trainable == "policy_heads"
    )


def make_training_shape(config: Config, own: DenoiserConfig) -> DenoiserConfig:
    """A checkpoint's architecture with what training gives it: layout, lengths, room for long contexts."""
    train, decode, block = config.train, config.decode, config.model.block_size
    if own.noise is not None:  # its layout and its blocks are its own
        return replace(own, canvas_length=decode.max_new_tokens or own.canvas_length)
    longest = [
        p.sequence_length + 1
        for p in train.get_phase_configs().values()
        if p.rope_theta and find_task(p).reads_sequences
    ]
    return replace(
        own,
        evidence_layout=config.model.evidence_layout or "independent",
        passage_length=train.passage_length,
        canvas_length=decode.max_new_tokens or own.canvas_length,
        block_length=own.block_length if decode.block_length is None else decode.block_length,
        block_size=own.block_size if block is None else block or None,
        finished_block_context=decode.finished_block_context or own.finished_block_context,
        commit_rule="policy_head" if train.trainable == "policy_heads" else "threshold",
        retrieval_gate=(decode.retrieval_gate or own.retrieval_gate)
        if train.trainable == "policy_heads"
        else "always",
        max_position_embeddings=max(own.max_position_embeddings, *longest, 0),
    )


def _fresh_model(config: Config) -> InitialModel:
    check_noise_settings(config, None)
    train, layout = config.train, config.model.evidence_layout or "independent"
    if find_task(next(iter(train.get_phase_configs().values()))).needs_trained_model:
        raise ConfigError(
            "rl begins with a model that answers: set model.path, or put a phase of sft before"
        )
    if train.lora_rank:
        raise ConfigError("lora_rank needs a checkpoint: set model.path, or lora_rank=0")
    heads, decode = train.hidden_size // train.head_dim, config.decode
    canvas = decode.max_new_tokens or DenoiserConfig.canvas_length
    # Positions for the question, the canvas, and all passages if they follow one another.
    passages = 1 if EVIDENCE_LAYOUTS[layout].separate_passages else config.retrieval.top_k
    room = passages * train.passage_length + 2 * LONG_QUESTION_TOKENS + canvas
    longest = [
        p.sequence_length + 1 for p in train.get_phase_configs().values() if find_task(p).reads_sequences
    ]
    layers = None if train.init_layers_from is None else _open_layers_checkpoint(train.init_layers_from)
    sizes = {name: getattr(train, name) for name in SIZE_FIELDS}
    fresh = DenoiserConfig(
        num_attention_heads=heads,
        num_key_value_heads=heads,
        qk_norm=True,
        tie_word_embeddings=True,
        **sizes,
    )
    shape = replace(
        fresh if layers is None else layers.config,
        vocab_size=train.vocab_size,
        max_position_embeddings=max(room, *longest, 0),
        mask_token_id=0,
        evidence_layout=layout,
        passage_length=train.passage_length,
        canvas_length=canvas,
        block_length=decode.block_length,
        block_size=config.model.block_size or None,
        finished_block_context=decode.finished_block_context or DenoiserConfig.finished_block_context,
    )
    path = config.data.corpus
    corpus = None if path is None else open_corpus(path, config.retrieval.index_dir)
    texts = iterate_world_texts(train.seed) if corpus is None else iterate_corpus_texts(corpus)
    tokenizer = Tokenizer(train_tokenizer(texts, train.vocab_size), 0, DEFAULT_PROMPT_TEMPLATE, (1,))
    return InitialModel(shape, tokenizer, None, train.seed, 0, layers_checkpoint=layers)


def _open_layers_checkpoint(path: str) -> Checkpoint:
    """The checkpoint whose layers a fresh denoiser takes over; raises `CheckpointError`."""
    found = open_checkpoint(path)
    reasons = {
        "denoises from uniform noise": found.config.noise is not None,
        "has attention patterns of its own": bool(found.config.attention_patterns),
        "predicts the next token": found.config.shifted,
    }
    if why := [reason for reason, holds in reasons.items() if holds]:
        raise CheckpointError(
            f"train.init_layers_from: {found.folder} {why[0]}, which a fresh denoiser does not: give it "
            "as model.path instead"
        )
    return found
