"""Stages: exception-safe, nested, silent when nobody listens; NVTX gets the same names."""

import threading
from contextlib import nullcontext

import pytest

from dlm_rag import nvtx_ranges
from dlm_rag.nvtx_ranges import STAGES, StageClock, profile_stage


def test_nested_stages_count_in_their_own_name_and_in_the_enclosing_one(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(nvtx_ranges.time, "perf_counter", lambda: float(next(now)))
    with StageClock() as clock, profile_stage("retrieve"), profile_stage("retrieve/embed"):
        pass
    assert clock.pop_seconds() == {"retrieve/embed": 1.0, "retrieve": 3.0}
    assert clock.pop_seconds() == {}


def test_clock_and_nvtx_range_are_closed_by_an_error(monkeypatch):
    closed = []

    class Range:
        def __enter__(self):
            pass

        def __exit__(self, *_):
            closed.append(True)

    monkeypatch.setattr(nvtx_ranges, "_range", lambda name: Range())
    with pytest.raises(KeyError), StageClock() as clock, profile_stage("denoise"):
        raise KeyError
    with profile_stage("commit"):
        pass
    assert closed == [True, True] and set(clock.seconds) == {"denoise"}, "the clock no longer listens"


def test_nothing_is_kept_when_no_clock_is_open_or_on_another_thread():
    with StageClock() as clock:
        worker = threading.Thread(target=lambda: profile_stage("commit").__enter__())
        worker.start()
        worker.join()
    with profile_stage("commit"):
        pass
    assert clock.seconds == {}


def test_a_misspelt_stage_is_an_error():
    with pytest.raises(ValueError, match="'denois' is not a stage"):
        profile_stage("denois")


def test_every_stage_of_a_decode_reaches_nvtx_in_one_domain(corpus_file, monkeypatch):
    from tests.support.decoding import QUESTIONS, make_decoder

    seen, open_ranges = [], []

    class Recorder:
        def __init__(self, message, domain):
            assert domain == "dlm_rag"
            self.message = message

        def __enter__(self):
            seen.append(self.message)
            open_ranges.append(self.message)

        def __exit__(self, *_):
            assert open_ranges.pop() == self.message

    monkeypatch.setattr(nvtx_ranges.nvtx, "annotate", Recorder)
    nvtx_ranges._range.cache_clear()
    try:
        make_decoder(corpus_file, "prefix").decode(QUESTIONS)
    finally:
        nvtx_ranges._range.cache_clear()
    assert open_ranges == []
    decoding = [name for name in STAGES[: STAGES.index("rollout")] if name != "retrieve/embed"]
    assert set(decoding) <= set(seen)
    assert "step 1 rows 3" in seen and any(name.startswith("step 2 rows ") for name in seen)


def test_torch_profiler_gets_the_same_names():
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with nvtx_ranges.profile_step(3, 8), profile_stage("denoise"):
            nvtx_ranges.mark_event("question q1")
        with pytest.raises(KeyError), nvtx_ranges.profile_step(4, 8), profile_stage("commit"):
            raise KeyError
    names = [event.name for event in profiler.events()]
    assert {"step 3 rows 8", "denoise", "question q1", "step 4 rows 8", "commit"} <= set(names)
    with profile_stage("denoise"):
        assert isinstance(nvtx_ranges._torch_range("denoise"), nullcontext), "nobody listens any more"
