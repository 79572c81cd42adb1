"""Four gradients for reinforcement learning through retrieval, on a chain of hops.

    python report/shortcuts.py

A question of three hops has one of 27 answers. Its evidence is the passage of the next hop: that of the
longest right prefix of committed tokens. A table gives the logits by evidence, position and what the other
positions hold, so nobody can know the second token before the first one has been searched for. What an
update learns from:

    exact       the log-probability of all that each step decided: commit, stay, forced commits
    committed   that of the committed tokens alone, each at the step that wrote it
    one_step    that of the answer, all masked, with the evidence of the question
    elbo        one draw of the bound of the answer: random masks, with the evidence of the last step

They see the same kind of rollouts and get as many forwards, those of rollouts and of updates together.
The learning rate of each is chosen among four on other tables than those it is reported on.
"""

import torch
from torch import Tensor

from dlm_rag.engine.policy import (
    SoftThreshold,
    compute_action_distribution,
    gather_action_log_probs,
    step_log_prob,
)

HOPS, WORDS = 3, 3
MASK = WORDS
WAYS = ("exact", "committed", "one_step", "elbo")
RATES = (0.03, 0.1, 0.3, 1.0)
QUESTIONS, GROUP, FORWARDS = 8, 8, 200_000
SOFT = SoftThreshold(1.0, 0.9, 0.5)
CONTEXTS = (WORDS + 1) ** HOPS  # of the whole canvas: a position that is asked about is masked in it


class Chains:
    """Tables of logits (T, hop, word, context, position, V), one for each seed, and rollouts of them."""

    def __init__(self, seeds: range) -> None:
        shape = (HOPS, WORDS, CONTEXTS, HOPS, WORDS + 1)
        made = [
            2 * torch.randn(shape, generator=torch.Generator().manual_seed(s), dtype=torch.float64)
            for s in seeds
        ]
        self.table = torch.stack(made).requires_grad_()
        self.noise = torch.Generator().manual_seed(seeds.start)

    def logits(self, of: Tensor, answers: Tensor, hop: Tensor, canvas: Tensor) -> Tensor:
        """(B, HOPS, V) for rows of the tables `of` (B,) whose evidence is that of `hop` (B,)."""
        context = (canvas * (WORDS + 1) ** torch.arange(HOPS)).sum(1)
        return self.table[of, hop, answers.gather(1, hop[:, None])[:, 0], context]

    def rollouts(self, of: Tensor, answers: Tensor, hard: bool = False) -> tuple[Tensor, list[tuple]]:
        """Canvases (B, HOPS) and the steps: rows, hop, canvas before, tokens taken (-1: stayed), forced."""
        canvas, steps = torch.full_like(answers, MASK), []
        while (rows := (canvas == MASK).any(1).nonzero()[:, 0]).numel():
            before = canvas[rows].clone()
            hop = find_hop(before, answers[rows])
            with torch.no_grad():
                taken, forced = self.draw(
                    self.logits(of[rows], answers[rows], hop, before), before == MASK, hard
                )
            canvas[rows] = torch.where(taken >= 0, taken, before)
            steps.append((rows, hop, before, taken, forced))
        return canvas, steps

    def draw(self, logits: Tensor, open_: Tensor, hard: bool) -> tuple[Tensor, Tensor]:
        """Tokens (B, HOPS), -1 where a position stays, and whether a row's were forced (B,)."""
        flat = logits.flatten(0, 1)
        found = compute_action_distribution(flat, torch.tensor([MASK]), SOFT)
        if hard:
            token = found.log_pi.argmax(-1)
            gate = (flat.softmax(-1).amax(-1) >= SOFT.threshold).double()
        else:
            token = torch.multinomial(found.log_pi.exp(), 1, generator=self.noise)[:, 0]
            at = torch.arange(len(flat))
            gate = (found.log_commit[at, token] - found.log_pi[at, token]).exp()
        lot = torch.rand(gate.shape, generator=self.noise, dtype=torch.float64)
        took = ((lot < gate).view_as(open_)) & open_
        urge = found.forced_logit.view_as(open_).masked_fill(~open_, -torch.inf)
        place = (
            urge.argmax(1) if hard else torch.multinomial(urge.softmax(1), 1, generator=self.noise)[:, 0]
        )
        forced = ~took.any(1)
        took = took | (forced[:, None] & (torch.arange(HOPS) == place[:, None]))
        return torch.where(took, token.view_as(open_), -1), forced

    def score(
        self, way: str, of: Tensor, answers: Tensor, canvas: Tensor, steps: list[tuple]
    ) -> tuple[Tensor, int]:
        """What stands for the log-likelihood of each rollout (B,), and the forwards that it takes."""
        if way in ("exact", "committed"):
            total = torch.zeros(len(of), dtype=torch.float64)
            for rows, hop, before, taken, forced in steps:
                logits = self.logits(of[rows], answers[rows], hop, before)
                row, at = (before == MASK).nonzero(as_tuple=True)
                parts = gather_action_log_probs(
                    compute_action_distribution(logits[row, at], torch.tensor([MASK]), SOFT), taken[row, at]
                )
                took = taken[row, at] >= 0
                if way == "exact":
                    each = step_log_prob(parts, row, took, forced)
                else:
                    each = torch.zeros(len(rows), dtype=torch.float64).index_add(0, row, parts[3] * took)
                total = total.index_add(0, rows, each)
            return total, sum(len(rows) for rows, *_ in steps)
        if way == "one_step":
            hop, seen, weight = torch.zeros_like(of), torch.full_like(canvas, MASK), torch.ones(len(of))
        else:
            hop = torch.zeros_like(of)
            for rows, at_hop, *_ in steps:
                hop[rows] = at_hop  # of the last step that a row took
            masks = torch.randint(1, HOPS + 1, of.shape, generator=self.noise)
            rank = torch.rand(canvas.shape, generator=self.noise).argsort(1).argsort(1)
            seen = torch.where(rank < masks[:, None], MASK, canvas)
            weight = HOPS / masks
        log_pi = self.logits(of, answers, hop, seen)[..., :MASK].log_softmax(-1)
        picked = log_pi.gather(2, canvas[..., None])[..., 0]
        return weight * (picked * (seen == MASK)).sum(1), len(of)


def find_hop(canvas: Tensor, answers: Tensor) -> Tensor:
    """The hop (B,) whose passage a search finds: behind the longest right prefix of what is committed."""
    return (canvas == answers).long().cumprod(1).sum(1).clamp(max=HOPS - 1)


def all_answers(tables: int, times: int = 1) -> tuple[Tensor, Tensor]:
    """Every answer of every table, `times` each: which table (B,), the answer (B, HOPS)."""
    one = torch.cartesian_prod(*[torch.arange(WORDS)] * HOPS).repeat(times, 1)
    return torch.arange(tables).repeat_interleave(len(one)), one.repeat(tables, 1)


def learn(way: str, rate: float, seeds: range) -> Chains:
    """Tables after as many forwards as there are."""
    chains, tables, spent = Chains(seeds), len(seeds), 0
    optimizer = torch.optim.Adam([chains.table], lr=rate)
    while spent < FORWARDS * tables:
        asked = torch.randint(0, WORDS, (tables * QUESTIONS, HOPS), generator=chains.noise)
        answers, of = (
            asked.repeat_interleave(GROUP, 0),
            torch.arange(tables).repeat_interleave(QUESTIONS * GROUP),
        )
        canvas, steps = chains.rollouts(of, answers)
        reward = (canvas == answers).all(1).double().view(-1, GROUP)
        score, forwards = chains.score(way, of, answers, canvas, steps)
        loss = -((reward - reward.mean(1, keepdim=True)).flatten() * score).sum() / (QUESTIONS * GROUP)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        spent += forwards + sum(len(rows) for rows, *_ in steps)
    return chains


def exact_match(chains: Chains, hard: bool) -> Tensor:
    """In percent (T,): by the hard threshold each answer once, sampled 100 times."""
    tables = len(chains.table)
    of, answers = all_answers(tables, 1 if hard else 100)
    right = (chains.rollouts(of, answers, hard)[0] == answers).all(1).double()
    return 100 * right.view(tables, -1).mean(1)


def alignment(way: str, seeds: range, times: int) -> Tensor:
    """The cosine (T,) of the expected gradient of a way with that of the expected reward.

    Both are means over `times` rollouts of each answer, each over rollouts of its own.
    """
    found = []
    for each in (way, "exact"):
        chains = Chains(seeds)
        chains.noise.manual_seed(1_000 + (each == way))
        of, answers = all_answers(len(seeds), times)
        canvas, steps = chains.rollouts(of, answers)
        reward = (canvas == answers).all(1).double()
        rate = torch.zeros(len(seeds), WORDS**HOPS, dtype=torch.float64)
        answer = (answers * WORDS ** torch.arange(HOPS)).sum(1)
        rate.index_put_((of, answer), reward / times, accumulate=True)
        score, _ = chains.score(each, of, answers, canvas, steps)
        ((reward - rate[of, answer]) * score).sum().backward()
        assert chains.table.grad is not None
        found.append(chains.table.grad.flatten(1))
    return torch.cosine_similarity(found[0], found[1])


def show(values: Tensor, digits: int) -> str:
    """Mean and half of its 95 % interval over 20 tables (Student's t)."""
    return (
        f"{float(values.mean()):.{digits}f} ± {2.093 * float(values.std()) / len(values) ** 0.5:.{digits}f}"
    )


def main() -> None:
    """Prints a line for each way: rate chosen on tables 100 to 119, figures of tables 0 to 19."""
    seeds = range(20)
    print(
        ["start", "", "", *(show(exact_match(Chains(seeds), hard), 1) for hard in (False, True))],
        flush=True,
    )
    for way in WAYS:
        tried = {
            rate: float(exact_match(learn(way, rate, range(100, 120)), False).mean()) for rate in RATES
        }
        rate = max(tried, key=lambda rate: tried[rate])
        learned = learn(way, rate, seeds)
        reached = [show(exact_match(learned, hard), 1) for hard in (False, True)]
        print([way, str(rate), show(alignment(way, seeds, 400), 2), *reached], tried, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
