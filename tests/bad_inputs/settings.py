"""Settings, flags, config files, the environment."""

import json
import os
from pathlib import Path

from bad_inputs import ASK, ASK_CORPUS, ASK_FILE, ASK_MODEL, Case

YAML = f"{ASK} --config c.yaml"
EVALUATE = (
    "evaluate --model model --corpus corpus.jsonl --questions questions.jsonl decode.canvas_length=8"
    " retrieval.top_k=1"
)
TRAIN = "train --out run"
RESULT = json.dumps(
    {
        "questions": {"all": 3},
        "settings": {"a": {"groups": {"all": {"f1": {"mean": 1, "low": 1, "high": 1}}}, "stamp": {}}},
        "first_minus": {},
    }
)
MANY = "1" * 5000
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


def parquet(path: Path) -> None:
    """A question of the paper's layout."""
    from pyarrow import Table
    from pyarrow import parquet as form

    form.write_table(Table.from_pylist([{"question": "Who?", "answer": "x"}]), path)


def yaml(what: str, text: str | bytes, says: str | tuple[str, ...]) -> Case:
    """A config file."""
    return Case(what, YAML, says, {"c.yaml": text})


def word(word: str, says: str | tuple[str, ...]) -> Case:
    """One word more."""
    return Case(f"the word {word[:40]!r}", f"{ASK} {word}", says)


def by_url(url: str, says: str | tuple[str, ...], more: str = "") -> Case:
    """A search by URL."""
    return Case(f"the URL {url} {more}".strip(), f"{ASK_MODEL} retrieval.url='{url}' {more}", says)


def serve(words: str, says: str) -> Case:
    """A server of a corpus."""
    return Case(f"retrieve-server {words}", f"retrieve-server {words}", says)


def index(words: str, says: str) -> Case:
    """An index that is built before it is searched."""
    return Case(f"index {words}", f"index {words}", says)


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NOBODY, NO_MILVUS = "http://127.0.0.1:1/retrieve", "milvus://127.0.0.1:1/world"

CASES = [
    # Search by URL.
    by_url(NOBODY, "cannot be searched: Connection refused"),
    by_url("127.0.0.1:8000/retrieve", "has no scheme: begin it with one of http://"),
    by_url("htp://127.0.0.1:8000/retrieve", "(nearest: 'http')"),
    by_url("https://127.0.0.1:1/retrieve", "cannot be searched: Connection refused"),
    by_url("htps://127.0.0.1/retrieve", "(nearest: 'https')"),
    by_url("http://", "names no host and port: write http://HOST:PORT"),
    by_url("http://:8000/retrieve", "names no host and port: write http://HOST:PORT/retrieve"),
    by_url("http://127.0.0.1:0/retrieve", "names no host and port"),
    by_url("http://127.0.0.1:99999/retrieve", "is no URL: Port out of range"),
    by_url("http://127.0.0.1:x/retrieve", "is no URL: Port could not be cast"),
    by_url("http://[::1/retrieve", "is no URL: Invalid IPv6"),
    by_url("http://a..b/", "is no URL: "),
    by_url(f"http://{'a' * 64}.b/", "is no URL: "),
    by_url("http://me:secret@127.0.0.1:1/retrieve", "a token is $DLM_RAG_RETRIEVAL_TOKEN"),
    by_url("http://127.0.0.1:1/retrieve#1", "names a user or a fragment"),
    by_url("http://127.0.0.1:1/a b", "holds a character that no URL has"),
    by_url("http://127.0.0.1:1/\u00e9", "holds a character that no URL has"),
    by_url(NOBODY, "is searched instead of a corpus: leave one of the two out", "--corpus corpus.jsonl"),
    by_url(NOBODY, "retrieval.kind has no effect on the service", "retrieval.kind=dense"),
    by_url(NOBODY, "retrieval.search_memory_gib has no effect", "retrieval.search_memory_gib=0"),
    by_url(NOBODY, "retrieval.index_folder has no effect", "retrieval.index_folder=here"),
    Case("a supporting passage that is not there", f"{ASK_FILE} --questions q.jsonl retrieval.oracle=true decode.query=question",
         ("q.jsonl, line 2: the supporting passage 'dun' is not in", "corpus.jsonl"),
         {"q.jsonl": '{"id": "a", "question": "Who?", "supporting_ids": ["emma"]}\n'
          '{"id": "b", "question": "Where?", "supporting_ids": ["dune", "dun"]}\n'}),
    by_url(NOBODY, "retrieval.oracle=true needs passages by their ids", "retrieval.oracle=true"),
    by_url(NOBODY, "url_seconds=0.0 is out of range", "retrieval.url_seconds=0"),
    by_url(NO_MILVUS, "milvus://127.0.0.1:1/world cannot be searched: Connection refused"),
    by_url("milvus://127.0.0.1:1", "names no collection: write milvus://HOST:PORT/NAME"),
    by_url("milvus://127.0.0.1:1/a/b/c", "names no collection"),
    by_url("milvus://127.0.0.1:1/a-b", "NAME of letters, digits, _"),
    by_url("mlivus://127.0.0.1:1/world", "(nearest: 'milvus')"),
    by_url("milvus://me:secret@127.0.0.1:1/world", "a token is $MILVUS_TOKEN"),
    by_url(NO_MILVUS, "retrieval.oracle=true needs passages by their ids", "retrieval.oracle=true"),
    by_url(NO_MILVUS, "retrieval.search_memory_gib has no effect", "retrieval.search_memory_gib=0"),
    index("", "no corpus: give --corpus a file of passages"),
    index("--corpus corpus.jsonl --model model", "an index has no use for model: leave it out"),
    index("--corpus corpus.jsonl retrieval.kind=none", "retrieval.kind=none has no index"),
    index(f"--corpus nowhere.jsonl --to {NO_MILVUS}", "cannot be searched: Connection refused"),
    index("--corpus corpus.jsonl --to world", "--to='world' has no scheme"),
    index(f"--corpus corpus.jsonl --to {NOBODY}", "is built at milvus://HOST:PORT/COLLECTION only"),
    word("retrieval.url_seconds=1", "retrieval.url_seconds has no effect without retrieval.url"),
    Case("every warning an error", ASK, '"id": "q1"', exit=0, env={"PYTHONWARNINGS": "error"}, slow=True),
    Case("training by URL", f"{TRAIN} retrieval.url={NOBODY}", "training searches data.corpus"),
    serve("", "no corpus: give --corpus FILE"),
    serve("--corpus nowhere.jsonl", "corpus 'nowhere.jsonl' was not found"),
    serve("--corpus corpus.jsonl --port 0", "--port '0' is not a whole number above 0"),
    serve("--corpus corpus.jsonl --port 99999", "127.0.0.1:99999 cannot be listened at (bind(): port must be"),
    serve("--corpus corpus.jsonl --port http", "--port 'http' is not a whole number"),
    serve("--corpus corpus.jsonl --host 192.0.2.1", "192.0.2.1:8000 cannot be listened at"),
    serve("--corpus corpus.jsonl --model model", "a server reads settings of retrieval, and not model.path"),
    serve("--corpus corpus.jsonl retrieval.oracle=true", "and not retrieval.oracle: leave it out"),
    serve("--corpus corpus.jsonl retrieval.kind=none", "leave retrieval.url, oracle and kind=none out"),
    serve(f"retrieval.url={NOBODY}", "and not retrieval.url: leave it out"),
    serve("--corpus corpus.jsonl Who?", "'Who?' is neither a flag nor KEY=VALUE"),
    Case("a server: an address of another machine", "serve --host 192.0.2.1", "cannot be listened at"),
    Case("a server: a port that is none", "serve --port 70000", "cannot be listened at"),
    Case("a server: a question", "serve 'Who wrote Emma?'", "is neither a flag nor KEY=VALUE"),
    Case("a server: what it does not read", "serve --out a.jsonl", "serve does not read out"),
    Case("a server: an oracle", "serve retrieval.oracle=true", "serve does not read retrieval.oracle"),
    Case("a server: a canvas over its bound", "serve serving.tokens=8", "decode.canvas_length"),
    Case("a server: no line", "serve serving.waiting=0", "waiting=0 is out of range"),
    Case("a server: keys that are not there", "serve serving.keys=a.txt", "keys file 'a.txt' was not found"),
    Case("a server: no keys", "serve serving.keys=a.txt", "holds no keys", {"a.txt": "# none\n"}),
    Case("a server: a short key", "serve serving.keys=a.txt", "a.txt, line 2: a key has", {"a.txt": "\nabc"}),
    Case("a program of another name", "retrieve_server", "nearest: 'retrieve-server'"),
    # Keys and values.
    Case("an unknown key", f"{ASK} decode.comit_threshold=0.9", "nearest: 'decode.commit_threshold'"),
    word("commit_threshold=0.9", "nearest: 'decode.commit_threshold'"),
    word("energy=yes", "energy='yes' is not one of auto, idle, none"),
    word("decode.=3", "unknown key 'decode.'"),
    word("decode=3", "unknown key 'decode'"),
    word("decode.seed[0]=3", "'decode.seed[0]=3' is no question: write settings as decode.seed=VALUE"),
    word("'decode.\x1b[31m=3'", "'decode. [31m=3' is no question"),
    word("decode.seed=", "decode.seed has the wrong type"),
    word("decode.seed=abc", "decode.seed has the wrong type"),
    word("decode.seed=1.5", "decode.seed has the wrong type"),
    word("decode.seed=???", "decode.seed=??? is no value"),
    word("decode.seed=[1", "the value of decode.seed=[1 cannot be read"),
    word(f"decode.seed={MANY}", "a number beyond all measure"),
    word(f"decode.seed={'[' * 5000}", "the value of decode.seed=[[["),
    word("decode.seed=99999999999999999999", "below 2^63"),
    word("decode.batch_size=0", "batch_size=0 is out of range"),
    word("decode.batch_size=1000000000", "batch_size=1000000000 is out of range"),
    word("decode.batch_size=1e9", "decode.batch_size has the wrong type"),
    word("decode.batch_size=true", "decode.batch_size has the wrong type"),
    word("decode.commit_threshold=nan", "commit_threshold=nan is out of range"),
    word("decode.commit_threshold=inf", "commit_threshold=inf is out of range"),
    word("decode.commit_threshold=-0.1", "between 0 and 1"),
    word("decode.temperature=-1", "at least 0"),
    word("decode.temperature=inf", "temperature=inf is out of range"),
    word("retrieval.search_memory_gib=inf", "search_memory_gib=inf is out of range"),
    word("retrieval.search_memory_gib=1e308", "search_memory_gib=1e+308 is out of range"),
    word("engine.host_pool_gib=nan", "host_pool_gib=nan is out of range"),
    word("engine.pool_gib=.inf", "pool_gib=inf is out of range"),
    word("decode.stop_early=maybe", "decode.stop_early has the wrong type"),
    word("decode.commit_rule=thresholt", "nearest: 'threshold'"),
    word(f"decode.commit_rule={'x' * 10000}", "xxx... is not one of"),
    word("'decode.commit_rule=[/nope]'", "is not one of"),
    word("retrieval.kind=", "kind='' is not one of"),
    word("model.dtype=int8", "dtype='int8' is not one of"),
    word("model.device=cuda:99", "device=cuda:99 is not available"),
    word("model.device=toaster", "device=toaster is not available"),
    word("decode.block_length=9", "longer than the canvas"),
    word("decode.tokens_per_step=2 decode.steps_per_block=4", "both say how much a step commits: leave one"),
    word("decode.steps_per_block=0", "steps_per_block=0 is out of range"),
    word("decode.schedule=roundet", "nearest: 'rounded'"),
    word("decode.edit_threshold=1.1", "edit_threshold=1.1 is out of range"),
    word("decode.edit_threshold=0.9", ("is for checkpoints whose attention has blocks", "leave it out")),
    word("decode.edit_rounds=-1", "edit_rounds=-1 is out of range"),
    word("decode.copy_price=-1", "copy_price=-1.0 is out of range"),
    word("decode.finished_blocks=text", ("finished_blocks=text has no effect", "has no blocks")),
    word("model.attention_block=4 decode.finished_blocks=kept", "needs evidence_layout=independent"),
    word("engine.host_pool_gib=1 engine.pool_gib=0", "set pool_gib too"),
    word("engine.memory_gib=0", "memory_gib=0.0 is out of range"),
    word("engine.memory_gib=1e5", "is more than the"),
    word("engine.memory_gib=1e-5", ("is too little for decode.batch_size=1: weights take", "not one question fits")),
    word("engine.memory_gib=1 engine.pool_gib=2", "pools 2 GiB"),
    word("engine.memory_gib=1 decode.finished_blocks=append model.attention_block=4 model.evidence_layout=independent",
         "whose rows grow with every search"),
    Case("a step beyond its budget", f"{TRAIN} engine.memory_gib=0.001", "engine.memory_gib=0.001 is 0.00107 GB",
         changes=("run",)),
    Case("a wait of no time", f"{TRAIN} train.timeout_minutes=0", "timeout_minutes=0.0 is out of range"),
    Case("a link of no speed", f"{TRAIN} --plan plan.link_gbit=0", "link_gbit=0.0 is out of range"),
    Case("a desk with a link of no speed", "profiling/desk.py --out run --gbit 0,fast", "--gbit and --delay want numbers"),
    Case("a desk of no part", "profiling/desk.py --out run --part cables", "--part cables is neither"),
    word("limit=0", "limit=0 is out of range"),
    word("quick=perhaps", "quick has the wrong type"),
    # A space where an equals sign belongs, a file without its flag.
    word("decode.batch_size 16", "'decode.batch_size' is no question"),
    word("decode.batchsize 16", "settings as decode.batchsize=VALUE"),
    word("out answers.jsonl", "'out' is no question"),
    word("questions.jsonl", "'questions.jsonl' is a file and no question"),
    word("'*.jsonl'", "'*.jsonl' is the name of a file and no question"),
    word("@more.txt", "is the name of a file and no question"),
    word("'decode.seed = 3'", "settings as decode.seed=VALUE, in one word"),
    word("decode,seed=3", "settings as decode.seed=VALUE"),
    word("“decode.seed=3”", "settings as decode.seed=VALUE"),
    word("—out a.jsonl", "flags begin with two hyphens"),
    word("-", "flags begin with two hyphens"),
    word("out=a.jsonl --out b.jsonl", "--out and out= name the same setting"),
    word("retrieval.corpus=other.jsonl", "--corpus and retrieval.corpus= name the same setting"),
    word("--compare all", "sample answers under one setting"),
    word("--out ''", "out is empty: give it a value, or leave it out"),
    word("questions=", "questions is empty"),
    word("out=\udcff", "out='\\udcff' is not UTF-8"),
    word("retrieval.query_prompt=\udcff --print-config", "query_prompt='\\udcff' is not UTF-8"),
    word("retrieval.index_folder=", "index_folder is empty"),
    word("retrieval.kind=dense retrieval.dense_model=/", "/ is no sentence-transformers model"),
    # Flags.
    Case("an unknown flag", f"{ASK} --top-k 3", "unrecognized arguments: --top-k 3; `dlm-rag sample --help`"),
    Case("a flag cut short", f"{ASK} --quest questions.jsonl", "unrecognized arguments: --quest"),
    Case("a flag without its value", f"{ASK} --out", "argument --out: expected one argument"),
    Case("a flag twice", f"{ASK} --corpus corpus.jsonl", "--corpus is given twice"),
    Case("--config twice", f"{ASK} --config sardi --config llada", "--config is given twice"),
    Case("no question at all", "sample --model model --corpus corpus.jsonl", "no question: type one"),
    Case("a blank question", f"{ASK} ' '", "question 2 is blank"),
    Case("no program of that name", "smaple", "nearest: 'sample'"),
    Case("a word for evaluate", f"{EVALUATE} --out run what", "'what' is neither a flag nor KEY=VALUE"),
    Case("--limit 0", f"{ASK_FILE} --questions questions.jsonl --limit 0", "limit=0 is out of range"),
    Case("--limit -1", f"{ASK_FILE} --questions questions.jsonl --limit=-1", "limit=-1 is out of range"),
    Case("--limit x", f"{ASK_FILE} --questions questions.jsonl --limit x", "limit has the wrong type"),
    Case("--limit 1.5", f"{ASK_FILE} --questions questions.jsonl --limit 1.5", "limit has the wrong type"),
    Case("--limit of typed questions", f"{ASK} --limit 3", "name one with --questions"),
    Case("--quick of typed questions", f"{ASK} --quick", "name one with --questions"),
    Case("--quick and --limit", f"{ASK_FILE} --questions questions.jsonl --quick --limit 3", "leave one out"),
    Case("--limit for training", f"{TRAIN} --limit 3", "unrecognized arguments: --limit"),
    Case("crossed chains of worlds", f"{TRAIN} --config corpus.yaml", "train.crossed=0.7 is for sft on questions"),
    Case("crossed chains of questions that are known", f"{TRAIN} data.corpus=corpus.jsonl data.questions=q train.crossed=1",
         "train.crossed=1.0 is for sft on questions that are made"),
    Case("chains of one passage", f"{TRAIN} data.corpus=corpus.jsonl train.hops=1", "train.hops=1: what is made of"),
    Case("questions for training", f"{TRAIN} --questions questions.jsonl", "give these, not --questions"),
    Case("passages for training", f"{TRAIN} --corpus corpus.jsonl", "data.corpus: give these, not --corpus"),
    Case("a trace for training", f"{TRAIN} --trace t.jsonl", "training has no use for trace"),
    Case("workers for training", f"{TRAIN} workers=2", "training has no use for workers"),
    Case("workers without a file", f"{ASK} workers=2", "answers into a file, not to the screen: add --out"),
    *[
        Case(f"workers={text}", f"{ASK} --out a workers='{text}'", "neither a number from 1 to 999 nor auto")
        for text in ("0", "-1", "four", "1.5", "1000", "2 ", "ray://host", "ray://:1", "host:10001")
    ],
    Case("a comparison for training", f"{TRAIN} --compare all", "training has no use for compare"),
    Case("a world of a billion", f"{TRAIN} train.world_passages=1000000000", "between 100 and 1000000"),
    Case("a step of a billion", f"{TRAIN} train.groups=1000000000", "groups=1000000000 is out of range"),
    Case("a model for the doctor", "doctor --model model", "leave model.path out"),
    Case("quick for training", f"{TRAIN} quick=true", "leave limit and quick out"),
    # Learning by reward, and heads.
    Case("reward for nothing", f"{TRAIN} train.objective=rl", "rl begins with a model that answers: set model.path"),
    Case("reward of what was copied", f"{TRAIN} --model model train.objective=rl decode.copy_price=4", "without what decode.copy_price makes of them"),
    Case("heads by examples", f"{TRAIN} train.learn=heads", "learn=heads is for objective=rl"),
    Case("adapters of no rank", f"{TRAIN} train.learn=lora", "learn=lora does not go with lora_rank=0"),
    Case("kl for heads", f"{TRAIN} --model model train.objective=rl train.learn=heads train.kl_weight=1", "kl_weight=0"),
    Case("no hops", f"{TRAIN} --model model train.objective=rl train.least_hops=4 train.hops=2", "least_hops=4 is more"),
    Case(
        "reward without answers",
        f"{TRAIN} --model model train.objective=rl train.passage_length=96 data.questions=questions.jsonl data.corpus=corpus.jsonl",
        "has no 'golden_answers' to be rewarded by",
        {"questions.jsonl": '{"id": "a", "question": "Who?"}\n'},
    ),
    word("decode.commit_rule=head", "commit_rule=head needs heads beside the model"),
    word("decode.search=head", "search=head needs heads beside the model"),
    word("decode.search=never", "search='never' is not one of"),
    Case("a threshold without a logit", f"{ASK} decode.commit_rule=sampled decode.commit_threshold=1", "has no logit"),
    word("decode.gate_width=0", "gate_width=0.0 is out of range"),
    Case("heads that are none", f"{ASK} decode.commit_rule=head", "is no safetensors file", {"model/heads.safetensors": "x"}),
    # Config files.
    Case("a YAML file that is not there", f"{ASK} --config sardy", "nearest: 'sardi.yaml'"),
    Case("a folder as YAML", f"{ASK} --config model", "'model' is a folder or a pipe"),
    Case("a pipe as YAML", f"{ASK} --config pipe", "'pipe' is a folder or a pipe", {"pipe": os.mkfifo}),
    Case("a name of 300 characters as YAML", f"{ASK} --config {'x' * 300}", "was not found"),
    Case("a YAML file that is none", f"{ASK} --config c.yaml", "c.yaml", {"c.yaml": "decode: [1"}),
    yaml("YAML of random bytes", bytes(range(256)), "c.yaml is not valid YAML"),
    yaml("YAML with a NUL", "decode: \0", "c.yaml is not valid YAML"),
    yaml("YAML that is a list", "- 1", "holds no settings"),
    yaml("YAML that is a number", "3", "c.yaml is not valid YAML"),
    yaml("YAML of two documents", "decode: {}\n---\nmodel: {}", "line 2: but found another document"),
    Case("a config that is no config", f"{ASK} --config /etc/passwd", "/etc/passwd holds what is no setting: write"),
    yaml("YAML nested deeply", "decode: " + "[" * 5000 + "]" * 5000, ("c.yaml is not valid YAML", "nesting")),
    yaml("YAML that nests sections deeply", "".join(f"{' ' * n}a:\n" for n in range(1500)), "c.yaml"),
    yaml("a YAML bomb", BOMB, "c.yaml is not valid YAML"),
    yaml("YAML with itself in it", "decode: &a {seed: *a}", "c.yaml"),
    yaml("YAML with a Python tag", "decode: !!python/object/apply:os.system [ls]", "line 1: could not"),
    yaml("YAML with a key twice", "decode:\n  seed: 1\n  seed: 2", "line 3: found duplicate key seed"),
    yaml("YAML with a section twice", "decode: {seed: 1}\ndecode: {top_k: 2}", "found duplicate key decode"),
    yaml("YAML with a tab", "decode:\n\tseed: 1", "line 2"),
    yaml("YAML with a list as key", "? [a]\n: 3", "found unhashable key"),
    yaml("YAML with null as key", "null: 3", "c.yaml is not valid YAML"),
    yaml("YAML with a number as key", "3: 4", "unknown key '3' in c.yaml"),
    yaml("YAML with control characters in a key", '"a\\x1b[31m": 3', "unknown key 'a [31m' in c.yaml"),
    yaml("YAML with a number of 5000 digits", f"decode: {{seed: {MANY}}}", "beyond all measure"),
    yaml("YAML with a value as section", "decode: 3", "decode is a section, in c.yaml"),
    yaml("YAML in UTF-16", "decode: {seed: 1}".encode("utf-16"), "it is not UTF-8: save it as that"),
    yaml("YAML with a dotted key", "decode.seed: 1", "unknown key 'decode.seed' in c.yaml: write `decode: {seed:"),
    yaml("YAML with a text as number", "decode: {seed: one}", "decode.seed has the wrong type"),
    yaml("YAML with a list as number", "decode: {seed: [1]}", "decode.seed"),
    yaml("YAML with nothing as number", "decode: {seed: }", "decode.seed"),
    yaml("YAML with a NUL in a path", 'retrieval: {query_prompt: "a\\0b"}', "query_prompt holds a NUL character"),
    yaml("YAML with ???", "decode: {seed: ???  }", "c.yaml"),
    yaml("YAML with '???'", "decode: {seed: '???'}", "decode.seed=??? is no value"),
    yaml("an unknown interpolation", "retrieval: {query_prompt: '${x}'}", "retrieval.query_prompt: Interpolation key 'x' not found"),
    yaml("a circle of interpolations", "retrieval: {query_prompt: '${retrieval.query_prompt}'}", "retrieval.query_prompt: Recursive"),
    yaml("a resolver of the environment", "decode: {seed: '${oc.env:HOME}'}", "decode.seed in c.yaml reads the environment"),
    yaml("an unknown resolver", "retrieval: {query_prompt: '${shell:ls}'}", "reads the environment, or more"),
    yaml("half an interpolation", "model: {path: '${'}", "model.path"),
    yaml("a huge YAML file", "#" * (2**20 + 1), "too large for a config"),
    yaml("a phase that is a number", "train: {phases: {a: 3}}", "train.phases.a must name settings"),
    yaml("a phase with an unknown key", "train: {phases: {a: {stepz: 3}}}", "nearest: 'steps'"),
    yaml("a phase with a value out of range", "train: {phases: {a: {steps: 0}}}", "steps=0 is out of range"),
    yaml("phases in a list", "train: {phases: [a]}", "train.phases is a mapping"),
    yaml("a share that is no number", "train: {mixture: {a: b}}", "train.mixture.a has the wrong type"),
    yaml("a share that is not a number", "train: {mixture: {a: .nan}}", "mixture=nan is out of range"),
    yaml("documents without a name", "data: {documents: {' ': x}}", "must be a name"),
    word("data.documents.a.b=3", "documents: 'a' must be a name without dots"),
    word("train.mixture.a.b=3", "mixture: the share of 'a' is no number"),
    Case("scores that cannot be written", f"{EVALUATE} --out run", "run/scores.png cannot be written",
         {"run/scores.png/x": ""}),
    # Settings of a comparison.
    Case("evaluate without --out", EVALUATE, "evaluation needs --out FOLDER"),
    *(
        Case(f"--compare {compare}", f"{EVALUATE} --out run --compare {compare}", says)
        for compare, says in {
            "statik": "nearest: 'static'",
            "''": "compare is empty",
            ",": "'' is neither",
            "static,": "'' is neither",
            "static+": "'' is neither",
            "static,static": "'static' is named twice",
            "all,static": "'all' stands alone",
            "questions=x": "'questions=x' is neither",
            "decode.sed=1": "unknown key 'decode.sed'",
            "decode.seed=x": "decode.seed has the wrong type",
            "'[/nope]'": "'[/nope]' is neither",
            "oracle": "has no supporting_ids",
            "decode.seed=1,static+model.path=a/b,static+model.path=a_b": "would share a folder",
        }.items()
    ),
    *(
        Case(f"--sweep {sweep[:70]}", f"{EVALUATE} --out run --sweep {sweep}", says)
        for sweep, says in {
            "decode.comit_threshold=0.9,0.8": "nearest: 'decode.commit_threshold'",
            "train.steps=1,2": "'train.steps' is none of the keys of model., retrieval., decode. in which",
            "questions=a,b": "'questions' is none of the keys",
            "0.9,0.8": "'0.9,0.8' is not KEY=VALUE,VALUE",
            "nonsense": "'nonsense' is neither a flag nor KEY=VALUE",
            "decode.seed=1": "no key has two values or more: write KEY=VALUE,VALUE",
            "decode.seed=1,,2": "a value of decode.seed=1,,2 is empty",
            "decode.seed=,": "a value of decode.seed=, is empty",
            "decode.seed=1,1": "a value of decode.seed=1,1 is named twice",
            "decode.seed=1,2 decode.seed=3,4": "decode.seed is named twice",
            "decode.seed=1,2 decode.seed=3": "decode.seed is swept, and set to one value too",
            "decode.seed=1,x": ("'decode.seed=x': decode.seed has the wrong type"),
            "decode.query=committed,proxy decode.query_threshold=0.5,1":
                "'decode.query=committed+decode.query_threshold=0.5': query_threshold=0.5 has no effect",
            "decode.query=question,proxy --compare static": "'static' sets decode.query, which is swept",
            " ".join(f"decode.{key}=1,2,3,4,5,6,7,8,9,10" for key in ("seed", "batch_size", "top_k", "lookahead")
                     ).replace("decode.top_k", "retrieval.top_k"): "sweep: 10000 settings are more than 1000",
        }.items()
    ),
    Case("a sweep of nothing", f"{EVALUATE} --out run --sweep", "argument --sweep: expected at least one argument"),
    Case("a sweep for sample", f"{ASK} --sweep decode.seed=1,2", "unrecognized arguments: --sweep"),
    # The paper's table.
    Case("a data set of nobody", "evaluate --dataset 2wikki --out run", ("is none of 2wiki, hotpotqa", "nearest: '2wiki'")),
    Case("a data set that is not there", "evaluate --dataset 2wiki --out run",
         ("data/2wikimultihopqa/test.parquet is not there", "hf download pauljngr/sardi-data")),
    Case("a data set without its passages", "evaluate --dataset synthworlds --out run",
         "data/synthworlds/sm/corpus/index_chunked/corpus.jsonl is not there",
         {"data/synthworlds/sm/test.parquet": ""}),
    Case("a data set without its model", "evaluate --dataset cofca --out run",
         ("checkpoints/sardi-dream-7b is not there", "hf download pauljngr/sardi-dream-7b"),
         {"data/cofca/test.parquet": "", "data/cofca/corpus/index_chunked/corpus.jsonl": ""}),
    Case("a data set of two corpora", "evaluate --dataset cofca --corpus corpus.jsonl --out run",
         "--dataset names questions and corpus: leave retrieval.corpus out"),
    Case("a data set whose index is of other passages",
         "evaluate --dataset cofca --model model --out run decode.canvas_length=8",
         ("params.index.json is of 7 passages", "has 1"),
         {"data/cofca/test.parquet": parquet, "data/cofca/corpus/index_chunked/corpus.jsonl": '{"id": 0, "text": "x"}\n',
          "data/cofca/corpus/index_chunked/params.index.json": '{"num_docs": 7}'}),
    # A result that is run again.
    *(
        Case(f"a result to reproduce that is {what}", f"evaluate --reproduce old --out run {more}", says, files)
        for what, more, says, files in (
            ("not there", "", "old is no result: name a folder of evaluate's --out", {}),
            ("a folder of something else", "", "old is no result", {"old/notes.txt": "mine"}),
            ("no JSON", "", "old/scores.json: the line is not JSON", {"old/scores.json": "{"}),
            ("another object", "", "old is no result", {"old/scores.json": '{"settings": {"a": 1}}'}),
            ("a list of settings", "", "old is no result", {"old/scores.json": '{"settings": []}'}),
            ("of other metrics", "", ("old is no result", "settings.a.groups.all.f1.mean:"),
             {"old/scores.json": RESULT.replace("mean", "median")}),
            ("of an older program", "", "old has no config.yaml: an older program made it", {"old/scores.json": RESULT}),
            ("compared anew", "--compare all", "leave --compare out", {"old/scores.json": RESULT}),
            ("swept anew", "--sweep decode.seed=1,2", "leave --sweep out", {"old/scores.json": RESULT}),
            ("of another config", "--config sardi", "leave --config out", {"old/scores.json": RESULT}),
            ("of fewer questions", "--limit 1", "leave --limit out", {"old/scores.json": RESULT}),
            ("of settings that are gone", "", "unknown key 'decode.gone' in old/config.yaml",
             {"old/scores.json": RESULT, "old/config.yaml": "decode: {gone: 1}"}),
            ("without answers", "", "trace 'old/trace.jsonl' was not found",
             {"old/scores.json": RESULT, "old/config.yaml": "questions: questions.jsonl"}),
        )
    ),
    Case("a result into itself", "evaluate --reproduce old --out old", "are the same folder: choose another --out",
         {"old/scores.json": RESULT, "old/config.yaml": ""}),
    Case("a page of what is no result", "dlm_rag.evaluation.results model", "model is no result"),
    *(
        Case(f"a page of a result with {what}", "dlm_rag.evaluation.results old", ("old is no result", key),
             {"old/scores.json": json.dumps(json.loads(RESULT) | change)})
        for what, key, change in (
            ("an estimate that is a text", "settings.a.groups.all.f1:", {"settings": {"a": {"groups": {"all": {"f1": "0.5"}}, "stamp": {}}}}),
            ("a mean that is a text", "first_minus.b.all.f1.mean:", {"first_minus": {"b": {"all": {"f1": {"mean": "1", "low": 1, "high": 1}}}}}),
            ("a mean that is NaN", "NaN", {"first_minus": {"b": {"all": {"f1": {"mean": float("nan"), "low": 1, "high": 1}}}}}),
            ("sweeps that are a number", "swept:", {"swept": 5}),
            ("swept values that are a number", "swept.decode.seed:", {"swept": {"decode.seed": 5}}),
            ("a count that is a text", "questions.all:", {"questions": {"all": "many"}}),
            ("a stamp that is a list", "settings.a.stamp:", {"settings": {"a": {"groups": {"all": {}}, "stamp": []}}}),
            ("no settings", "scores.json", {"settings": {}}),
            ("a data set of nobody", "scores.json", {"dataset": "nope"}),
        )
    ),
    Case("a page of a result without figures", "dlm_rag.evaluation.results old", "| a | - | - | - | - | - | - | - | - |",
         exit=0, files={"old/scores.json": RESULT.replace('"f1"', '"f2"')}),
    Case("a page of nothing", "dlm_rag.evaluation.results", "the following arguments are required: RESULT"),
    # Values that a shell has lost, and data that another objective reads.
    Case("a corpus of nothing", f"{ASK_MODEL} retrieval.corpus=", "corpus is empty"),
    Case("evaluate into -", f"{EVALUATE} --out -", "evaluation needs --out FOLDER"),
    Case("documents for sft", f"{TRAIN} data.documents.a=corpus.jsonl", "data.documents are read by pretrain and adapt"),
    Case("questions for documents", f"{TRAIN} train.objective=pretrain data.questions=questions.jsonl"
         " data.corpus=corpus.jsonl", "data.questions are read by sft and rl"),
    # Paths.
    Case("a corpus that leads to itself", f"{ASK_MODEL} --corpus loop", "Too many levels",
         {"loop": lambda path: path.symlink_to("loop")}),
    Case("a corpus that is not there", f"{ASK_MODEL} --corpus nope.jsonl", "'nope.jsonl' was not found"),
    Case("a user who is not there", f"{ASK_MODEL} --corpus '~nobody-here/c'", "no such home folder"),
    Case("questions of a user who is not there", f"{ASK_FILE} --questions '~nobody-here/q'", "home folder"),
    Case("a path of 5000 characters", f"{ASK_MODEL} --corpus {'x' * 5000}", "File name too long"),
    Case("a path of 300 characters", f"{ASK_FILE} --questions {'x' * 300}", "File name too long"),
    Case("a path through a file", f"{ASK_MODEL} --corpus corpus.jsonl/c", "was not found"),
    Case("an index folder in a file", f"{ASK} retrieval.index_folder=corpus.jsonl", "retrieval.index_folder"),
    Case("an index folder of nobody", f"{ASK} retrieval.index_folder='~nobody-here'", "home folder"),
    Case("an index folder nested too deeply", f"{ASK} retrieval.index_folder={'a/' * 3000}",
         ("retrieval.index_folder='a/a/", "cannot be read (File name too long)")),
    Case("a model of nobody", f"{ASK_CORPUS} --model '~nobody-here/m'", "no such home folder"),
    Case("a model with a name of 5000 characters", f"{ASK_CORPUS} --model {'x' * 5000}", "File name too long"),
    Case("a model that is not there", f"{ASK_CORPUS} --model nope", "nope"),
    Case(
        "questions that are the corpus",
        f"{ASK_FILE} --questions corpus.jsonl",
        "corpus.jsonl",
    ),
    Case("out is the corpus", f"{ASK} --out corpus.jsonl", "are the same file"),
    Case("out is the file of questions", f"{ASK_FILE} --questions questions.jsonl --out ./questions.jsonl",
         "are the same file"),
    # The environment.
    Case("a rank that is no number", TRAIN, "RANK='x' is not a whole number", env={"RANK": "x"}, slow=True),
    Case("a rank among none", TRAIN, "RANK=5 and WORLD_SIZE=1 in the environment are not torchrun's",
         env={"RANK": "5"}, slow=True),
    Case("two processes without torchrun", TRAIN, "RANK=0 and WORLD_SIZE=2 in the environment",
         env={"WORLD_SIZE": "2", "MASTER_ADDR": None}, slow=True),
    Case("W&B without a key", f"{TRAIN} train.wandb=online train.world_passages=100", "run `wandb login`",
         env={"WANDB_API_KEY": None, "WANDB_MODE": None, "HOME": "."}, slow=True),
    Case("a cache that is a file", ASK, "retrieval.index_folder", env={"DLM_RAG_CACHE": "corpus.jsonl"}),
    Case("a cache that cannot be made", ASK, "retrieval.index_folder", env={"DLM_RAG_CACHE": "/proc/x"}),
    Case("a cache of nobody", ASK, "DLM_RAG_CACHE='~nobody-here': there is no such home folder",
         env={"DLM_RAG_CACHE": "~nobody-here"}),
    Case("a cache nested too deeply", ASK, ("DLM_RAG_CACHE='a/a/", "cannot be read (File name too long)"),
         env={"DLM_RAG_CACHE": "a/" * 3000}),
    Case("a question of UTF-8 where the locale is ASCII", f"{ASK_FILE} 'Who wrote \u00c9mma?'", '\\u00c9mma', exit=0,
         env=ASCII, slow=True),
    Case("a question of Latin 1 where the locale is ASCII", f"{ASK_FILE} 'Who wrote \udcc9mma?'",
         "question 1 is not UTF-8", env=ASCII),
    Case("a file of UTF-8 where the locale is ASCII", f"{ASK_FILE} --questions \u00c9mma", "set PYTHONUTF8=1", env=ASCII),
    Case("a home that cannot be written", ASK, "retrieval.index_folder",
         env={"DLM_RAG_CACHE": None, "HOME": "/proc/x"}),
    Case("no threads for numba", ASK, "NUMBA_NUM_THREADS", env={"NUMBA_NUM_THREADS": "0"}, slow=True),
    Case("a word as threads for numba", ASK, "NUMBA_NUM_THREADS", env={"NUMBA_NUM_THREADS": "x"}, slow=True),
    Case("numba without its compiler", ASK, "unset it", env={"NUMBA_DISABLE_JIT": "1"}, slow=True),
    Case("a word as threads", ASK, "Who wrote Emma?", exit=0, env={"OMP_NUM_THREADS": "abc"}, slow=True),
    Case("a dumb terminal one column wide", f"{EVALUATE} --out run", "run", exit=0, slow=True,
         env={"TERM": "dumb", "COLUMNS": "1"}),
    Case("output in ASCII", "sample 'Who wrote Zoë?' --model model --corpus corpus.jsonl decode.canvas_length=8",
         "Zo\\u00eb", exit=0, env={"PYTHONIOENCODING": "ascii"}, slow=True),
    # Programs of the checkout.
    Case("a benchmark told nonsense", "profiling/bench_world.py seven", "'seven' is not a whole number"),
    Case("a benchmark told two numbers", "profiling/bench_world.py 1 2", "the one word beside the settings"),
    Case("a benchmark told a fraction", "profiling/bench_bm25.py 2.5", "'2.5' is not a whole number"),
    Case("a benchmark told 0", "profiling/bench_threads.py 0", "'0' is not a whole number", slow=True),
    Case("a benchmark of another kind", (
        "profiling/bench_retrieval.py --questions questions.jsonl --corpus corpus.jsonl --kinds bm52"
    ), "--kinds: 'bm52' is none of bm25, dense, hybrid (nearest: 'bm25')"),
    Case("a profile of nothing", "profiling/nsys.py", "the following arguments are required: program"),
    Case("a profile of what is no program", "profiling/nsys.py smaple", "invalid choice: 'smaple'"),
    Case("a report that is not there", "profiling/attribute.py nope.sqlite", "nope.sqlite"),
    Case("joules of a run without", "profiling/attribute.py x.sqlite --energy x.json", "holds no joules: name the stamp", {"x.json": '{"energy": null}'}),
    Case("a program nearly of that name", "docter", "nearest: 'doctor'"),
    Case("a key of the doctor's", "doctor model.devise=cpu", "nearest: 'model.device'"),
    Case("a question to the doctor", "doctor 'Who wrote Emma?'", "is neither a flag nor KEY=VALUE"),
]  # fmt: skip
