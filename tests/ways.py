"""Every way of decoding and of training, of tiny models: for tests that run all of them."""

from conftest import byte_tokenizer, tiny_denoiser, tiny_tokenizer
from tiny_gemma import write_gemma

from dlm_rag import Decoder, load_retriever
from dlm_rag.config import DecodeConfig, EngineConfig, load_config
from dlm_rag.model.heads import Heads
from dlm_rag.model.shape import Experts
from dlm_rag.tokenizer import PromptTemplate
from dlm_rag.training.phase import open_trainer

EXPERTS = Experts(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, shared_intermediate_size=32,
    score_function="sigmoid", expert_bias=True, n_group=2, topk_group=1,
)  # fmt: skip
TIERS = EngineConfig(pool_gib=4e-5, host_pool_gib=4e-5)  # a few passages each, which leave and come back
DECODING = {  # layout of the evidence, shape of the model, settings
    "joint": ("joint", {}, {}),
    "prefix": ("prefix", {}, {}),
    "independent": ("independent", {}, {}),
    "shifted": ("independent", {"shifted": True, "qkv_bias": True, "qk_norm": True}, {}),
    "experts": ("independent", {"experts": EXPERTS}, {}),
    "blocks, reread": ("joint", {"attention_block": 3}, {}),
    "blocks, text": ("independent", {"attention_block": 3}, {"finished_blocks": "text"}),
    "blocks, append": ("independent", {"attention_block": 3}, {"finished_blocks": "append"}),
    "blocks, kept": ("independent", {"attention_block": 3}, {"finished_blocks": "kept"}),
    "pipeline": ("independent", {}, {"overlap": "pipeline"}),
    "drawn": ("prefix", {}, {"temperature": 0.5}),
    "by entropy": ("joint", {}, {"commit_rule": "entropy_bound"}),
    "by lot": ("independent", {}, {"commit_rule": "sampled", "temperature": 1.0}),
    "by heads": ("prefix", {"attention_block": 3}, {"commit_rule": "head", "search": "head"}),
    "copying": ("independent", {}, {"copy_price": 3.0, "canvas_length": 3}),
    "edited": ("independent", {"attention_block": 3}, {"edit_threshold": 0.5, "edit_rounds": 2}),
    "one question at a time": ("joint", {"attention_block": 3}, {"batch_size": 1}),
}
SHAPE = [
    "train.hidden_size=64", "train.num_hidden_layers=2", "train.vocabulary=400", "train.groups=2",
    "train.rows=3", "train.world_passages=100", "train.steps=9", "train.worlds=1",
    "train.validation_questions=1", "train.passage_length=96", "decode.canvas_length=24",
    "retrieval.top_k=3",
]  # fmt: skip
PRETRAIN = ["train.objective=pretrain", "train.sequence_length=96", "train.batch_tokens=192"]
PLAIN = ["model.path={folder}/plain"]
RL = [
    *PLAIN, "train.objective=rl", "train.rows=4", "train.hops=1", "train.optimizer=adamw",
    "train.steps_of_rollout=2", "decode.canvas_length=8",
]  # fmt: skip
DENOISER = [*RL, "train.learn=all", "decode.commit_rule=threshold", "decode.gate_width=2"]
GEMMA = ["model.path={folder}/gemma", "train.self_conditioning=0.5"]
TRAINING = {
    "sft": [],
    "sft, joint": ["model.evidence_layout=joint"],
    "sft, prefix": ["model.evidence_layout=prefix"],
    "sft in parts": ["train.accumulate=2", "train.optimizer=adamw"],
    "sft in blocks, reread": ["model.attention_block=8"],
    "sft in blocks, text": ["model.attention_block=8", "decode.finished_blocks=text"],
    "sft, checkpointing": ["train.checkpointing=full"],
    "sft, selective, sdpa": ["train.checkpointing=selective", "model.attention=sdpa"],
    "adapters": [*PLAIN, "train.lora_rank=4", "train.checkpointing=full"],
    "experts": ["model.path={folder}/experts"],
    "pretrain": [*PRETRAIN, "train.logit_chunk=16", "train.checkpointing=selective"],
    "adapt": [*PRETRAIN, "train.objective=adapt", "train.checkpointing=full"],
    "rl": DENOISER,
    "rl in parts": [*DENOISER, "train.accumulate=2", "train.checkpointing=full"],
    "rl of what was committed": [*DENOISER, "train.committed_only=true"],
    "rl with several updates": [*DENOISER, "train.updates=2"],
    "rl near the first weights": [*DENOISER, "train.kl_weight=0.1"],
    "rl of heads": [*RL, "train.learn=heads", "decode.commit_rule=head", "decode.search=head"],
    "uniform noise": GEMMA,
    "uniform noise, nelbo": [*GEMMA, "train.uniform_loss=nelbo", "train.checkpointing=full"],
}


def make_decoder(corpus_file, way, place=lambda denoiser: denoiser):
    """place: what is done to the denoiser before a decoder is built around it."""
    layout, shape, settings = DECODING[way]
    config = DecodeConfig(**{"canvas_length": 6, "batch_size": 2, "commit_threshold": 0.4} | settings)
    denoiser = place(tiny_denoiser(evidence_layout=layout, **shape))
    denoiser.heads = Heads().requires_grad_(False)
    retriever, tokenizer = (
        load_retriever(corpus_file, top_k=2),
        tiny_tokenizer(PromptTemplate.read(None, layout)),
    )
    return Decoder(denoiser, retriever, tokenizer, config, layout, engine=TIERS)


def write_checkpoints(folder):
    """What the ways of training begin with; returns the folder."""
    shapes = {"plain": {}, "experts": {"experts": EXPERTS}, "blocks": {"attention_block": 32}}
    for name, shape in shapes.items():
        denoiser = tiny_denoiser(max_position_embeddings=512, **shape)
        denoiser.save_pretrained(folder / name, eos_token_id=257)
        byte_tokenizer().save_pretrained(folder / name)
    write_gemma(folder / "gemma")
    return folder


def make_trainer(out, folder, way, *more, processes=None):
    """The trainer and its validation; folder: as `write_checkpoints` left it."""
    words = [word.format(folder=folder) for word in (*SHAPE, *TRAINING[way], *more)]
    return open_trainer(load_config(None, words), out, processes)


def mix_groups(monkeypatch):
    """From now on half of the rollouts of every question seem right, whatever they answer."""
    mixed = lambda rewards, priced: [(-1.0) ** n for n in range(len(rewards))]  # noqa: E731
    monkeypatch.setattr("dlm_rag.training.rollouts.advantages", mixed)
