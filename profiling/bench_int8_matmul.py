"""What int8 products (W8A8) would save in the layers of a model on this processor.

    OMP_NUM_THREADS=1 python profiling/bench_int8_matmul.py                                  # the shipped
    model OMP_NUM_THREADS=1 python profiling/bench_int8_matmul.py 4096,4096 4096,12288             # other
    widths, in,out

Microseconds of x @ W.T for rows of x: float32, bfloat16, and int8 by `torch._int_mm` with the quantisation
of x by row, which every product needs, and without. Weights are quantised ahead. Medians of 30, by turns.
"""

from statistics import median

import torch
from bench_tools import TableRow, print_table, time_calls

from dlm_rag.cli import CommandParser, run_program
from dlm_rag.files.hub import SHIPPED_FOLDER
from dlm_rag.model.checkpoint import open_checkpoint

ROWS = (16, 64, 256, 1024)  # tokens of a call: one question has 60 to 100, a batch of 16 about 900


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "")
    parser.add_argument("widths", nargs="*", type=parse_widths, help="in,out of each product")
    widths = parser.parse_args(argv).widths
    if not widths:
        c = open_checkpoint(SHIPPED_FOLDER / "model").config
        widths = [(c.hidden_size, out) for out in (c.hidden_size, c.intermediate_size, c.vocab_size)]
        widths.insert(2, (c.intermediate_size, c.hidden_size))
    print_table([measure(width, out, rows) for width, out in widths for rows in ROWS])


def parse_widths(word: str) -> tuple[int, int]:
    """Two numbers; raises `ValueError`."""
    width, out = map(int, word.split(","))
    return width, out


def measure(width: int, out: int, rows: int) -> TableRow:
    """Microseconds of a product (rows, width) with (out, width)."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, width, generator=generator), torch.randn(out, width, generator=generator)
    low, low_weight = x.bfloat16(), weight.bfloat16()
    weight_scale = weight.abs().amax(1) / 127
    packed = (weight / weight_scale[:, None]).round().to(torch.int8).t()

    def quantise() -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().amax(1, keepdim=True) / 127
        return (x / scale).round().to(torch.int8), scale

    ready, _ = quantise()

    def int8() -> torch.Tensor:
        numbers, scale = quantise()
        return torch._int_mm(numbers, packed).float() * scale * weight_scale

    calls = {
        "float32": lambda: x @ weight.t(),
        "bfloat16": lambda: low @ low_weight.t(),
        "int8": int8,
        "int8, product alone": lambda: torch._int_mm(ready, packed),
    }
    off = ((int8() - x @ weight.t()).norm() / (x @ weight.t()).norm()).item()
    times = {name: 1e6 * median(time_calls(call, x.device, 30)) for name, call in calls.items()}
    gain = {"float32 / int8": times["float32"] / times["int8"], "error": off}
    return {"in, out": f"{width}, {out}", "rows": rows} | times | gain


if __name__ == "__main__":
    run_program(main)
