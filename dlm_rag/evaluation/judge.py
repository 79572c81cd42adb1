"""Accuracy by a judge: another model is asked whether an answer means what a golden one does.

The prompt is that of R1-Searcher (Song et al. 2025, arXiv 2503.05592, section 3.1); where there are several
golden answers, with the line on them of SimpleDeepSearcher (Sun et al. 2025, arXiv 2505.16834, figure 5).
What was judged is kept in `judged.jsonl` beside the answers.
"""

import hashlib
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from dlm_rag.baselines.chat_client import ChatClient, ChatError, Completion
from dlm_rag.baselines.run import PROBE_TOKENS
from dlm_rag.decode.trace_file import read_trace
from dlm_rag.errors import ConfigError
from dlm_rag.files.journal import Journal, explain_write_errors, read_json_lines, repair_last_line
from dlm_rag.progress import report_progress
from dlm_rag.questions import Question

JUDGED_FILE = "judged.jsonl"
JUDGE_PROMPT = (
    "Given a Question and its Golden Answer, verify whether the Predicted Answer is correct. The "
    "prediction is correct if it fully aligns with the meaning and key information of the Golden Answer. "
    "Respond with True if the prediction is correct and False otherwise.{several}\n\nQuestion: {question}\n"
    "Golden Answer: {golden}\nPredicted Answer: {answer}"
)
SEVERAL_ANSWERS = (
    "\nGolden Answer may have multiple options, and matching any one of them is considered correct."
)
MAX_JUDGE_TOKENS = 512
_VERDICT = re.compile(r"\W*(true|false)\b", re.IGNORECASE)


def format_judge_prompt(question: Question, answer: str) -> str:
    """What the judge is asked."""
    golden = question.golden_answers
    several = SEVERAL_ANSWERS if len(golden) > 1 else ""
    said = {"question": question.question, "golden": "; ".join(golden), "answer": answer}
    return JUDGE_PROMPT.format(several=several, **said)


def parse_verdict(reply: str) -> bool | None:
    """What a reply begins with, True or False; None where it begins otherwise, or has the other one too."""
    found = _VERDICT.match(reply)
    if found is None:
        return None
    verdict = found[1].lower() == "true"
    other = re.search(r"\bfalse\b" if verdict else r"\btrue\b", reply, re.IGNORECASE)
    return None if other else verdict


def ask_judge(client: ChatClient, prompt: str, max_tokens: int = MAX_JUDGE_TOKENS) -> Completion:
    """Raises `ChatError`."""
    messages = [{"role": "user", "content": prompt}]
    return client.ask({"messages": messages, "temperature": 0, "seed": 0, "max_tokens": max_tokens})


def check_judge(client: ChatClient) -> None:
    """Raises `ConfigError` where the judge cannot be asked."""
    client.check_model()
    try:
        ask_judge(client, "Respond with True.", PROBE_TOKENS)
    except ChatError as error:
        raise ConfigError(f"{client.server.setting} answers no chat: {error}") from None


def judge_answers(
    client: ChatClient, trace: Path, questions: Sequence[Question], concurrency: int
) -> dict[str, bool | None]:
    """The verdicts on the answers of a trace, by question; None where the judge has given none.

    An empty answer is wrong, of which nobody is asked, nor of what was judged in the same words before.
    Raises `RunError` once the server refuses, or is gone; what is judged is kept.
    """
    asked, path, model = {q.id: q for q in questions}, trace.with_name(JUDGED_FILE), client.server.model
    answers = {r.id: r.answer for r in read_trace(trace) if r.id in asked}
    prompts = {name: format_judge_prompt(asked[name], answer) for name, answer in answers.items() if answer}
    digests = {name: _digest(model, prompt) for name, prompt in prompts.items()}
    held = {line.get("asked"): line.get("correct") for _, line in read_json_lines(path, ConfigError)}
    verdicts: dict[str, bool | None] = dict.fromkeys(asked, False)
    verdicts |= {name: held.get(digest) for name, digest in digests.items()}
    left = [name for name in prompts if digests[name] not in held]
    if path.is_file():
        repair_last_line(path)
    progress = report_progress("judging", len(left))
    with closing(Journal(path)) as journal, progress as advance, explain_write_errors(path):
        for name, reply in client.ask_all(lambda name: ask_judge(client, prompts[name]), left, concurrency):
            if isinstance(reply, Completion) and (verdict := parse_verdict(reply.text)) is not None:
                line = {"id": name, "asked": digests[name], "correct": verdict, "reply": reply.text}
                journal.append(line)
                verdicts[name] = verdict
            advance(1)
    return verdicts


def _digest(model: str, prompt: str) -> str:
    return hashlib.sha256(f"{model}\n{prompt}".encode()).hexdigest()[:24]
