"""The measurements: pages are those of the stored results, and every figure says how it was made."""

import importlib
import importlib.util
import json
import re
from collections import Counter
from functools import cache

import pytest
import yaml

from dlm_rag.config import list_setting_fields
from dlm_rag.errors import ConfigError
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


def an_entry(**changes):
    entry = {
        "title": "Two",
        "what": "A sum.",
        "command": "python train.py",
        "machine": "one",
        "date": "2026-11-26",
    }
    return {key: value for key, value in (entry | changes).items() if value is not None}


def store(folder, *entries, page="world"):
    """A folder of results in which one page has these entries and the others have one each."""
    (folder / "results").mkdir()
    for name in builder().PAGES:
        of_page = entries if name == page else [an_entry()]
        (folder / "results" / f"{name}.yaml").write_text(yaml.safe_dump(list(of_page)))
    return folder


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


@pytest.mark.parametrize(
    "changed", ["model.safetensors", "config.json", "generation_config.json", "corpus.jsonl", "settings"]
)
def test_a_change_since_the_measurement_is_said(tmp_path, monkeypatch, changed):
    again = measure_again()
    (tmp_path / "model").mkdir()
    files = ["model/model.safetensors", "model/config.json", "corpus.jsonl"]
    for name in files:
        (tmp_path / name).write_text(name)
    digests = {name: again.digest_file(tmp_path / name) for name in files}
    then = {"date": "2026-11-25", "files": digests, "settings": {"static": {"decode.seed": 0, "gone": 1}}}
    now = {"decode.seed": 0, "decode.new": 2}
    monkeypatch.setattr(again, "resolve_settings", lambda command: {"static": now})
    assert again.list_changes("x", then, tmp_path) == []
    if changed == "settings":
        now["decode.seed"] = 1
        said = "decode.seed of 'static' was 0, and is 1"
    else:
        name = changed if changed == "corpus.jsonl" else f"model/{changed}"
        said = f"{name} {'has changed' if (tmp_path / name).exists() else 'is new'}"
        (tmp_path / name).write_text("other")
    assert again.list_changes("x", then, tmp_path) == [said]
    monkeypatch.setattr(again, "ROOT", tmp_path)
    monkeypatch.setattr(again, "list_changes", lambda command, then: [said])
    with pytest.raises(ConfigError, match="out of date.*measure_again.py"):
        again.check_inputs({"x": then})


def test_every_page_has_a_file_of_results():
    stored = {path.stem for path in (builder().FOLDER / "results").iterdir()}
    assert stored == set(builder().PAGES)
    assert {path.stem for path in builder().FOLDER.glob("*.md")} == {"index", *stored}


def test_no_measurement_is_stored_twice():
    entries = all_entries()
    titles = Counter(entry["title"].lower() for _, entry in entries)
    tables = Counter(json.dumps(entry["rows"]) for _, entry in entries if entry.get("rows"))
    assert not [each for each, times in (titles + tables).items() if times > 1]


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


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (an_entry(titel="x"), "unknown key 'titel' (nearest: 'title')"),
        (an_entry(machine=None), "machine is missing"),
        (an_entry(command=[]), "command"),
        (an_entry(what=" "), "what"),
        (an_entry(date="26 November"), "is not like '2026-11-26'"),
        (an_entry(columns=["a"], rows=[[1.5]]), "quote numbers"),
        (an_entry(columns=["a", "b"], rows=[["1"]]), "every row needs 2 cells"),
        (an_entry(rows=[["1"]]), "every row needs 0 cells"),
    ],
)
def test_an_entry_that_cannot_be_shown_is_refused(tmp_path, entry, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        builder().render_pages(store(tmp_path, an_entry(title="One"), entry))
    assert "world.yaml, entry 2" in str(error.value)


def test_two_entries_with_one_anchor_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="rename one"):
        builder().render_pages(store(tmp_path, an_entry(), an_entry(title="Two!")))


def test_what_is_dumped_is_read_again():
    """YAML reads all that `dump_entry` writes, and shows it in the page."""
    entry = an_entry(command=["a # b", "c: d"], columns=["x", "y | z"], rows=[["1.0 [0, 2]", ""]], seed=0)
    text = builder().dump_entry(entry)
    assert yaml.safe_load(text) == [entry]
    shown = builder().render_entry(entry)
    assert (
        "```sh\na # b\nc: d\n```" in shown
        and "| x | y \\| z |" in shown
        and "one; 2026-11-26; seed 0" in shown
    )


def test_an_evaluation_becomes_an_entry(tmp_path):
    """--add stores the command, the stamp and the table of a scores.json, and writes the pages anew."""
    store(tmp_path, an_entry())
    means = {"exact_match": {"mean": 0.5, "low": 0.25, "high": 0.75}}
    stamp = {"device": "one cpu", "date": "2026-11-26T10:00:00+00:00", "commit": "c0ffee", "seed": 3}
    settings = {name: {"groups": {"all": means}, "stamp": stamp} for name in ("a", "b")}
    scores = {"questions": {"all": 2}, "settings": settings, "first_minus": {"b": {"all": means}}}
    (tmp_path / "scores.json").write_text(json.dumps(scores | {"command": "dlm-rag evaluate"}))
    add = ["--folder", str(tmp_path), "--add", str(tmp_path / "scores.json"), "--page", "world"]
    builder().main([*add, "--title", "New", "--what", "Equal."])
    _, entry = builder().read_entries("world", tmp_path)
    assert entry["machine"] == "one cpu" and entry["date"] == "2026-11-26" and entry["seed"] == 3
    assert [row[:2] for row in entry["rows"]] == [["a", "50.0 [25, 75]"], ["b", "50.0 [25, 75]"]]
    assert "| a | 50.0 [25, 75] |" in (tmp_path / "world.md").read_text()
    assert "[New](world.md#new)" in (tmp_path / "index.md").read_text()
    with pytest.raises(ConfigError, match="--title"):
        builder().main(add)
