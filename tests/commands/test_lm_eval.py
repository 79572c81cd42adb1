"""`dlm-rag lm-eval`: tasks of lm-evaluation-harness, whose numbers are those of its own `hf` model."""

import json
import random
import sys

import pytest
import yaml

from dlm_rag.config.sections import LikelihoodConfig
from dlm_rag.errors import ConfigError
from dlm_rag.evaluation.likelihood import estimate_log_likelihoods
from tests.support.passages import write_jsonl_file
from tests.support.tiny_models import tiny_denoiser, tiny_tokenizer

WORDS = "emma was written by jane austen and read by many people in many towns".split()
TASKS = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}", "doc_to_choice": "choices", "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_text": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "tiny_answer": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@pytest.fixture
def tasks(tmp_path):
    """A folder of tasks, and its documents; one text is longer than a tiny model's context."""
    pytest.importorskip("lm_eval", reason="pip install 'dlm_rag[lm-eval]'")
    rng = random.Random(0)
    documents = [
        {
            "question": f"who {' '.join(rng.choices(WORDS, k=3))}?", "label": rng.randrange(3),
            "choices": [" ".join(rng.choices(WORDS, k=n)) for n in (1, 1, 2)],
            "text": " ".join(rng.choices(WORDS, k=2 if n else 90)),
        }
        for n in range(4)
    ]  # fmt: skip
    write_jsonl_file(tmp_path / "documents.jsonl", documents)
    data = {"dataset_path": "json", "test_split": "test"}
    data |= {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "documents.jsonl")}}}
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **data, **task}))
    return tmp_path, documents


@pytest.fixture
def run(tasks, tmp_path, monkeypatch):
    """Scores and samples of tasks, by the command line."""
    from dlm_rag.commands import lm_eval

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))

    def call(names, *model_args, model="dlm_rag"):
        out = tmp_path / "out" / f"{model}{len(list(tmp_path.glob('out/*')))}"
        words = [*(["--model", model] if model != "dlm_rag" else []), "--model_args", ",".join(model_args)]
        words += ["--tasks", names, "--include_path", str(tasks[0]), "--device", "cpu", "--batch_size", "4"]
        lm_eval.main([*words, "--output_path", str(out), "--log_samples"])
        (scores,) = out.rglob("results_*.json")
        found = {path.name.split("_2")[0].removeprefix("samples_"): path for path in out.rglob("samples_*")}
        samples = {
            name: sorted(map(json.loads, path.read_text().splitlines()), key=lambda one: one["doc_id"])
            for name, path in found.items()
        }
        return json.loads(scores.read_text())["results"], samples

    return call


def log_likelihoods(samples):
    return [float(nats) for one in samples for ((nats, *_),) in one["resps"]]


@pytest.mark.slow
def test_an_autoregressive_checkpoint_scores_as_by_the_harness(run, autoregressive_qwen):
    ours, mine = run("tiny_choice,tiny_text", f"pretrained={autoregressive_qwen}")
    pytest.importorskip("accelerate", reason="the harness's own model needs it")
    windows = f"pretrained={autoregressive_qwen},max_length=254"  # ours feed their last token, too
    theirs, samples = run("tiny_choice,tiny_text", windows, model="hf")
    assert log_likelihoods(mine["tiny_choice"]) == pytest.approx(
        log_likelihoods(samples["tiny_choice"]), abs=1e-3
    )
    for task, scores in theirs.items():
        for name, value in scores.items():
            if isinstance(value, float):
                assert ours[task][name] == pytest.approx(value, rel=1e-4), name


@pytest.fixture
def masked(tmp_path):
    folder, denoiser = tmp_path / "masked", tiny_denoiser(max_position_embeddings=96)
    denoiser.save_pretrained(folder)
    tiny_tokenizer().inner.save_pretrained(folder)
    return folder, denoiser


@pytest.mark.slow
def test_multiple_choice_is_by_the_bounds(run, tasks, masked, capsys):
    folder, denoiser = masked
    scores, samples = run("tiny_choice", f"pretrained={folder},samples=8,seed=3")
    assert "12 log-likelihoods: 0 exact, 12 bounds" in capsys.readouterr().err
    asked = [(document, choice) for document in tasks[1] for choice in document["choices"]]
    expected = estimate_log_likelihoods(
        denoiser,
        [([*document["question"].encode()], [*f" {choice}".encode()]) for document, choice in asked],
        LikelihoodConfig(samples=8, seed=3),
        [f"tiny_choice/{n}" for n in range(4) for _ in range(3)],
    )
    nats = [each.nats for each in expected]
    assert log_likelihoods(samples["tiny_choice"]) == pytest.approx(nats, rel=1e-5)
    best = [max(range(3), key=lambda n: nats[3 * row + n]) for row in range(4)]
    right = [n == document["label"] for n, document in zip(best, tasks[1], strict=True)]
    assert scores["tiny_choice"]["acc,none"] == pytest.approx(sum(right) / 4)
    again, _ = run("tiny_choice", f"pretrained={folder},samples=8,seed=3")
    assert again == scores


@pytest.mark.slow
def test_what_the_harness_cannot_have_is_said(run, masked):
    with pytest.raises(ConfigError, match="dlm-rag serve"):
        run("tiny_answer", f"pretrained={masked[0]}")
    with pytest.raises(ConfigError, match="nearest: 'samples'"):
        run("tiny_choice", f"pretrained={masked[0]},sample=8")


def test_without_the_harness_its_extra_is_named(monkeypatch):
    from dlm_rag.commands import lm_eval

    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    with pytest.raises(ConfigError, match=r"dlm_rag\[lm-eval\]"):
        lm_eval.main(["--tasks", "arc_easy"])
