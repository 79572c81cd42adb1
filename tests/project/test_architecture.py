"""The house: imports run downward only and in no circle, files and signatures stay small.

Measured from the import statements as they are written: those inside functions and under TYPE_CHECKING
count too.
"""

import ast
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import UnionType
from typing import Any

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "dlm_rag"
GROUND = "errors text answer_forms files randomness nvtx_ranges progress config machine cli questions"
FLOORS = [  # lowest first; a room knows the floors below it
    GROUND,  # these know one another, in no circle; rooms of the other floors know no neighbour
    "model retrieval data energy",
    "tokenizer",
    "evidence",
    "decode",
    "engine",
    "diffusion_gemma",
    "workers",
    "__init__",  # the front door: load, Decoder, Denoiser, Question, Tokenizer, load_retriever ...
    "baselines",
    "evaluation",
    "page",
    "serving",
    "training",
    "commands",
    "__main__",
]
FLOOR_OF = {room: height for height, rooms in enumerate(FLOORS) for room in rooms.split()}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
MOST_LINES, MOST_PARAMETERS, MOST_FUNCTION_LINES = 500, 7, 60


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a package by its own, without `__init__`."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }


def programs() -> dict[str, Path]:
    """The programs of profiling/, which import one another by their bare names."""
    return {path.stem: path for path in sorted((ROOT / "profiling").glob("*.py"))}


def room_of(module: str) -> str:
    """The first name below the package, as in `dlm_rag.model.layers`; of the package itself `__init__`."""
    return [*module.split("."), "__init__"][1]


def imported(source: str, known: set[str]) -> Iterator[str]:
    """The modules of `known` that a source imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
            base = node.module or ""
            # `from dlm_rag.decode import answers_file` names a module, `import load_retriever` a thing in
            # one.
            names = [name if (name := f"{base}.{a.name}") in known else base for a in node.names]
        else:
            continue
        yield from (name for name in names if name in known)


def imports_of(known: dict[str, Path]) -> dict[str, set[str]]:
    """module -> those of the modules that it imports."""
    return {name: set(imported(path.read_text(), set(known))) for name, path in known.items()}


def climbs(importing: str, other: str) -> bool:
    """Whether an import from the one room of the other does not lead downward."""
    here, there = FLOOR_OF[importing], FLOOR_OF[other]
    return importing != other and (there > here or (there == here and here > 0))


def test_imports_run_downward_only():
    assert {room_of(name) for name in modules()} == set(FLOOR_OF), "every room has its floor"
    pairs = [(name, other) for name, others in imports_of(modules()).items() for other in sorted(others)]
    wrong = [f"{a} imports {b}" for a, b in pairs if climbs(room_of(a), room_of(b))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("found", [modules, programs])
def test_no_circle_of_imports(found):
    try:
        TopologicalSorter(imports_of(found())).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def functions(paths: Iterable[Path], kinds: type | UnionType) -> Iterator[tuple[str, Any]]:
    """The functions in files, each with its place."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds):
                yield f"{path.relative_to(ROOT)}, line {node.lineno}", node


def test_files_and_functions_of_the_package_are_short():
    paths = modules().values()
    lengths = {str(path): (len(path.read_text().splitlines()), MOST_LINES) for path in paths}
    for place, node in functions(paths, FUNCTION):
        lengths[place] = node.end_lineno - node.lineno + 1, MOST_FUNCTION_LINES
    assert not {place: length for place, (length, most) in lengths.items() if length > most}


def parameters(of: ast.arguments) -> int:
    """How many a function has, `self`, `*args` and `**kwargs` included."""
    named = [*of.posonlyargs, *of.args, *of.kwonlyargs]
    return len(named) + sum(rest is not None for rest in (of.vararg, of.kwarg))


def test_functions_take_few_parameters():
    """In the whole repository, methods, tests and lambdas included, but not of a Triton kernel."""
    paths = [p for p in sorted(ROOT.rglob("*.py")) if not {".venv", "build"} & {*p.relative_to(ROOT).parts}]
    counts = {place: parameters(node.args) for place, node in functions(paths, FUNCTION | ast.Lambda)}
    many = {place for place, count in counts.items() if count > MOST_PARAMETERS}
    assert not {place for place in many if not place.startswith("dlm_rag/model/indexed_attention.py")}
