"""The documentation: links lead somewhere, code names what is there, pages are short."""

import ast
import importlib.util
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from distutils.core import run_setup
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from dlm_rag.__main__ import PROGRAMS
from dlm_rag.config import CONFIG_FOLDER, list_setting_fields
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
SITE_PAGES = sorted(DOCS.rglob("*.md"))
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *SITE_PAGES]
CARDS = sorted((ROOT / "dlm_rag" / "shipped").glob("*/README.md"))
OF_THE_PAST = {"log.md", "CHANGELOG.md"}  # pages that name settings and programs that are gone
SECTIONS = {key.partition(".")[0] for key in list_setting_fields() if "." in key}


class Block(NamedTuple):
    """A fenced block of a page; title: the name of the file it is to be written to."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def name_page(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read_blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page; those of a list or an admonition without its indentation."""
    found, lines = [], iter(enumerate(page.read_text().splitlines(), start=1))
    for number, line in lines:
        if fence := re.fullmatch(r"( *)(```+)([\w+-]*)(.*)", line):
            body, indent = [], len(fence[1])
            for _, inner in lines:
                if inner.strip() == fence[2]:
                    break
                body.append(inner[indent:])
            title = re.search(r'title="([^"]+)"', fence[4])
            found.append(Block(page, number, fence[3], title[1] if title else "", "\n".join(body)))
    return found


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def select_blocks(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def read_prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^ *(```+).*?^ *\1 *$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@cache
def list_anchors(page: Path) -> set[str]:
    """The anchors of a page, as GitHub and the site make them of headings, or as the page names them."""
    found = set()
    for title in re.findall(r"^#+ (.*)$", read_prose(page), re.MULTILINE):
        words, _, own = title.partition("{ #")
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", words).replace("`", "")
        plain = re.sub(r"[^\w -]", "", text.strip().lower())
        found |= {own.rstrip(" }"), plain.replace(" ", "-"), re.sub(r"[-\s]+", "-", plain)}
    return found


def find_broken_links(page: Path) -> list[str]:
    """The links and images of a page, as GitHub shows it, that lead nowhere."""
    broken = []
    prose = re.sub(r"`[^`\n]*`", "", read_prose(page))
    for link in re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", prose):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        has_anchors = anchor and target.suffix == ".md" and target.name != "api.md"
        if not target.exists() or (has_anchors and anchor not in list_anchors(target)):
            broken.append(link)
    return broken


def test_links_and_images_lead_somewhere():
    """The links of the site are checked again when it is built, which is a step of `.ci/run`."""
    broken = {name_page(page): find_broken_links(page) for page in [*PAGES, *CARDS]}
    assert not {name: links for name, links in broken.items() if links}


def test_the_site_has_every_page_once():
    def list_pages(nav):
        for entry in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else [nav]:
            yield from [entry] if isinstance(entry, str) else list_pages(entry)

    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = list(list_pages(settings["nav"]))
    assert sorted(listed) == [str(page.relative_to(DOCS)) for page in SITE_PAGES]


@pytest.mark.slow
def test_generated_pages_are_up_to_date():
    done = subprocess.run(
        [sys.executable, DOCS / "build_reference.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_python_compiles():
    for block in select_blocks("python", "py"):
        text = re.sub(r"^(>>> |\.\.\. )", "", block.text, flags=re.MULTILINE)
        compile(text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


COMMAND = re.compile(
    r"(?:dlm-rag|python3? -m dlm_rag|(?:python3?|torchrun .*?) (?P<script>sample|evaluate|train)\.py)"
    r"(?P<words>(?: [^\n;|&>]*)?)"
)


@cache
def list_flags(program: str) -> set[str]:
    """The flags of a program; empty for those whose words are another program's."""
    if program in ("lm-eval", "profile"):
        return set()
    capture = runpy.run_path(str(DOCS / "build_reference.py"))["capture_help"]
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", capture(program)))


def find_wrong_commands(page: Path, text: str) -> Iterator[str]:
    """What is wrong with the programs, flags, scripts and modules that a shell block names."""
    for found in COMMAND.finditer(text):
        words = [*filter(None, [found["script"]]), *found["words"].split()]
        if not words or words[0].startswith("-"):
            continue
        if words[0] not in PROGRAMS:
            yield f"no program {words[0]}"
        elif flags := list_flags(words[0]):
            given = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
            yield from (f"{words[0]} has no {flag}" for flag in given - flags)
    own = {Path(name).name for name in re.findall(r"([\w./-]+\.py)[`\"]", page.read_text())}
    for script in re.findall(r"python3? ([\w./-]+\.py)", text):
        if not (ROOT / script).is_file() and Path(script).name not in own:
            yield f"no script {script}"
    for module in re.findall(r"python3? -m (\w[\w.]*)", text):
        if module != "venv" and not importlib.util.find_spec(module):
            yield f"no module {module}"


def test_shell_names_what_is_there():
    """Measurements are of their commits."""
    wrong = []
    for block in select_blocks("bash", "sh", "shell", "console"):
        if block.page.parent.name == "measurements":
            continue
        text = re.sub(r"(?:^|(?<=\s))#.*$", "", block.text.replace("\\\n", " "), flags=re.MULTILINE)
        if block.language == "console":  # what is typed, without what is printed
            text = "\n".join(line for line in text.splitlines() if line.startswith("$ "))
        wrong += [f"{block}: {said}" for said in find_wrong_commands(block.page, text)]
    assert not wrong, "\n".join(wrong)


def find_unknown_names(page: Path) -> set[str]:
    """The configs, settings and programs that a page names and that are not there."""
    text = re.sub(r"^ *```python.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    configs = {path.name for path in CONFIG_FOLDER.glob("*.yaml")} | set(
        re.findall(r'title="(\S+\.yaml)"', text)
    )
    unknown = {Path(name).name for name in re.findall(r"--config ([\w/.-]+\.yaml)", text)} - configs
    named = re.findall(rf"(?<![\w/.-])((?:{'|'.join(sorted(SECTIONS))})\.[a-z0-9_]+)(?![\w/(.])", text)
    named = {key for key in named if not key.endswith((".py", ".md", ".png", ".yaml", ".html", ".jsonl"))}
    unknown |= named - set(list_setting_fields())
    programs = set(re.findall(r"(?:python|torchrun .*) profiling/(\w+)\.py", text))
    return unknown | (programs - {path.stem for path in (ROOT / "profiling").glob("*.py")})


def test_configs_settings_and_scripts_that_are_named_exist():
    """Measurements and the log are of their commits."""
    pages = [page for page in PAGES if page.name not in OF_THE_PAST and page.parent.name != "measurements"]
    unknown = {name_page(page): find_unknown_names(page) for page in pages}
    assert not {name: names for name, names in unknown.items() if names}


def test_extras_that_are_named_exist():
    """In pages and in messages of the package."""
    extras = set(run_setup(str(ROOT / "setup.py"), stop_after="init").extras_require)
    code = [path for folder in ("dlm_rag", "configs", "profiling") for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".yaml", ".md")]  # fmt: skip
    for path in [*PAGES, *code]:
        for named in re.findall(r"pip install[^\n]*?(?:dlm_rag|\.)\[([\w,-]+)\]", path.read_text()):
            assert set(named.split(",")) <= extras, path


def test_the_map_names_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    start = text.index("    dlm_rag/  ")
    rooms = set(re.findall(r"^      ([a-z_]+)/ ", text[start:], re.MULTILINE))
    folders = {path.parent.name for path in (ROOT / "dlm_rag").glob("*/__init__.py")}
    assert rooms == folders | {"shipped"}


def test_the_extensions_of_contributing_can_be_imported():
    names: dict[str, object] = {}
    for block in read_blocks(ROOT / "CONTRIBUTING.md"):
        if block.language == "python":
            exec(compile(block.text, str(block), "exec"), names)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"=mine:(\w+)", text)) <= set(names)


def test_the_python_of_the_readme_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (program,) = (block.text for block in read_blocks(ROOT / "README.md") if block.language == "python")
    exec(program, {})
    assert "Naibrourt Haweal" in capsys.readouterr().out


def test_the_gate_finds_the_two_commands():
    """`.ci/run` takes its commands from the README; a listing of another kind there must not become one."""
    line = next(
        line
        for line in (ROOT / ".ci" / "run").read_text().splitlines()
        if line.startswith("mapfile -t commands")
    )
    script = f'{line}\nprintf "%s\\n" "${{commands[@]}}"'
    found = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    install_and_ask, install_and_test = found.stdout.splitlines()
    assert install_and_ask.endswith("sample.py") and install_and_test.endswith("-m pytest -n 2")


def test_readme_and_docs_stay_short():
    """The log and the reference are looked up, not read."""
    pages = (p for p in DOCS.rglob("*.md") if p.name != "log.md" and "reference" not in p.parts)
    assert len((ROOT / "README.md").read_text().split()) <= 600
    assert sum(len(page.read_text().split()) for page in pages) <= 13_000
