"""What a training run logs: a line a minute with the time left, the last validation, metrics, W&B."""

import json
import math
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import torch

from dlm_rag.commands.train import prepare_run_folder
from dlm_rag.config import load_config
from dlm_rag.training import metrics_logger
from dlm_rag.training.metrics_logger import MetricsLogger, read_metrics, start_wandb
from tests.support.training import METRICS_LINES, MICRO_SETTINGS


def step_metrics(step, **more):
    speed = {"seconds": 0.5, "tokens_per_second": 2e3, "supervised_tokens_per_second": 150.0}
    counts = {"rows": 4, "tokens": 1000, "supervised_tokens": 75}
    return {"step": step, "loss": 9 / (1 + step), **speed, **counts, **more}


def test_a_log_has_a_line_a_minute_with_the_time_left(tmp_path, monkeypatch):
    clock, said = [0.0], []
    monkeypatch.setattr(metrics_logger.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(metrics_logger, "print_note", said.append)
    config = load_config(None, [*MICRO_SETTINGS, "train.max_steps=1000"])
    with MetricsLogger(tmp_path, config, 0) as report:
        for step in range(1000):
            clock[0] += 0.5
            report.log_step(step_metrics(step))
    steps = [int(re.match(r"step ([\d,]+)/1,000 ", line)[1].replace(",", "")) for line in said]
    assert steps == [50, 170, 290, 410, 530, 650, 770, 890, 1000]
    assert [line.rpartition(" · ")[2] for line in said][:2] == ["8 min left", "7 min left"]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 999


def test_the_last_validation_is_told(tmp_path, capfd):
    """The line of the last step precedes its validation, and has the scores of an earlier one."""
    config = load_config(None, [*MICRO_SETTINGS, "train.max_steps=2"])
    with MetricsLogger(tmp_path, config, 0) as report:
        for step, score in enumerate((0.25, 0.75)):
            report.log_step(step_metrics(step))
            report.log_validation({"exact_match": score})
    told = capfd.readouterr()
    line = (told.out + told.err).splitlines()[-1]
    assert "step 2" in line and "75.0%" in line and "25.0%" not in line


def test_metrics_of_a_task_of_ones_own_stay_whatever_they_are(tmp_path):
    """Texts, lists, flags and NaN stay through validations and --resume, and so do lines of others."""
    path, config = tmp_path / "metrics.jsonl", load_config(None, [*MICRO_SETTINGS, "train.max_steps=9"])
    own = {"stage": "warm", "shares": [0.5, 0.5], "warm": True, "best": math.nan, "notes": {"a": ["b"]}}
    own |= {"tensor": torch.tensor(0.5), "numpy": np.float32(math.inf), "path": tmp_path}
    with MetricsLogger(tmp_path, config, 0) as report:
        for step in range(4):
            report.log_step(step_metrics(step, mfu="unknown", **own))
        before = path.read_text().splitlines()
        report.log_validation({"exact_match": 0.5})
    after = path.read_text().splitlines()
    assert len(after) == 4 and after[:3] == before[:3], "only the last line is written again"
    assert json.loads(after[3]) == json.loads(before[3]) | {"exact_match": 0.5}
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2, 3]
    path.write_text("# a note of the user's\n" + path.read_text() + '{"step": 4, "lo')
    with MetricsLogger(tmp_path, config, 3) as report:
        assert path.read_text().splitlines() == ["# a note of the user's", *after[:3]]
        report.log_validation({"exact_match": 0.75})
        report.log_step(step_metrics(3, **own))
    assert [line.get("exact_match") for line in read_metrics(path)] == [None, None, 0.75, None]


def test_metrics_of_steps_that_are_computed_again_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(METRICS_LINES[:2]) + METRICS_LINES[2][:13])
    MetricsLogger(tmp_path, load_config(None, MICRO_SETTINGS), 1)
    assert path.read_text() == METRICS_LINES[0]
    path.write_text(METRICS_LINES[0].rstrip())
    MetricsLogger(tmp_path, load_config(None, MICRO_SETTINGS), 1)
    assert path.read_text() == METRICS_LINES[0], "it lacked its line break and nothing else"
    foreign = ["garbage\n", "\udcff\n", "[1]\n", '{"step": "1"}\n', '{"step": 1}\n', "\n"]
    path.write_text("".join([METRICS_LINES[0], *foreign, METRICS_LINES[1]]), errors="surrogateescape")
    assert [line["step"] for line in read_metrics(path)] == [0, 1], "what is no step is skipped"


def test_a_resumed_run_asks_wandb_for_the_run_that_it_began(tmp_path, monkeypatch):
    """And another run for another; what the client is asked for, without it."""
    asked = []
    fake = SimpleNamespace(init=lambda **settings: asked.append(settings), Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "")  # of which W&B itself would make an error
    config = load_config(None, ["train.wandb=online"])
    for folder in ("a", "a", "b"):
        (tmp_path / folder).mkdir(exist_ok=True)
        start_wandb(config, tmp_path / folder)
    first, again, other = (settings["id"] for settings in asked)
    assert "WANDB_MODE" not in os.environ
    assert first == again != other and {settings["resume"] for settings in asked} == {"allow"}
    prepare_run_folder(tmp_path / "a", resume=False)  # which holds what a run leaves before its first step
