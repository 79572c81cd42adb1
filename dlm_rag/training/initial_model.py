"""What a run begins with and ends in: an architecture, its tokenizer and first weights; its export.

A denoiser is built without contents, put where it belongs (in shards, where it has any), and then filled:
a process reads or makes one tensor at a time and keeps its rows, which are the same whoever has them.
"""

import random
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dlm_rag.config import Config
from dlm_rag.config.sections import DECODE_NAMES, RETRIEVAL_NAMES, list_given
from dlm_rag.data.synthetic_world import make_world, make_world_question
from dlm_rag.errors import CheckpointError, ConfigError
from dlm_rag.evidence.prompt_segments import check_finished_blocks
from dlm_rag.model.checkpoint import Checkpoint, open_checkpoint, save_tensors, write_generation_config
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import EVIDENCE_LAYOUTS, DenoiserConfig
from dlm_rag.progress import quiet_imports
from dlm_rag.randomness import make_keyed_generator
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.tokenizer import Tokenizer, add_mask_token, does_think, load_tokenizer
from dlm_rag.tokenizer.prompts import PromptTemplate, load_prompt
from dlm_rag.training.batches import LONG_QUESTION_TOKENS
from dlm_rag.training.distributed import get_local

LORA_TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EMBEDDING_NAMES = ("embed_tokens.weight", "lm_head.weight")
MEAN_CHUNK_ROWS = 4096  # of a tensor whose mean is taken


def build_meta_denoiser(config: DenoiserConfig, lora_rank: int, frozen: torch.dtype) -> Denoiser:
    """A denoiser on the meta device: shapes, float32 where it is trained, else in `frozen`."""
    with torch.device("meta"):
        denoiser = Denoiser(config)
        if lora_rank:
            add_lora_adapters(denoiser, lora_rank)
        for parameter in denoiser.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(frozen)
    return denoiser


def add_lora_adapters(denoiser: Denoiser, rank: int) -> None:
    """Low-rank adapters (LoRA, arXiv 2106.09685) on all matrices of the layers, which are frozen."""
    try:
        with quiet_imports():
            from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError("lora_rank needs peft: install it with `pip install 'dlm_rag[lora]'`") from None
    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LORA_TARGET_MODULES)
    inject_adapter_in_model(adapters, denoiser)
    for name, parameter in denoiser.named_parameters():
        parameter.requires_grad_("lora_" in name)


def allocate_denoiser(denoiser: Denoiser, device: torch.device) -> None:
    """Gives an empty denoiser memory on the device, for its shards alone where it has any."""
    denoiser.to_empty(device=device)
    denoiser.tie_weights()
    denoiser.set_rope_theta(denoiser.config.rope_theta)


def _read_local_rows(value: Tensor, checkpoint: Checkpoint, name: str) -> None:
    """Reads this process's rows; tokens that the checkpoint did not have get the mean of all others."""
    own, local = _local_rows(value), get_local(value)
    old = checkpoint.config.vocab_size if name in EMBEDDING_NAMES else value.shape[0]
    kept = slice(min(own.start, old), min(own.stop, old))
    if kept.start < kept.stop:
        local[: kept.stop - kept.start].copy_(checkpoint.read_tensor_rows(name, kept))
    if own.stop > max(own.start, old):
        starts = range(0, old, MEAN_CHUNK_ROWS)
        parts = (slice(start, min(start + MEAN_CHUNK_ROWS, old)) for start in starts)
        sums = (checkpoint.read_tensor_rows(name, part).double().sum(0) for part in parts)
        local[max(0, kept.stop - own.start) :].copy_(sum(sums, torch.zeros(())) / old)


def draw_fresh_weights(config: DenoiserConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a fresh denoiser by its name, whole, on the CPU.

    Matrices are normal with variance 1 / fan-in, those that write into the residual stream smaller by the
    square root of their number; gains are 1, those of queries and keys 1.5.
    """
    with torch.device("meta"):
        shapes = Denoiser(config)
    generator = make_keyed_generator("weights", seed)
    for name, shape in shapes.named_parameters():
        value = torch.zeros(shape.shape)
        if value.dim() == 2:
            value.normal_(0.0, value.shape[1] ** -0.5, generator=generator)
        elif not name.endswith("bias"):
            value.fill_(1.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.mul_((2 * config.num_hidden_layers) ** -0.5)
        yield name, value


def _local_rows(value: Tensor) -> slice:
    """Which rows of a parameter this process has: all, or its shard's."""
    if not hasattr(value, "device_mesh"):
        return slice(0, value.shape[0])
    size = -(-value.shape[0] // value.device_mesh.size())
    start = min(value.device_mesh.get_local_rank() * size, value.shape[0])
    return slice(start, start + len(get_local(value)))


@dataclass(frozen=True)
class InitialModel:
    """An architecture with its tokenizer, before any weight is there."""

    config: DenoiserConfig
    tokenizer: Tokenizer
    checkpoint: Checkpoint | None  # that the weights come from; None: fresh ones
    seed: int
    lora_rank: int

    def build_on_meta(self, frozen: torch.dtype) -> Denoiser:
        """The denoiser on the meta device; frozen: the dtype of weights that are not trained."""
        return build_meta_denoiser(self.config, self.lora_rank, frozen)

    @torch.no_grad()
    def materialize(self, denoiser: Denoiser, device: torch.device, trained: bool = True) -> None:
        """Gives a meta denoiser, or its shards, memory on the device and the first weights.

        They are the checkpoint's, or fresh ones that depend on the seed; adapters besides. trained: also
        those under training; else only what is frozen, as where a run has saved the rest.
        """
        allocate_denoiser(denoiser, device)
        fresh = dict[str, Tensor]()
        for name, value in denoiser.named_parameters():
            if value.requires_grad and not trained:
                continue
            if ".lora_" in name:  # A as a linear layer's weights; B zero, so that nothing changes yet
                whole = torch.zeros(value.shape)
                if ".lora_A." in name:
                    bound = whole.shape[1] ** -0.5
                    generator = make_keyed_generator("adapter", self.seed, name)
                    whole.uniform_(-bound, bound, generator=generator)
                get_local(value).copy_(whole[_local_rows(value)])
            elif self.checkpoint is not None:
                _read_local_rows(value, self.checkpoint, name.replace(".base_layer", ""))
            else:
                fresh[name] = value
        for name, whole in draw_fresh_weights(self.config, self.seed) if fresh else ():
            get_local(fresh[name]).copy_(whole[_local_rows(fresh[name])])

    def export(self, folder: Path, tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> None:
        """A folder that `sample.py --model` reads; of a public family, also that family's own classes.

        tensors: the whole state of the denoiser, adapters included, which are merged into the weights.
        dtype: by default float32, as bfloat16 rounds small changes away; bfloat16 for a fresh model.
        """
        dtype = dtype or (torch.bfloat16 if self.checkpoint is None else torch.float32)
        merged = merge_lora_weights(tensors, self.checkpoint if self.lora_rank else None)
        tensors = {name: value.to(dtype) for name, value in merged.items()}
        extra: dict[str, Any] = {"prompt": asdict(self.tokenizer.template)}
        extra |= {} if self.tokenizer.thinks else {"thinks": False}
        extra |= {} if self.checkpoint else {"eos_token_id": self.tokenizer.end_id}
        save_tensors(tensors, self.config, folder, extra, self.checkpoint)
        self.tokenizer.inner.save_pretrained(folder)
        for path in self.checkpoint.folder.iterdir() if self.checkpoint is not None else ():
            # Code that public classes consist of is copied, never run.
            if path.is_file() and (path.suffix == ".py" or path.name == "generation_config.json"):
                shutil.copyfile(path, folder / path.name)
        write_generation_config(folder, self.config)


def merge_lora_weights(tensors: dict[str, Tensor], base: Checkpoint | None = None) -> dict[str, Tensor]:
    """A denoiser's tensors by their plain names, adapters added to their weights in float32: W + 2 B A.

    base: what frozen weights are read from, which may be in a lower dtype in memory.
    """
    found = {}
    for name, value in tensors.items():
        plain = name.replace(".base_layer", "")
        if ".lora_" in name:
            continue
        if base is not None and plain in base.tensor_sources:
            value = torch.empty(value.shape)
            _read_local_rows(value, base, plain)
        if plain != name and name.endswith(".weight"):
            a, b = (tensors[name.replace("base_layer", f"lora_{x}.default")].float() for x in "AB")
            value = value.float() + 2.0 * b @ a
        found[plain] = value
    return found


MAX_TOKENIZER_PASSAGES = 100_000  # that a tokenizer is learned from, at most
MASK_TOKEN, END_TOKEN = "<mask>", "<end>"
_WORD_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Ids 0 and 1 are the mask and the end token; the rest, all bytes among them, is learned from texts."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(" "), normalizers.Replace("\n", "\n ")])
    words = pre_tokenizers.Split(Regex(_WORD_PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[MASK_TOKEN, END_TOKEN], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
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
DEFAULT_PASSAGE_LENGTH = 96  # tokens


def open_initial_model(config: Config) -> InitialModel:
    """What the config says the run begins with; raises `UserError` before any weight is read."""
    path = config.model.path
    origin = _make_fresh_model(config) if path is None else _open_base_model(config, path)
    shape = origin.config
    check_finished_blocks(shape, shape.finished_block_context, shape.evidence_layout)
    return origin


def _open_base_model(config: Config, path: str) -> InitialModel:
    base, train = open_checkpoint(path, config.model.block_size), config.train
    if base.config.adapter is not None:
        raise ConfigError(f"{base.folder} denoises from uniform noise, and only decodes here")
    inner, own = load_tokenizer(base.folder), base.config
    mask_id = own.mask_token_id
    if mask_id is None:
        if train.objective in ("sft", "rl"):
            raise ConfigError(
                f"{base.folder} is an autoregressive model: train it with train.objective=pretrain first"
            )
        mask_id = add_mask_token(inner)
        own = replace(own, shifted=True, causal_context=False, block_size=None, block_length=None)
    if mask_id > max(own.vocab_size, len(inner)):  # a row would be made for every id below it
        raise CheckpointError(
            f"the mask token in {base.folder} has the id {mask_id}, but the model {own.vocab_size}: "
            "the tokenizer belongs to another model"
        )
    vocabulary = max(own.vocab_size, mask_id + 1)
    own = replace(own, vocab_size=vocabulary, mask_token_id=mask_id)
    shape = make_training_shape(config, own, base.raw_config)
    template = load_prompt(config.prompt, shape.evidence_layout, base.raw_config.get("prompt"))
    thinks = does_think(base.raw_config)
    tokenizer = Tokenizer(inner, mask_id, template, base.end_token_ids, vocabulary, thinks)
    if tokenizer.end_id is None:
        raise CheckpointError(f"{base.folder} names no end token: add eos_token_id to its config.json")
    return InitialModel(shape, tokenizer, base, train.seed, train.lora_rank)


def make_training_shape(
    config: Config, own: DenoiserConfig, raw_config: Mapping[str, Any] = MappingProxyType({})
) -> DenoiserConfig:
    """An architecture with what training gives it: layout, lengths, room for long contexts.

    raw_config: the checkpoint's `config.json`, whose layout and length of passages stay where none are set.
    One that names no layout learns `independent`; by reward it keeps that of its family.
    Raises `ConfigError` for a model that is not trained here.
    """
    train, decode, block = config.train, config.decode, config.model.block_size
    block = own.block_size if block is None else block or None
    if own.causal_context and train.objective != "rl":
        raise ConfigError(
            "this model predicts the first token of a block from the text before it, which only "
            "train.objective=rl trains: train another model"
        )
    if block and train.objective == "pretrain":
        raise ConfigError(
            "pretrain masks all of a document at once, where a model of blocks has finished those before: "
            "set model.block_size=0, or train.objective=sft"
        )
    canvas = decode.max_new_tokens or own.canvas_length
    if not block and (decode.block_length or 0) > canvas:
        raise ConfigError(f"block_length={decode.block_length} is longer than max_new_tokens={canvas}")
    retrieval = list_given(config.retrieval, RETRIEVAL_NAMES)
    unset = own.evidence_layout if train.objective == "rl" else "independent"
    own = own.add_settings(list_given(decode, DECODE_NAMES), **retrieval)
    return replace(
        own,
        evidence_layout=config.model.evidence_layout or raw_config.get("evidence_layout") or unset,
        passage_length=train.passage_length or raw_config.get("passage_length") or DEFAULT_PASSAGE_LENGTH,
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
    # Positions for the question, the canvas, and all passages if they follow one another.
    layout = EVIDENCE_LAYOUTS[config.model.evidence_layout or "independent"]
    facts = 1 if layout.separate_passages else config.retrieval.top_k
    room = facts * (train.passage_length or DEFAULT_PASSAGE_LENGTH)
    room += 2 * LONG_QUESTION_TOKENS + (config.decode.max_new_tokens or DenoiserConfig.canvas_length)
    if train.objective not in ("sft", "rl"):
        room = max(room, train.sequence_length + 1)
    own = DenoiserConfig(
        vocab_size=train.vocab_size, mask_token_id=0, hidden_size=train.hidden_size,
        intermediate_size=train.intermediate_size, num_hidden_layers=train.num_hidden_layers,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=head_dim, qk_norm=True,
        tie_word_embeddings=True, max_position_embeddings=room,
    )  # fmt: skip
    texts: Iterable[str] = iterate_world_texts(train.seed)
    if corpus is not None:
        passages = open_corpus(corpus, config.retrieval.index_dir)
        every = -(-len(passages) // MAX_TOKENIZER_PASSAGES)
        texts = (passages[row].text for row in range(0, len(passages), every))
    prompt = DEFAULT_PROMPT_TEMPLATE
    if config.prompt is not None:
        prompt = load_prompt(config.prompt, config.model.evidence_layout or "independent")
    tokenizer = Tokenizer(train_tokenizer(texts, train.vocab_size), 0, prompt, (1,))
    return InitialModel(make_training_shape(config, own), tokenizer, None, train.seed, 0)
