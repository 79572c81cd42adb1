"""The answers file: nothing that was answered is lost or asked twice, whatever is killed."""

from dlm_rag.decode.answers import AnswersFile
from dlm_rag.decode.rollout import Rollout

STAMP = {"answers_depend_on": {}}


def answered(name):
    return Rollout(name, "Who?", "joint", 3, response=f"### {name}", finished=True)


def test_the_same_command_started_twice_deletes_nothing(tmp_path):
    """Both read an empty file; the second gets the lock when the first is done."""
    out = tmp_path / "a.jsonl"
    first, second = AnswersFile(out), AnswersFile(out)
    first.begin(STAMP)
    first.append(answered("q1"))
    first.close()
    second.begin(STAMP)
    second.close()
    assert out.read_text().count("\n") == 1
