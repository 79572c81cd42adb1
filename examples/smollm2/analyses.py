"""What retrieval inside denoising does to the model of this folder: analyses of the SARDI paper.

    python examples/smollm2/analyses.py paired interleaved static runs/hotpotqa=h.jsonl runs/2wiki=w.jsonl
    python examples/smollm2/analyses.py recall runs/2wiki/interleaved/trace.jsonl questions.jsonl
    python examples/smollm2/analyses.py dependence corpus.jsonl questions.jsonl --limit 60
    python examples/smollm2/analyses.py words runs/2wiki/static/trace.jsonl

`paired`: exact match of two settings of `dlm-rag evaluate`, and the difference question by question, for
each result with its questions, for all together, and by kind of question; with FOLDER,OTHER=QUESTIONS the
second setting is in OTHER. `recall`: how many of the
supporting passages were among the evidence when a share of the response was written (19 points more after a
quarter, there). `dependence`: mutual information, in nats, of the next two masked tokens, which parallel
decoding would commit together, with gold passages and with none, along the response that is written with
gold passages (0.060 and 0.588 there). `words`: answers and responses with a word that neither the question
nor a passage has, which are broken names, or known from elsewhere. Intervals are 95 %, of recall and
dependence from questions drawn again.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dlm_rag import Denoiser, Tokenizer, read_trace
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER
from dlm_rag.evaluation.metrics import compute_support_recall, estimate_difference, score_rollout
from dlm_rag.evidence.encode_segments import encode_canvases
from dlm_rag.evidence.prompt_segments import ContextBudget, fit_passages, lay_out_prompt
from dlm_rag.model.packed_batch import LaidOutPrompt
from dlm_rag.questions import Question, read_questions
from dlm_rag.retrieval.corpus import get_row_id, open_corpus
from dlm_rag.text import split_words

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
CANDIDATES = 8  # tokens that the first of a pair may be
NONE = "no passages"
GOLD = "gold passages"


def format_interval(values: Sequence[float] | np.ndarray, scale: float = 1.0, digits: int = 1) -> str:
    """Returns the mean of values, one a question, with its 95 % interval."""
    found = np.asarray(values) * scale
    drawn = np.random.default_rng(0).choice(found, (2000, len(found))).mean(1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return f"{found.mean():.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def compare_settings(one: str, other: str, results: Sequence[str]) -> None:
    """Prints exact match of two settings and its paired difference, in percent, with 95 % intervals."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        folders, _, questions = result.partition("=")
        folder, _, second = folders.partition(",")
        asked = {question.id: question for question in read_questions(questions)}
        traces = Path(folder, one, "trace.jsonl"), Path(second or folder, other, "trace.jsonl")
        right = [{r.id: score_rollout(r, asked[r.id]).exact_match for r in read_trace(t)} for t in traces]
        for name in (name for name in right[0] if name in right[1]):
            for group in (folder, "all", *asked[name].labels):
                groups.setdefault(group, []).append((right[0][name], right[1][name]))
    print(f"questions, exact match of {one} and {other}, difference")
    for group, pairs in groups.items():
        first, second = (100 * sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        change = estimate_difference(a - b for a, b in pairs)
        assert change is not None
        said = f"{100 * change.mean:+.1f} [{100 * change.low:.1f}, {100 * change.high:.1f}]"
        print(f"{group} ({len(pairs)})  {first:.1f}  {second:.1f}  {said}")


def count_unknown_words(traces: Sequence[Path]) -> None:
    """Prints how many answers and responses have a word that no text before them has, with the answers."""
    for trace in traces:
        shown, rollouts = list[str](), [r for r in read_trace(trace) if r.answer]
        responses = 0
        for rollout in rollouts:
            known = {*split_words(rollout.question), "yes", "no", "unknown"}
            known.update(word for text in rollout.passages.values() for word in split_words(text))
            shown += [rollout.answer] * (not known.issuperset(split_words(rollout.answer)))
            responses += not known.issuperset(split_words(rollout.response))
        print(f"{trace}: of {len(rollouts)} answers {len(shown)}, of the responses {responses}")
        print(*(f"    {answer}" for answer in shown), sep="\n")


def measure_recall(trace: Path, questions: Path) -> None:
    """Prints the share of supporting passages in the evidence, by share of the response's tokens."""
    asked = {question.id: question for question in read_questions(questions)}
    found: list[list[float | None]] = []
    for rollout in read_trace(trace):
        question, known = asked[rollout.id], rollout.passages
        written = np.cumsum([len(step.committed) for step in rollout.steps])
        recall = [compute_support_recall(step.passage_ids, known, question) for step in rollout.steps]
        if not recall or None in recall:  # it failed, or nobody has said what supports its answer
            continue
        found.append([
            recall[min(int(np.searchsorted(written, share * written[-1])), len(recall) - 1)]
            for share in SHARES
        ])  # fmt: skip
    print(f"{len(found)} questions: supporting passages among the evidence, %")
    for share, column in zip(SHARES, zip(*found, strict=True), strict=True):
        print(f"{share:5.0%} of the response  {format_interval(column, 100)}")


class PairModel:
    """The shipped model, asked about two masked tokens side by side."""

    def __init__(self, folder: Path) -> None:
        self.denoiser = Denoiser.from_pretrained(folder, dtype="bfloat16")
        self.tokenizer = Tokenizer.from_pretrained(folder)

    def lay_out(self, question: str, passages: dict[str, str]) -> LaidOutPrompt:
        shape = self.denoiser.config
        fitted = fit_passages(self.tokenizer, question, passages, ContextBudget.from_config(shape))
        return lay_out_prompt(fitted.prompt, shape)

    @torch.inference_mode()
    def predict(
        self, laid: LaidOutPrompt, texts: Sequence[Sequence[int]], places: Sequence[int]
    ) -> torch.Tensor:
        """Returns log-probabilities (rows, vocabulary) of one place of each text; the rest is masked."""
        shape, rows = self.denoiser.config, []
        for ids, place in zip(texts, places, strict=True):
            begin, end = laid.block_bounds(place)
            masks = [self.tokenizer.mask_id] * (end - len(ids))
            rows.append(laid.build_row([*ids, *masks], max(0, begin), shape.shifted))
        hidden, _ = encode_canvases(self.denoiser, rows, [[place] for place in places])
        logits = self.denoiser.compute_token_logits(hidden).float()
        logits[:, self.tokenizer.mask_id] = -torch.inf
        return logits.log_softmax(-1)

    def measure_pair(self, laid: LaidOutPrompt, ids: Sequence[int]) -> tuple[float, int]:
        """Returns the mutual information of the next two tokens after `ids`, and the likeliest next one.

        I = sum over x of p(x) KL(p(y | x) || sum over x of p(x) p(y | x)), with x the likeliest candidates.
        """
        log_probs = self.predict(laid, [ids], [len(ids)])[0]
        best, tokens = log_probs.topk(CANDIDATES)
        weights = best.softmax(-1)
        texts = [[*ids, token] for token in tokens.tolist()]
        given = self.predict(laid, texts, [len(ids) + 1] * CANDIDATES)
        joint = torch.logsumexp(given + weights.log()[:, None], 0)
        given, joint = given[:, joint > -50], joint[joint > -50]
        divergence = (given.exp() * (given - joint)).sum(-1)
        return float((weights * divergence).sum()), int(tokens[0])

    def measure_response(
        self, laid: LaidOutPrompt, response: Sequence[int]
    ) -> tuple[list[float], list[int]]:
        """Returns the mutual information of each pair that is in one block, and the response.

        Without a `response` the likeliest tokens are written, one by one, up to the end.
        """
        ids, pairs, end_ids = list[int](), list[float](), self.tokenizer.end_ids
        while len(ids) < (len(response) or self.denoiser.config.canvas_length - 1):
            if len(ids) + 1 < laid.block_bounds(len(ids))[1]:
                value, token = self.measure_pair(laid, ids)
                pairs.append(value)
            else:
                token = int(self.predict(laid, [ids], [len(ids)])[0].argmax())
            ids.append(response[len(ids)] if response else token)
            if ids[-1] in end_ids:
                break
        return pairs, ids


def measure_dependence(corpus: Path, questions: Path, limit: int) -> None:
    """Prints mutual information with and without gold passages, and its difference question by question."""
    model = PairModel(SHIPPED_FOLDER / "smollm2")
    pages: dict[str, dict[str, str]] = {}  # a long row is several passages
    for passage in open_corpus(corpus):
        pages.setdefault(get_row_id(passage.id), {})[passage.id] = passage.text
    found: dict[str, list[float]] = {GOLD: [], NONE: []}
    asked: list[Question] = read_questions(questions)[:limit]
    for question in asked:
        gold = {name: text for row in question.supporting_ids for name, text in pages[row].items()}
        response: list[int] = []
        for name, passages in ((GOLD, gold), (NONE, {})):
            laid = model.lay_out(question.question, passages)
            pairs, response = model.measure_response(laid, response)
            found[name].append(float(np.mean(pairs)))
    print(f"{len(asked)} questions: mutual information of the next two tokens, nats")
    for name, values in found.items():
        print(f"{name:15} {format_interval(values, digits=3)}")
    difference = np.subtract(found[GOLD], found[NONE])
    print(f"{'difference':15} {format_interval(difference, digits=3)}, paired")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    paired = commands.add_parser("paired")
    paired.add_argument("one")
    paired.add_argument("other")
    paired.add_argument("results", nargs="+", metavar="FOLDER=QUESTIONS")
    recall = commands.add_parser("recall")
    recall.add_argument("trace", type=Path)
    recall.add_argument("questions", type=Path)
    words = commands.add_parser("words")
    words.add_argument("traces", type=Path, nargs="+")
    dependence = commands.add_parser("dependence")
    dependence.add_argument("corpus", type=Path)
    dependence.add_argument("questions", type=Path)
    dependence.add_argument("--limit", type=int, default=60)
    given = parser.parse_args()
    if given.command == "paired":
        compare_settings(given.one, given.other, given.results)
    elif given.command == "recall":
        measure_recall(given.trace, given.questions)
    elif given.command == "words":
        count_unknown_words(given.traces)
    else:
        measure_dependence(given.corpus, given.questions, given.limit)


if __name__ == "__main__":
    main()
