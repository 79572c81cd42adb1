"""What a run begins with, and what it ends in: a denoiser and its tokenizer, fresh or of a checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlm_rag.config import Config
from dlm_rag.errors import CheckpointError, ConfigError
from dlm_rag.evidence.prompt_segments import check_finished_blocks
from dlm_rag.model.checkpoint import Checkpoint, open_checkpoint, save_tensors
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.diffusion_gemma import DiffusionGemma
from dlm_rag.model.families.diffusion_gemma import to_checkpoint_names
from dlm_rag.model.policy_heads import HEADS_PREFIX
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.tokenizer import PromptTemplate, Tokenizer, load_tokenizer
from dlm_rag.training.initial_weights import allocate_denoiser, build_meta_denoiser, init_weights
from dlm_rag.training.tokenizer_training import iterate_corpus_texts, iterate_world_texts, train_tokenizer
from dlm_rag.training.uniform_checks import check_noise_settings

LONG_QUESTION_TOKENS = (
    64  # tokens of a long question of a world; small vocabularies need up to twice as many
)
DEFAULT_PROMPT_TEMPLATE = PromptTemplate(head="{question}\n", fact="{passage}")
ADDED_MASK_TOKEN = "<|mask|>"  # for tokenizers that have none


@dataclass(frozen=True)
class InitialModel:
    """An architecture with its tokenizer, before any weight is there."""

    config: DenoiserConfig
    tokenizer: Tokenizer
    checkpoint: Checkpoint | None  # that the weights come from; None: fresh ones
    seed: int
    lora_rank: int
    heads_only: bool = False  # beside weights that stay
    layers_checkpoint: Checkpoint | None = None  # of which a fresh denoiser has the layers

    def build_on_meta(self, frozen: torch.dtype) -> Any:
        """The denoiser on the meta device; `frozen`: of weights beside which others are
        trained."""
        if self.config.noise is not None and self.checkpoint is not None:
            return DiffusionGemma.build_on_meta(self.checkpoint)
        return build_meta_denoiser(self.config, self.lora_rank, frozen, self.heads_only)

    def materialize(self, denoiser: Any, device: torch.device, trained: bool = True) -> None:
        """Gives what `empty` made, or its shards, memory on the device and the first weights.

        trained: as in `init_weights`.
        """
        if self.config.noise is not None and self.checkpoint is not None:
            denoiser.load(self.checkpoint, device, torch.float32)
            return
        allocate_denoiser(denoiser, device)
        init_weights(denoiser, self.checkpoint, self.seed, trained, self.layers_checkpoint)

    def build_denoiser(self, device: torch.device, frozen: torch.dtype = torch.float32) -> Denoiser:
        """The whole denoiser with its first weights, float32 where they are trained."""
        denoiser = self.build_on_meta(frozen)
        self.materialize(denoiser, device)
        return denoiser

    def export(
        self, folder: Path, tensors: dict[str, Tensor], rope_theta: float, dtype: torch.dtype
    ) -> None:
        """A folder that `sample.py --model` reads; of a public family, also that family's own classes.

        tensors: the whole state of the denoiser, adapters included, which are merged into the weights.
        """
        whole = merge_lora_weights(tensors, self.lora_rank)
        if self.config.noise is not None and self.checkpoint is not None:
            whole = to_checkpoint_names(whole, self.checkpoint.raw_config, self.checkpoint.folder)
        tensors = {
            n: value if n.startswith(HEADS_PREFIX) else value.to(dtype) for n, value in whole.items()
        }
        template = self.tokenizer.template
        extra: dict[str, Any] = {
            "prompt": {"head": template.head, "fact": template.fact, "tail": template.tail},
            "eos_token_id": self.tokenizer.end_id,
        }
        if self.checkpoint is not None:
            extra.pop("eos_token_id")
        config = replace(self.config, rope_theta=rope_theta)
        save_tensors(tensors, config, folder, extra, self.checkpoint)
        self.tokenizer.inner.save_pretrained(folder)
        if self.checkpoint is not None:
            for path in self.checkpoint.folder.iterdir():
                # The code that public classes consist of; it is copied, never run.
                if path.is_file() and (path.suffix == ".py" or path.name == "generation_config.json"):
                    shutil.copyfile(path, folder / path.name)


def open_initial_model(config: Config) -> InitialModel:
    """What the config says the run begins with; raises `UserError` before any weight is read."""
    origin = (
        _fresh_model(config) if config.model.path is None else _from_checkpoint(config, config.model.path)
    )
    if origin.checkpoint is None:
        check_noise_settings(config, None)
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
            "finished_block_context=no_evidence is trained for models that predict in place, and this one "
            "predicts the "
            "next token: set decode.finished_block_context=recompute"
        )


def _from_checkpoint(config: Config, path: str) -> InitialModel:
    checkpoint = open_checkpoint(path, config.model.block_size)
    train, own = config.train, checkpoint.config
    check_noise_settings(config, checkpoint)
    inner = load_tokenizer(checkpoint.folder)
    mask_id = own.mask_token_id
    if mask_id is None:
        first = next(iter(train.get_phase_configs().values()))
        if first.objective != "adapt":
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
        if p.objective != "sft" and p.rope_theta
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
    train, layout = config.train, config.model.evidence_layout or "independent"
    if any(phase.objective == "rl" for phase in list(train.get_phase_configs().values())[:1]):
        raise ConfigError(
            "rl begins with a model that answers: set model.path, or put a phase of sft before"
        )
    if train.lora_rank:
        raise ConfigError("lora_rank needs a checkpoint: a fresh denoiser has nothing to stand beside")
    heads, canvas = train.hidden_size // train.head_dim, config.decode.max_new_tokens
    canvas = canvas or DenoiserConfig.canvas_length
    # Positions for the question, the canvas, and all passages where they stand behind one another.
    passages = 1 if layout == "independent" else config.retrieval.top_k
    room = passages * train.passage_length + 2 * LONG_QUESTION_TOKENS + canvas
    longest = [p.sequence_length + 1 for p in train.get_phase_configs().values() if p.objective != "sft"]
    layers = None if train.init_layers_from is None else _open_layers_checkpoint(train.init_layers_from)
    own = (
        layers.config
        if layers
        else DenoiserConfig(
            vocab_size=train.vocab_size,
            hidden_size=train.hidden_size,
            num_hidden_layers=train.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=train.head_dim,
            intermediate_size=train.intermediate_size,
            qk_norm=True,
            tie_word_embeddings=True,
        )
    )
    shape = replace(
        own,
        vocab_size=train.vocab_size,
        max_position_embeddings=max(room, *longest, 0),
        mask_token_id=0,
        evidence_layout=layout,
        passage_length=train.passage_length,
        canvas_length=canvas,
        block_length=config.decode.block_length,
        block_size=config.model.block_size or None,
        finished_block_context=config.decode.finished_block_context
        or DenoiserConfig.finished_block_context,
    )
    path = config.data.corpus
    corpus = None if path is None else open_corpus(path, config.retrieval.index_dir)
    texts = iterate_world_texts(train.seed) if corpus is None else iterate_corpus_texts(corpus)
    tokenizer = Tokenizer(train_tokenizer(texts, train.vocab_size), 0, DEFAULT_PROMPT_TEMPLATE, (1,))
    return InitialModel(shape, tokenizer, None, train.seed, 0, layers_checkpoint=layers)


def _open_layers_checkpoint(path: str) -> Checkpoint:
    """The checkpoint whose layers a fresh denoiser takes over; raises `CheckpointError`."""
    found = open_checkpoint(path)
    if found.config.noise is not None:
        raise CheckpointError(f"{found.folder} is a model of uniform noise: give it as model.path instead")
    if found.config.attention_patterns:
        raise CheckpointError(
            f"{found.folder} has attention patterns of its own: give it as model.path instead"
        )
    if found.config.shifted:
        raise CheckpointError(f"{found.folder} predicts the next token: a fresh denoiser predicts in place")
    return found


def merge_lora_weights(tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A denoiser's tensors by their plain names, adapters added to the weights beside them: W + 2 B A."""
    if not rank:
        return tensors
    found = {}
    for name, value in tensors.items():
        if ".lora_" in name:
            continue
        if ".base_layer." in name and name.endswith(".weight"):
            a, b = (tensors[name.replace("base_layer", f"lora_{x}.default")].float() for x in "AB")
            value = (value.float() + 2.0 * b @ a).to(value.dtype)
        found[name.replace(".base_layer", "")] = value
    return found
