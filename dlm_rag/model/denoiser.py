"""The denoiser p_theta: one bidirectional transformer for every checkpoint.

RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts. Shapes: B rows, L length, T packed
tokens (one row after another), V vocabulary.

The smallest run: `Denoiser(DenoiserConfig(vocab_size=64))(torch.zeros(1, 8, dtype=torch.long))`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor, nn

from dlm_rag.errors import ConfigError
from dlm_rag.machine import choose_device, choose_dtype
from dlm_rag.model import layers
from dlm_rag.model.checkpoint import Checkpoint, open_checkpoint, save_tensors
from dlm_rag.model.denoiser_config import QUERY_SCALE_KEY, DenoiserConfig, compute_rope_frequencies
from dlm_rag.model.packed_batch import KeysValues, PackedRows, Segment, pack_rows
from dlm_rag.model.quantize import check_quantize, list_quantized_weights, quantize_weight
from dlm_rag.nvtx_ranges import profile_layer

# By the beginnings of their names, operators whose results selective checkpointing keeps.
SAVED_OPS = (
    "aten::mm", "aten::addmm", "aten::_scaled_dot_product_", "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_varlen_forward",
)  # fmt: skip


@dataclass
class FlopCount:
    """What was computed and moved, summed over calls.

    A call of T packed tokens does 2 FLOPs for each weight and token, and 4 D for each pair of a query and a
    key in each head; it reads the weights once, and keys and values once for each row. A token goes through
    the experts that it chooses; as many are read as tokens would meet that choose evenly. Activations are
    not counted. A test compares it with torch's FlopCounterMode, which takes half of a step on a CPU.
    """

    flops: float = 0.0
    attention_flops: float = 0.0  # those in the products of queries, keys and values
    bytes_moved: float = 0.0
    calls: int = 0
    tokens: int = 0

    def flops_with_backward(self, frozen: bool) -> float:
        """FLOPs of forward and backward, which is twice forward: by inputs, and by weights not frozen."""
        return 2 * self.flops + self.attention_flops if frozen else 3 * self.flops

    def __add__(self, other: FlopCount) -> FlopCount:
        return FlopCount(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: FlopCount) -> FlopCount:
        return FlopCount(*map(operator.sub, vars(self).values(), vars(other).values()))


class Denoiser(layers.TransformerWeights):
    """Maps token ids to logits; `logits[:, i]` always predicts token `i`.

    `forward` takes rectangular batches. The decoder uses its two halves: `encode` runs the transformer over
    ragged rows, `compute_token_logits` computes logits at the positions that are needed.
    """

    inverse_frequencies: Tensor

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__(config)
        self.config = config
        self.attention, self.quantize = "auto", "none"  # as the settings of `model`
        self.activation_checkpointing = "none"  # while gradients are recorded: none, selective, full
        self.activation_checkpointing_interval = 1  # of the layers that it is for
        self._compiled_before: int | None = None
        self.flop_count = FlopCount()  # of all calls since
        self._origin: tuple[Checkpoint, int] | None = None  # what was loaded, and how many parameters
        self.tie_weights()
        self.set_rope_theta(config.rope_theta)
        if not self.embed_tokens.weight.is_meta:
            self.initialise()

    def tie_weights(self) -> None:
        """Ties head and embedding if the config says so, after either was replaced."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def set_rope_theta(self, theta: float) -> None:
        """Gives the rotary positions another base, as before training on longer contexts."""
        self.config = replace(self.config, rope_theta=theta)
        frequencies, self.rope_gain = compute_rope_frequencies(self.config)
        if not self.embed_tokens.weight.is_meta:
            frequencies = frequencies.to(self.device)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Denoiser:
        """As torch's, for `to` and the like; frequencies stay float32, quantised weights are refused."""
        if self.quantize != "none":
            raise ConfigError(
                "quantised weights stay as they are: load the model on the device and in the dtype wanted"
            )
        dtype, found = self.dtype, super()._apply(fn, recurse)
        if self._origin is not None and self.dtype != dtype:  # which may have been a finer one
            self._origin = self._origin[0], -1
        if self.inverse_frequencies.dtype != torch.float32:
            self.set_rope_theta(self.config.rope_theta)
        return found

    @torch.no_grad()
    def initialise(self) -> None:
        """Fresh weights: matrices normal with a deviation of 0.02, biases 0, gains 1."""
        for name, value in self.named_parameters():
            if value.dim() > 1:
                value.normal_(0.0, 0.02)
            else:
                value.fill_(0.0 if name.endswith("bias") else 1.0)

    @classmethod
    def from_pretrained(
        cls, path: str | Path | Checkpoint, device: str | torch.device = "cpu",
        dtype: str | torch.dtype = torch.float32, attention: str = "auto", quantize: str = "none",
        device_map: str | Sequence[str] | None = None,
    ) -> Denoiser:  # fmt: skip
        """The denoiser in a Hugging Face style folder or hub id (see `families.FAMILIES`).

        Reads safetensors straight into `dtype` on `device`, and into the precision that `quantize` names.
        device_map: devices that share the layers, the first with embedding and head; "auto": all of CUDA.
        Never runs code or unpickles. Raises `CheckpointError` naming a missing, extra or misshapen tensor.
        """
        checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
        named = choose_device(device) if isinstance(device, str) else device
        device, *others = devices = list_devices(device_map) or [named]
        if isinstance(dtype, str):
            dtype = choose_dtype(dtype, device)
        layers.choose_backend(attention, device, dtype, checkpoint.config.causal_context)
        check_quantize(quantize, checkpoint.config, dtype)
        with torch.device("meta"):
            denoiser = cls(checkpoint.config)
        denoiser.attention, denoiser.quantize = attention, quantize
        homes = assign_devices(checkpoint.config, devices) if others else None
        quantized = {*list_quantized_weights(denoiser)} if quantize != "none" else set()
        kept = {*checkpoint.tensor_sources} - quantized if quantized else set()
        values = dict[str, nn.Parameter]()
        for name, value in checkpoint.iterate_tensors(device, dtype, kept, homes):
            if name in quantized:
                quantize_weight(denoiser, name, value, quantize)
            else:
                values[name] = nn.Parameter(value)
        denoiser.load_state_dict(values, strict=False, assign=True)
        denoiser.tie_weights()
        denoiser.set_rope_theta(denoiser.config.rope_theta)  # on this device
        parameters = dict(denoiser.named_parameters())
        for name, parameter in parameters.items():
            parameter.loaded_as = checkpoint, name, _get_version(parameter)  # type: ignore[attr-defined]
        denoiser._origin = checkpoint, len(parameters)
        return denoiser.eval()

    def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Says what answers in its place."""
        raise ConfigError("a Denoiser fills in masks: dlm_rag.load(model, corpus).ask(question) answers")

    @property
    def weights_fingerprint(self) -> str:
        """The fingerprint of the checkpoint whose weights these are; what is done to `data` is not noticed.
        Raises `ConfigError` where they come from no checkpoint, or were changed since."""
        if self._origin is None:
            raise ConfigError("these weights are of no checkpoint: load them with Denoiser.from_pretrained")
        (checkpoint, count), found = self._origin, dict(self.named_parameters())
        same = (
            getattr(value, "loaded_as", None) == (checkpoint, name, _get_version(value))
            for name, value in found.items()
        )
        if len(found) != count or not all(same):
            raise ConfigError(f"the weights have changed since they were loaded from {checkpoint.folder}")
        return checkpoint.weights_fingerprint

    def save_pretrained(self, folder: str | Path, **extra: Any) -> None:
        """Writes `config.json` (with `extra` keys) and weights; raises `ConfigError` for quantised ones."""
        if self.quantize != "none":
            raise ConfigError("quantised weights are not saved: load them with model.quantize=none")
        save_tensors(self.state_dict(), self.config, Path(folder), extra)

    @property
    def device(self) -> torch.device:
        """Where tokens come in and logits go out."""
        return self.embed_tokens.weight.device

    @property
    def layer_devices(self) -> list[torch.device]:
        """Where each layer is, with its keys and values."""
        return [next(block.parameters()).device for block in self.layers]

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of keys and values: that of the weights, or of an autocast that is on."""
        return layers.get_compute_dtype(self.embed_tokens.weight)

    @property
    def backend(self) -> str:
        """The attention kernel in use, as stamped on results."""
        return layers.choose_backend(
            self.attention, self.device, self.compute_dtype, self.config.causal_context
        )

    def compile_layers(self) -> None:
        """Compiles what comes before and after attention, once for all lengths; only rounding changes."""
        if self._compiled_before is not None:
            return
        self._compiled_before = _count_compiled_graphs()
        for block in self.layers:
            mlp: Any = block.mlp
            if hasattr(mlp, "experts"):  # of whose products torch traces bfloat16 alone
                mlp.forward = torch.compiler.disable(mlp.forward)
            for name in ("project_qkv", "apply_attention_output"):
                setattr(block, name, torch.compile(getattr(block, name), dynamic=True))

    @property
    def compilations(self) -> int | None:
        """Graphs compiled since `compile_layers`, or None where it was not called."""
        return None if self._compiled_before is None else _count_compiled_graphs() - self._compiled_before

    def forward(self, input_ids: Tensor, block: int | None = None) -> Tensor:
        """(B, L) ids -> (B, L, V) logits; positions see their own block and what is before.

        block: length of the blocks, counted from the first token; 1 is the attention of autoregressive
        models. None: the config's `block_size`, or where it has none, every position sees every other.
        With `causal_context`, all blocks but the last are causal.
        """
        (rows, length), block = input_ids.shape, block or self.config.block_size
        causal = (length - 1) // block * block if self.config.causal_context and block else 0
        row = Segment((0,) * length, 0, block=block, causal=causal)
        packed = pack_rows([row] * rows, input_ids.device)
        hidden = self.encode(replace(packed, ids=input_ids.flatten()))[0].view(rows, length, -1)
        ahead = length - 1 if self.config.shifted else causal  # tokens whose states predict the next one
        hidden = torch.cat((hidden[:, :1], hidden[:, :ahead], hidden[:, ahead + 1 :]), dim=1)
        return self.compute_token_logits(hidden.flatten(0, 1)).view(rows, length, -1)

    def encode(
        self, rows: PackedRows, keep: bool = False, probe: layers.AttentionProbe | None = None
    ) -> tuple[Tensor, KeysValues]:
        """Runs the layers over packed rows.

        Returns hidden states before the final norm, of all tokens (T, hidden) or of those that are read
        (n, hidden), and, with `keep`, the keys and values of all rows, for use in a
        `packed_batch.SharedContext`, else an empty list. `probe` gets the queries and keys of its layer.
        """
        if self.config.routes_blocks:  # by all tokens of a block, also in the last layer
            rows = replace(rows, last_layer_metadata=rows.attention_metadata)
        self.count_work(rows)
        with self._float32_sums():
            call = layers.ForwardContext(rows, self.backend, probe)
            rope = self.compute_rope(rows.positions)
            x = self.embed_tokens(rows.ids)
            if layers.is_autocast(x):  # sums stay float32, of full copies as of shards cast and gathered
                x = x.float()
            kept, top, devices = [], len(self.layers) - 1, self.layer_devices
            again = self.activation_checkpointing != "none" and torch.is_grad_enabled()
            every = self.activation_checkpointing_interval
            for layer, block in enumerate(self.layers):
                if (home := devices[layer]) != x.device:
                    x, rope, call = move_to_device((x, rope, call), home)
                with profile_layer(layer):
                    run = partial(self._run_again, block) if again and layer % every == 0 else block
                    x, k, v = run(x, rope, call, layer, layer == top)
                if keep:
                    kept.append((k, v))
        x = x.to(self.device)
        if rows.output_indices is not None and rows.last_layer_metadata is rows.attention_metadata:
            x = x[rows.output_indices]
        return x, kept

    def _float32_sums(self) -> AbstractContextManager[object]:
        """Autocast for float16 weights: residuals of Qwen2-like models pass 65,504, the most of float16."""
        if self.dtype != torch.float16 or layers.is_autocast(self.embed_tokens.weight):
            return nullcontext()
        return torch.autocast(self.device.type, torch.float16)

    def count_work(self, rows: PackedRows) -> None:
        """Adds what the layers do for packed rows to `flop_count`."""
        sight = rows.attention_metadata
        last = sight if self.config.routes_blocks else rows.last_layer_metadata
        self.flop_count += count_encode_flops(
            self.config, rows.lengths, sight.key_lengths, last.query_lengths, self.compute_dtype.itemsize,
            (sight.num_attention_pairs, last.num_attention_pairs),
        )  # fmt: skip

    def compute_rope(self, positions: Tensor) -> layers.Rope:
        """Cos and sin of positions (T,), each `rotary_dim` wide; behind them those of queries that grow."""
        places, scaling = positions.float()[:, None, None], self.config.rope_scaling
        angles = places * self.inverse_frequencies
        cos, sin = angles.cos() * self.rope_gain, angles.sin() * self.rope_gain
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        if not scaling or QUERY_SCALE_KEY not in scaling:
            return cos, sin
        steps = (places / scaling["original_max_position_embeddings"]).floor()
        scale = 1 + scaling[QUERY_SCALE_KEY] * steps.log1p()
        return cos, sin, cos * scale, sin * scale

    def _run_again(self, block: nn.Module, *inputs: Any) -> Any:
        """One layer, whose activations backward computes again."""
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        saved = partial(create_selective_checkpoint_contexts, _choose_saved)
        options: Any = {"context_fn": saved} if self.activation_checkpointing == "selective" else {}
        return checkpoint(block, *inputs, use_reentrant=False, **options)

    def compute_token_logits(self, hidden: Tensor) -> Tensor:
        """Logits (n, V) from hidden states (n, hidden), through norm and head; the caller un-shifts."""
        self.flop_count += count_head_flops(self.config, len(hidden), self.compute_dtype.itemsize)
        with self._float32_sums():
            return self.lm_head(self.norm(hidden))


def load_denoiser(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, attention: str = "auto",
    quantize: str = "none", device_map: str | None = None,
) -> AnyDenoiser:  # fmt: skip
    """The model of a checkpoint with its weights, of the class that its family runs on."""
    if (adapter := checkpoint.config.adapter) is not None:
        return cast(HostedDenoiser, adapter.DiffusionGemma(checkpoint, device, dtype))
    return Denoiser.from_pretrained(checkpoint, device, dtype, attention, quantize, device_map)


def list_devices(device_map: str | Sequence[str] | None) -> list[torch.device]:
    """The devices of `model.device_map`, none where it is not set. They run their layers one after another:
    this adds memory, not speed. Raises `ConfigError`."""
    if device_map == "auto":
        if not (count := torch.cuda.device_count()):
            raise ConfigError("model.device_map=auto finds no CUDA device: leave it out")
        device_map = [f"cuda:{number}" for number in range(count)]
    names = device_map.split(",") if isinstance(device_map, str) else device_map or ()
    devices = [choose_device(name.strip()) for name in names]
    if len({device.type for device in devices}) > 1:
        raise ConfigError(f"model.device_map={device_map} mixes kinds of devices: name GPUs alone")
    return devices


def assign_devices(config: DenoiserConfig, devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """The device of each layer's tensors by name: about as many numbers on each; the first has the rest."""
    sizes = {name: prod(shape) for name, shape in layers.list_tensor_shapes(config).items()}
    layer_of = {name: int(name.split(".")[1]) for name in sizes if name.startswith("layers.")}
    by_layer = np.bincount([*layer_of.values()], [sizes[name] for name in layer_of])
    total = sum(sizes.values())
    middles = total - by_layer.sum() + by_layer.cumsum() - by_layer / 2
    homes = (middles / total * len(devices)).astype(int)
    return {name: devices[homes[layer]] for name, layer in layer_of.items()}


def move_to_device(value: Any, device: torch.device) -> Any:
    """Tensors on a device, in tuples and in what describes the rows of a call; caches stay."""
    if isinstance(value, tuple):
        return tuple(move_to_device(part, device) for part in value)
    return map_arrays(value, lambda tensor: tensor.to(device))


def map_arrays(value: Any, change: Callable[[Any], Any]) -> Any:
    """Rows, or what holds them, with every array or tensor changed once; what was one object stays one."""
    made: dict[int, Any] = {}

    def visit(value: Any) -> Any:
        if id(value) in made:
            return made[id(value)]
        if isinstance(value, np.ndarray | Tensor):
            found = change(value)
        elif is_dataclass(value) and not isinstance(value, type):
            own = {item.name: visit(getattr(value, item.name)) for item in fields(value) if item.init}
            found = replace(value, **own)
        elif isinstance(value, dict):
            found = {name: visit(part) for name, part in value.items()}
        elif isinstance(value, tuple) and value and isinstance(value[0], np.ndarray | Tensor):
            found = tuple(map(visit, value))
        else:
            return value
        made[id(value)] = found
        return found

    return visit(value)


def _choose_saved(context: Any, op: Any, *inputs: Any, **options: Any) -> Any:
    """What selective checkpointing keeps: the results of matrix products and of attention."""
    from torch.utils.checkpoint import CheckpointPolicy

    # "aten::mm.out", by which compiled code writes into its buffers, is not saved.
    name = op.name()
    saved = name.startswith(SAVED_OPS) and "." not in name and not name.endswith("_backward")
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _count_compiled_graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _get_version(value: nn.Parameter) -> tuple[torch.dtype, int]:
    """What changes when a parameter does."""
    return value.dtype, -1 if value.is_inference() else value._version


class HostedDenoiser:
    """A model that runs on the class of another library; the folder of its family says how it decodes."""

    config: DenoiserConfig
    device: torch.device
    dtype: torch.dtype
    attention, backend, quantize = "auto", "sdpa", "none"
    compilations: int | None = None

    def make_runner(self) -> Any:
        """The `ModelRunner` that decodes with it."""
        raise NotImplementedError


AnyDenoiser = Denoiser | HostedDenoiser


def count_encode_flops(
    config: DenoiserConfig, lengths: Sequence[int], keys: Sequence[int], through: Sequence[int], size: int,
    pairs: tuple[int, int] | None = None,
) -> FlopCount:  # fmt: skip
    """One `Denoiser.encode`: tokens of each row, keys that it sees, tokens that pass the last layer.

    size: bytes of a number. pairs: of a token and a key that it sees, in a layer and in the last one.
    """
    c, layers = config, config.num_hidden_layers
    kv = 2 * c.num_key_value_heads * c.head_dim
    q = c.num_attention_heads * c.head_dim
    own = c.hidden_size * kv  # weights that every token of a layer needs
    rest = 2 * c.hidden_size * q  # those that only what goes on needs
    total, last = sum(lengths), sum(through)
    seen, last_seen = pairs or (
        sum(n * k for n, k in zip(queries, keys, strict=True)) for queries in (lengths, through)
    )
    products = looks = moved = 0.0
    for layer in range(layers):
        on, pairs_seen = (last, last_seen) if layer == layers - 1 else (total, seen)
        fed, read = _feed_forward(c, on, layer >= c.dense_layers)
        products += own * total + (rest + fed) * on
        looks += 4 * q * pairs_seen
        moved += own + (rest if on else 0) + read + kv * sum(keys)
    return FlopCount(2 * products + looks, looks, size * moved, 1, total)


def _feed_forward(config: DenoiserConfig, tokens: int, sparse: bool) -> tuple[float, float]:
    """Weights of the net or the experts of a layer that a token goes through, and that `tokens` read."""
    width, e = config.hidden_size, config.experts
    if not sparse or e is None:
        plain = 3.0 * width * config.intermediate_size
        return plain, plain if tokens else 0.0
    one = 3.0 * width * e.moe_intermediate_size
    all_take = width * (e.num_experts + 3.0 * e.shared_intermediate_size)
    met = 1 - (1 - e.num_experts_per_tok / e.num_experts) ** tokens  # were they chosen evenly
    return all_take + e.num_experts_per_tok * one, (all_take if tokens else 0.0) + met * e.num_experts * one


def count_head_flops(config: DenoiserConfig, rows: float, size: int) -> FlopCount:
    """Logits of `rows` hidden states."""
    return FlopCount(
        flops=2 * rows * config.hidden_size * config.vocab_size,
        bytes_moved=size * config.vocab_size * (config.hidden_size + rows),
    )
