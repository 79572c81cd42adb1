"""Trains SmolLM2-135M to denoise answers to questions about passages, as a LoRA adapter.

    python examples/smollm2/train_adapter.py rows.jsonl runs/smollm2 --minutes 67 --learning-rate 2e-3

rows.jsonl is of `make_rows.py`, or a folder of `pack.py`, with which none of our packages is needed. The
result is an adapter in PEFT's format with the config of the denoiser: `dlm-rag sample --model runs/smollm2
--corpus FILE "Who ...?"` reads it. It ends after `--minutes`, along which the learning rate falls;
`--resume` goes on from the last save, `--start` begins with an adapter, `--causal-share 1` trains the
autoregressive twin. On a GPU give more rows a step.

What differs from `dlm-rag train` with `objective=sft`, and why: passages are padded and attention is plain
matrix products, which costs a CPU half as much as a call of SDPA for each row; W + 2 B A is made once a
step, and its gradient gives those of A and B; in three of four steps no gradient flows into the passages,
which are three quarters of the tokens; a third of the rows predict each token from those before it.
"""

import argparse
import ctypes
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from row_sets import FACT, HEAD, PASSAGE_LENGTH, ROWS_FILE, Row, RowSet, read_sets, unpack_rows
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYERS, HEADS, KEY_HEADS, WIDTH, HIDDEN = 30, 9, 3, 64, 576
EPS, ROPE_THETA = 1e-5, 100_000.0
END, VOCABULARY = 2, 49152
MASK = VOCABULARY  # added to the vocabulary, with the mean of all embeddings
BLOCK = 16
RANK, SCALE = 32, 2.0
MATRICES = tuple(f"self_attn.{x}_proj" for x in "qkvo") + tuple(
    f"mlp.{x}_proj" for x in ("gate", "up", "down")
)
HIDDEN_SCORE = -30000.0
FULL_GRADIENT_EVERY = 4
STATE_FILE, ADAPTER_FILE = "state.safetensors", "adapter_model.safetensors"
ADAPTER_HALVES = ("adapter_1.safetensors", "adapter_2.safetensors")
SAVE_STEPS, LOG_STEPS, WARMUP_STEPS = 40, 10, 25
CONSTANT_SHARE = 0.35  # of the time, at the highest learning rate
END_WEIGHT, PADDING_WEIGHT, FINISHED_WEIGHT = 0.7, 0.05, 0.3
CAUSAL_SHARE = 0.35  # share of the rows without a mask, whose tokens are each predicted from those before
ALL_MASKED_SHARE, CUT_SHARE, FIRST_SHOWN_SHARE = 0.31, 0.46, 0.92  # of the rows with masks
FURTHER_WEIGHT, LEAST_WEIGHT = 0.75, 0.15  # of a masked token by how many masks stand right before it


def load_base(folder: Path) -> dict[str, Tensor]:
    """Returns the weights of a converted model, or of the parts that `pack.py` wrote, by name."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    parts = [load_file(path) for path in sorted(folder.glob("base-*.safetensors"))]
    packed = {name: value for part in parts for name, value in part.items()}
    return {
        name.partition(":")[0]: dequantize(value, name.partition(":")[2]) for name, value in packed.items()
    }


def dequantize(values: Tensor, kind: str) -> Tensor:
    """Returns the weights (rows, columns) in bfloat16 of GGUF's blocks of 32, (rows, bytes); F32 as it is.

    A block of Q4_1 is a scale and a minimum in float16 and 32 numbers of 4 bits, the first 16 in the low
    halves of the bytes; one of Q8_0 a scale and 32 int8.
    """
    if kind == "F32":
        return values.bfloat16()
    blocks = values.unflatten(-1, (-1, {"Q4_1": 20, "Q8_0": 34}[kind]))
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    if kind == "Q8_0":
        numbers = blocks[..., 2:].contiguous().view(torch.int8).float() * scale
    else:
        least, halves = blocks[..., 2:4].contiguous().view(torch.float16).float(), blocks[..., 4:]
        numbers = torch.cat((halves & 15, halves >> 4), -1).float() * scale + least
    return numbers.flatten(-2).bfloat16()


class Denoiser:
    """SmolLM2 with adapters, as plain products over padded rows; base weights are bfloat16 and fixed."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        tensors = {name: value.to(device) for name, value in load_base(folder).items()}
        self.device = device
        self.base = {
            f"{layer}.{name}": tensors[f"model.layers.{layer}.{name}.weight"].bfloat16()
            for layer in range(LAYERS)
            for name in MATRICES
        }
        self.norms = [
            [
                tensors[f"model.layers.{layer}.{name}_layernorm.weight"].bfloat16()
                for name in ("input", "post_attention")
            ]
            for layer in range(LAYERS)
        ]
        embeddings = tensors["model.embed_tokens.weight"]
        mean = embeddings.float().mean(0, keepdim=True).to(embeddings.dtype)
        self.embeddings = torch.cat((embeddings, mean)).bfloat16()
        self.last_norm = tensors["model.norm.weight"].bfloat16()
        generator = torch.Generator().manual_seed(0)
        self.a, self.b = {}, {}
        for name, weight in self.base.items():
            drawn = (torch.rand(RANK, weight.shape[1], generator=generator) * 2 - 1) * weight.shape[
                1
            ] ** -0.5
            self.a[name] = drawn.to(device).requires_grad_()
            self.b[name] = torch.zeros(weight.shape[0], RANK, device=device).requires_grad_()
        angles = torch.arange(2 * PASSAGE_LENGTH).float()[:, None]
        angles = angles / ROPE_THETA ** (torch.arange(0, WIDTH, 2).float() / WIDTH)
        self.cosine = torch.cat((angles.cos(),) * 2, -1).bfloat16().to(device)
        self.sine = torch.cat((angles.sin(),) * 2, -1).bfloat16().to(device)

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.a.values(), *self.b.values()]

    @torch.no_grad()
    def start_from(self, adapter: dict[str, Tensor]) -> None:
        """Takes over the values of an adapter in PEFT's format."""
        for name in self.base:
            prefix = f"base_model.model.model.layers.{name}"
            self.a[name].copy_(adapter[f"{prefix}.lora_A.weight"])
            self.b[name].copy_(adapter[f"{prefix}.lora_B.weight"])

    @torch.no_grad()
    def merge(self) -> dict[str, Tensor]:
        """Returns W + 2 B A of every matrix, which collect gradients."""
        return {
            name: (weight.float() + SCALE * (self.b[name] @ self.a[name])).bfloat16().requires_grad_()
            for name, weight in self.base.items()
        }

    @torch.no_grad()
    def pass_gradients(self, merged: dict[str, Tensor]) -> None:
        """Gives A and B the gradients of the merged matrices: of A is 2 B^T G, of B is 2 G A^T."""
        for name, weight in merged.items():
            assert weight.grad is not None
            self.a[name].grad = SCALE * (self.b[name].t().bfloat16() @ weight.grad).float()
            self.b[name].grad = SCALE * (weight.grad @ self.a[name].t().bfloat16()).float()

    def run(self, merged: dict[str, Tensor], batch: "Batch", full_gradient: bool) -> Tensor:
        """Returns normed states (rows * length, hidden) of the chains, which see the passages of their set.

        full_gradient: whether gradients flow through the keys and values of the passages, too.
        """
        layers = [[merged[f"{layer}.{name}"] for name in MATRICES] for layer in range(LAYERS)]
        attention = [torch.cat(weights[:3]) for weights in layers]
        gates = [torch.cat(weights[4:6]) for weights in layers]
        seen = []
        with torch.set_grad_enabled(full_gradient and torch.is_grad_enabled()):
            shape = batch.passages.shape
            positions = torch.arange(shape[1], device=self.device).repeat(shape[0])
            x, turn = (
                self.embeddings[batch.passages.flatten()],
                (self.cosine[positions], self.sine[positions]),
            )
            for layer, (_, _, _, out, *_, down) in enumerate(layers):
                q, k, v = project(x, self.norms[layer][0], attention[layer], turn, shape)
                seen.append((k, v))
                if layer + 1 < LAYERS:
                    mixed = attend(q, [k], [v], batch.passage_bias)
                    x = transform(x, mixed, out, self.norms[layer][1], gates[layer], down)
        shape = batch.chains.shape
        positions = batch.positions.flatten()
        x, turn = self.embeddings[batch.chains.flatten()], (self.cosine[positions], self.sine[positions])
        for layer, (_, _, _, out, *_, down) in enumerate(layers):
            q, k, v = project(x, self.norms[layer][0], attention[layer], turn, shape)
            context = [batch.gather(kept) for kept in seen[layer]]
            mixed = attend(q, [context[0], k], [context[1], v], batch.chain_bias)
            x = transform(x, mixed, out, self.norms[layer][1], gates[layer], down)
        return F.rms_norm(x, (HIDDEN,), self.last_norm, EPS)

    def loss(
        self, merged: dict[str, Tensor], batch: "Batch", full_gradient: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Returns the weighted cross-entropy at the supervised states, and which tokens are right."""
        states = self.run(merged, batch, full_gradient)[batch.supervised]
        logits = F.linear(states, self.embeddings[:VOCABULARY]).float()
        losses = F.cross_entropy(logits, batch.targets, reduction="none")
        loss = (losses * batch.weights).sum() / batch.weights.sum()
        return loss, logits.detach().argmax(-1) == batch.targets


def project(
    x: Tensor, gain: Tensor, weight: Tensor, turn: tuple[Tensor, Tensor], shape: torch.Size
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries (rows, key heads, 3 * length, width) and keys and values, without the 3."""
    found = F.linear(F.rms_norm(x, (HIDDEN,), gain, EPS), weight)
    turned, v = found.split(((HEADS + KEY_HEADS) * WIDTH, KEY_HEADS * WIDTH), -1)
    turned, v = turned.unflatten(-1, (-1, WIDTH)), v.unflatten(-1, (-1, WIDTH))
    half = torch.cat((-turned[..., WIDTH // 2 :], turned[..., : WIDTH // 2]), -1)
    turned = turned * turn[0][:, None] + half * turn[1][:, None]
    q, k = turned[:, :HEADS], turned[:, HEADS:]
    grouped = q.view(*shape, KEY_HEADS, HEADS // KEY_HEADS, WIDTH).permute(0, 2, 3, 1, 4).flatten(2, 3)
    return (
        grouped,
        k.reshape(*shape, -1, WIDTH).transpose(1, 2),
        v.reshape(*shape, -1, WIDTH).transpose(1, 2),
    )


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor], bias: Tensor) -> Tensor:
    """Returns (rows * length, heads * width) of queries that see several runs of keys under one bias."""
    scores = torch.cat([q @ k.transpose(-1, -2) for k in keys], -1)
    rows, groups, queries, seen = scores.shape
    length = queries // (HEADS // KEY_HEADS)
    scores = scores.view(rows, groups, -1, length, seen) * WIDTH**-0.5 + bias[:, :, None]
    shares = scores.softmax(-1).view(rows, groups, queries, seen).split([k.shape[2] for k in keys], -1)
    mixed = sum(share @ v for share, v in zip(shares, values, strict=True))
    assert isinstance(mixed, Tensor)
    return mixed.view(rows, groups, -1, length, WIDTH).permute(0, 3, 1, 2, 4).reshape(rows * length, -1)


def transform(x: Tensor, mixed: Tensor, out: Tensor, gain: Tensor, gates: Tensor, down: Tensor) -> Tensor:
    x = x + F.linear(mixed, out)
    gate, up = F.linear(F.rms_norm(x, (HIDDEN,), gain, EPS), gates).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)


@dataclass(frozen=True)
class Batch:
    """Padded passages (sets * count, length) and chains (rows, length): question, response, window."""

    passages: Tensor
    chains: Tensor
    positions: Tensor
    passage_bias: Tensor
    chain_bias: Tensor
    sets: Tensor  # (rows,) the set of each chain
    supervised: Tensor  # places among all tokens of the chains
    targets: Tensor
    weights: Tensor

    def gather(self, kept: Tensor) -> Tensor:
        """Keys or values of passages as each chain sees them, (rows, key heads, count * length, width)."""
        count = len(kept) // (int(self.sets.max()) + 1)
        joined = kept.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)
        return joined.index_select(0, self.sets)


def mask_window(rng: random.Random, real: int) -> list[bool]:
    """Draws which tokens of a block are masked: all, those after a cut, or each with one probability."""
    drawn = rng.random()
    if drawn < ALL_MASKED_SHARE:
        masked = [True] * BLOCK
    elif drawn < ALL_MASKED_SHARE + CUT_SHARE:
        cut = rng.randrange(1, real) if real > 1 else 1
        masked = [place >= cut or rng.random() < 0.03 for place in range(BLOCK)]
    else:
        time_share = rng.random()
        masked = [rng.random() < time_share for _ in range(BLOCK)]
    if rng.random() < FIRST_SHOWN_SHARE:  # decoding asks for it alone
        masked[0] = False
    return masked


def make_chain(
    rng: random.Random, row: Row, causal_share: float
) -> tuple[list[int], int, list[tuple[int, int, float]]]:
    """Returns the ids of a chain, where its window begins, and (state, target, weight) of what counts.

    The state before a token predicts it. What precedes the window is causal, so that all of it counts.
    """
    response, at = row.response + [END] * (not row.is_open), len(row.head)
    if rng.random() < causal_share:
        counted = [(at + n - 1, token, weigh_token(token)) for n, token in enumerate(response)]
        return row.head + response, at + len(response), counted
    finished = BLOCK * rng.randrange(math.ceil(len(response) / BLOCK)) if rng.random() < 0.5 else 0
    window = (response[finished : finished + BLOCK] + [END] * BLOCK)[:BLOCK]
    real = min(BLOCK, len(response) - finished)
    masked = mask_window(rng, real)
    shown = [MASK if hide else token for token, hide in zip(window, masked, strict=True)]
    counted = [(at + place - 1, response[place], FINISHED_WEIGHT) for place in range(finished)]
    masks_before = 0
    for place, token in enumerate(window):
        near = max(LEAST_WEIGHT, FURTHER_WEIGHT**masks_before) if place else 1.0
        masks_before = masks_before + 1 if masked[place] else 0
        if place and not masked[place]:
            continue
        if place < real:
            counted.append((at + finished + place - 1, token, near * weigh_token(token)))
        elif not row.is_open:
            counted.append((at + finished + place - 1, END, PADDING_WEIGHT))
    return row.head + response[:finished] + shown, at + finished, counted


def weigh_token(token: int) -> float:
    return END_WEIGHT if token == END else 1.0


def make_batch(
    sets: list[RowSet], rng: random.Random, device: torch.device, causal_share: float = CAUSAL_SHARE
) -> Batch:
    """Pads the passages and chains of sets that have as many passages each."""
    texts = [ids for item in sets for ids in item.passages]
    longest = max(map(len, texts))
    passages = torch.full((len(texts), longest), END)
    for number, ids in enumerate(texts):
        passages[number, : len(ids)] = torch.tensor(ids)
    made = [
        (number, make_chain(rng, row, causal_share))
        for number, item in enumerate(sets)
        for row in item.rows
    ]
    length = max(len(ids) for _, (ids, *_) in made)
    chains, own = (
        torch.full((len(made), length), END),
        torch.full((len(made), length, length), HIDDEN_SCORE),
    )
    before = torch.ones(length, length).tril().bool()
    counted = []
    for number, (_, (ids, window, places)) in enumerate(made):
        chains[number, : len(ids)] = torch.tensor(ids)
        visible = before.clone()
        visible[window : len(ids), : len(ids)] = True
        visible[:, len(ids) :], visible[len(ids) :, 0] = False, True
        own[number].masked_fill_(visible, 0.0)
        counted += [(number * length + place, token, weight) for place, token, weight in places]
    there = torch.arange(longest) < torch.tensor([len(ids) for ids in texts])[:, None]
    causal = torch.ones(longest, longest).tril().bool() & there[:, None]
    causal[:, 0, 0] = True
    numbers = torch.tensor([number for number, _ in made])
    context = torch.where(there.view(len(sets), -1), 0.0, HIDDEN_SCORE)[numbers]
    context = context[:, None].expand(-1, length, -1)
    columns = [torch.tensor(column) for column in zip(*counted, strict=True)]
    positions = (PASSAGE_LENGTH + torch.arange(length)).expand(len(made), -1)
    passage_bias = torch.where(causal, 0.0, HIDDEN_SCORE)[:, None].bfloat16()
    chain_bias = torch.cat((context, own), -1)[:, None].bfloat16()
    tensors = (passages, chains, positions, passage_bias, chain_bias, numbers, *columns)
    return Batch(*(tensor.to(device) for tensor in tensors))


def iterate_batches(sets: list[RowSet], rows_per_step: int) -> Iterator[list[RowSet]]:
    """Yields sets of as many passages and like lengths, without end, in an order that the epoch fixes."""
    epoch = 0
    while True:
        rng, order = random.Random(epoch), list(range(len(sets)))
        rng.shuffle(order)
        for first in range(0, len(order), 2000):
            part = [sets[number] for number in order[first : first + 2000]]
            part.sort(key=lambda item: (len(item.passages), max(map(len, item.passages))))
            batches: list[list[RowSet]] = [[]]
            for item in part:
                last = batches[-1]
                rows = sum(len(other.rows) for other in last) + len(item.rows)
                if last and (len(last[0].passages) != len(item.passages) or rows > rows_per_step):
                    batches.append([])
                batches[-1].append(item)
            rng.shuffle(batches)
            yield from batches
        epoch += 1


def save(
    out: Path, model: Denoiser, optimizer: torch.optim.Optimizer, step: int, seconds: float, base: Path
) -> None:
    """Writes the adapter as `dlm-rag` reads it, also in halves, and what `--resume` needs.

    seconds: that the steps took. base: the folder with the config of the base.
    """
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name in model.a:
        prefix = f"base_model.model.model.layers.{name}"
        tensors[f"{prefix}.lora_A.weight"] = model.a[name].detach().bfloat16().cpu().contiguous()
        tensors[f"{prefix}.lora_B.weight"] = model.b[name].detach().bfloat16().cpu().contiguous()
    save_file(tensors, out / ADAPTER_FILE, metadata={"format": "pt"})
    names = sorted(tensors)
    for number, half in enumerate(ADAPTER_HALVES):
        save_file({name: tensors[name] for name in names[number::2]}, out / half)
    adapter = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "smollm2", "r": RANK,
        "lora_alpha": round(SCALE * RANK), "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        "target_modules": sorted({name.split(".")[-1] for name in MATRICES}),
    }  # fmt: skip
    (out / "adapter_config.json").write_text(json.dumps(adapter, indent=2) + "\n")
    config = json.loads((base / "config.json").read_text())
    config = {
        key: value for key, value in config.items() if key[0] != "_" and key != "transformers_version"
    }
    config |= {
        "vocab_size": VOCABULARY + 1, "mask_token_id": MASK, "evidence_layout": "parallel",
        "passage_length": PASSAGE_LENGTH, "canvas_length": 48, "block_length": BLOCK,
        "attention_block": BLOCK, "causal_context": True, "abstain": "answer",
        "prompt": {"head": HEAD, "fact": FACT.strip(), "chat": False, "answer": "titled"},
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    state = {"step": torch.tensor(step), "seconds": torch.tensor(seconds)}
    for number, parameter in enumerate(model.parameters):
        state[f"{number}.value"] = parameter.detach()
        state |= {f"{number}.{name}": value for name, value in optimizer.state[parameter].items()}
    save_file(state, out / "state.part")
    (out / "state.part").replace(out / STATE_FILE)


@torch.no_grad()
def resume(out: Path, model: Denoiser, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    """Reads what `save` has written into the adapter and the optimizer; returns the number of steps
    and the seconds that they took."""
    state = load_file(out / STATE_FILE, device=str(model.device))
    for number, parameter in enumerate(model.parameters):
        parameter.copy_(state[f"{number}.value"])
        names = ("step", "exp_avg", "exp_avg_sq")
        optimizer.state[parameter] = {name: state[f"{number}.{name}"] for name in names}
    return int(state["step"]), float(state.get("seconds", 0.0))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0, help="of training, after which it ends")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--rows-per-step", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--causal-share", type=float, default=CAUSAL_SHARE, help="of the rows; 1: an autoregressive model"
    )
    parser.add_argument("--steps", type=int, default=10**9, help="after which it ends, if that is earlier")
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="of an adapter to begin with")
    parser.add_argument("--resume", action="store_true", help="go on from the last save in OUT")
    return parser.parse_args()


def main() -> None:
    given = parse_arguments()
    device, packed = torch.device(given.device), given.rows.is_dir()
    if packed:
        folder, sets = given.rows, unpack_rows(given.rows / ROWS_FILE)
    else:
        from dlm_rag.files.hub import get_smollm2

        folder = get_smollm2()
        sets = read_sets(given.rows, folder)
    model = Denoiser(folder, device)
    if given.start:
        model.start_from(load_file(given.start / ADAPTER_FILE))
    print(f"{sum(len(item.rows) for item in sets):,} rows about {len(sets):,} sets of passages", flush=True)
    optimizer = torch.optim.AdamW(
        model.parameters, lr=given.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    batches, step, spent, seen = iterate_batches(sets, given.rows_per_step), 0, 0.0, 0
    if given.resume:
        step, spent = resume(given.out, model, optimizer)
        seen = sum(len(item.rows) for _ in range(step) for item in next(batches))
    begun, every = time.time() - spent, 1 if device.type == "cuda" else FULL_GRADIENT_EVERY
    recent: list[tuple[float, float]] = []
    with (given.out.with_name(f"{given.out.name}.jsonl")).open("a") as log:
        while (done := (time.time() - begun) / (60 * given.minutes)) < 1 and step < given.steps:
            falling = min(1.0, (1 - done) / (1 - CONSTANT_SHARE))
            for group in optimizer.param_groups:
                group["lr"] = given.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS) * max(0.02, falling)
            rng, merged = random.Random(step), model.merge()
            batch = make_batch(next(batches), rng, device, given.causal_share)
            loss, right = model.loss(merged, batch, step % every == every - 1)
            loss.backward()
            model.pass_gradients(merged)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step, seen = step + 1, seen + len(batch.sets)
            recent = [*recent, (loss.item(), right[batch.targets != END].float().mean().item())][-20:]
            if step % LOG_STEPS == 0:
                loss_mean, accuracy = (sum(column) / len(recent) for column in zip(*recent, strict=True))
                record = {
                    "step": step, "loss": round(loss_mean, 4), "accuracy": round(accuracy, 4), "rows": seen,
                    "grad_norm": round(norm.item(), 3),
                    "rows_per_second": round(seen / (time.time() - begun), 2),
                }  # fmt: skip
                print(json.dumps(record), file=log, flush=True)
                print(json.dumps(record), flush=True)
                if device.type == "cpu" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                    libc.malloc_trim(0)  # glibc holds on to freed pieces: 13 GB after 300 steps
            if step % SAVE_STEPS == 0:
                save(given.out, model, optimizer, step, time.time() - begun, folder)
    save(given.out, model, optimizer, step, time.time() - begun, folder)


if __name__ == "__main__":
    main()
