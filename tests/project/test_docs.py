"""The documentation: the README is short, links lead somewhere, map and commands name what is there."""

import re
import subprocess

import pytest

from dlm_rag.config import CONFIG_FOLDER, list_setting_fields
from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = {key.partition(".")[0] for key in list_setting_fields() if "." in key}
TAKEN_OUT = {"log.md"}  # pages that name settings of the past


def settings_named(text: str) -> set[str]:
    """The settings that a text names, as in `decode.batch_size=16`; `train.py` and `engine.md` are none."""
    found = re.findall(rf"(?<![\w/.-])((?:{'|'.join(sorted(SECTIONS))})\.[a-z_]+)(?![\w/(.])", text)
    return {key for key in found if not key.endswith((".py", ".md", ".png"))}


def test_the_readme_is_read_in_minutes():
    assert len((ROOT / "README.md").read_text().split()) <= 1200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    for link in links:
        name, _, heading = link.partition("#")
        there = page.parent / name if name else page
        assert there.exists(), link
        lines = there.read_text().splitlines() if heading else []
        slugs = {
            re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
            for line in lines
            if line[:1] == "#"
        }
        assert not heading or heading in slugs, link


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == pages


def test_the_map_names_every_room():
    text = (ROOT / "README.md").read_text()
    start = text.index("    dlm_rag/  ")
    rooms = set(re.findall(r"^      ([a-z_]+)/ ", text[start:], re.MULTILINE))
    folders = {path.parent.name for path in (ROOT / "dlm_rag").glob("*/__init__.py")}
    assert rooms == folders | {"shipped"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configs_and_settings_that_are_named_exist(page):
    text = page.read_text()
    there = {path.name for path in CONFIG_FOLDER.glob("*.yaml")}
    assert set(re.findall(r"--config (\w+\.yaml)", text)) <= there
    if page.name not in TAKEN_OUT:
        assert settings_named(text) <= set(list_setting_fields())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_profiling_programs_that_are_named_exist(page):
    """A program that is gone is named with the commit that had it, and not as a command."""
    programs = re.findall(r"(?:python|torchrun .*) profiling/(\w+)\.py", page.read_text())
    assert set(programs) <= {path.stem for path in (ROOT / "profiling").glob("*.py")}


def test_the_python_of_the_readme_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(program, {})
    assert "Naibrourt Haweal (8 forwards)" in capsys.readouterr().out


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
    assert install_and_ask.endswith("sample.py") and install_and_test.endswith("-m pytest")
