"""The house: imports run downward only and in no circle, files and signatures stay small.

Measured from the import statements as they are written: those inside functions and under TYPE_CHECKING
count too.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "dlm_rag"
GROUND = "errors text files randomness nvtx_ranges progress config machine cli questions"
FLOORS = [  # lowest first; a room knows the floors below it
    GROUND,  # these know one another, in no circle; rooms of the other floors know no neighbour
    "diffusion model retrieval data energy",
    "tokenizer",
    "evidence",
    "decode",
    "workers",
    "__init__",  # the front door: Decoder, Denoiser, Tokenizer, load_retriever
    "evaluation page",
    "synthesis serving",
    "training",
    "commands",
    "__main__",
]
FLOOR_OF = {room: height for height, rooms in enumerate(FLOORS) for room in rooms.split()}
MOST_LINES, MOST_PARAMETERS, MOST_FUNCTION_LINES = 370, 7, 60


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
            # `from dlm_rag.decode import results_file` names a module, `import load_retriever` a thing in
            # one.
            names = [name if (name := f"{base}.{a.name}") in known else base for a in node.names]
        else:
            continue
        yield from (name for name in names if name in known)


def imports_of(known: dict[str, Path]) -> dict[str, set[str]]:
    """module -> those of the modules that it imports."""
    return {name: set(imported(path.read_text(), set(known))) for name, path in known.items()}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """The imports of the package."""
    return imports_of(modules())


def climbs(importing: str, other: str) -> bool:
    """Whether an import from the one room of the other does not lead downward."""
    here, there = FLOOR_OF[importing], FLOOR_OF[other]
    return importing != other and (there > here or (there == here and here > 0))


def test_every_room_has_its_floor():
    assert {room_of(name) for name in modules()} == set(FLOOR_OF)


def test_imports_run_downward_only(graph):
    wrong = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in sorted(others)
        if climbs(room_of(name), room_of(other))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("found", [modules, programs])
def test_no_circle_of_imports(found):
    try:
        TopologicalSorter(imports_of(found())).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_what_counts_as_an_import():
    source = """
from typing import TYPE_CHECKING
import dlm_rag.text, os
if TYPE_CHECKING:
    from dlm_rag.decode import results_file
def f():
    from dlm_rag.retrieval import load_retriever
"""
    known = {"dlm_rag.text", "dlm_rag.decode", "dlm_rag.decode.results_file", "dlm_rag.retrieval"}
    assert set(imported(source, known)) == known - {"dlm_rag.decode"}
    assert climbs("text", "model") and climbs("model", "retrieval") and climbs("data", "tokenizer")
    assert (
        not climbs("model", "text") and not climbs("questions", "files") and not climbs("decode", "decode")
    )


def test_files_of_the_package_are_short():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules().values()
    }
    assert not {path: length for path, length in lengths.items() if length > MOST_LINES}


def test_functions_of_the_package_are_short():
    lengths = {
        f"{path.relative_to(ROOT)}, {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {name: length for name, length in lengths.items() if length > MOST_FUNCTION_LINES}


def parameters(of: ast.arguments) -> int:
    """How many a function has, `self`, `*args` and `**kwargs` included."""
    named = [*of.posonlyargs, *of.args, *of.kwonlyargs]
    return len(named) + sum(rest is not None for rest in (of.vararg, of.kwarg))


def test_functions_take_few_parameters():
    """In the whole repository, methods, tests and lambdas included."""
    wrong = [
        f"{path.relative_to(ROOT)}, line {node.lineno}: {found} parameters"
        for path in sorted(ROOT.rglob("*.py"))
        if not {".venv", "build"} & set(path.relative_to(ROOT).parts)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        and (found := parameters(node.args)) > MOST_PARAMETERS
    ]
    assert not wrong, "\n".join(wrong)
