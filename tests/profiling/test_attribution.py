"""Attribution of a session: a report made by hand, whose right answer can be worked out on paper."""

import json
import sys

import pytest

from tests.support.nsys_reports import DOMAIN_CREATE, MARK, PUSH_POP, write_nsys_sqlite
from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "profiling"))

import attribution
import profile_readers

MAIN, WORKER, AUTOGRAD, OTHER = (7 << 24) | 1, (7 << 24) | 2, (7 << 24) | 3, (8 << 24) | 1
MS = 1_000_000


@pytest.fixture
def session_file(tmp_path):
    """Two steps of 100 ms on one thread; a search beside the second; kernels on two streams.

    step 0: 0 to 100, denoise 10 to 60 in it. step 1: 120 to 220, retrieve 120 to 150 with search 130 to
    150, denoise 150 to 210. Beside: retrieve 140 to 170 on the worker.
    """
    strings = ["dlm_rag", "denoise", "gemm", "flash", "cudaLaunchKernel", "cudaStreamSynchronize"]
    ranges = [
        (0, 100, "step 0 rows 2", None, MAIN), (10, 60, None, 1, MAIN),
        (120, 220, "step 1 rows 4", None, MAIN), (120, 150, "retrieve", None, MAIN),
        (130, 150, "retrieve/search", None, MAIN), (150, 210, None, 1, MAIN),
        (140, 170, "retrieve", None, WORKER),
    ]  # fmt: skip
    events = [(a * MS, b * MS, PUSH_POP, text, string, 1, tid) for a, b, text, string, tid in ranges] + [
        (0, None, DOMAIN_CREATE, None, 0, 1, MAIN),  # the domain dlm_rag of this process
        (0, 500 * MS, PUSH_POP, "denoise", None, 0, MAIN),  # the default domain
        (0, 500 * MS, PUSH_POP, "denoise", None, 1, OTHER),  # a process whose domain 1 is another
        (0, None, DOMAIN_CREATE, None, 0, 2, OTHER),
        (0, 500 * MS, PUSH_POP, "denoise", None, 2, OTHER),  # another rank
        (99 * MS, None, MARK, "question q1", None, 1, MAIN),
        (219 * MS, None, MARK, "question q2", None, 1, MAIN),
        (215 * MS, None, PUSH_POP, "commit", None, 1, MAIN),  # was open when the session ended
    ]
    calls = [
        (12, 13, MAIN, 1, 4), (14, 15, MAIN, 2, 4), (160, 161, MAIN, 3, 4), (161, 200, MAIN, 9, 5),
        (90, 91, MAIN, 4, 4), (211, 212, AUTOGRAD, 5, 4),
    ]  # fmt: skip
    process = MAIN & ~0xFFFFFF
    kernels = [(20, 40, 1, 2), (30, 55, 2, 3), (165, 195, 3, 2), (92, 130, 4, 3), (212, 216, 5, 2)]
    return write_nsys_sqlite(
        tmp_path / "session.sqlite", strings, events,
        [(a * MS, b * MS, *call) for a, b, *call in calls],
        [(a * MS, b * MS, process, correlation, name) for a, b, correlation, name in kernels],
    )  # fmt: skip


def by_stage(found):
    return {part.stage: part for part in found.stages}


def ms(seconds):
    return pytest.approx(1e3 * seconds)


def test_times_on_paper(session_file):
    found = attribution.attribute_session(profile_readers.read_profile_session(session_file))
    stages = by_stage(found)
    assert ms(found.wall) == 220 and found.counts_by_unit == {"question": 2, "step": 2, "session": 1}
    assert found.others == 1
    assert {name: round(1e3 * part.self_time) for name, part in stages.items()} == {
        "denoise": 110, "step": 60, "retrieve/search": 20, "retrieve": 10, attribution.OUTSIDE_STAGES: 20,
    }  # fmt: skip
    assert ms(stages["step"].wall) == 200 and ms(stages["retrieve"].wall) == 30
    assert stages["retrieve"].calls == 2 and ms(stages["retrieve"].beside) == 30
    assert sum(part.self_time for part in found.stages) == pytest.approx(found.wall)
    assert sum(part.share for part in found.stages) == pytest.approx(1)
    assert ms(found.overlap) == 20, "retrieval 140 to 170 beside denoising 150 to 210"
    steps = found.steps
    assert (steps.count, steps.rows) == (2, 3.0) and ms(steps.first) == ms(steps.median) == 100


def test_gpu_columns_on_paper(session_file):
    """Denoise launches 20-40, 30-55 and 165-195: busy 65. Of its 110 ms the GPU runs 35 and 30.

    92-130 was launched in step 0, 212-216 by a thread without ranges while step 1 was open.
    """
    found = attribution.attribute_session(profile_readers.read_profile_session(session_file))
    denoise, step = by_stage(found)["denoise"], by_stage(found)["step"]
    assert ms(denoise.gpu_busy) == 65 and ms(denoise.gpu_idle) == 110 - 35 - 30
    assert ms(denoise.host_waits) == 39
    assert {k: round(1e3 * v) for k, v in denoise.kernels.items()} == {"gemm": 50, "flash": 25}
    assert ms(step.gpu_busy) == 65 + 38 + 4 and ms(step.gpu_idle) == 200 - 35 - 8 - 10 - 30 - 4
    assert ms(found.gpu_busy) == 35 + 38 + 30 + 4
    outside = by_stage(found)[attribution.OUTSIDE_STAGES]
    assert (outside.gpu_busy, outside.gpu_idle) == (0, 0), "92-130 covers it, and belongs to step 0"


def event(name, category, start, end, tid, **args):
    """An event of a Chrome trace, in ms."""
    return {"ph": "X", "name": name, "cat": category, "ts": 1e3 * start, "dur": 1e3 * (end - start),
            "pid": 1, "tid": tid, "args": args}  # fmt: skip


def test_layers_and_operators_below_a_stage_on_paper(tmp_path):
    """They take nothing from the stage itself; of operators the outer one counts, on its own thread."""
    ranges = [("step 1 rows 2", 0, 100), ("denoise", 10, 70), ("layer 0", 10, 30), ("layer 1", 30, 45),
              ("layer 0", 45, 60), ("commit", 80, 90)]  # fmt: skip
    operators = [("aten::linear", 10, 22), ("aten::addmm", 11, 20), ("aten::linear", 22, 25),
                 ("aten::add", 50, 52), ("aten::sort", 82, 89)]  # fmt: skip
    events = [event(name, "user_annotation", start, end, 1) for name, start, end in ranges]
    events += [event(name, "cpu_op", start, end, 1) for name, start, end in operators]
    events.append(event("aten::add", "cpu_op", 12, 18, 2))  # beside, as backward's thread
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    stages = by_stage(
        attribution.attribute_session(profile_readers.read_profile_session(tmp_path / "trace.json"))
    )
    denoise, commit = stages["denoise"], stages["commit"]
    assert ms(denoise.self_time) == 60 and denoise.layers == pytest.approx({0: 0.035, 1: 0.015})
    assert denoise.kernels == pytest.approx({"aten::linear": 0.015, "aten::add": 0.008})
    assert commit.layers == {} and commit.kernels == pytest.approx({"aten::sort": 0.007})


def test_a_gpu_trace_of_torch_on_paper(tmp_path):
    """Forward launches 20-40 and waits 5; backward's kernel 50-95 is launched by another thread."""
    ranges = [("step 4 rows 2", 0, 100), ("forward", 10, 45), ("backward", 50, 90), ("aten::mm", 50, 60)]
    events = [event(name, "user_annotation", start, end, 1) for name, start, end in ranges] + [
        event("forward", "gpu_user_annotation", 20, 40, 7),
        event("cudaLaunchKernel", "cuda_runtime", 12, 13, 1, correlation=1),
        event("cudaStreamSynchronize", "cuda_runtime", 30, 35, 1, correlation=2),
        event("cudaLaunchKernel", "cuda_runtime", 52, 53, 2, correlation=3),
        event("gemm", "kernel", 20, 40, 7, correlation=1),
        event("gemm [backward]", "kernel", 50, 95, 7, correlation=3),
        event("memcpy", "gpu_memcpy", 96, 98, 7),
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "x"}]}))
    found = attribution.attribute_session(profile_readers.read_profile_session(tmp_path / "trace.json"))
    stages = by_stage(found)
    assert ms(found.gpu_busy) == 20 + 45 + 2 and ms(found.wall) == 100
    assert ms(stages["forward"].gpu_busy) == 20 and ms(stages["forward"].gpu_idle) == 15
    assert ms(stages["forward"].host_waits) == 5
    assert ms(stages["backward"].gpu_busy) == 45 and stages["backward"].gpu_idle == 0
    assert stages["backward"].kernels == {"gemm [backward]": pytest.approx(0.045)}
    assert ms(stages[attribution.OUTSIDE_STAGES].gpu_busy) == 2, "nobody launched it"
