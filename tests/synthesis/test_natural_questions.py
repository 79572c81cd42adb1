"""Facts of real-looking sentences, and the questions made of them."""

import random
import re
from functools import cache

import pytest

from dlm_rag.retrieval.corpus import Passage
from dlm_rag.synthesis.facts import FactFinder, load_relations
from dlm_rag.synthesis.natural_questions import UNKNOWN, WRAPPINGS, NaturalQuestions
from dlm_rag.synthesis.passage_links import TitledPassage
from dlm_rag.text import normalize_answer, normalize_whitespace

_WRAPPED = re.compile(rf"(?:{'|'.join(WRAPPINGS)}) (?=wh)", re.IGNORECASE)

TEXTS = {
    "Harbour Lights": """Harbour Lights is a 1931 British drama film directed by Edwin Marlowe and starring
        Vera Stanton and Tom Ashby. The film was released on 4 May 1931.""",
    "Edwin Marlowe": """Edwin John Marlowe (3 March 1890 – 17 June 1961) was a British film director. He was
        born in Leeds, Yorkshire. He was married to Ada Pennington. He directed 14 films.""",
    "Ada Pennington": """Ada Pennington (born 1 July 1899) was an English actress. She studied at Girton
        College.""",
    "Low Water": '"Low Water" is a novel by Nora Haddon. It was published in 1922 by Tidewell Press.',
    "Nora Haddon": """Nora Haddon (12 May 1880 – 2 April 1950) was an Irish novelist. She is best known for
        her sea stories. She won the Meridian Prize.""",
    "Marwick": "Marwick is a village in Orkney, Scotland. Its population was 312.",
    "Sel Quartet": "The Sel Quartet is a band formed in 1994 by Ilse Brandt.",
}
EXPECTED = [
    ("Harbour Lights", "director", "Edwin Marlowe"),
    ("Harbour Lights", "star", "Vera Stanton and Tom Ashby"),
    ("Harbour Lights", "released", "4 May 1931"),
    ("Edwin Marlowe", "born_when", "3 March 1890"),
    ("Edwin Marlowe", "died_when", "17 June 1961"),
    ("Edwin Marlowe", "born_where", "Leeds, Yorkshire"),
    ("Edwin Marlowe", "spouse", "Ada Pennington"),
    ("Edwin Marlowe", "occupation", "film director"),
    ("Edwin Marlowe", "country", "British"),
    ("Edwin Marlowe", "", "14"),
    ("Ada Pennington", "born_when", "1 July 1899"),
    ("Ada Pennington", "school", "Girton College"),
    ("Low Water", "writer", "Nora Haddon"),
    ("Low Water", "released", "1922"),
    ("Nora Haddon", "known_for", "her sea stories"),
    ("Nora Haddon", "award", "the Meridian Prize"),
    ("Marwick", "located", "Orkney, Scotland"),
    ("Sel Quartet", "founded_when", "1994"),
]


@cache
def make_passages():
    return [
        Passage(f"p{n}", title, f"{title}\n{normalize_whitespace(text)}")
        for n, (title, text) in enumerate(TEXTS.items())
    ]


@cache
def ask(wordings="ask"):
    return NaturalQuestions(make_passages(), lambda row: True, wordings)


@pytest.mark.parametrize(("title", "relation", "found"), EXPECTED)
def test_a_sentence_tells_its_fact(title, relation, found):
    row = list(TEXTS).index(title)
    finder = FactFinder([TitledPassage.from_passage(passage) for passage in make_passages()])
    told = {(fact.relation, fact.object) for fact in finder.find(row)}
    assert (relation, found) in told


def test_nobody_is_born_in_the_year_of_death():
    passage = Passage("x", "Ann Low", "Ann Low (August 6, 1892 – January 6, 1963) was a painter.")
    (one,) = (
        f for f in FactFinder([TitledPassage.from_passage(passage)]).find(0) if f.relation == "born_when"
    )
    assert one.object == "August 6, 1892"


def draw_many(count=400):
    rng, asked = random.Random(0), ask()
    singles = [asked.draw_single(rng) for _ in range(count)]
    chains = [chain for _ in range(count) if (chain := asked.draw_chain(rng)) is not None]
    return singles + chains


def test_an_answer_stands_in_the_passage_and_not_in_the_question():
    for one in draw_many():
        told = normalize_answer(make_passages()[one.rows[-1]].text)
        assert normalize_answer(one.answer) in told
        assert f" {normalize_answer(one.answer)} " not in f" {normalize_answer(one.question)} "
        assert one.response.endswith(f"### {one.answer}")


def test_wordings_that_are_held_out_are_never_drawn():
    held = {
        template.format(s=name, o="").lower().rstrip("?.")
        for relation in load_relations()["relations"].values()
        for template in relation["held_out"]
        for name in TEXTS
    }
    assert not held & {one.question.lower().rstrip("?.") for one in draw_many()}
    rng = random.Random(1)
    table = [one for _ in range(200) if (one := ask("held_out").draw_single(rng)).template != "clause"]
    asked = {one.question.lower().rstrip("?.").replace("the film ", "") for one in table}
    assert len(asked & held) > len(asked) / 2


def test_a_chain_goes_from_the_first_passage_to_the_second():
    rng = random.Random(2)
    chains = [chain for _ in range(200) if (chain := ask().draw_chain(rng)) is not None]
    assert chains
    for chain in chains:
        first, second = chain.statements
        title = list(TEXTS)[chain.rows[1]]
        assert title in first and title in second and title.lower() not in chain.question.lower()


def test_crossed_chains_are_told_by_their_passage_alone():
    rng = random.Random(3)
    crossed = [made for _ in range(300) if (made := ask().draw_crossed(rng)) is not None]
    assert crossed
    for asked, passage in crossed:
        assert passage.title in asked.statements[0] and passage.title in asked.statements[1]
        assert normalize_answer(asked.answer) in normalize_answer(passage.text)


def test_what_is_missing_is_not_told():
    rng = random.Random(4)
    for _ in range(200):
        row = rng.randrange(len(TEXTS))
        missing = ask().draw_missing(rng, row)
        assert missing is None or missing.answer == UNKNOWN
        if missing is not None:
            relations = load_relations()["relations"]
            same = lambda text: _WRAPPED.sub("", text.rstrip("?.")).lower()  # noqa: E731
            templates = {
                name for name, relation in relations.items() for form in relation["ask"]
                if same(form.format(s=list(TEXTS)[row], o="")) == same(missing.question)
            }  # fmt: skip
            assert templates and not templates & {fact.relation for fact in ask().facts[row]}


def test_names_and_dates_change_everywhere_alike():
    rng, changed = random.Random(5), 0
    for _ in range(60):
        one = ask().draw_chain(rng)
        if one is None:
            continue
        names = [(list(TEXTS)[row], ask().group_of(row)) for row in one.rows]
        rename = ask().renamer.draw(rng, names)
        told = rename(make_passages()[one.rows[-1]].text)
        assert normalize_answer(rename(one.answer)) in normalize_answer(told)
        changed += rename(one.response) != one.response
    assert changed > 20
