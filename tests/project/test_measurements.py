"""The measurements: pages are those of the stored results, and every figure says how it was made."""

import importlib
import importlib.util
import re
from functools import cache

from dlm_rag.config import list_setting_fields
from tests.support.paths import ROOT


@cache
def builder():
    """The module docs/build_measurements.py."""
    spec = importlib.util.spec_from_file_location("build_measurements", ROOT / "docs/build_measurements.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure_again():
    """The module docs/measure_again.py."""
    return importlib.import_module("docs.measure_again")


def all_entries():
    return [(page, entry) for page in builder().PAGES for entry in builder().read_entries(page)]


def test_pages_are_up_to_date():
    for name, text in builder().render_pages().items():
        assert (builder().FOLDER / name).read_text() == text, "run python docs/build_measurements.py"


def test_no_result_is_older_than_what_it_depends_on():
    """README's table and world.md are what their command prints with the files and settings of now."""
    measure_again().check_inputs()


def test_readme_has_the_figures_of_the_store():
    path = ROOT / "README.md"
    assert measure_again().write_readme(path, builder().read_entries("world")) == path.read_text()
    results = (ROOT / "dlm_rag/shipped/model/RESULTS.md").read_text()
    cells = builder().read_entries("world")[0]["rows"][1][1:]
    assert f"| {' | '.join(cells)} |" in results, "run python docs/measure_again.py"


def test_what_is_evaluated_with_shipped_files_is_checked_or_names_its_commit():
    """A result that is not in inputs.json is of the past, and says of which commit."""
    inputs = measure_again().read_inputs()
    for page, entry in all_entries():
        commands = [each for each in builder().list_commands(entry) if "evaluate" in each]
        checked = [each for each in commands if each in inputs]
        assert not commands or checked or {"commit", "date"} & entry.keys(), (page, entry["title"])


def test_commands_name_what_exists():
    """A program or a setting that is gone needs the commit that still has it."""
    settings = list_setting_fields()
    sections = "|".join({key.partition(".")[0] for key in settings if "." in key})
    for page, entry in all_entries():
        text = " ".join(builder().list_commands(entry))
        programs = re.findall(r"(?<![\w/])((?:profiling|tests|docs|examples)/[\w/]+\.py|\w+\.py)", text)
        modules = [f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (dlm_rag\.[\w.]+)", text)]
        configs = [f"configs/{name}" for name in re.findall(r"--config (\S+\.yaml)", text)]
        gone = [name for name in [*programs, *modules, *configs] if not (ROOT / name).exists()]
        gone += [
            key for key in re.findall(rf"(?<![\w.])((?:{sections})\.\w+)=", text) if key not in settings
        ]
        assert not gone or "commit" in entry, (page, entry["title"], gone)
