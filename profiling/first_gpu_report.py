"""The page of first_gpu.py: Markdown, JSON, a picture."""

from pathlib import Path
from typing import Any

from attribute import MAX_KERNEL_NAME_CHARS
from bench_tools import format_markdown_table, save_figure, write_json

from dlm_rag.files.paths import write_text_atomic

ReportLine = dict[str, Any]


def write_first_gpu_report(out: Path, found: dict[str, ReportLine]) -> None:
    """page.md, page.json and page.png from what the parts have found until now."""
    write_json(out / "page.json", found)
    decodes = {name: part for name, part in found.items() if has_metric(part, "answers_per_second")}
    trains = {name: part for name, part in found.items() if has_metric(part, "tokens_per_second")}
    picture = bool(decodes or trains)
    if picture:
        plot_throughput(out / "page.png", decodes, trains)
    blocks = [*format_machine(found.get("machine", {"lines": []}))]
    blocks += ["![answers a second, training](page.png)"] if picture else []
    for name, part in decodes.items():
        blocks += format_decoding(name, part)
    for part in found.values():
        blocks += format_exactness(part) if has_metric(part, "same_tokens") else []
    for part in trains.values():
        blocks += format_training(part)
    for part in found.values():
        blocks += format_denoising(part) if has_metric(part, "step_ms") else []
    for name, part in found.items():
        if "attribution" in part:
            blocks += format_attribution(name, part)
    blocks += ["## What went wrong", *(format_errors(found) or ["Nothing."])]
    blocks += [
        "",
        format_markdown_table(["part", "seconds"], [[n, f"{p['seconds']:.0f}"] for n, p in found.items()]),
    ]
    write_text_atomic(out / "page.md", "\n\n".join(blocks) + "\n")


def has_metric(part: ReportLine, key: str) -> bool:
    return any(key in line for line in part["lines"])


def format_errors(found: dict[str, ReportLine]) -> list[str]:
    """What each part that failed has said last."""
    return [f"**{name}**: {part['error']}" for name, part in found.items() if part["error"]]


def format_machine(part: ReportLine) -> list[str]:
    """What all this ran on."""
    if "machines" not in part:
        return ["# A first look", "The machine could not be looked at."]
    name = part["machines"][0]["name"]
    blocks = [f"# A first look at {name}", f"Commit {part['commit']}, {part['date']}."]
    if part["device"] == "cpu":
        blocks.append(
            "**On a CPU**: this shows that the page is made and which parts run; it says nothing of a GPU."
        )
    known = part["machines"][0] | {f"{package} (version)": v for package, v in part["versions"].items()}
    rows = [[key, str(value)] for key, value in known.items()]
    rows += [["arithmetic", part["dtype"]]]
    rows += [[f"kernel {kernel}", text] for kernel, text in part["kernels"].items()]
    if "reads_pages" in part:
        rows.append(["varlen reads pages", "yes" if part["reads_pages"] else "no"])
    rows += [
        ["memory free, GiB", f"{part['free_gib']:.1f}"],
        ["default pool, GiB", f"{part['prefix_cache_gib']:.1f}"],
    ]
    if "roofline" in part:
        best = part["roofline"]
        rows.append(["matrix products, TFLOP/s", f"{best['flops'] / 1e12:.2f}"])
        rows.append(["copies, GB/s", f"{best['bytes'] / 1e9:.0f}"])
    return [*blocks, format_markdown_table(["machine", ""], rows)]


def format_decoding(name: str, part: ReportLine) -> list[str]:
    """Answers a second of one shape."""
    rows = []
    for line in part["lines"]:
        low, high = line["answers_per_second_range"]
        rows.append(
            [
                line["setting"], f"{line['answers_per_second']:.2f} [{low:.2f}, {high:.2f}]",
                f"{line['speed_up']:.2f}", f"{line['forwards']:.1f}",
                f"{1e3 * line['seconds_per_forward']:.2f}", f"{line['gflop_per_answer']:,.1f}",
                f"{line['roofline_share']:.1%} ({line['bound']})", f"{line['reuse']:.1%}",
                str(line["evicted"]), format_gib(line["peak_gib"]),
            ]
        )  # fmt: skip
    headings = [
        "setting", "answers/s", "speed-up", "forwards", "ms/forward of a row", "GFLOP/answer",
        "of the roofline", "reused", "evicted", "peak GiB",
    ]  # fmt: skip
    said = (
        f"{part['parameters'] / 1e6:,.0f} M parameters. The reference is the published algorithm, plainly: "
        f"one question at a time, the `{part['layout']}` layout, nothing kept, logits everywhere. The "
        "others: the `independent` layout, one warm pool, questions that it has not seen. Speed-ups "
        "are of a forward of a row: no two settings have answered the same questions."
    )
    return [f"## Decoding: {name}", said, format_markdown_table(headings, rows)]


def format_exactness(part: ReportLine) -> list[str]:
    """Questions that get the tokens that they got alone, the first way of each precision."""
    rows = [
        [
            line["dtype"], line["way"], line["kernel"], f"{line['same_tokens']} of {line['of']}",
            f"{line['farthest_confidence']:.1e}",
        ]
        for line in part["lines"]
    ]  # fmt: skip
    headings = ["precision", "way", "kernel", "same tokens as alone", "confidences differ by, at most"]
    said = "The shipped model. Confidences are compared where all tokens are the same."
    return ["## The same tokens?", said, format_markdown_table(headings, rows)]


def format_training(part: ReportLine) -> list[str]:
    """Steps with each switch."""
    rows = []
    for line in part["lines"]:
        rows.append(
            [
                line["switch"], f"{line['tokens_per_second']:,.0f}", f"{line['tflops_per_second']:,.2f}",
                f"{line['mfu']:.1%}" if "mfu" in line else "unknown machine",
                f"{1e3 * line['seconds']:,.0f}", format_gib(line["peak_gib"]),
                format_gib(line["planned_gib"]),
            ]
        )  # fmt: skip
    headings = ["switch", "tokens/s", "TFLOP/s", "MFU", "ms/step", "peak GiB", "planned GiB"]
    said = (
        f"{part['parameters'] / 1e6:,.0f} M parameters, sequences of {part['sequence_length']:,} tokens, "
        f"{part['batch_tokens']:,} tokens a step, AdamW. The plan does not know of compilation."
    )
    return ["## Training", said, format_markdown_table(headings, rows)]


def format_denoising(part: ReportLine) -> list[str]:
    """Steps of a DiffusionGemma, by how many rows take one together."""
    rows = [
        [
            str(line["rows"]), f"{line['model_ms']:,.1f}", f"{line['step_ms']:,.1f}",
            f"{line['step_ms'] / line['rows']:,.1f}", f"{line['prompt_ms']:,.1f}",
            format_gib(line["peak_gib"]),
        ]
        for line in part["lines"]
    ]  # fmt: skip
    headings = ["rows", "ms of the model", "ms a step", "ms a step and row", "ms of a prompt", "peak GiB"]
    said = (
        f"DiffusionGemma in the shape `{part['shape']}`, random weights in bfloat16: "
        f"{part['parameters'] / 1e6:,.0f} M parameters, {part['weights_gib']:.2f} GiB. A step proposes "
        f"{part['canvas']} tokens a row, self-conditioned, behind {part['prompt_tokens']:,} that have not "
        "changed; the model alone leaves out that they are drawn. Medians."
    )
    return ["## Denoising from uniform noise", said, format_markdown_table(headings, rows)]


def format_attribution(name: str, part: ReportLine) -> list[str]:
    """The tables of attribute.py, shortened."""
    blocks = [f"## Where the time goes: {name}", f"Whole, with a picture: `{part['attribution_folder']}/`."]
    for title, headings, rows in part["attribution"]:
        short = [[cell[:MAX_KERNEL_NAME_CHARS] for cell in row] for row in rows]
        blocks += [f"**{title}**", format_markdown_table(headings, short)]
    return blocks


def format_gib(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def plot_throughput(path: Path, decodes: dict[str, ReportLine], trains: dict[str, ReportLine]) -> None:
    """Answers a second of every setting, above; tokens a second and memory of every switch, below."""
    from matplotlib.figure import Figure

    settings = [(name, line) for name, part in decodes.items() for line in part["lines"]]
    switches = [line for part in trains.values() for line in part["lines"]]
    panels = [(len(settings), "decode"), (len(switches), "train"), (len(switches), "memory")]
    panels = [(count, kind) for count, kind in panels if count]
    figure = Figure(figsize=(8, sum(0.35 * count + 1 for count, _ in panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=[count + 2 for count, _ in panels])
    for axis, (_, kind) in zip(axes[:, 0], panels, strict=True):
        if kind == "decode":
            labels = [f"{name}, {line['setting']}" for name, line in settings]
            values = [line["answers_per_second"] for _, line in settings]
            texts = [
                f"{line['answers_per_second']:.2f}  ({line['speed_up']:.1f}x, "
                f"{line['roofline_share']:.0%} of the roofline)"
                for _, line in settings
            ]
            axis.set_xscale("log")
            axis.set_xlim(min(values) / 2, 40 * max(values))
            axis.set_xlabel("answers a second")
        elif kind == "train":
            labels = [line["switch"] for line in switches]
            values = [line["tokens_per_second"] for line in switches]
            texts = [
                f"{line['tokens_per_second']:,.0f}"
                + (f"  (MFU {line['mfu']:.0%})" if "mfu" in line else "")
                for line in switches
            ]
            axis.set_xlim(0, 1.4 * max(values))
            axis.set_xlabel("training tokens a second")
        else:
            labels = [line["switch"] for line in switches]
            values = [line["planned_gib"] for line in switches]
            texts = [f"planned {line['planned_gib']:.2f}, {measured(line)}" for line in switches]
            peaks = [(n, line["peak_gib"]) for n, line in enumerate(switches) if line["peak_gib"]]
            axis.plot([peak for _, peak in peaks], [n for n, _ in peaks], "k|", markersize=14)
            axis.set_xlim(0, 1.6 * max([*values, *(peak for _, peak in peaks)]))
            axis.set_xlabel("GiB of a step: bars planned, marks measured")
        axis.barh(range(len(values)), values, color="#3b78b5", height=0.7)
        for place, (value, text) in enumerate(zip(values, texts, strict=True)):
            axis.text(value, place, f"  {text}", va="center", fontsize=8)
        axis.set_yticks(range(len(labels)), labels, fontsize=8)
        axis.invert_yaxis()
    save_figure(path, figure)


def measured(line: ReportLine) -> str:
    return f"measured {line['peak_gib']:.2f}" if line["peak_gib"] else "not measured on a CPU"
