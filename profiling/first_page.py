"""The page of first_gpu.py: Markdown, JSON, a picture."""

import json
from pathlib import Path
from typing import Any

from pages import NAME_LENGTH, markdown

from dlm_rag.files.whole import new_file, write_whole

Line = dict[str, Any]


def write(out: Path, found: dict[str, Line]) -> None:
    """page.md, page.json and page.png from what the parts have found until now."""
    write_whole(out / "page.json", json.dumps(found, indent=2) + "\n")
    decodes = {name: part for name, part in found.items() if has(part, "answers_per_second")}
    trains = {name: part for name, part in found.items() if has(part, "tokens_per_second")}
    picture = bool(decodes or trains)
    if picture:
        plot(out / "page.png", decodes, trains)
    blocks = [*machine(found.get("machine", {"lines": []}))]
    blocks += ["![answers a second, training](page.png)"] if picture else []
    for name, part in decodes.items():
        blocks += decoding(name, part)
    for part in found.values():
        blocks += same_tokens(part) if has(part, "same_tokens") else []
    for part in trains.values():
        blocks += training(part)
    for part in found.values():
        blocks += from_noise(part) if has(part, "step_ms") else []
    for name, part in found.items():
        if "attribution" in part:
            blocks += attribution(name, part)
    blocks += ["## What went wrong", *(errors(found) or ["Nothing."])]
    blocks += ["", table(["part", "seconds"], [[n, f"{p['seconds']:.0f}"] for n, p in found.items()])]
    write_whole(out / "page.md", "\n\n".join(blocks) + "\n")


def has(part: Line, key: str) -> bool:
    return any(key in line for line in part["lines"])


def errors(found: dict[str, Line]) -> list[str]:
    """What each part that failed has said last."""
    return [f"**{name}**: {part['error']}" for name, part in found.items() if part["error"]]


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(map(markdown, lines))


def machine(part: Line) -> list[str]:
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
        ["default pool, GiB", f"{part['pool_gib']:.1f}"],
    ]
    if "roofline" in part:
        best = part["roofline"]
        rows.append(["matrix products, TFLOP/s", f"{best['flops'] / 1e12:.2f}"])
        rows.append(["copies, GB/s", f"{best['bytes'] / 1e9:.0f}"])
    return [*blocks, table(["machine", ""], rows)]


def decoding(name: str, part: Line) -> list[str]:
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
                str(line["evicted"]), gib(line["peak_gib"]),
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
    return [f"## Decoding: {name}", said, table(headings, rows)]


def same_tokens(part: Line) -> list[str]:
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
    return ["## The same tokens?", said, table(headings, rows)]


def training(part: Line) -> list[str]:
    """Steps with each switch."""
    rows = []
    for line in part["lines"]:
        rows.append(
            [
                line["switch"], f"{line['tokens_per_second']:,.0f}", f"{line['tflops_per_second']:,.2f}",
                f"{line['mfu']:.1%}" if "mfu" in line else "unknown machine",
                f"{1e3 * line['seconds']:,.0f}", gib(line["peak_gib"]), gib(line["planned_gib"]),
            ]
        )  # fmt: skip
    headings = ["switch", "tokens/s", "TFLOP/s", "MFU", "ms/step", "peak GiB", "planned GiB"]
    said = (
        f"{part['parameters'] / 1e6:,.0f} M parameters, sequences of {part['sequence_length']:,} tokens, "
        f"{part['batch_tokens']:,} tokens a step, AdamW. The plan does not know of compilation."
    )
    return ["## Training", said, table(headings, rows)]


def from_noise(part: Line) -> list[str]:
    """Steps of a DiffusionGemma, by how many rows take one together."""
    rows = [
        [
            str(line["rows"]), f"{line['model_ms']:,.1f}", f"{line['step_ms']:,.1f}",
            f"{line['step_ms'] / line['rows']:,.1f}", f"{line['prompt_ms']:,.1f}", gib(line["peak_gib"]),
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
    return ["## Denoising from uniform noise", said, table(headings, rows)]


def attribution(name: str, part: Line) -> list[str]:
    """The tables of attribute.py, shortened."""
    blocks = [f"## Where the time goes: {name}", f"Whole, with a picture: `{part['attribution_folder']}/`."]
    for title, headings, rows in part["attribution"]:
        short = [[cell[:NAME_LENGTH] for cell in row] for row in rows]
        blocks += [f"**{title}**", table(headings, short)]
    return blocks


def gib(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def plot(path: Path, decodes: dict[str, Line], trains: dict[str, Line]) -> None:
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
        axis.spines[["top", "right"]].set_visible(False)
    with new_file(path) as scratch:
        figure.savefig(scratch, dpi=150)


def measured(line: Line) -> str:
    return f"measured {line['peak_gib']:.2f}" if line["peak_gib"] else "not measured on a CPU"
