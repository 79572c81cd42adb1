"""Questions answered into files, by a decoder in this process or by workers; the weights are read last."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dlm_rag import __version__
from dlm_rag.baselines import is_model_url
from dlm_rag.cli import check_writable, parse_int, print_note
from dlm_rag.commands.arguments import CommandLine, check_read, parse_command_line
from dlm_rag.commands.prepare_decoder import (
    PreparedBaseline,
    PreparedDecoder,
    ResourceCache,
    fill_in_shipped_files,
    prepare_decoder,
)
from dlm_rag.config import Config
from dlm_rag.config.fields import replace_settings
from dlm_rag.decode.rollout import Rollout
from dlm_rag.energy import EnergyReading, open_meter
from dlm_rag.errors import ConfigError
from dlm_rag.machine import compute_code_digest, default_pool_bytes, describe_machine
from dlm_rag.page.render import check_page_target
from dlm_rag.progress import report_progress
from dlm_rag.questions import Question

if TYPE_CHECKING:
    from dlm_rag.baselines.run import BaselineEngine
    from dlm_rag.config import ModelConfig
    from dlm_rag.decode.terminal import RunTotals
    from dlm_rag.decode.trace_file import AnswersFile
    from dlm_rag.engine.engine import Decoder
    from dlm_rag.workers.worker_pool import DecoderFactory, WorkerPool

Machine = dict[str, str | int]  # as `describe_machine`
Prepared: TypeAlias = "PreparedDecoder | PreparedBaseline"
Engines: TypeAlias = "LocalEngines | WorkerEngines"


class LocalEngines:
    """What answers the questions of several jobs, one after another: a decoder in this process."""

    _model: ModelConfig | None = None
    _decoder: Decoder | BaselineEngine | None = None

    def open(self, prepared: Prepared) -> list[Machine]:
        """Reads the weights, unless they are loaded, and meters energy; returns every other machine."""
        config = prepared.config
        kept = self._decoder.denoiser if self._decoder and config.model == self._model else None
        vars(self).clear()  # frees the pool: the next one is a share of what is free
        self._decoder, self._model = prepared.load(kept), config.model
        self.stream, self.describe = self._decoder.stream, self._decoder.describe
        self.read_energy = open_meter(config.energy, prepared.devices).stop
        return []


class WorkerEngines:
    """Decoders in processes of their own, used as `LocalEngines` are."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.describe = pool.describe

    def open(self, prepared: Prepared) -> list[Machine]:
        assert isinstance(prepared, PreparedDecoder), "`prepare_baseline` refuses workers"
        self._prepared = prepared
        return self._pool.open(make_decoder_factory(prepared), prepared.config.decode.batch_size)

    def read_energy(self) -> EnergyReading:
        """Nothing: the sensors are on the machines of the workers."""
        asked = self._prepared.config.energy != "none"
        return EnergyReading(0.0, reason="the sensors are on the workers' machines" * asked)

    def stream(self, questions: Sequence[Question]) -> Iterator[Rollout]:
        return self._pool.stream(questions, self._make_failed_rollout)

    def _make_failed_rollout(self, question: Question, error: str) -> Rollout:
        decode = self._prepared.config.decode
        assert decode.max_new_tokens is not None
        return Rollout(
            question.id, question.question, self._prepared.evidence_layout, decode.max_new_tokens,
            settings=asdict(decode), finished=True, error=error,
        )  # fmt: skip


@contextmanager
def open_engines(workers: str | None, jobs: Iterable[Prepared]) -> Iterator[Engines]:
    """The engines of these jobs, until the end of the block. Raises `ConfigError`."""
    if workers is None:
        yield LocalEngines()
        return
    import torch

    from dlm_rag.workers.worker_pool import WorkerPool, describe_local_node, plan_workers

    decoders = [job for job in jobs if isinstance(job, PreparedDecoder)]
    device, weights = decoders[0].device, max(job.weight_bytes for job in decoders)
    if len({job.device for job in decoders}) > 1:
        raise ConfigError("workers= has one device for all settings: leave model.device out of compare")
    if workers.startswith("ray://"):
        plan = partial(plan_workers, "auto", device=device, weights=weights)
        pool, threads = WorkerPool(workers, plan), 1
    else:
        placement = plan_workers(workers, [describe_local_node(device)], device, weights)
        pool, threads = WorkerPool("local", placement), placement.threads_per_worker
    torch.set_num_threads(threads)  # the stamp names a worker's
    with pool:
        yield WorkerEngines(pool)


@contextmanager
def count_answers(engines: Engines) -> Iterator[RunTotals]:
    """Totals of what is answered in the block, which add it; its energy and a line on it at the end."""
    from dlm_rag.decode.terminal import RunTotals

    tally = RunTotals()
    try:
        yield tally
    finally:
        tally.close(engines.describe(), engines.read_energy())


def make_decoder_factory(prepared: PreparedDecoder) -> DecoderFactory:
    """Makes a job's decoders in workers: with absolute paths, and the device and dtype of here."""

    def locate(path: str | None) -> str | None:  # anything but a file or folder (a hub id) is left as it is
        found = Path(path or "").expanduser()
        return str(found.absolute()) if path and found.exists() else path

    config, questions = prepared.given
    dtype = str(prepared.dtype).removeprefix("torch.")
    model = replace(config.model, path=locate(config.model.path), device=prepared.device.type, dtype=dtype)
    names = ("corpus", "index_dir", "embedding_model")
    paths: dict[str, Any] = {name: locate(getattr(config.retrieval, name)) for name in names}
    engine = replace(config.engine, store=locate(config.engine.store))
    retrieval = replace_settings(config.retrieval, **paths)
    config = replace(config, model=model, retrieval=retrieval, engine=engine)
    asked = questions if config.retrieval.oracle else []
    return partial(make_worker_decoder, config, asked, describe_dependencies(prepared))


def describe_dependencies(prepared: PreparedDecoder) -> dict[str, Any]:
    """What answers depend on, and the code: the version and a digest of this process's sources."""
    return {"dlm_rag": f"{__version__} ({compute_code_digest()})"} | prepared.answers_depend_on()


def make_worker_decoder(
    config: Config, questions: list[Question], depends_on: dict[str, Any], workers_per_machine: int
) -> tuple[Decoder, Machine]:
    """A decoder in a worker; raises `UserError` where what it reads is not the main process's."""
    prepared = prepare_decoder(config, questions)
    here = describe_dependencies(prepared)
    for key, value in depends_on.items():
        if here.get(key) != value:
            raise ConfigError(f"{key} is {here.get(key)}, and {value} in the main process")
    engine = prepared.config.engine
    if engine.prefix_cache_gib is None and engine.memory_gib is None:
        gib = default_pool_bytes(prepared.device) / 2**30 / workers_per_machine
        engine = replace(engine, prefix_cache_gib=gib)
        prepared = replace(prepared, config=replace(prepared.config, engine=engine))
    return prepared.load(), describe_machine(prepared.device, prepared.attention)


@dataclass
class AnswerJob:
    """Questions to be answered into files; everything but the weights has been checked."""

    questions: list[Question]
    prepared: Prepared
    file: AnswersFile
    failed: int = 0  # of those that were run; the answers file says why

    def run(self, engines: Engines, advance: Callable[[float], None] | None = None) -> None:
        """Answers what remains; advance: called for every answer, instead of a progress bar."""
        remaining, tally = self.file.remaining(self.questions), None
        try:
            if remaining:
                self.file.open_run(self.prepared.stamp(), self.prepared.trace_header())
                remaining = self.file.remaining(self.questions)  # another process may have answered some
            if answered := len(self.questions) - len(remaining):
                print_note(f"{answered} of {len(self.questions)} questions are answered already")
            if not remaining:
                return
            for machine in engines.open(self.prepared):
                self.file.add_machine(machine)
            bar = nullcontext(advance) if advance else report_progress("answering", len(remaining))
            with bar as draw, count_answers(engines) as tally:
                for rollout in engines.stream(remaining):
                    self.file.append(rollout)
                    tally.add(rollout)
                    draw(1)
        except KeyboardInterrupt:
            count = tally.answers if tally else 0
            print_note(f"{count} of {len(remaining)} answered; the same command goes on from here")
            raise
        finally:
            if tally and tally.answers:
                self.file.add_energy(tally.energy)
            self.file.close()
        self.failed = tally.failed
        print_note(tally.summary)


def parse_answer_command_line(
    description: str, argv: list[str], reads: Sequence[str], **more: Any
) -> CommandLine:
    """As `parse_command_line`; with --plan prints what decoding takes, and exits. Raises `UserError`."""
    options = {"plan": (False, "print what decoding takes, and do nothing")} | more.pop("options", {})
    words = parse_command_line(description, argv, (*reads, "plan.machine"), options=options, **more)
    if (count := parse_int(os.environ.get("WORLD_SIZE", "1"), 1, "WORLD_SIZE=")) > 1:
        raise ConfigError(f"torchrun has started {count} processes: start one, with workers={count}")
    if words.options["plan"]:
        from dlm_rag.training.plan import print_decode_plan

        print_decode_plan(fill_in_shipped_files(words.config, words.questions))
        raise SystemExit(0)
    check_read(words.settings, reads)
    return words


def plan_answer_job(
    config: Config, questions: list[Question], once: ResourceCache | None = None,
    prepare: Callable[[Config, list[Question], ResourceCache], Prepared] = prepare_decoder,
) -> AnswerJob:  # fmt: skip
    """The job of answering what is not answered in `out` and `trace`. Raises `UserError`, also of these."""
    assert config.out is not None
    if config.workers is not None and not is_model_url(config.model.path) and find_spec("ray") is None:
        raise ConfigError("workers= needs Ray: pip install 'dlm_rag[workers]', or leave it out")
    check_output_files(config)
    from dlm_rag.decode.trace_file import AnswersFile

    supports = {each.id: [*(each.supporting_ids or each.supporting_titles)] for each in questions}
    supports = supports if config.retrieval.oracle else {}
    file = AnswersFile(Path(config.out), Path(config.trace) if config.trace else None, supports)
    file.remaining(questions)
    prepared = prepare(config, questions, ResourceCache() if once is None else once)
    file.check_same_settings(prepared.answers_depend_on())
    return AnswerJob(questions, prepared, file)


def check_output_files(config: Config) -> None:
    """Raises `ConfigError` when a file cannot be written, or is named for two purposes."""
    written, read = {"out": config.out, "trace": config.trace, "html": config.html}, dict[str, str | None]()
    if config.out is not None:
        written["the run.json of out"] = f"{config.out}.run.json"
        read["the lock of out"] = f"{config.out}.lock"
    read["questions"] = config.questions
    if config.retrieval.corpus != config.questions:  # whose contexts are searched
        read["corpus"] = config.retrieval.corpus
    check_distinct_paths(written, read)
    if config.html is not None:
        if config.out is not None and config.trace is None:
            raise ConfigError("the page of answers in a file is made from their traces: add --trace FILE")
        check_page_target(config.html)


def check_distinct_paths(written: Mapping[str, str | None], others: Mapping[str, str | None]) -> None:
    """Raises `ConfigError` where one of the files cannot be written, or two by their keys are the same."""
    named = [(key, path) for key, path in {**written, **others}.items() if path not in (None, "-")]
    for (key, path), (other, again) in combinations(named, 2):
        if _is_same_file(str(path), str(again)):
            raise ConfigError(f"{key} and {other} are the same file, {again}: name another for {key}")
    for key, target in written.items():
        if target is not None:
            check_writable(target, key)


def _is_same_file(path: str, other: str) -> bool:
    """Whether two names are of one file, be they links, hard ones or in another case."""
    try:
        return Path(path).samefile(other)
    except (OSError, ValueError):
        return os.path.realpath(path) == os.path.realpath(other)
