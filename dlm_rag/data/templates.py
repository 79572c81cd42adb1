"""The texts of invented worlds: sounds of names, relations with all their wordings, asides."""

from dataclasses import dataclass

ONSETS = "b br d dr f fl g gr h j k kl l m n p pr r s sh sk st t th tr v w z".split()
VOWELS = "a e i o u ai ea ou".split()
CODAS = ["", "", *"n l r s m th nd lk rt sk".split()]

OCCUPATIONS = "painter printer composer chemist pilot poet surgeon farmer judge sailor weaver".split()
PRODUCTS = "clocks glass wool paper salt tiles knives bells candles honey ropes lenses".split()
GENRES = {
    "book": ("novel", "memoir", "play"),
    "film": ("comedy", "drama", "thriller"),
    "album": ("folk album", "jazz album", "choral album"),
}


@dataclass(frozen=True)
class Relation:
    """A fact with all its wordings; {s} is the subject, {o} the object.

    sentence_templates: sentences of a passage, {s} there is a pronoun. noun_phrases: noun phrases that
    stand for the object. question_templates: questions for the object. The last of `noun_phrases` and of
    `question_templates` is held out from training. trace: the sentence of the reasoning.
    """

    name: str
    subject: str
    object: str
    sentence_templates: tuple[str, ...]
    noun_phrases: tuple[str, ...]
    question_templates: tuple[str, ...]
    trace: str


RELATIONS = (
    Relation("author", "book", "person",
             ("It was written by {o}.", "{o} wrote it.", "Its author is {o}."),
             ("the author of {s}", "the person who wrote {s}", "the writer behind {s}"),
             ("Who wrote {s}?", "Who is the author of {s}?", "By whom was {s} written?"),
             "{s} was written by {o}."),
    Relation("publisher", "book", "company",
             ("{o} published it.", "It came out with {o}."),
             ("the publisher of {s}", "the company that published {s}", "the house that brought out {s}"),
             ("Which company published {s}?", "Who is the publisher of {s}?", "Who brought out {s}?"),
             "{s} was published by {o}."),
    Relation("director", "film", "person",
             ("It was directed by {o}.", "{o} directed it.", "Its director was {o}."),
             ("the director of {s}", "the person who directed {s}", "the one in charge of filming {s}"),
             ("Who directed {s}?", "Who was the director of {s}?", "By whom was {s} directed?"),
             "{s} was directed by {o}."),
    Relation("lead", "film", "person",
             ("{o} played the main role.", "The main role was given to {o}."),
             ("the star of {s}", "the person who played the main role in {s}", "the lead of {s}"),
             ("Who played the main role in {s}?", "Who starred in {s}?", "Whose was the main role in {s}?"),
             "The main role in {s} was played by {o}."),
    Relation("performer", "album", "person",
             ("It was recorded by {o}.", "{o} recorded it.", "The voice on it is that of {o}."),
             ("the performer of {s}", "the person who recorded {s}", "the voice on {s}"),
             ("Who recorded {s}?", "Who is the performer of {s}?", "Whose voice is on {s}?"),
             "{s} was recorded by {o}."),
    Relation("label", "album", "company",
             ("It was released by {o}.", "{o} released it."),
             ("the label of {s}", "the company that released {s}", "the firm behind the release of {s}"),
             ("Which company released {s}?", "What is the label of {s}?", "Who put out {s}?"),
             "{s} was released by {o}."),
    Relation("founder", "company", "person",
             ("It was founded by {o}.", "{o} founded it.", "The founder was {o}."),
             ("the founder of {s}", "the person who founded {s}", "whoever started {s}"),
             ("Who founded {s}?", "Who was the founder of {s}?", "By whom was {s} started?"),
             "{s} was founded by {o}."),
    Relation("seat", "company", "city",
             ("Its main office is in {o}.", "It has its seat in {o}.", "The firm is based in {o}."),
             ("the city where {s} is based", "the seat of {s}", "the home town of {s}"),
             ("Where is {s} based?", "In which city is the main office of {s}?", "Where does {s} sit?"),
             "{s} is based in {o}."),
    Relation("birthplace", "person", "city",
             ("{s} was born in {o}.", "{s} came from {o}.", "The city of birth was {o}."),
             ("the birthplace of {s}", "the city where {s} was born", "the place {s} came from"),
             ("Where was {s} born?", "In which city was {s} born?", "From which city did {s} come?"),
             "{s} was born in {o}."),
    Relation("spouse", "person", "person",
             ("{s} was married to {o}.", "{s} married {o}.", "There was a marriage with {o}."),
             ("the spouse of {s}", "the person married to {s}", "the one who shared a home with {s}"),
             ("Who was married to {s}?", "Who was the spouse of {s}?", "To whom was {s} married?"),
             "{s} was married to {o}."),
    Relation("school", "person", "school",
             ("{s} studied at {o}.", "{s} went to {o}.", "The years of study were spent at {o}."),
             ("the school of {s}", "the school where {s} studied", "the place where {s} was taught"),
             ("Where did {s} study?", "Which school did {s} go to?", "At which school was {s} taught?"),
             "{s} studied at {o}."),
    Relation("site", "school", "city",
             ("It stands in {o}.", "Its halls are in {o}.", "It is a school in {o}."),
             ("the city of {s}", "the city where {s} stands", "the town around {s}"),
             ("In which city is {s}?", "Where does {s} stand?", "Which city is home to {s}?"),
             "{s} stands in {o}."),
    Relation("country", "city", "country",
             ("It lies in {o}.", "It is a city in {o}.", "It belongs to {o}."),
             ("the country of {s}", "the country where {s} lies", "the land around {s}"),
             ("In which country is {s}?", "Which country does {s} belong to?", "In what land is {s}?"),
             "{s} lies in {o}."),
    Relation("capital", "country", "city",
             ("Its capital is {o}.", "It is governed from {o}.", "The capital is {o}."),
             ("the capital of {s}", "the city from which {s} is governed", "the first city of {s}"),
             ("What is the capital of {s}?", "From which city is {s} governed?",
              "Which is the first city of {s}?"),
             "The capital of {s} is {o}."),
    Relation("leader", "country", "person",
             ("It is led by {o}.", "{o} leads it.", "Its leader is {o}."),
             ("the leader of {s}", "the person who leads {s}", "the head of {s}"),
             ("Who leads {s}?", "Who is the leader of {s}?", "Who stands at the head of {s}?"),
             "{s} is led by {o}."),
    Relation("occupation", "person", "literal",
             ("{s} was a {o}.", "{s} worked as a {o}."),
             ("the occupation of {s}",),
             ("What was the occupation of {s}?", "What did {s} work as?", "How did {s} earn a living?"),
             "{s} was a {o}."),
    Relation("year", "company", "literal",
             ("That was in {o}.", "It dates from {o}."),
             ("the year of {s}",),
             ("When was {s} founded?", "In which year was {s} founded?", "How old is {s}?"),
             "{s} was founded in {o}."),
    Relation("product", "city", "literal",
             ("It is known for its {o}.", "Its {o} are sold everywhere."),
             ("the product of {s}",),
             ("What is {s} known for?", "Which goods is {s} known for?", "What is sold from {s}?"),
             "{s} is known for its {o}."),
)  # fmt: skip
OPENING_TEMPLATES = {
    "book": "{s} is a {kind}.", "film": "{s} is a {kind}.", "album": "{s} is a {kind}.",
    "person": "{s} is well remembered.", "city": "{s} is an old city.", "country": "{s} is a country.",
    "school": "{s} is a school.", "company": "{s} is a company.",
}  # fmt: skip
HELD_OUT_WORDING_SHARE = 0.2
ANSWER_MARKER = "### "
RELATION_BY_NAME = {relation.name: relation for relation in RELATIONS}
ENTITY_KIND_SHARES = {
    "person": 0.30, "city": 0.18, "country": 0.05, "school": 0.10,
    "book": 0.11, "film": 0.09, "album": 0.07, "company": 0.10,
}  # fmt: skip
# Two invented words to a name, of one a country: what finds a passage is its name, not its kind.
NAME_PATTERNS = {
    "person": ("{} {}",) * 5 + ("{} van {}", "{} {} the Younger"),
    "city": ("{} {}", "{} {}", "{} on {}", "{} by {}"),
    "country": ("{}ia", "{}land", "Upper {}"),
    "school": ("{} {} School", "{} and {} School", "{} {} Academy"),
    "book": ("{} under {}", "The {} of {}", "{} and {}"),
    "film": ("The {} {}", "{} in {}", "{} meets {}"),
    "album": ("{} of {}", "{} for {}", "{} after {}"),
    "company": ("{} and {}", "{} and {}", "{} {} Works"),
}
# The only words that names of all worlds share.
NAME_PATTERN_WORDS = frozenset(
    word
    for patterns in NAME_PATTERNS.values()
    for name in patterns
    for word in name.split()
    if "{" not in word
)
# Facts that no question needs; {p} and {w} are a person and a work from elsewhere in the world.
ASIDE_TEMPLATES = {
    "person": ("A street bears the name.", "{p} wrote a letter about it.", "The portrait is by {p}."),
    "city": ("{p} once stayed there.", "It has a bridge of iron.", "{w} mentions it."),
    "country": ("Its flag is green.", "{w} is read in its schools."),
    "school": ("{p} taught there.", "Its library is small.", "{w} has a chapter on it."),
    "book": ("{p} disliked it.", "It was printed in {n} copies.", "{w} borrows a scene from it."),
    "film": ("{p} praised it.", "It was shown for {n} days.", "{w} is often shown with it."),
    "album": ("{p} owned a copy.", "It sold {n} copies.", "{w} has the same cover."),
    "company": ("{p} once worked there.", "It has {n} workers.", "{w} was paid for by it."),
}  # fmt: skip
