"""Settings of training: its data, the run, the plan; of rows that are made for it."""

from dlm_rag.config.fields import SET, CheckedSettings, setting, settings_dataclass
from dlm_rag.errors import ConfigError

# What settings need, as `only_with` says it.
SFT, RL, PRETRAIN = ({"train.objective": (name,)} for name in ("sft", "rl", "pretrain"))
ANSWERING = {"train.objective": ("sft", "rl")}
NEW_MODEL = {"model.path": (None,)}
WORLDS = {"data.corpus": (None,)}


@settings_dataclass
class DataConfig(CheckedSettings):
    """Your own training data. Without any, training invents worlds."""

    questions: str | None = setting(None, only_with=ANSWERING)
    """sft: file or folder of questions with a `response`, or at least `golden_answers`; needs
    data.corpus"""
    corpus: str | None = setting(None)
    """sft, rl: passages from which evidence is retrieved; needs data.questions"""
    documents: str | None = setting(None, only_with=PRETRAIN)
    """pretrain: JSON lines file with a `text`, or a folder of such files"""

    def __post_init__(self) -> None:
        if self.questions is not None and self.corpus is None:
            raise ConfigError("data.questions needs data.corpus too")
        if self.corpus is not None and self.questions is None:
            raise ConfigError("data.corpus needs data.questions too: a file or a folder of them")


@settings_dataclass
class TrainConfig(CheckedSettings):
    """What is trained, on what, and how."""

    # The run.
    seed: int = setting(0)
    """random seed of weights, worlds and examples"""
    wandb: str = setting("off", choices=("off", "offline", "online"))
    """also log metrics to Weights & Biases"""
    hidden_size: int = setting(192, low=64, high=2**17, only_with=NEW_MODEL)
    """hidden size of a new model"""
    intermediate_size: int = setting(256, low=32, high=2**20, only_with=NEW_MODEL)
    """feed-forward size of a new model"""
    num_hidden_layers: int = setting(5, low=2, high=2**12, only_with=NEW_MODEL)
    """number of layers of a new model"""
    vocab_size: int = setting(1024, low=300, high=2**20, only_with=NEW_MODEL)
    """vocabulary size of a new model; its tokenizer is trained on worlds, or on data.corpus"""
    passage_length: int = setting(96, low=16)
    """maximum length of a passage in tokens, in the independent evidence layout"""
    lora_rank: int = setting(0, low=0, only_with={"model.path": SET})
    """rank of low-rank adapters on frozen weights (needs peft); 0 trains all weights"""
    # What it trains on.
    objective: str = setting("sft", table="dlm_rag.training.tasks:TASKS")
    """training objective: sft (questions, evidence and responses), pretrain (documents; also from an
    autoregressive checkpoint) or rl (rewarded rollouts); or a class of your own as module:Class"""
    max_steps: int = setting(2000, low=1)
    """number of optimizer steps; may be raised with --resume: curricula go by the first number"""
    passage_sets_per_step: int = setting(6, low=1, high=2**16, only_with=SFT)
    """sft: number of passage sets in a step, over all processes"""
    rows_per_set: int = setting(12, low=1, high=2**16, only_with=SFT)
    """sft: number of rows (a question and its mask) trained on each passage set"""
    prompts_per_step: int = setting(6, low=1, high=2**16, only_with=RL)
    """rl: number of questions in a step, over all processes"""
    num_generations: int = setting(12, low=1, high=2**16, only_with=RL)
    """rl: number of rollouts per question (the group size of GRPO)"""
    sequence_length: int = setting(1024, low=8, only_with=PRETRAIN)
    """pretrain: length of a packed sequence in tokens"""
    batch_tokens: int = setting(16384, low=8, only_with=PRETRAIN)
    """pretrain: number of tokens in a step, over all processes"""
    # Optimisation.
    optimizer: str = setting("muon", choices=("muon", "adamw"))
    """optimizer: muon (for the matrices of the layers, adamw for the rest) or adamw (for everything)"""
    muon_learning_rate: float = setting(0.02, low=0, only_with={"train.optimizer": ("muon",)})
    """learning rate of Muon"""
    learning_rate: float = setting(8e-3, low=0)
    """learning rate of AdamW; four times this for QK norm gains if Muon is used"""
    warmup_steps: int = setting(50, low=0)
    """number of steps over which the learning rate rises"""
    decay_fraction: float = setting(0.25, low=0, high=1)
    """fraction of the steps, at the end, over which the learning rate falls to 0"""
    # Resources: none of this changes the loss, except by rounding.
    dtype: str = setting("auto", choices=("auto", "float32", "bfloat16", "float16"))
    """dtype of the computation, with trained weights in float32; auto takes bfloat16 on CUDA (float16
    before Ampere), else float32"""
    gradient_accumulation_steps: int = setting(1, low=1)
    """number of microbatches in which each process computes its share of a step"""
    activation_checkpointing: str = setting("none", choices=("none", "selective", "full"))
    """recompute activations in the backward pass: full (all of a layer) or selective (all but attention
    and, unless compiled, matrix products)"""
    data_workers: int = setting(0, low=0, high=1024, only_with=SFT)
    """sft: number of processes that make batches ahead of the steps; 0: a thread, one step ahead"""
    compile: bool = setting(False)
    """compile around attention with torch.compile"""
    parallel: str = setting("ddp", choices=("ddp", "fsdp"))
    """data parallelism: ddp (full copies) or fsdp (weights, gradients and optimizer state sharded)"""
    # Training on worlds.
    pointer_loss_weight: float | None = setting(None, low=0, only_with=SFT)
    """weight of the pointer loss; unset: 0.3 for a new model, 0 for a checkpoint"""
    final_pointer_loss_weight: float | None = setting(None, low=0, only_with=SFT)
    """weight of the pointer loss at the end of training, reached as the learning rate falls; unset:
    0.08 or 0"""
    max_hops: int = setting(4, low=1, high=4, only_with=ANSWERING | {"data.questions": (None,)})
    """maximum number of hops of a question, in training and evaluation"""
    min_hops: int = setting(1, low=1, high=4, only_with=RL | WORLDS)
    """rl: minimum number of hops of a question"""
    world_passages: int = setting(700, low=100, high=10**6)
    """number of passages in a training world"""
    steps_per_world: int = setting(50, low=1, only_with=ANSWERING | WORLDS)
    """number of steps after which the oldest world is replaced"""
    # Reinforcement learning: the reward minus these costs.
    reward: str = setting("exact_match", table="dlm_rag.training.rl.reward:REWARDS", only_with=RL)
    """rl: reward of a rollout before costs; or a function of your own as module:function"""
    forward_cost: float = setting(0.0, low=0, only_with=RL)
    """rl: reward subtracted for each forward pass"""
    search_cost: float = setting(0.0, low=0, only_with=RL)
    """rl: reward subtracted for each search"""
    train_steps_per_rollout: int | None = setting(None, low=1, only_with=RL)
    """rl: number of randomly chosen denoising steps of each rollout that are trained on; unset: all"""
    # Checkpoints and evaluation.
    save_steps: int = setting(200, low=1)
    """number of steps between checkpoints"""
    eval_steps: int = setting(500, low=1)
    """number of steps between evaluations with the decoder"""
    eval_questions: int = setting(25, low=1, only_with=ANSWERING)
    """number of evaluation questions for each number of hops, about a separate world"""

    def __post_init__(self) -> None:
        if self.hidden_size % 32:
            raise ConfigError(f"hidden_size={self.hidden_size} must be a multiple of 32")
        if self.batch_tokens % self.sequence_length:
            raise ConfigError(f"batch_tokens must be a multiple of sequence_length={self.sequence_length}")


@settings_dataclass
class PlanConfig(CheckedSettings):
    """Assumptions of `--plan`."""

    machine: str | None = setting(None, choices=("gb300", "gb10", "h100", "h200", "b200", "v100"))
    """machine to plan for; unset: all known ones"""
    devices: int = setting(1, low=1)
    """number of devices that a training step is divided among; what they send each other is not counted"""


@settings_dataclass
class SynthesisConfig(CheckedSettings):
    """Training rows: a model's own responses to questions, filtered."""

    filter: str = setting("answer", choices=("answer", "evidence"))
    """which responses are kept: those that end in a known answer (where none is known, those supported by
    their evidence), or those supported by their evidence"""
    decontaminate_against: str | None = setting(None)
    """files of evaluation questions, separated by commas; rows that share 12 consecutive words with one
    are dropped"""
