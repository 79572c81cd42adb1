"""Score a denoiser on questions with known answers: decode into a folder, then score its traces.

    python evaluate.py --questions questions.jsonl --model DIR_OR_HUB_ID --corpus passages.jsonl \\
        --out runs/first

The folder holds `answers.jsonl`, `trace.jsonl` and `scores.json`. A run that was stopped goes on when
the same command is given again.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dlm_rag.cli import decode_to_file, gather_questions, parse, run
from dlm_rag.errors import ConfigError

if TYPE_CHECKING:
    from dlm_rag.data.questions import Question
    from dlm_rag.evaluation.metrics import Score


def main(argv: list[str]) -> None:
    config = parse(__doc__ or "", argv, typed=False).config
    if config.out is None or config.questions is None:
        raise ConfigError("evaluation needs --questions FILE and --out FOLDER")
    if config.trace is not None:
        raise ConfigError("evaluation keeps its traces in the folder of --out: leave --trace out")
    questions = gather_questions(config, [])
    if not all(question.golden_answers for question in questions):
        raise ConfigError(f"{config.questions} has questions without golden_answers: nothing to score")
    folder = Path(config.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={folder} cannot be a folder: {error.strerror}") from None
    files = replace(config, out=str(folder / "answers.jsonl"), trace=str(folder / "trace.jsonl"))
    decode_to_file(files, questions)
    table = score_folder(folder, questions)
    (folder / "scores.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    show(table)


def score_folder(folder: Path, questions: "list[Question]") -> "dict[str, dict[str, float | None]]":
    """Mean scores over the folder's traces, for all questions and for each number of hops."""
    from dlm_rag.decode.rollout import Rollout
    from dlm_rag.evaluation.metrics import mean_score, score

    with (folder / "trace.jsonl").open(encoding="utf-8") as file:
        rollouts = {rollout.id: rollout for rollout in map(Rollout.from_trace, map(json.loads, file))}
    groups: dict[str, list[Score]] = {"all": []}
    for question in questions:
        scored = score(rollouts[question.id], question)
        groups["all"].append(scored)
        if question.hops is not None:
            groups.setdefault(f"{question.hops} hops", []).append(scored)
    return {
        name: {"questions": len(scores), **asdict(mean_score(scores))}
        for name, scores in sorted(groups.items(), key=lambda item: (item[0] != "all", item[0]))
    }


def show(table: "dict[str, dict[str, float | None]]") -> None:
    from rich.console import Console
    from rich.table import Table

    grid = Table("", *(name.replace("_", " ") for name in table["all"]))
    for name, row in table.items():
        cells = ("-" if value is None else f"{value:.4g}" for value in row.values())
        grid.add_row(name, *cells)
    Console().print(grid)


if __name__ == "__main__":
    run(main)
