"""Several settings on the same questions: means with intervals, and paired differences.

A setting is a name from `SETTING_PRESETS` (of a model behind a server from `SERVED_PRESETS`) or
`KEY=VALUE`, joined by `+`: `static`, `interleaved+method=dense`, `commit_rule=top_k+tokens_per_step=2`. The
section of a key may be left out where no other section has such a key. A sweep makes such names: every
combination of the values of some keys, under each setting there is.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod

from dlm_rag.baselines import POLICIES, is_model_url
from dlm_rag.config import list_setting_fields
from dlm_rag.config.fields import suggest_setting
from dlm_rag.errors import ConfigError, QuestionError, suggest_nearest
from dlm_rag.evaluation import metrics
from dlm_rag.evaluation.metrics import SHARE_METRICS, Estimate, Score, bootstrap_mean
from dlm_rag.questions import Question

SETTING_PRESETS = {
    "interleaved": ("decode.query_policy=proxy",),
    "committed": ("decode.query_policy=committed", "decode.query_threshold=0"),
    "static": ("decode.query_policy=question",),
    "two_rounds": ("decode.query_policy=two_rounds",),
    "feedback": ("decode.query_policy=feedback",),
    "none": ("retrieval.method=none", "decode.query_policy=question"),
    "oracle": ("retrieval.oracle=true", "decode.query_policy=question"),
}
SERVED_PRESETS = {name: (f"remote.policy={name}",) for name in POLICIES} | {
    "oracle": ("retrieval.oracle=true", "remote.policy=static")
}
COMPARED_SECTIONS = ("model.", "retrieval.", "decode.", "remote.", "prompt")  # what settings may differ in
MAX_SWEEP_SETTINGS = 1000  # of a sweep; more are a slip of the hand
QuestionGroups = dict[str, list[int]]  # name -> places in the list of questions
SettingMetrics = Mapping[str, Estimate | None]  # of one setting in one group of questions
GroupSummary = dict[str, dict[str, Estimate | None]]  # group -> metric -> estimate
MetricsBySetting = Mapping[str, SettingMetrics]
SummaryBySetting = Mapping[str, GroupSummary]


def parse_compared_settings(compare: str, served: bool = False) -> dict[str, list[str]]:
    """`KEY=VALUE` words by the name of each setting; "all" is every preset. Raises `ConfigError`.

    served: whether a setting that names no model is of one behind a server, which has presets of its own.
    """
    everything = SERVED_PRESETS if served else SETTING_PRESETS
    names = list(everything) if compare == "all" else [name.strip() for name in compare.split(",")]
    if "all" in names:
        raise ConfigError("compare: 'all' stands alone; name the settings one by one to add others")
    settings: dict[str, list[str]] = {}
    for name in names:
        if name in settings:
            raise ConfigError(f"compare: '{name}' is named twice")
        settings[name], parts = [], [complete_key(part) for part in name.split("+")]
        own = [part.removeprefix("model.path=") for part in parts if part.startswith("model.path=")]
        presets = SERVED_PRESETS if (is_model_url(own[0]) if own else served) else SETTING_PRESETS
        for part in parts:
            if not part.startswith(COMPARED_SECTIONS) and part not in presets:
                raise ConfigError(
                    f"compare: '{part}' is neither KEY=VALUE of {', '.join(COMPARED_SECTIONS)} nor one of "
                    f"{', '.join(presets)}, all{suggest_nearest(part, presets)}"
                )
            settings[name] += presets.get(part, (part,))
    return settings


def complete_key(part: str) -> str:
    """Returns `top_k=3` as `retrieval.top_k=3`; a part whose key names no setting, or two, as it is."""
    key, equals, value = part.partition("=")
    known = [name for name in list_setting_fields() if name.startswith(COMPARED_SECTIONS)]
    full = [name for name in known if equals and name.rpartition(".")[2] == key]
    return f"{full[0]}={value}" if len(full) == 1 else part


def parse_sweep(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of each word `KEY=VALUE,VALUE` by its key. Raises `ConfigError`."""
    keys = [key for key in list_setting_fields() if key.startswith(COMPARED_SECTIONS)]
    swept: dict[str, list[str]] = {}
    for word in words:
        key, equals, said = word.partition("=")
        values = [value.strip() for value in said.split(",")]
        wrong = ""
        if not equals:
            wrong = f"'{word}' is not KEY=VALUE,VALUE"
        elif key not in keys:
            wrong = f"'{key}' is not a key of {', '.join(COMPARED_SECTIONS)}{suggest_setting(key, keys)}"
        elif "" in values:
            wrong = f"a value of {word} is empty: write {key}=VALUE,VALUE"
        elif key in swept or len({*values}) < len(values):
            wrong = f"{key if key in swept else f'a value of {word}'} is named twice"
        if wrong:
            raise ConfigError(f"sweep: {wrong}")
        swept[key] = values
    if (count := prod(map(len, swept.values()))) > MAX_SWEEP_SETTINGS:
        raise ConfigError(f"sweep: {count} settings are more than {MAX_SWEEP_SETTINGS}: take values out")
    return swept


def expand_sweep(
    settings: Mapping[str, Sequence[str]], swept: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Every setting with each combination, the last key fastest; `ConfigError` if one sets a swept key."""
    found = {}
    for name, words in settings.items():
        if both := sorted({*swept} & {word.partition("=")[0] for word in words}):
            raise ConfigError(f"sweep: '{name}' sets {both[0]}, which is swept: leave one out")
        for values in product(*swept.values()):
            more = [f"{key}={value}" for key, value in zip(swept, values, strict=True)]
            found["+".join([*([name] if name else []), *more])] = [*words, *more]
    return found


def group_questions(questions: Sequence[Question]) -> QuestionGroups:
    """All questions, those of each number of hops, of each label, and of each label and hops. If some have
    labels, those without are `unlabelled`. Raises `QuestionError` for a group's name as label."""
    by_hops = {
        f"{hops} hop{'s' * (hops != 1)}": [n for n, q in enumerate(questions) if q.hops == hops]
        for hops in sorted({q.hops for q in questions if q.hops is not None})
    }
    groups = {"all": list(range(len(questions))), **by_hops}
    labels = [q.labels or ("unlabelled",) for q in questions]
    for label in [*sorted({label for of in labels for label in of} - {"unlabelled"}), "unlabelled"]:
        having = [n for n, of in enumerate(labels) if label in of]
        if label in groups or ", " in label or re.fullmatch(r"\d+ hops?", label):
            raise QuestionError(f"the label '{label}' is the name of another group: rename that field")
        if 0 < len(having) < len(questions):
            groups[label] = having
            both = {f"{name}, {label}": sorted({*places} & {*having}) for name, places in by_hops.items()}
            groups |= {name: places for name, places in both.items() if places}
    return groups


def summarize_scores(scores: Sequence[Score], groups: QuestionGroups) -> GroupSummary:
    """Every metric of one setting in every group: means, and tokens per forward as a ratio of sums."""
    found: GroupSummary = {}
    for group, places in groups.items():
        ended = [n for n in places if not scores[n].failed]
        values = {
            name: [getattr(scores[n], name) for n in (places if name in SHARE_METRICS else ended)]
            for name in metrics.SCORE_METRICS
        }
        found[group] = {
            name: (metrics.estimate_share if name in SHARE_METRICS else bootstrap_mean)(each)
            for name, each in values.items()
        }
        found[group]["tokens_per_forward"] = metrics.bootstrap_ratio(values["tokens"], values["forwards"])
    return found


def compare_to_first(scores: dict[str, list[Score]], groups: QuestionGroups) -> dict[str, GroupSummary]:
    """The first setting minus each of the others, question by question, in what it achieved and took."""
    estimators: dict[str, Callable[[list[float]], Estimate | None]] = {
        "exact_match": metrics.estimate_difference, "f1": metrics.estimate_difference,
        "forwards": bootstrap_mean, "searches": bootstrap_mean,
    }  # fmt: skip
    (_, first), *others = scores.items()
    return {
        setting: {
            group: {
                name: estimate(
                    [
                        getattr(first[n], name) - getattr(theirs[n], name)
                        for n in places
                        if name in SHARE_METRICS or not (first[n].failed or theirs[n].failed)
                    ]
                )
                for name, estimate in estimators.items()
            }
            for group, places in groups.items()
        }
        for setting, theirs in others
    }
