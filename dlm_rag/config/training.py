"""Settings of training: its data, the run and its phases, the plan."""

from dataclasses import dataclass, fields, replace
from typing import Any

from dlm_rag.config.checked import CheckedSettings, setting
from dlm_rag.config.renamed import find_new_key
from dlm_rag.errors import ConfigError, suggest_nearest, summarize_error


@dataclass
class DataConfig(CheckedSettings):
    """Data of one's own to train on; where nothing is named, invented worlds take its place."""

    questions: str | None = setting(
        None,
        "sft: file or folder of questions with a `response`, or at least `golden_answers`; needs "
        "data.corpus",
    )
    corpus: str | None = setting(
        None,
        "sft, rl: passages from which evidence is retrieved; without data.questions, questions are made "
        "from its titles",
    )
    held_out: float = setting(
        0.25, "share of the passages that generated training questions never ask about", low=0, high=0.9
    )
    documents: dict[str, str] = setting(  # noqa: RUF009 - a factory
        dict, "pretrain, adapt: JSON lines files with a `text`, as NAME: FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, path in self.documents.items():
            if not name.strip() or not isinstance(path, str):
                raise ConfigError(f"documents: '{name}' must be a name without dots, and its value a file")
        if self.questions is not None and self.corpus is None:
            raise ConfigError("data.questions needs data.corpus too")


@dataclass
class TrainConfig(CheckedSettings):
    """What is trained, on what, and how; each of `phases` may set all but the first group anew."""

    # The run.
    phases: dict[str, Any] = setting(  # noqa: RUF009 - a factory
        dict, "training phases by name, run one after another; each lists the settings in which it differs"
    )
    seed: int = setting(0, "random seed of weights, worlds and examples")
    wandb: str = setting(
        "off", "also log metrics to Weights & Biases", choices=("off", "offline", "online")
    )
    init_layers_from: str | None = setting(
        None, "checkpoint whose layers initialise a new model with a vocabulary of its own"
    )
    timeout_minutes: float = setting(
        10.0,
        "time in minutes that a process waits for another one before the run stops with what was saved",
        low=0.01, high=10_000,
    )  # fmt: skip
    hidden_size: int = setting(192, "hidden size of a new model", low=64, high=2**17)
    head_dim: int = setting(32, "attention head dimension of a new model", low=8, high=2**12)
    intermediate_size: int = setting(256, "feed-forward size of a new model", low=32, high=2**20)
    num_hidden_layers: int = setting(5, "number of layers of a new model", low=2, high=2**12)
    vocab_size: int = setting(
        1024,
        "vocabulary size of a new model; its tokenizer is trained on worlds, or on data.corpus",
        low=300,
        high=2**20,
    )
    passage_length: int = setting(
        96, "maximum length of a passage in tokens, in the independent evidence layout", low=16
    )
    trainable: str | None = setting(
        None,
        "what is trained: all weights; lora (adapters); policy_heads (rl only: two small heads that "
        "decide when to commit and when to search); unset: lora if lora_rank is set, else all",
        choices=("all", "lora", "policy_heads"),
    )
    lora_rank: int = setting(
        0, "rank of low-rank adapters on frozen weights (needs peft); 0 trains all weights", low=0
    )
    # What a phase trains on.
    objective: str = setting(
        "sft",
        "training objective: sft (questions, evidence and responses), pretrain (documents), adapt "
        "(documents, from an autoregressive checkpoint whose attention becomes bidirectional) or rl "
        "(rewarded rollouts)",
        choices=("sft", "pretrain", "adapt", "rl"),
    )
    uniform_loss: str = setting(
        "cross_entropy",
        "loss of sft for a uniform noise model: cross-entropy at every canvas position, or the NELBO",
        choices=("cross_entropy", "nelbo"),
    )
    self_conditioning: float = setting(
        0.5,
        "uniform noise only: share of rows that are given the logits of a first pass, as decoding gives "
        "those of the previous step",
        low=0,
        high=1,
    )
    max_steps: int = setting(2000, "number of optimizer steps; may be raised with --resume", low=1)
    passage_sets_per_step: int = setting(
        6, "sft: number of passage sets in a step, over all processes", low=1, high=2**16
    )
    rows_per_set: int = setting(
        12, "sft: number of rows (a question and its mask) trained on each passage set", low=1, high=2**16
    )
    prompts_per_step: int = setting(
        6, "rl: number of questions in a step, over all processes", low=1, high=2**16
    )
    num_generations: int = setting(
        12, "rl: number of rollouts per question (the group size of GRPO)", low=1, high=2**16
    )
    counterfactual_share: float = setting(
        0.0,
        "sft on questions generated from data.corpus: share of passage sets whose second passage is "
        "swapped for another one under the same name",
        low=0,
        high=1,
    )
    mixture: dict[str, float] = setting(  # noqa: RUF009 - a factory
        dict, "pretrain, adapt: share of each source in data.documents; unset: equal shares"
    )
    sequence_length: int = setting(1024, "pretrain, adapt: length of a packed sequence in tokens", low=8)
    batch_tokens: int = setting(
        16384, "pretrain, adapt: number of tokens in a step, over all processes", low=8
    )
    rope_theta: float | None = setting(
        None, "base of the rotary position embedding; unset takes the model's own", low=1
    )
    attention_anneal_fraction: float = setting(
        0.3,
        "adapt: fraction of the steps over which attention changes from causal to bidirectional",
        low=0,
        high=1,
    )
    # How it is optimised.
    optimizer: str = setting(
        "muon",
        "optimizer: muon (for the matrices of the layers, adamw for the rest) or adamw (for everything)",
        choices=("muon", "adamw"),
    )  # fmt: skip
    muon_learning_rate: float = setting(0.02, "learning rate of Muon", low=0)
    learning_rate: float = setting(
        8e-3, "learning rate of AdamW; four times this for QK norm gains if Muon is used", low=0
    )
    weight_decay: float = setting(0.0, "weight decay of matrices", low=0)
    warmup_steps: int = setting(50, "number of steps over which the learning rate rises", low=0)
    decay_fraction: float = setting(
        0.25, "fraction of the steps, at the end, over which the learning rate falls to 0", low=0, high=1
    )
    # What it takes: none of this changes the loss, but by rounding.
    dtype: str = setting(
        "auto",
        "dtype of the computation, with trained weights in float32; auto takes bfloat16 on CUDA (float16 "
        "before Ampere), else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    gradient_accumulation_steps: int = setting(
        1, "number of microbatches in which each process computes its share of a step", low=1
    )
    activation_checkpointing: str = setting(
        "none",
        "recompute activations in the backward pass: full (all of a layer) or selective (all but "
        "attention and, unless compiled, matrix products)",
        choices=("none", "selective", "full"),
    )
    logit_chunk: int = setting(
        4096, "number of supervised positions whose logits are computed at a time", low=1
    )
    compile: bool = setting(False, "compile around attention with torch.compile")
    parallel: str = setting(
        "ddp",
        "data parallelism: ddp (full copies), fsdp (weights, gradients and optimizer state sharded) or "
        "single (one process)",
        choices=("single", "ddp", "fsdp"),
    )
    context_parallel: int = setting(
        1, "pretrain: number of processes that share each sequence, for very long ones", low=1
    )
    # Training on worlds.
    curriculum_accuracy: float = setting(
        0.62,
        "running accuracy on names at which prompts get more passages: first 2, then 2 to 4, then 4 to "
        "top_k",
        low=0,
    )
    eos_weight: float = setting(0.15, "loss weight of an end token", low=0)
    final_eos_weight: float = setting(
        0.4, "loss weight of an end token at the end of training, reached as the learning rate falls", low=0
    )
    pointer_loss_weight: float | None = setting(
        None, "weight of the pointer loss; unset: 0.3 for a new model, 0 for a checkpoint", low=0
    )
    final_pointer_loss_weight: float | None = setting(
        None,
        "weight of the pointer loss at the end of training, reached as the learning rate falls; unset: "
        "0.08 or 0",
        low=0,
    )
    max_hops: int = setting(
        4, "maximum number of hops of a question, in training and evaluation", low=1, high=4
    )
    min_hops: int = setting(1, "rl: minimum number of hops of a question", low=1, high=4)
    world_passages: int = setting(700, "number of passages in a training world", low=100, high=10**6)
    worlds: int = setting(6, "number of worlds that examples are drawn from at a time", low=1)
    steps_per_world: int = setting(50, "number of steps after which the oldest world is replaced", low=1)
    # Learning by reward: exact match, with these parts and prices added.
    f1_weight: float = setting(0.0, "rl: weight of the answer's F1 in the reward", low=0)
    recall_weight: float = setting(
        0.0, "rl: weight in the reward of the share of supporting passages in the last evidence", low=0
    )
    forward_cost: float = setting(0.0, "rl: reward subtracted for each forward pass", low=0)
    search_cost: float = setting(0.0, "rl: reward subtracted for each search", low=0)
    cost_start: float = setting(
        0.0, "rl: fraction of the steps after which forward_cost and search_cost apply", low=0, high=1
    )
    rollout_temperature: float = setting(
        1.0, "rl: sampling temperature of rollouts, if the denoiser is trained", low=1e-3, high=100
    )
    train_steps_per_rollout: int | None = setting(
        None,
        "rl: number of randomly chosen denoising steps of each rollout that are trained on; unset: all",
        low=1,
    )
    num_iterations: int = setting(
        1, "rl: number of weight updates on the rollouts of a step", low=1, high=2**10
    )
    clip_eps: float = setting(
        0.2, "rl: clipping range of the probability ratio of a step, with several updates", low=0
    )
    kl_coef: float = setting(
        0.0,
        "rl: coefficient of the KL divergence from the policy at the start of the phase, in nats per step",
        low=0,
    )
    committed_only: bool = setting(
        False,
        "rl: train on the committed tokens alone, as if their positions were given (biased; a control)",
    )
    # What is kept and reported.
    save_steps: int = setting(200, "number of steps between checkpoints", low=1)
    eval_steps: int = setting(500, "number of steps between evaluations with the decoder", low=1)
    eval_questions: int = setting(
        25, "number of evaluation questions for each number of hops, about a separate world", low=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if odd := [name for name, share in self.mixture.items() if not isinstance(share, int | float)]:
            raise ConfigError(f"mixture: the share of '{odd[0]}' is no number; a name has no dots")
        sizes = ("hidden_size", "head_dim", "intermediate_size", "num_hidden_layers")
        usual = {item.name: item.default for item in fields(self)}
        if self.init_layers_from is not None and (
            said := [n for n in sizes if getattr(self, n) != usual[n]]
        ):
            raise ConfigError(
                f"{said[0]}={getattr(self, said[0])} has no effect beside layers={self.init_layers_from}, "
                "which are "
                "as they are: leave one out (train.init_layers_from=null)"
            )
        if self.init_layers_from is not None and self.lora_rank:
            raise ConfigError(
                "layers begins a fresh denoiser, which has nothing for lora_rank: leave one out"
            )
        if self.hidden_size % self.head_dim:
            raise ConfigError(f"hidden_size={self.hidden_size} must be a multiple of {self.head_dim}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs")
        if self.batch_tokens % self.sequence_length:
            raise ConfigError(
                f"batch_tokens={self.batch_tokens} must be a multiple of sequence_length="
                f"{self.sequence_length}"
            )
        if self.context_parallel > 1 and self.objective != "pretrain":
            raise ConfigError("context_parallel needs objective=pretrain: whole rows, seen by all")
        if self.trainable is not None and bool(self.lora_rank) != (self.trainable == "lora"):
            raise ConfigError(
                f"learn={self.trainable} does not go with lora_rank={self.lora_rank}: leave learn out, or "
                "the "
                "rank"
            )
        phases = self.get_phase_configs()
        if self.trainable == "policy_heads" and any(phase.objective != "rl" for phase in phases.values()):
            raise ConfigError("learn=heads is for objective=rl: nothing else teaches when to commit")
        if self.trainable == "policy_heads" and self.kl_coef:
            raise ConfigError("kl_coef is for the denoiser's own policy: set kl_coef=0 with learn=heads")
        if self.committed_only and self.num_iterations > 1:
            raise ConfigError("committed_only has no ratio to be clipped: set updates=1")
        if self.objective == "rl" and self.min_hops > self.max_hops:
            raise ConfigError(f"min_hops={self.min_hops} is more than hops={self.max_hops}")

    @property
    def items(self) -> int:
        """What the processes share in a step: sets of passages (sft), or packed sequences."""
        if self.objective == "sft":
            return self.passage_sets_per_step
        if self.objective == "rl":
            return self.prompts_per_step
        return self.batch_tokens // self.sequence_length

    @property
    def item_rows(self) -> int:
        """Rows of one of these items."""
        return {"sft": self.rows_per_set, "rl": self.num_generations}.get(self.objective, 1)

    @property
    def is_denoiser_frozen(self) -> bool:
        """Whether the weights of the denoiser itself stay as they are."""
        return bool(self.lora_rank) or self.trainable == "policy_heads"

    def get_phase_configs(self) -> dict[str, "TrainConfig"]:
        """The settings of each phase by its name, in order; one without a name where none are given.

        Raises `ConfigError` for what a phase cannot set.
        """
        if not self.phases:
            return {"": self}
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        known = [item.name for item in fields(self)]
        may = known[known.index("objective") :]
        found: dict[str, Any] = {}
        for name, differences in self.phases.items():
            if not isinstance(differences, dict):
                raise ConfigError(f"train.phases.{name} must name settings, as in {{steps: 100}}")
            for key in differences:
                if new := find_new_key(f"train.phases.{name}.{key}"):
                    raise ConfigError(f"train.phases.{name}.{key} is now called {new}: write that")
                if key not in may:
                    reason = "belongs to the run, not to a phase" if key in known else "is unknown"
                    raise ConfigError(f"train.phases.{name}.{key} {reason}{suggest_nearest(key, may)}")
            alone = replace(self, phases={})
            try:
                tree = OmegaConf.merge(OmegaConf.structured(alone), differences)
                found[name] = OmegaConf.to_object(tree)
            except OmegaConfBaseException as error:
                key = getattr(error, "full_key", None) or ""
                raise ConfigError(f"train.phases.{name}.{key}: {summarize_error(error)}") from None
            except ConfigError as error:
                raise ConfigError(f"train.phases.{name}: {error}") from None
        return found


@dataclass
class PlanConfig(CheckedSettings):
    """What `train.py --plan` assumes."""

    machine: str | None = setting(
        None,
        "machine to plan for; unset: all known ones",
        choices=("gb300", "gb10", "h100", "h200", "b200", "v100"),
    )
    devices: int = setting(1, "number of devices", low=1)
    network_gbit: float | None = setting(
        None,
        "bandwidth of the network between devices in Gb/s, one way; unset takes the machine's own",
        low=1e-3,
        high=1e6,
    )
    mfu: float = setting(0.4, "assumed model FLOPs utilisation of training", low=0.01, high=1)
    tokens: float | None = setting(
        None, "number of tokens of the whole run; unset: what its steps add up to", low=1
    )
    days: float | None = setting(None, "claimed duration in days, to be checked", low=0.001)
    price_per_kwh: float = setting(0.3, "price of a kilowatt hour in dollars", low=0)
    price_per_hour: float = setting(0.0, "price of a device hour in dollars, in addition to energy", low=0)
