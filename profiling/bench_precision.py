"""The shipped model in every precision that works here: exact match, tokens, forwards, bytes, seconds.

    OMP_NUM_THREADS=1 python profiling/bench_precision.py --out runs/precision
    python profiling/bench_precision.py --out runs/precision --only float32,int8,fp8 model.device=cuda

Asked are the 300 questions of the shipped world of which nothing was held out, in batches of 16 and then
each alone, with nothing kept from the batches. `difference`: of exact match from the first precision, in
points, paired by question, with its 95 % interval. `same tokens`: questions with the tokens of the first,
written in the same order. `alone`: with the same tokens alone and in a batch. Seconds are those of the
batches, on a CPU of processor time. Quantised layers are those of a model in `model.dtype`. Writes table.md
and scores.json into --out.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from bench_tools import (
    TableRow,
    format_markdown_table,
    parse_bench_args,
    print_table,
    synchronize_device,
    write_json,
)

from dlm_rag.cli import print_note, run_program
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, prepare_decoder
from dlm_rag.config import Config
from dlm_rag.decode.decoder import Decoder
from dlm_rag.decode.rollout import Rollout
from dlm_rag.evaluation.compare import compute_paired_differences
from dlm_rag.evaluation.metrics import Score, score_rollout
from dlm_rag.files.paths import write_text_atomic
from dlm_rag.machine import choose_device, get_code_commit, get_machine_name
from dlm_rag.model.quantize import METHODS, find_problem
from dlm_rag.questions import Question, read_questions

DTYPES = ("float32", "bfloat16", "float16")
BATCH_SIZE = 16
OPTIONS: dict[str, tuple[str | int, str]] = {
    "only": (",".join((*DTYPES, *METHODS)), "precisions, the first of which is the reference"),
    "questions": (0, "number of questions, 0 for all"),
}


def main(argv: list[str]) -> None:
    words, out = parse_bench_args(__doc__ or "", argv, OPTIONS)
    config = fill_in_shipped_files(words.config, [])
    asked = [q for q in read_questions(str(config.questions)) if not q.labels]
    asked = asked[: int(words.options["questions"]) or None]
    device, rows = choose_device(config.model.device), list[TableRow]()
    first: tuple[list[Score], list[list[tuple[int, int]]]] | None = None
    for name in str(words.options["only"]).split(","):
        if name in METHODS and (problem := find_problem(name, device)):
            print_note(f"{name} is left out: {problem}")
            continue
        change = f"model.{'quantize' if name in METHODS else 'dtype'}={name}"
        changed = words.with_settings([*words.settings, change, f"decode.batch_size={BATCH_SIZE}"]).config
        row, scores, tokens = measure(fill_in_shipped_files(changed, []), asked)
        first = first or (scores, tokens)
        differences = compute_paired_differences(scores, first[0], {"all": [*range(len(asked))]})
        found = differences["all"]["exact_match"]
        assert found is not None, "questions were asked"
        mean, low, high = (100 * value for value in (found.mean, found.low, found.high))
        same = sum(map(list.__eq__, tokens, first[1]))
        rows.append({
            "precision": name, "EM": row.pop("EM"), "difference": f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]",
            "same tokens": same, **row,
        })  # fmt: skip
        print_note(str(rows[-1]))
    print_table(rows)
    stamp = {
        "commit": get_code_commit(), "date": time.strftime("%Y-%m-%d"), "machine": get_machine_name(device),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "questions": len(asked),
    }  # fmt: skip
    write_json(out / "scores.json", {"stamp": stamp, "rows": rows})
    origin = ", ".join(f"{key} {value}" for key, value in stamp.items())
    write_text_atomic(Path(out) / "table.md", f"{format_markdown_table(rows)}\n\n{origin}\n")


def measure(
    config: Config, asked: Sequence[Question]
) -> tuple[TableRow, list[Score], list[list[tuple[int, int]]]]:
    """What one precision comes to; scores and tokens of the questions in batches."""
    prepared = prepare_decoder(config, [*asked])
    decoder = prepared.load()
    decoder.decode(asked[:2])
    decoder.model_runner.reset_cache()
    clock = time.process_time if prepared.device.type == "cpu" else time.perf_counter
    begin = clock()
    batched = decoder.decode(asked)
    synchronize_device(prepared.device)
    seconds = clock() - begin
    tokens, scores = (
        list_tokens(batched),
        [score_rollout(*pair) for pair in zip(batched, asked, strict=True)],
    )
    alone = list_tokens(decode_alone(decoder, asked))
    row = {
        "EM": 100 * sum(score.exact_match for score in scores) / len(scores),
        "forwards": sum(score.forwards for score in scores) / len(scores),
        "alone": sum(map(list.__eq__, alone, tokens)),
        "weights MB": prepared.weight_bytes / 1e6,
        "seconds": seconds,
    }
    return row, scores, tokens


def decode_alone(decoder: Decoder, asked: Sequence[Question]) -> list[Rollout]:
    """The questions one after another, with nothing kept from the batches."""
    decoder.config = replace(decoder.config, batch_size=1)
    decoder.model_runner.reset_cache()
    return decoder.decode(asked)


def list_tokens(rollouts: Sequence[Rollout]) -> list[list[tuple[int, int]]]:
    """Positions and tokens of each question in the order in which they were written."""
    return [
        [(token.position, token.token_id) for step in rollout.steps for token in step.written_tokens]
        for rollout in rollouts
    ]


if __name__ == "__main__":
    run_program(main)
