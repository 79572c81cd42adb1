"""Settings of training: its data, the run and its phases, the plan."""

from dataclasses import dataclass, fields, replace
from typing import Any

from dlm_rag.config.checked import Checked, setting
from dlm_rag.errors import ConfigError, fold_message, nearest


@dataclass
class DataConfig(Checked):
    """Data of one's own to train on; where nothing is named, invented worlds take its place."""

    questions: str | None = setting(
        None,
        "sft: file or folder of files of questions with a `response`, or at least `golden_answers`; needs "
        "data.corpus",
    )
    corpus: str | None = setting(
        None,
        "sft, rl: the passages that evidence for them is retrieved from; without data.questions these are "
        "made from its titles",
    )
    held_out: float = setting(
        0.25, "share of the passages that made questions are not about in training", low=0, high=0.9
    )
    documents: dict[str, str] = setting(  # noqa: RUF009 - a factory
        dict, "pretrain, adapt: files of JSON lines with a `text`, by a name for each"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, path in self.documents.items():
            if not name.strip() or not isinstance(path, str):
                raise ConfigError(f"documents: '{name}' must be a name without dots, and its value a file")
        if self.questions is not None and self.corpus is None:
            raise ConfigError("data.questions needs data.corpus too")


@dataclass
class TrainConfig(Checked):
    """What is trained, on what, and how; each of `phases` may set all but the first group anew."""

    # The run.
    phases: dict[str, Any] = setting(  # noqa: RUF009 - a factory
        dict, "phases by name, one after another; each names what differs"
    )
    seed: int = setting(0, "of weights, worlds, examples")
    wandb: str = setting("off", "metrics to Weights & Biases too", choices=("off", "offline", "online"))
    layers: str | None = setting(
        None, "checkpoint whose layers a fresh denoiser begins with, under embeddings of its own"
    )
    timeout_minutes: float = setting(
        10.0,
        "that a process waits for another, unplugged or stuck, before the run ends with what was saved",
        low=0.01, high=10_000,
    )  # fmt: skip
    hidden_size: int = setting(192, "width of a fresh denoiser", low=64, high=2**17)
    head_dim: int = setting(32, "width of its heads", low=8, high=2**12)
    intermediate_size: int = setting(256, "width of its feed-forward layers", low=32, high=2**20)
    num_hidden_layers: int = setting(5, "its depth", low=2, high=2**12)
    vocabulary: int = setting(
        1024, "tokens of its tokenizer, learned on training worlds, or on data.corpus", low=300, high=2**20
    )
    passage_length: int = setting(96, "positions of a passage in the independent layout", low=16)
    learn: str | None = setting(
        None,
        "all weights; lora: adapters beside them; heads: rl alone, two small heads on when to commit and "
        "to search; unset: adapters with a lora_rank, else all",
        choices=("all", "lora", "heads"),
    )
    lora_rank: int = setting(0, "train low-rank adapters beside frozen weights (needs peft); 0: all", low=0)
    # What a phase trains on.
    objective: str = setting(
        "sft",
        "sft: questions, evidence, responses; pretrain: documents; adapt: documents, from an "
        "autoregressive checkpoint whose attention opens step by step; rl: rollouts by reward",
        choices=("sft", "pretrain", "adapt", "rl"),
    )
    uniform_loss: str = setting(
        "cross_entropy",
        "sft of a model of uniform noise: cross-entropy at every position of the canvas, or the NELBO",
        choices=("cross_entropy", "nelbo"),
    )
    self_conditioning: float = setting(
        0.5,
        "share of its rows that are shown the logits of a first pass, as decoding shows those of the step "
        "before",
        low=0,
        high=1,
    )
    steps: int = setting(2000, "optimizer steps; may be raised on --resume", low=1)
    groups: int = setting(
        6, "sft: sets of passages a step, over all processes; rl: questions", low=1, high=2**16
    )
    rows: int = setting(12, "sft: questions and masks on each set; rl: rollouts", low=1, high=2**16)
    crossed: float = setting(
        0.0,
        "sft on questions made from data.corpus: share of the sets of passages whose second passage is "
        "another, under the name that the first has",
        low=0,
        high=1,
    )
    mixture: dict[str, float] = setting(  # noqa: RUF009 - a factory
        dict, "pretrain, adapt: share of each of data.documents; unset: equal shares"
    )
    sequence_length: int = setting(1024, "pretrain, adapt: tokens of a packed sequence", low=8)
    batch_tokens: int = setting(16384, "pretrain, adapt: tokens a step, over all processes", low=8)
    rope_theta: float | None = setting(None, "base of the rotary positions; unset: the model's own", low=1)
    opening_share: float = setting(
        0.3,
        "adapt: share of the steps in which attention opens from causal to bidirectional",
        low=0,
        high=1,
    )
    # How it is optimised.
    optimizer: str = setting(
        "muon", "muon: on the matrices of the layers, adamw on the rest; adamw: on all",
        choices=("muon", "adamw"),
    )  # fmt: skip
    matrix_learning_rate: float = setting(0.02, "of Muon", low=0)
    learning_rate: float = setting(8e-3, "of AdamW; four-fold on QK gains beside Muon", low=0)
    weight_decay: float = setting(0.0, "of the matrices", low=0)
    warmup_steps: int = setting(50, "steps until the full rate", low=0)
    decay_share: float = setting(
        0.25, "share of the steps, at the end, in which the rate falls to 0", low=0, high=1
    )
    # What it takes: none of this changes the loss, but by rounding.
    dtype: str = setting(
        "auto",
        "of the arithmetic; weights under training are float32. auto: bfloat16 on CUDA (float16 before "
        "Ampere), else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    accumulate: int = setting(1, "parts that each process computes its share of a step in", low=1)
    checkpointing: str = setting(
        "none",
        "activations that backward computes again: all of a layer, or all but attention and (unless "
        "compiled) matrix products",
        choices=("none", "selective", "full"),
    )
    logit_chunk: int = setting(4096, "supervised positions whose logits are computed at a time", low=1)
    compile: bool = setting(False, "torch.compile around attention")
    parallel: str = setting(
        "ddp",
        "whole copies on all processes (ddp); weights, gradients and optimizer in shards (fsdp); one "
        "process only (single)",
        choices=("single", "ddp", "fsdp"),
    )
    context_parallel: int = setting(
        1, "pretrain: processes that share each sequence, for very long ones", low=1
    )
    # Training on worlds.
    next_stage_accuracy: float = setting(
        0.62, "running accuracy on names at which prompts get more passages: 2, 2-4, 4 to top_k", low=0
    )
    end_weight: float = setting(0.15, "what an end token counts in the loss", low=0)
    late_end_weight: float = setting(0.4, "the same at the end, reached as the rate falls", low=0)
    pointer_weight: float | None = setting(
        None, "of pointer supervision; unset: 0.3 for a fresh denoiser, 0 for a checkpoint's", low=0
    )
    late_pointer_weight: float | None = setting(
        None, "the same at the end, reached as the rate falls; unset: 0.08 or 0", low=0
    )
    hops: int = setting(4, "of the longest questions, in training and validation", low=1, high=4)
    least_hops: int = setting(1, "rl: of the shortest questions", low=1, high=4)
    world_passages: int = setting(700, "passages of a training world", low=100, high=10**6)
    worlds: int = setting(6, "worlds that examples are drawn from at a time", low=1)
    steps_per_world: int = setting(50, "steps after which the oldest world is replaced", low=1)
    # Learning by reward: exact match, with these parts and prices added.
    f1_weight: float = setting(0.0, "rl: reward of the F1 of the answer", low=0)
    recall_weight: float = setting(0.0, "rl: reward of the supporting passages in the last evidence", low=0)
    forward_price: float = setting(0.0, "rl: taken off for each forward", low=0)
    search_price: float = setting(0.0, "rl: taken off for each search", low=0)
    prices_from: float = setting(0.0, "rl: share of the steps after which prices hold", low=0, high=1)
    rollout_temperature: float = setting(
        1.0, "rl: of the tokens that rollouts draw, where the denoiser learns", low=1e-3, high=100
    )
    steps_of_rollout: int | None = setting(
        None, "rl: denoising steps of each rollout that the denoiser learns from, by lot; unset: all", low=1
    )
    updates: int = setting(1, "rl: updates of the weights with the rollouts of a step", low=1, high=2**10)
    clip: float = setting(
        0.2, "rl: how far an update may move the probability of a step, with several updates", low=0
    )
    kl_weight: float = setting(
        0.0, "rl: of the divergence from the policy that the phase began with, in nats a step", low=0
    )
    committed_only: bool = setting(
        False, "rl: learn from the committed tokens alone, as if positions were given (biased; a control)"
    )
    # What is kept and reported.
    save_every: int = setting(200, "steps between checkpoints", low=1)
    validate_every: int = setting(500, "steps between validations by the decoder", low=1)
    validation_questions: int = setting(25, "for each number of hops, about a world of its own", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if odd := [name for name, share in self.mixture.items() if not isinstance(share, int | float)]:
            raise ConfigError(f"mixture: the share of '{odd[0]}' is no number; a name has no dots")
        sizes = ("hidden_size", "head_dim", "intermediate_size", "num_hidden_layers")
        usual = {item.name: item.default for item in fields(self)}
        if self.layers is not None and (said := [n for n in sizes if getattr(self, n) != usual[n]]):
            raise ConfigError(
                f"{said[0]}={getattr(self, said[0])} has no effect beside layers={self.layers}, which are "
                "as they are: leave one out (train.layers=null)"
            )
        if self.layers is not None and self.lora_rank:
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
        if self.learn is not None and bool(self.lora_rank) != (self.learn == "lora"):
            raise ConfigError(
                f"learn={self.learn} does not go with lora_rank={self.lora_rank}: leave learn out, or the "
                "rank"
            )
        phases = self.in_phases()
        if self.learn == "heads" and any(phase.objective != "rl" for phase in phases.values()):
            raise ConfigError("learn=heads is for objective=rl: nothing else teaches when to commit")
        if self.learn == "heads" and self.kl_weight:
            raise ConfigError(
                "kl_weight is for the denoiser's own policy: set kl_weight=0 with learn=heads"
            )
        if self.committed_only and self.updates > 1:
            raise ConfigError("committed_only has no ratio to be clipped: set updates=1")
        if self.objective == "rl" and self.least_hops > self.hops:
            raise ConfigError(f"least_hops={self.least_hops} is more than hops={self.hops}")

    @property
    def items(self) -> int:
        """What the processes share in a step: sets of passages (sft), or packed sequences."""
        if self.objective in ("sft", "rl"):
            return self.groups
        return self.batch_tokens // self.sequence_length

    @property
    def frozen(self) -> bool:
        """Whether the weights of the denoiser itself stay as they are."""
        return bool(self.lora_rank) or self.learn == "heads"

    def in_phases(self) -> dict[str, "TrainConfig"]:
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
                if key not in may:
                    reason = "belongs to the run, not to a phase" if key in known else "is unknown"
                    raise ConfigError(f"train.phases.{name}.{key} {reason}{nearest(key, may)}")
            alone = replace(self, phases={})
            try:
                tree = OmegaConf.merge(OmegaConf.structured(alone), differences)
                found[name] = OmegaConf.to_object(tree)
            except OmegaConfBaseException as error:
                key = getattr(error, "full_key", None) or ""
                raise ConfigError(f"train.phases.{name}.{key}: {fold_message(error)}") from None
            except ConfigError as error:
                raise ConfigError(f"train.phases.{name}: {error}") from None
        return found


@dataclass
class PlanConfig(Checked):
    """What `train.py --plan` assumes."""

    machine: str | None = setting(
        None,
        "a known machine; unset: all of them",
        choices=("gb300", "gb10", "h100", "h200", "b200", "v100"),
    )
    devices: int = setting(1, "how many of them", low=1)
    link_gbit: float | None = setting(
        None, "of the network between them, one way, in Gb/s; unset: the machine's own", low=1e-3, high=1e6
    )
    mfu: float = setting(0.4, "share of the peak FLOP/s that training reaches", low=0.01, high=1)
    tokens: float | None = setting(None, "tokens of the whole run; unset: what its steps come to", low=1)
    days: float | None = setting(None, "a claim to be checked: that it takes so long", low=0.001)
    kwh_price: float = setting(0.3, "of a kilowatt hour, in dollars", low=0)
    hour_price: float = setting(0.0, "of an hour of one device beside that, in dollars", low=0)
