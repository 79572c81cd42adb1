"""The page of first_gpu.py: Markdown, JSON, a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attribute import MAX_KERNEL_NAME_CHARS
from bench_tools import format_markdown_table, save_figure, write_json

from dlm_rag.files.paths import write_text_atomic

ReportLine = dict[str, Any]
DECODING = {  # heading -> how a line fills it
    "setting": "{setting}",
    "answers/s": "{answers_per_second:.2f} [{answers_per_second_range[0]:.2f}, "
    "{answers_per_second_range[1]:.2f}]",
    "speed-up": "{speed_up:.2f}",
    "forwards": "{forwards:.1f}",
    "ms/forward of a row": "{ms_per_forward:.2f}",
    "GFLOP/answer": "{gflop_per_answer:,.1f}",
    "of the roofline": "{roofline_share:.1%} ({bound})",
    "reused": "{reuse:.1%}",
    "evicted": "{evicted}",
    "peak GiB": "{peak}",
}
EXACTNESS = {
    "precision": "{dtype}",
    "way": "{way}",
    "kernel": "{kernel}",
    "same tokens as alone": "{same_tokens} of {of}",
    "confidences differ by, at most": "{farthest_confidence:.1e}",
}
TRAINING = {
    "switch": "{switch}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "TFLOP/s": "{tflops_per_second:,.2f}",
    "MFU": "{known_mfu}",
    "ms/step": "{ms:,.0f}",
    "peak GiB": "{peak}",
    "planned GiB": "{planned_gib:.2f}",
}
DENOISING = {
    "rows": "{rows}",
    "ms of the model": "{model_ms:,.1f}",
    "ms a step": "{step_ms:,.1f}",
    "ms a step and row": "{ms_per_row:,.1f}",
    "ms of a prompt": "{prompt_ms:,.1f}",
    "peak GiB": "{peak}",
}
SECTIONS = [  # metric that a line of the section has, title, what is said, columns
    (
        "answers_per_second",
        "Decoding: {name}",
        "{millions:,.0f} M parameters. The reference is the published algorithm, plainly: one question at "
        "a time, the `{layout}` layout, nothing kept, logits everywhere. The others: the `independent` "
        "layout, one warm pool, questions that it has not seen. Speed-ups are of a forward of a row: no "
        "two settings have answered the same questions.",
        DECODING,
    ),
    (
        "same_tokens",
        "The same tokens?",
        "The shipped model. Confidences are compared where all tokens are the same.",
        EXACTNESS,
    ),
    (
        "tokens_per_second",
        "Training",
        "{millions:,.0f} M parameters, sequences of {sequence_length:,} tokens, {batch_tokens:,} tokens a "
        "step, AdamW. The plan does not know of compilation.",
        TRAINING,
    ),
    (
        "step_ms",
        "Denoising from uniform noise",
        "DiffusionGemma in the shape `{shape}`, random weights in bfloat16: {millions:,.0f} M parameters, "
        "{weights_gib:.2f} GiB. A step proposes {canvas} tokens a row, self-conditioned, after "
        "{prompt_tokens:,} that have not changed; the model alone leaves out that they are drawn. Medians.",
        DENOISING,
    ),
]


def write_first_gpu_report(out: Path, found: dict[str, ReportLine]) -> None:
    """page.md, page.json and page.png from what the parts have found until now."""
    write_json(out / "page.json", found)
    blocks = format_machine(found.get("machine", {}))
    if plot_throughput(out / "page.png", found):
        blocks.append("![answers a second, training](page.png)")
    for metric, title, said, columns in SECTIONS:
        for name, part in found.items():
            if any(metric in line for line in part["lines"]):
                facts = part | {"name": name, "millions": part.get("parameters", 0) / 1e6}
                rows = [
                    [form.format(**complete_line(line)) for form in columns.values()]
                    for line in part["lines"]
                ]
                blocks += [f"## {title.format(**facts)}", said.format(**facts)]
                blocks.append(format_markdown_table(list(columns), rows))
    for name, part in found.items():
        if "attribution" in part:
            blocks += [f"## Where the time goes: {name}"]
            blocks += [f"Whole, with a picture: `{part['attribution_folder']}/`."]
            for title, headings, rows in part["attribution"]:
                short = [[cell[:MAX_KERNEL_NAME_CHARS] for cell in row] for row in rows]
                blocks += [f"**{title}**", format_markdown_table(headings, short)]
    errors = [f"**{name}**: {part['error']}" for name, part in found.items() if part["error"]]
    blocks += ["## What went wrong", *(errors or ["Nothing."]), ""]
    times = [[name, f"{part['seconds']:.0f}"] for name, part in found.items()]
    blocks.append(format_markdown_table(["part", "seconds"], times))
    write_text_atomic(out / "page.md", "\n\n".join(blocks) + "\n")


def complete_line(line: ReportLine) -> ReportLine:
    """A line with the figures that follow from it."""
    peak = line.get("peak_gib")
    return line | {
        "peak": "" if peak is None else f"{peak:.2f}",
        "known_mfu": f"{line['mfu']:.1%}" if "mfu" in line else "unknown machine",
        "ms": 1e3 * line.get("seconds", 0.0),
        "ms_per_forward": 1e3 * line.get("seconds_per_forward", 0.0),
        "ms_per_row": line.get("step_ms", 0.0) / line.get("rows", 1),
    }


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
    known |= {"arithmetic": part["dtype"]}
    known |= {f"kernel {kernel}": text for kernel, text in part["kernels"].items()}
    if "reads_pages" in part:
        known["varlen reads pages"] = "yes" if part["reads_pages"] else "no"
    known["memory free, GiB"] = f"{part['free_gib']:.1f}"
    known["default pool, GiB"] = f"{part['prefix_cache_gib']:.1f}"
    if "roofline" in part:
        known["matrix products, TFLOP/s"] = f"{part['roofline']['flops'] / 1e12:.2f}"
        known["copies, GB/s"] = f"{part['roofline']['bytes'] / 1e9:.0f}"
    rows = [[key, str(value)] for key, value in known.items()]
    return [*blocks, format_markdown_table(["machine", ""], rows)]


def plot_throughput(path: Path, found: dict[str, ReportLine]) -> bool:
    """Answers a second of every setting, tokens a second and memory of every switch, if there are any."""
    lines = [(name, line) for name, part in found.items() for line in part["lines"]]
    decodes = [(name, line) for name, line in lines if "answers_per_second" in line]
    switches = [line for _, line in lines if "tokens_per_second" in line]
    panels: list[list[Any]] = [decodes] * bool(decodes) + [switches, switches] * bool(switches)
    if not panels:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, sum(0.35 * len(panel) + 1 for panel in panels)), layout="constrained")
    heights = [len(panel) + 2 for panel in panels]
    axes = list(figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0])
    if decodes:
        axis, values = axes.pop(0), [line["answers_per_second"] for _, line in decodes]
        texts = [
            "{answers_per_second:.2f}  ({speed_up:.1f}x, {roofline_share:.0%} of the roofline)".format(
                **line
            )
            for _, line in decodes
        ]
        draw_bars(axis, [f"{name}, {line['setting']}" for name, line in decodes], values, texts)
        axis.set(xscale="log", xlim=(min(values) / 2, 40 * max(values)), xlabel="answers a second")
    if switches:
        names, values = (
            [line["switch"] for line in switches],
            [line["tokens_per_second"] for line in switches],
        )
        texts = [
            f"{line['tokens_per_second']:,.0f}" + (f"  (MFU {line['mfu']:.0%})" if "mfu" in line else "")
            for line in switches
        ]
        draw_bars(axes[0], names, values, texts)
        axes[0].set(xlim=(0, 1.4 * max(values)), xlabel="training tokens a second")
        planned, peaks = ([line[key] for line in switches] for key in ("planned_gib", "peak_gib"))
        texts = [
            f"planned {plan:.2f}, " + (f"measured {peak:.2f}" if peak else "not measured on a CPU")
            for plan, peak in zip(planned, peaks, strict=True)
        ]
        draw_bars(axes[1], names, planned, texts)
        axes[1].plot([peak or float("nan") for peak in peaks], range(len(peaks)), "k|", markersize=14)
        most = max(value for value in (*planned, *peaks) if value)
        axes[1].set(xlim=(0, 1.6 * most), xlabel="GiB of a step: bars planned, marks measured")
    save_figure(path, figure)
    return True


def draw_bars(axis: Any, labels: Sequence[str], values: Sequence[float], texts: Sequence[str]) -> None:
    """A bar for each value, with its text."""
    axis.barh(range(len(values)), values, color="#3b78b5", height=0.7)
    for place, (value, text) in enumerate(zip(values, texts, strict=True)):
        axis.text(value, place, f"  {text}", va="center", fontsize=8)
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.invert_yaxis()
