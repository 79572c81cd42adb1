"""Every way of decoding and of training, of tiny models: for tests that run all of them."""

from dataclasses import replace

import numpy as np

from dlm_rag import Decoder, load_retriever
from dlm_rag.config import DecodeConfig, EngineConfig, load_config
from dlm_rag.model.denoiser_config import ExpertsConfig
from dlm_rag.tokenizer.prompts import PromptTemplate
from dlm_rag.training.trainer import open_trainer
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser, tiny_tokenizer

EXPERTS = ExpertsConfig(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, shared_intermediate_size=32,
    score_function="sigmoid", expert_bias=True, n_group=2, topk_group=1,
)  # fmt: skip
ROUTED = replace(EXPERTS, n_group=1, expert_capacity=4)
# a few passages, which leave and come back
SMALL_POOL_ENGINE = EngineConfig(prefix_cache_gib=4e-5)
DECODING_SETUPS = {  # layout of the evidence, shape of the model, settings
    "joint": ("joint", {}, {}),
    "prefix": ("prefix", {}, {}),
    "independent": ("independent", {}, {}),
    "shifted": ("independent", {"shifted": True, "qkv_bias": True, "qk_norm": True}, {}),
    "parallel windows": ("parallel", {"block_size": 3, "shifted": True, "causal_context": True}, {}),
    "experts": ("independent", {"experts": EXPERTS}, {}),
    "blocks, reread": ("joint", {"block_size": 3}, {}),
    "blocks, text": ("independent", {"block_size": 3}, {"finished_block_context": "no_evidence"}),
    "pipeline": ("independent", {}, {"overlap": "pipeline"}),
    "drawn": ("prefix", {}, {"temperature": 0.5}),
    "by entropy": ("joint", {}, {"commit_rule": "entropy_bound", "commit_threshold": 0.9}),
    "by lot": ("independent", {}, {"commit_rule": "sampled", "temperature": 1.0}),
    "experts of a block": ("joint", {"block_size": 3, "experts": ROUTED}, {"edit_threshold": 0.1}),
    "edited": ("independent", {"block_size": 3}, {"edit_threshold": 0.5, "max_edit_steps": 2}),
    "one question at a time": ("joint", {"block_size": 3}, {"batch_size": 1}),
}
SHAPE = [
    "train.hidden_size=64", "train.num_hidden_layers=2", "train.vocab_size=400",
    "train.passage_sets_per_step=2", "train.prompts_per_step=2",
    "train.rows_per_set=3", "train.num_generations=3", "train.world_passages=100", "train.max_steps=9",

    "train.eval_questions=1", "train.passage_length=96", "decode.max_new_tokens=24",
    "retrieval.top_k=3",
]  # fmt: skip
PRETRAIN = ["train.objective=pretrain", "train.sequence_length=96", "train.batch_tokens=192"]
PLAIN = ["model.path={folder}/plain"]
RL = [
    *PLAIN, "train.objective=rl", "train.num_generations=4", "train.max_hops=1", "train.optimizer=adamw",
    "train.train_steps_per_rollout=2", "decode.max_new_tokens=8", "decode.gate_temperature=2",
]  # fmt: skip
TRAINING_SETUPS = {
    "sft": [],
    "sft, joint": ["model.evidence_layout=joint"],
    "sft, prefix": ["model.evidence_layout=prefix"],
    "sft in parts": ["train.gradient_accumulation_steps=2", "train.optimizer=adamw"],
    "sft in blocks, reread": ["model.block_size=8"],
    "sft in blocks, text": ["model.block_size=8", "decode.finished_block_context=no_evidence"],
    "sft, checkpointing": ["train.activation_checkpointing=full"],
    "sft, selective, sdpa": ["train.activation_checkpointing=selective", "model.attn_implementation=sdpa"],
    "adapters": [*PLAIN, "train.lora_rank=4", "train.activation_checkpointing=full"],
    "experts": ["model.path={folder}/experts"],
    "pretrain": [*PRETRAIN, "train.activation_checkpointing=selective"],
    "pretrain, full": [*PRETRAIN, "train.activation_checkpointing=full"],
    "rl": RL,
    "rl in parts": [*RL, "train.gradient_accumulation_steps=2", "train.activation_checkpointing=full"],
}


def make_setup_decoder(corpus_file, way, place=lambda denoiser: denoiser):
    """place: what is done to the denoiser before a decoder is built around it."""
    layout, shape, settings = DECODING_SETUPS[way]
    config = DecodeConfig(**{"max_new_tokens": 6, "batch_size": 2, "commit_threshold": 0.4} | settings)
    denoiser = place(tiny_denoiser(evidence_layout=layout, **shape))
    retriever, tokenizer = (
        load_retriever(corpus_file, top_k=2),
        tiny_tokenizer(PromptTemplate.from_checkpoint(None, layout)),
    )
    return Decoder(denoiser, retriever, tokenizer, config, layout, engine=SMALL_POOL_ENGINE)


def write_setup_checkpoints(folder):
    """What the ways of training begin with; returns the folder."""
    shapes = {"plain": {}, "experts": {"experts": EXPERTS}, "blocks": {"block_size": 32}}
    for name, shape in shapes.items():
        denoiser = tiny_denoiser(max_position_embeddings=512, evidence_layout="independent", **shape)
        denoiser.save_pretrained(folder / name, eos_token_id=257)
        byte_tokenizer().save_pretrained(folder / name)
    return folder


def make_setup_trainer(out, folder, way, *more, processes=None):
    """The trainer and its validation; folder: as `write_setup_checkpoints` left it."""
    words = [word.format(folder=folder) for word in (*SHAPE, *TRAINING_SETUPS[way], *more)]
    return open_trainer(load_config(None, words), out, processes)


def force_mixed_rewards(monkeypatch):
    """From now on half of the rollouts of every question seem right, whatever they answer."""
    mixed = lambda rewards: np.array([(-1.0) ** n for n in range(len(rewards))])  # noqa: E731
    monkeypatch.setattr("dlm_rag.training.rl.compute_advantages", mixed)
