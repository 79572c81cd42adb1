"""What foreign files say is checked: names stay within their folder, values have their declared types."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlm_rag.errors import CheckpointError, ConfigError
from dlm_rag.files.paths import resolve_path_inside
from tests.support.properties import hypothesis_settings


@pytest.mark.parametrize("name", ["a.txt", "held_out/a.txt", "...", "a..b", "not there", "link.txt", " "])
def test_a_name_in_the_folder_is_its_path(tmp_path, name):
    (tmp_path / "link.txt").symlink_to("/etc/passwd")  # as the hub's cache links to its blobs
    assert resolve_path_inside(tmp_path, name, "rows.json", ConfigError) == tmp_path / name


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../a", "a/../../b", "a/../b", "/etc/passwd", "//etc", "a/", "./a", "a//b", "a\0b",
        "out/a", "out/../a", "a" * 5000 + "/../..", 5, None, True, ["a"], {"a": 1},
    ],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused(tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"^index\.json names .* is not the name of a file in"):
        resolve_path_inside(folder, name, "index.json", CheckpointError)


PIECES = st.sampled_from(["..", ".", "", "a", "b", "/", "//", "out", "in", "~", "\\", "a b"])


@given(pieces=st.lists(PIECES, max_size=6), glue=st.sampled_from(["/", "", "\\"]))
@hypothesis_settings(200)
def test_no_name_leads_out_of_the_folder(tmp_path, pieces, glue):
    folder = tmp_path / "folder"
    (folder / "in").mkdir(parents=True, exist_ok=True)
    if not (folder / "out").is_symlink():
        (folder / "out").symlink_to(tmp_path)
    try:
        found = resolve_path_inside(folder, glue.join(pieces), "x", ConfigError)
    except ConfigError:
        return
    assert Path(os.path.realpath(found.parent)).is_relative_to(folder) and found != folder
