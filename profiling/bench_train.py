"""Our training step against a plain Hugging Face Trainer: same weights, documents, batches and loss.

    python profiling/bench_train.py --out runs/bench_train [--steps 20] [--rounds 3]    # needs accelerate

The Trainer runs transformers' own Llama (attention in both directions) on padded batches, with logits at
all positions and the masked-diffusion loss over them. Ours packs the same documents, and computes logits
of masked positions in chunks. Both take the same batches in the same order with AdamW in float32; their
losses must agree. Turns alternate. Memory: bytes that operators allocated, at most, in one step. Two data
sets: short documents as they come, which the plain loop pads, and one long text, where nothing is padded.
Expectation: of the weights of this shape, which are what a token costs, the head's are two thirds, and half
of the tokens are masked: 1.5 times fewer FLOPs without padding, 3 with half of it. Full logits are 0.5 GB,
several times over.
"""

import json
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from bench_tools import TableRow, parse_bench_args, print_table, rotate, write_json
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

from dlm_rag.cli import print_note, run_program
from dlm_rag.config import Config, TrainConfig
from dlm_rag.machine import describe_machine, get_code_commit
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.training.batches import Example, MaskedObjective, make_masked_batch
from dlm_rag.training.documents import PackedDocuments, open_token_file
from dlm_rag.training.initial_model import DEFAULT_PROMPT_TEMPLATE, iterate_world_texts, train_tokenizer
from dlm_rag.training.sources import write_world_documents
from dlm_rag.training.step_memory import MemoryTracker

VOCABULARY, HIDDEN, LAYERS = 32_000, 256, 4
BATCH, SEQUENCE = 4096, 512  # tokens
LEARNING_RATE = 1e-3
OPTIONS: dict[str, tuple[str | int, str]] = {
    "steps": (20, "optimizer steps in each turn"),
    "rounds": (3, "turns of each"),
}


def make_document_batches(steps: int, folder: Path, joined: bool) -> list[list[Example]]:
    """The batches of all steps: passages and answered questions of invented worlds, or all in one text."""
    tokenizer = Tokenizer(train_tokenizer(iterate_world_texts(0), 1024), 0, DEFAULT_PROMPT_TEMPLATE, (1,))
    train = TrainConfig(objective="pretrain", sequence_length=SEQUENCE, batch_tokens=BATCH)
    path = write_world_documents(Config(train=train), folder)
    if joined:
        texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
        path = folder / "joined.jsonl"
        path.write_text(json.dumps({"text": "\n\n".join(texts)}) + "\n", encoding="utf-8")
    source = open_token_file(path, tokenizer, str(folder))
    batches = PackedDocuments([source], tokenizer, train, shifted=True)
    return [
        batches.examples(step, range(train.batch_tokens // train.sequence_length)) for step in range(steps)
    ]


class PaddedDataset(torch.utils.data.Dataset[Any]):
    """Batches as a padded collator makes them: ids, mask of real tokens, labels and weights."""

    def __init__(self, batches: list[list[Example]], mask_id: int) -> None:
        self._batches, self._mask_id = batches, mask_id

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        rows = self._batches[number]
        lead = len(rows[0].prompt)

        def pad(parts: list[Tensor], value: float) -> Tensor:
            whole = pad_sequence(parts, batch_first=True, padding_value=value)
            return F.pad(whole, (lead, 0), value=value)

        targets = [torch.tensor(row.target) for row in rows]
        hidden = [torch.tensor(row.masked) for row in rows]
        pairs = [*zip(targets, hidden, strict=True)]
        ids = pad([target.where(~masked, self._mask_id) for target, masked in pairs], 0)
        ids[:, :lead] = torch.tensor([row.prompt.ids for row in rows])
        lengths = torch.tensor([lead + len(target) for target in targets])
        return {
            "input_ids": ids,
            "real": torch.arange(ids.shape[1]) < lengths[:, None],
            "labels": pad([target.where(masked, -100) for target, masked in pairs], -100),
            "weights": pad([torch.full((len(row.target),), row.weight) for row in rows], 0.0),
            "divisor": torch.tensor(sum(row.divisor or 0.0 for row in rows)),
        }


class HfBaselineTrainer(Trainer):
    """The loop that most would write: full logits, cross-entropy over them."""

    found: list[float]  # the loss of every step

    def compute_loss(  # type: ignore[override]
        self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
    ) -> Any:
        real = inputs["real"]
        seen = torch.zeros(real.shape, dtype=torch.float32).masked_fill(~real, float("-inf"))
        places = torch.arange(real.shape[1]).expand_as(inputs["input_ids"])
        logits = model(
            input_ids=inputs["input_ids"], position_ids=places,
            attention_mask=seen[:, None, None, :].expand(-1, 1, real.shape[1], -1), use_cache=False,
        ).logits.float()  # fmt: skip
        losses = F.cross_entropy(  # row i predicts token i + 1
            logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten(), reduction="none"
        )
        loss = (losses * inputs["weights"][:, 1:].flatten()).sum() / inputs["divisor"]
        self.found.append(float(loss.detach()))
        return loss


def train_hf_baseline(weights: Path, batches: list[list[Example]]) -> tuple[float, list[float]]:
    """Seconds and losses of the Hugging Face loop."""
    model = LlamaForCausalLM.from_pretrained(weights, attn_implementation="sdpa")
    with tempfile.TemporaryDirectory() as folder:
        trainer = HfBaselineTrainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder, max_steps=len(batches), per_device_train_batch_size=1,
                learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=1.0,
                weight_decay=0.0, adam_beta2=0.95, use_cpu=True,
                logging_strategy="no", report_to=[], disable_tqdm=True, save_strategy="no",
                dataloader_pin_memory=False, remove_unused_columns=False,
            ),
            train_dataset=PaddedDataset(batches, 0),
            data_collator=lambda found: found[0],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        in_order = torch.utils.data.SequentialSampler(range(len(batches)))
        trainer._get_train_sampler = lambda *_: in_order  # type: ignore[method-assign]
        trainer.found = []
        start = time.perf_counter()
        trainer.train()
    return time.perf_counter() - start, trainer.found


def train_packed(weights: Path, batches: list[list[Example]]) -> tuple[float, list[float]]:
    """Seconds and losses of our step."""
    denoiser = load_denoiser_from_llama(weights)
    objective = MaskedObjective(denoiser)
    optimizer = torch.optim.AdamW(
        denoiser.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    losses = []
    start = time.perf_counter()
    for examples in batches:
        batch = make_masked_batch(examples, denoiser.config, "joint")
        loss, _ = objective(batch, batch.counts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(denoiser.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return time.perf_counter() - start, losses


def load_denoiser_from_llama(weights: Path) -> Denoiser:
    """The same weights, with the mask that Llama has no name for."""
    config = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps(config | {"mask_token_id": 0}))
    return Denoiser.from_pretrained(weights).train()


def measure_peak_bytes_of_loops(weights: Path, examples: list[Example]) -> list[int]:
    """Bytes that operators had allocated at most in forward and backward of one batch: plain, ours."""
    model = LlamaForCausalLM.from_pretrained(weights, attn_implementation="sdpa")
    inputs = PaddedDataset([examples], 0)[0]
    objective = MaskedObjective(load_denoiser_from_llama(weights))
    batch = make_masked_batch(examples, objective.denoiser.config, "joint")
    found = []
    for step in (
        lambda: HfBaselineTrainer.compute_loss(SimpleNamespace(found=[]), model, inputs).backward(),  # type: ignore[arg-type]
        lambda: objective(batch, batch.counts)[0].backward(),
    ):
        with MemoryTracker() as alive:
            step()
        found.append(alive.peak_bytes)
    return found


def main(argv: list[str]) -> None:
    words, out = parse_bench_args(__doc__ or "", argv, OPTIONS)
    steps, rounds = words.options["steps"], words.options["rounds"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 32, num_key_value_heads=HIDDEN // 32, intermediate_size=4 * HIDDEN,
        max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    logging.disable_progress_bar()
    rows: list[TableRow] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LlamaForCausalLM(config).save_pretrained(folder / "llama")
        for kind in ("short", "long"):
            batches = make_document_batches(steps, folder, joined=kind == "long")
            found = compare_training_loops(folder / "llama", batches, rounds)
            rows += [{"documents": kind} | row for row in found]
    machine = describe_machine(torch.device("cpu"), "sdpa")
    stamp = {"commit": get_code_commit(), "machine": machine, "tokens_per_step": BATCH}
    write_json(out / "scores.json", stamp | {"loops": rows})
    print_table([{key: value for key, value in row.items() if key != "losses"} for row in rows])


def compare_training_loops(weights: Path, batches: list[list[Example]], rounds: int) -> list[TableRow]:
    """A row for each loop, both on the same batches, in turns."""
    ways = {"Hugging Face Trainer": train_hf_baseline, "ours": train_packed}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[float]] = {}
    for number in range(rounds):
        for name in rotate([*ways], number):
            took, losses[name] = ways[name](weights, batches)
            seconds[name].append(took)
            print_note(f"round {number + 1}, {name}: {len(batches) * BATCH / took:,.0f} tokens/s")
    plain, ours = (losses[name] for name in ways)
    padded = sum(max(len(row.target) for row in rows) * len(rows) for rows in batches)
    peaks = measure_peak_bytes_of_loops(weights, batches[0])
    shares = (1 - len(batches) * BATCH / padded, 0.0)
    pairs = [*zip(*seconds.values(), strict=True)]
    return [
        {
            "loop": name,
            "tokens/s": [len(batches) * BATCH / each for each in seconds[name]],
            "times the Trainer": [pair[0] / pair[place] for pair in pairs],
            "peak MB": peaks[place] / 1e6,
            "padding %": 100 * shares[place],
            "losses differ by, at most": max(abs(a - b) / b for a, b in zip(ours, plain, strict=True)),
            "losses": losses[name],
        }
        for place, name in enumerate(ways)
    ]


if __name__ == "__main__":
    run_program(main)
