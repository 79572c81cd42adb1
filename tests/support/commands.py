"""A program run in this process."""

import sys
from pathlib import Path

import pytest

from dlm_rag.cli import run_program
from dlm_rag.commands import sample
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_denoiser().save_pretrained(folder, eos_token_id=257)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def call(monkeypatch, capsys, model, corpus_file):
    """Runs a program in this process: its exit code, standard output and standard error."""

    def invoke(*words, program=sample, defaults=True):
        given = [] if not defaults else ["decode.max_new_tokens=8"]
        for flag, value in (("--model", model), ("--corpus", corpus_file)):
            if defaults and flag not in words:
                given += [flag, str(value)]
        monkeypatch.setattr(sys, "argv", ["sample.py", *map(str, words), *given])
        with pytest.raises(SystemExit) as stop:
            run_program(getattr(program, "main", program))
        out = capsys.readouterr()
        return stop.value.code, out.out, out.err

    return invoke
