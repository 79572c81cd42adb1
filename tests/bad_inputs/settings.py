"""Settings, flags, config files, the environment."""

import json
import os
from pathlib import Path

from tests.bad_inputs import (
    SAMPLE_COMMAND,
    SAMPLE_WITH_CORPUS,
    SAMPLE_WITH_MODEL,
    SAMPLE_WITHOUT_QUESTION,
    BadInputCase,
)

YAML = f"{SAMPLE_COMMAND} --config c.yaml"
EVALUATE = (
    "evaluate --model model --corpus corpus.jsonl --questions questions.jsonl decode.max_new_tokens=8"
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


def yaml(what: str, text: str | bytes, says: str | tuple[str, ...]) -> BadInputCase:
    """A config file."""
    return BadInputCase(what, YAML, says, {"c.yaml": text})


def word(word: str, says: str | tuple[str, ...]) -> BadInputCase:
    """One word more."""
    return BadInputCase(f"the word {word[:40]!r}", f"{SAMPLE_COMMAND} {word}", says)


def by_url(url: str, says: str | tuple[str, ...], more: str = "") -> BadInputCase:
    """A search by URL."""
    return BadInputCase(
        f"the URL {url} {more}".strip(), f"{SAMPLE_WITH_MODEL} retrieval.url='{url}' {more}", says
    )


def serve(words: str, says: str) -> BadInputCase:
    """A server of a corpus."""
    return BadInputCase(f"retrieve-server {words}", f"retrieve-server {words}", says)


def index(words: str, says: str) -> BadInputCase:
    """An index that is built before it is searched."""
    return BadInputCase(f"index {words}", f"index {words}", says)


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NOBODY, NO_MILVUS = "http://127.0.0.1:1/retrieve", "milvus://127.0.0.1:1/world"

CASES = [
    # Search by URL.
    by_url(NOBODY, "cannot be searched: Connection refused"),
    by_url("htp://127.0.0.1:8000/retrieve", "retrieval.url=htp://127.0.0.1:8000/retrieve"),
    by_url("http://", "retrieval.url=http://"),
    by_url("http://127.0.0.1:99999/retrieve", "retrieval.url=http://127.0.0.1:99999/retrieve"),
    by_url("http://a..b/", "retrieval.url=http://a..b/ cannot be searched"),
    by_url("http://me:secret@127.0.0.1:1/retrieve", "a token is $DLM_RAG_RETRIEVAL_TOKEN"),
    by_url("http://127.0.0.1:1/retrieve#1", "has a user or a fragment"),
    by_url(NOBODY, "retrieval.corpus=corpus.jsonl has no effect", "--corpus corpus.jsonl"),
    by_url(NOBODY, "retrieval.method=dense has no effect", "retrieval.method=dense"),
    by_url(NOBODY, "retrieval.index_dir=here has no effect", "retrieval.index_dir=here"),
    BadInputCase("a supporting passage that is not there", f"{SAMPLE_WITHOUT_QUESTION} --questions q.jsonl retrieval.oracle=true decode.query_policy=question",
         ("q.jsonl, line 2: the supporting passage 'dun' is not in", "corpus.jsonl"),
         {"q.jsonl": '{"id": "a", "question": "Who?", "supporting_ids": ["emma"]}\n'
          '{"id": "b", "question": "Where?", "supporting_ids": ["dune", "dun"]}\n'}),
    by_url(NOBODY, "retrieval.oracle=true has no effect", "retrieval.oracle=true"),
    by_url(NO_MILVUS, "milvus://127.0.0.1:1/world cannot be searched: Connection refused"),
    by_url("milvus://127.0.0.1:1", "names no collection: write milvus://HOST:PORT/NAME"),
    by_url("milvus://127.0.0.1:1/a/b/c", "names no collection"),
    by_url("milvus://127.0.0.1:1/a-b", "NAME of letters, digits, _"),
    by_url("milvus://me:secret@127.0.0.1:1/world", "a token is $MILVUS_TOKEN"),
    by_url(NO_MILVUS, "retrieval.oracle=true has no effect", "retrieval.oracle=true"),
    index("", "a corpus is indexed"),
    index("--corpus corpus.jsonl --model model", "model.path has no effect here"),
    index("--corpus corpus.jsonl retrieval.method=none", "a corpus is indexed"),
    index(f"--corpus nowhere.jsonl --to {NO_MILVUS}", "cannot be searched: Connection refused"),
    index("--corpus corpus.jsonl --to world", "--to=world"),
    index(f"--corpus corpus.jsonl --to {NOBODY}", "--to=http"),
    word("retrieval.timeout=1", "retrieval.timeout=1.0 has no effect"),
    BadInputCase("every warning an error", SAMPLE_COMMAND, '"id": "q1"', exit=0, env={"PYTHONWARNINGS": "error"}, slow=True),
    BadInputCase("training by URL", f"{TRAIN} retrieval.url={NOBODY}", "retrieval.url has no effect here"),
    serve("", "a corpus is searched"),
    serve("--corpus nowhere.jsonl", "corpus 'nowhere.jsonl' was not found"),
    serve("--corpus corpus.jsonl --port 0", "--port '0' is not a whole number above 0"),
    serve("--corpus corpus.jsonl --port 99999", "127.0.0.1:99999 cannot be listened at (bind(): port must be"),
    serve("--corpus corpus.jsonl --port http", "--port 'http' is not a whole number"),
    serve("--corpus corpus.jsonl --host 192.0.2.1", "192.0.2.1:8000 cannot be listened at"),
    serve("--corpus corpus.jsonl --model model", "model.path has no effect here"),
    serve("--corpus corpus.jsonl retrieval.oracle=true", "retrieval.oracle has no effect here"),
    serve("--corpus corpus.jsonl retrieval.method=none", "a corpus is searched"),
    serve(f"retrieval.url={NOBODY}", "retrieval.url has no effect here"),
    serve("--corpus corpus.jsonl Who?", "'Who?' is neither a flag nor KEY=VALUE"),
    BadInputCase("a server: an address of another machine", "serve --host 192.0.2.1", "cannot be listened at"),
    BadInputCase("a server: a port that is none", "serve --port 70000", "cannot be listened at"),
    BadInputCase("a server: a question", "serve 'Who wrote Emma?'", "is neither a flag nor KEY=VALUE"),
    BadInputCase("a server: what it does not read", "serve --out a.jsonl", "out has no effect here"),
    BadInputCase("a server: an oracle", "serve retrieval.oracle=true", "retrieval.oracle has no effect here"),
    BadInputCase("a server: a canvas over its bound", "serve serving.max_tokens=8", "decode.max_new_tokens"),
    BadInputCase("a server: no line", "serve serving.max_queue_per_key=0", "max_queue_per_key=0 must be"),
    BadInputCase("a server: keys that are not there", "serve serving.api_keys_file=a.txt", "keys file 'a.txt' was not found"),
    BadInputCase("a server: no keys", "serve serving.api_keys_file=a.txt", "holds no keys", {"a.txt": "# none\n"}),
    BadInputCase("a server: a short key", "serve serving.api_keys_file=a.txt", "a.txt, line 2: a key has", {"a.txt": "\nabc"}),
    BadInputCase("a program of another name", "retrieve_server", "nearest: 'retrieve-server'"),
    # Keys and values.
    BadInputCase("an unknown key", f"{SAMPLE_COMMAND} decode.comit_threshold=0.9", "nearest: 'decode.commit_threshold'"),
    word("commit_threshold=0.9", "nearest: 'decode.commit_threshold'"),
    word("energy=yes", "energy=yes is not one of auto, idle, none"),
    word("decode.=3", "unknown key 'decode.'"),
    word("decode=3", "unknown key 'decode'"),
    word("decode.seed[0]=3", "'decode.seed[0]=3' is not a question"),
    word("'decode.\x1b[31m=3'", "'decode. [31m=3' is not a question"),
    word("decode.seed=abc", "decode.seed="),
    word("decode.seed=99999999999999999999", "below 2^63"),
    word("decode.batch_size=0", "batch_size=0 must be"),
    word("decode.commit_threshold=nan", "commit_threshold=nan must be"),
    word("retrieval.bm25_cache_gib=1", "retrieval.bm25_cache_gib in the command line was removed"),
    word("decode.early_stopping=maybe", "decode.early_stopping=maybe"),
    word("decode.commit_rule=thresholt", "nearest: 'threshold'"),
    word(f"decode.commit_rule={'x' * 10000}", "xxx... is not one of"),
    word("'decode.commit_rule=[/nope]'", "is not one of"),
    word("retrieval.method=", "retrieval.method= is not one of"),
    word("model.device=cuda:99", "device=cuda:99 is not available"),
    word("model.device=toaster", "device=toaster is not available"),
    word("decode.block_length=9", "is longer than max_new_tokens"),
    word("decode.tokens_per_step=2 decode.steps_per_block=4", "both say how much a step commits: leave one"),
    word("decode.schedule=roundet", "nearest: 'rounded'"),
    word("decode.edit_threshold=0.9", ("edit_threshold=0.9 has no effect", "leave it out")),
    word("decode.finished_block_context=no_evidence", ("finished_block_context=no_evidence has no effect", "has no blocks")),
    word("model.block_size=4 decode.finished_block_context=no_evidence", "needs evidence_layout=independent"),
    word("engine.cpu_offload_gib=1 engine.prefix_cache_gib=0", "engine.cpu_offload_gib=1.0 has no effect"),
    word("engine.memory_gib=1e5", "is more than the"),
    word("engine.memory_gib=1e-5", ("is too little for decode.batch_size=1: weights take", "not one question fits")),
    word("engine.memory_gib=1 engine.prefix_cache_gib=2", "pools 2 GiB"),
    word("decode.remask_threshold=0.5", "committed tokens are masked no more"),
    BadInputCase("a step beyond its budget", f"{TRAIN} engine.memory_gib=0.001", "engine.memory_gib=0.001 is 0.00107 GB",
         changes=("run",)),
    BadInputCase("a desk with a link of no speed", "profiling/netns_cluster.py --out run --gbit 0,fast", "--gbit and --delay want numbers"),
    BadInputCase("a desk of no part", "profiling/netns_cluster.py --out run --part cables", "--part cables is neither"),
    # A space where an equals sign belongs, a file without its flag.
    word("decode.batch_size 16", "'decode.batch_size' is not a question"),
    word("decode.batchsize 16", "settings as decode.batchsize=VALUE"),
    word("out answers.jsonl", "'out' is not a question"),
    word("questions.jsonl", "'questions.jsonl' is a file, not a question"),
    word("'*.jsonl'", "'*.jsonl' is the name of a file, not a question"),
    word("@more.txt", "'@more.txt' is the name of a file, not a question"),
    word("'decode.seed = 3'", "settings as decode.seed=VALUE, in one word"),
    word("decode,seed=3", "settings as decode.seed=VALUE"),
    word("“decode.seed=3”", "settings as decode.seed=VALUE"),
    word("—out a.jsonl", "flags begin with two hyphens"),
    word("-", "flags begin with two hyphens"),
    word("out=a.jsonl --out b.jsonl", "--out and out= set the same setting"),
    word("retrieval.corpus=other.jsonl", "--corpus and retrieval.corpus= set the same setting"),
    word("--compare all", "compare has no effect here"),
    word("--out ''", "out= is empty: give it a value, or leave it out"),
    word("out=\udcff", "is not UTF-8"),
    word("retrieval.method=dense retrieval.embedding_model=/", "/ is not a sentence-transformers model"),
    # Flags.
    BadInputCase("an unknown flag", f"{SAMPLE_COMMAND} --top-k 3", "unrecognized arguments: --top-k 3; `dlm-rag sample --help`"),
    BadInputCase("a flag cut short", f"{SAMPLE_COMMAND} --quest questions.jsonl", "unrecognized arguments: --quest"),
    BadInputCase("a flag without its value", f"{SAMPLE_COMMAND} --out", "argument --out: expected one argument"),
    BadInputCase("a flag twice", f"{SAMPLE_COMMAND} --corpus corpus.jsonl", "--corpus is given twice"),
    BadInputCase("--config twice", f"{SAMPLE_COMMAND} --config sardi --config llada", "--config is given twice"),
    BadInputCase("no question at all", "sample --model model --corpus corpus.jsonl", "no question: type one"),
    BadInputCase("a blank question", f"{SAMPLE_COMMAND} ' '", "question 2 is blank"),
    BadInputCase("no program of that name", "smaple", "nearest: 'sample'"),
    BadInputCase("a word for evaluate", f"{EVALUATE} --out run what", "'what' is neither a flag nor KEY=VALUE"),
    BadInputCase("--limit 0", f"{SAMPLE_WITHOUT_QUESTION} --questions questions.jsonl --limit 0", "limit=0"),
    BadInputCase("--limit of typed questions", f"{SAMPLE_COMMAND} --limit 3", "name one with --questions"),
    BadInputCase("--quick of typed questions", f"{SAMPLE_COMMAND} --quick", "name one with --questions"),
    BadInputCase("--quick and --limit", f"{SAMPLE_WITHOUT_QUESTION} --questions questions.jsonl --quick --limit 3", "leave one out"),
    BadInputCase("--limit for training", f"{TRAIN} --limit 3", "limit has no effect here"),
    BadInputCase("crossed chains of worlds", f"{TRAIN} --config corpus.yaml", "train.counterfactual_share=0.7 has no effect"),
    BadInputCase("crossed chains of questions that are known", f"{TRAIN} data.corpus=corpus.jsonl data.questions=q train.counterfactual_share=1",
         "train.counterfactual_share=1.0 has no effect"),
    BadInputCase("chains of one passage", f"{TRAIN} data.corpus=corpus.jsonl train.max_hops=1", "train.max_hops=1"),
    BadInputCase("questions for training", f"{TRAIN} --questions questions.jsonl", "questions has no effect here"),
    BadInputCase("passages for training", f"{TRAIN} --corpus corpus.jsonl", "retrieval.corpus has no effect here"),
    BadInputCase("a trace for training", f"{TRAIN} --trace t.jsonl", "trace has no effect here"),
    BadInputCase("workers for training", f"{TRAIN} workers=2", "workers has no effect here"),
    BadInputCase("workers without a file", f"{SAMPLE_COMMAND} workers=2", "answers into a file, not to the screen: add --out"),
    *[
        BadInputCase(f"workers={text}", f"{SAMPLE_COMMAND} --out a workers='{text}'", "must be from 1 to 999, auto")
        for text in ("0", "-1", "four", "1.5", "1000", "2:1", "ray://host", "ray://:1", "host:10001")
    ],
    BadInputCase("a comparison for training", f"{TRAIN} --compare all", "compare has no effect here"),
    BadInputCase("a world of a billion", f"{TRAIN} train.world_passages=1000000000", "train.world_passages=1000000000"),
    BadInputCase("a model for the doctor", "doctor --model model", "leave model.path out"),
    BadInputCase("quick for training", f"{TRAIN} quick=true", "quick has no effect here"),
    # Learning by reward, and heads.
    BadInputCase("reward for nothing", f"{TRAIN} train.objective=rl", "rl begins with a model that answers: set model.path"),
    BadInputCase("reward of what was copied", f"{TRAIN} --model model train.objective=rl decode.copy_penalty=4", "decode.copy_penalty"),
    BadInputCase("heads by examples", f"{TRAIN} train.trainable=policy_heads", "trainable=policy_heads does not go with objective=sft"),
    BadInputCase("adapters of no rank", f"{TRAIN} train.trainable=lora", "trainable=lora does not go with lora_rank=0"),
    BadInputCase("kl for heads", f"{TRAIN} --model model train.objective=rl train.trainable=policy_heads train.kl_coef=1", "train.kl_coef=1.0 has no effect"),
    BadInputCase("no hops", f"{TRAIN} --model model train.objective=rl train.min_hops=4 train.max_hops=2", "min_hops=4 is more"),
    BadInputCase(
        "reward without answers",
        f"{TRAIN} --model model train.objective=rl train.passage_length=96 data.questions=questions.jsonl data.corpus=corpus.jsonl",
        "has no 'golden_answers'",
        {"questions.jsonl": '{"id": "a", "question": "Who?"}\n'},
    ),
    word("decode.commit_rule=policy_head", "commit_rule=policy_head needs heads beside the model"),
    word("decode.retrieval_gate=policy_head", "retrieval_gate=policy_head needs heads beside the model"),
    BadInputCase("a threshold without a logit", f"{SAMPLE_COMMAND} decode.commit_rule=sampled decode.commit_threshold=1", "must be between 0 and 1"),
    BadInputCase("heads that are none", f"{SAMPLE_COMMAND} decode.commit_rule=policy_head", "is not a safetensors file", {"model/heads.safetensors": "x"}),
    # Config files.
    BadInputCase("a YAML file that is not there", f"{SAMPLE_COMMAND} --config sardy", "nearest: 'sardi.yaml'"),
    BadInputCase("a folder as YAML", f"{SAMPLE_COMMAND} --config model", "config 'model' was not found as a file"),
    BadInputCase("a pipe as YAML", f"{SAMPLE_COMMAND} --config pipe", "config 'pipe' was not found as a file", {"pipe": os.mkfifo}),
    BadInputCase("a name of 300 characters as YAML", f"{SAMPLE_COMMAND} --config {'x' * 300}", "was not found"),
    BadInputCase("a YAML file that is none", f"{SAMPLE_COMMAND} --config c.yaml", "c.yaml", {"c.yaml": "decode: [1"}),
    yaml("YAML of random bytes", bytes(range(256)), "c.yaml cannot be read"),
    yaml("YAML with a NUL", "decode: \0", "c.yaml is not valid YAML"),
    yaml("YAML that is a list", "- 1", "holds no settings"),
    yaml("YAML of two documents", "decode: {}\n---\nmodel: {}", "line 2: but found another document"),
    BadInputCase("a config that is no config", f"{SAMPLE_COMMAND} --config /etc/passwd", "/etc/passwd holds no settings"),
    yaml("YAML nested deeply", "decode: " + "[" * 5000 + "]" * 5000, ("c.yaml is not valid YAML", "nested")),
    yaml("YAML that nests sections deeply", "".join(f"{' ' * n}a:\n" for n in range(1500)), "c.yaml"),
    yaml("a YAML bomb", BOMB, "unknown key 'a0' in c.yaml"),
    yaml("YAML with itself in it", "decode: &a {seed: *a}", "decode.seed="),
    yaml("YAML with a Python tag", "decode: !!python/object/apply:os.system [ls]", "line 1: could not"),
    yaml("YAML with a key twice", "decode:\n  seed: 1\n  seed: 2", "line 3: the key seed"),
    yaml("YAML with a section twice", "decode: {seed: 1}\ndecode: {top_k: 2}", "line 2: the key decode"),
    yaml("YAML with a tab", "decode:\n\tseed: 1", "line 2"),
    yaml("YAML with a list as key", "? [a]\n: 3", "found unhashable key"),
    yaml("YAML with null as key", "null: 3", "in c.yaml"),
    yaml("YAML with a number as key", "3: 4", "unknown key '3' in c.yaml"),
    yaml("YAML with control characters in a key", '"a\\x1b[31m": 3', "unknown key 'a [31m' in c.yaml"),
    yaml("YAML with a number of 5000 digits", f"decode: {{seed: {MANY}}}", "c.yaml is not valid YAML"),
    yaml("YAML with a value as section", "decode: 3", "decode is a section"),
    yaml("YAML in UTF-16", "decode: {seed: 1}".encode("utf-16"), "c.yaml cannot be read"),
    yaml("YAML with a dotted key", "decode.seed: 1", "unknown key 'decode.seed' in c.yaml: write `decode: {seed:"),
    yaml("YAML with a text as number", "decode: {seed: one}", "decode.seed="),
    yaml("YAML with a NUL in a path", 'retrieval: {query_prompt: "a\\0b"}', "retrieval.query_prompt="),
    yaml("a resolver of the environment", "decode: {seed: '${oc.env:HOME}'}", "decode.seed=${oc.env:HOME} must be"),
    yaml("a huge YAML file", "#" * (2**20 + 1), "too large for a config"),
    yaml("a phase that is a number", "train: {phases: {a: 3}}", "train.phases.a=3"),
    yaml("a phase with an unknown key", "train: {phases: {a: {stepz: 3}}}", "nearest: 'max_steps'"),
    yaml("a phase with a value out of range", "train: {phases: {a: {max_steps: 0}}}", "train.phases.a.max_steps=0"),
    yaml("phases in a list", "train: {phases: [a]}", "train.phases="),
    yaml("a share that is not a number", "train: {mixture: {a: .nan}}", "train.mixture.a=nan"),
    yaml("documents without a name", "data: {documents: {' ': x}}", "data.documents"),
    word("data.documents.a.b=3", "data.documents.a="),
    word("train.mixture.a.b=3", "train.mixture.a="),
    BadInputCase("scores that cannot be written", f"{EVALUATE} --out run", "run/scores.png cannot be written",
         {"run/scores.png/x": ""}),
    # Settings of a comparison.
    BadInputCase("evaluate without --out", EVALUATE, "evaluation needs --out FOLDER"),
    *(
        BadInputCase(f"--compare {compare}", f"{EVALUATE} --out run --compare {compare}", says)
        for compare, says in {
            "statik": "nearest: 'static'",
            "''": "compare= is empty",
            ",": "'' is neither",
            "static,": "'' is neither",
            "static+": "'' is neither",
            "static,static": "'static' is named twice",
            "all,static": "'all' stands alone",
            "questions=x": "'questions=x' is neither",
            "decode.sed=1": "unknown key 'decode.sed'",
            "decode.seed=x": "decode.seed=",
            "'[/nope]'": "'[/nope]' is neither",
            "oracle": "has no supporting_ids",
            "decode.seed=1,static+model.path=a/b,static+model.path=a_b": "would share a folder",
        }.items()
    ),
    *(
        BadInputCase(f"--sweep {sweep[:70]}", f"{EVALUATE} --out run --sweep {sweep}", says)
        for sweep, says in {
            "decode.comit_threshold=0.9,0.8": "nearest: 'decode.commit_threshold'",
            "train.max_steps=1,2": "'train.max_steps' is not a key of model., retrieval., decode.",
            "questions=a,b": "'questions' is not a key",
            "0.9,0.8": "'0.9,0.8' is not KEY=VALUE,VALUE",
            "nonsense": "'nonsense' is neither a flag nor KEY=VALUE",
            "decode.seed=1": "no key has two values or more: write KEY=VALUE,VALUE",
            "decode.seed=1,,2": "a value of decode.seed=1,,2 is empty",
            "decode.seed=,": "a value of decode.seed=, is empty",
            "decode.seed=1,1": "a value of decode.seed=1,1 is named twice",
            "decode.seed=1,2 decode.seed=3,4": "decode.seed is named twice",
            "decode.seed=1,2 decode.seed=3": "decode.seed is swept, and set to one value too",
            "decode.seed=1,x": ("'decode.seed=x': decode.seed=x"),
            "decode.query_policy=committed,question decode.query_threshold=0.5,1":
                "query_threshold=0.5 has no effect",
            "decode.query_policy=question,proxy --compare static": "'static' sets decode.query_policy, which is swept",
            " ".join(f"decode.{key}=1,2,3,4,5,6,7,8,9,10" for key in ("seed", "batch_size", "top_k", "query_window")
                     ).replace("decode.top_k", "retrieval.top_k"): "sweep: 10000 settings are more than 1000",
        }.items()
    ),
    BadInputCase("a sweep of nothing", f"{EVALUATE} --out run --sweep", "argument --sweep: expected at least one argument"),
    BadInputCase("a sweep for sample", f"{SAMPLE_COMMAND} --sweep decode.seed=1,2", "unrecognized arguments: --sweep"),
    # The paper's table.
    BadInputCase("a data set of nobody", "evaluate --dataset 2wikki --out run", ("is not one of 2wiki, hotpotqa", "nearest: '2wiki'")),
    BadInputCase("a data set that is not there", "evaluate --dataset 2wiki --out run",
         ("data/2wikimultihopqa/test.parquet is not there", "hf download pauljngr/sardi-data")),
    BadInputCase("a data set without its passages", "evaluate --dataset synthworlds --out run",
         "data/synthworlds/sm/corpus/index_chunked/corpus.jsonl is not there",
         {"data/synthworlds/sm/test.parquet": ""}),
    BadInputCase("a data set without its model", "evaluate --dataset cofca --out run",
         ("checkpoints/sardi-dream-7b is not there", "hf download pauljngr/sardi-dream-7b"),
         {"data/cofca/test.parquet": "", "data/cofca/corpus/index_chunked/corpus.jsonl": ""}),
    BadInputCase("a data set of two corpora", "evaluate --dataset cofca --corpus corpus.jsonl --out run",
         "--dataset names questions and corpus: leave retrieval.corpus out"),
    BadInputCase("a data set whose index is of other passages",
         "evaluate --dataset cofca --model model --out run decode.max_new_tokens=8",
         ("params.index.json is of 7 passages", "has 1"),
         {"data/cofca/test.parquet": parquet, "data/cofca/corpus/index_chunked/corpus.jsonl": '{"id": 0, "text": "x"}\n',
          "data/cofca/corpus/index_chunked/params.index.json": '{"num_docs": 7}'}),
    # A result that is run again.
    *(
        BadInputCase(f"a result to reproduce that is {what}", f"evaluate --reproduce old --out run {more}", says, files)
        for what, more, says, files in (
            ("not there", "", "old is not a result: name a folder of evaluate's --out", {}),
            ("a folder of something else", "", "old is not a result", {"old/notes.txt": "mine"}),
            ("no JSON", "", "old/scores.json: the line is not JSON", {"old/scores.json": "{"}),
            ("another object", "", "old is not a result", {"old/scores.json": '{"settings": {"a": 1}}'}),
            ("a list of settings", "", "old is not a result", {"old/scores.json": '{"settings": []}'}),
            ("of other metrics", "", ("old is not a result", "settings.a.groups.all.f1.mean:"),
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
    BadInputCase("a result into itself", "evaluate --reproduce old --out old", "are the same folder: choose another --out",
         {"old/scores.json": RESULT, "old/config.yaml": ""}),
    BadInputCase("a page of what is no result", "dlm_rag.evaluation.stored_results model", "model is not a result"),
    *(
        BadInputCase(f"a page of a result with {what}", "dlm_rag.evaluation.stored_results old", ("old is not a result", key),
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
    BadInputCase("a page of a result without figures", "dlm_rag.evaluation.stored_results old", "| a | - | - | - | - | - | - | - | - |",
         exit=0, files={"old/scores.json": RESULT.replace('"f1"', '"f2"')}),
    BadInputCase("a page of nothing", "dlm_rag.evaluation.stored_results", "the following arguments are required: RESULT"),
    # Values that a shell has lost, and data that another objective reads.
    BadInputCase("a corpus of nothing", f"{SAMPLE_WITH_MODEL} retrieval.corpus=", "retrieval.corpus= is empty"),
    BadInputCase("evaluate into -", f"{EVALUATE} --out -", "evaluation needs --out FOLDER"),
    BadInputCase("documents for sft", f"{TRAIN} data.documents.a=corpus.jsonl", "data.documents={'a'"),
    BadInputCase("questions for documents", f"{TRAIN} train.objective=pretrain data.questions=questions.jsonl"
         " data.corpus=corpus.jsonl", "data.questions=questions.jsonl has no effect"),
    # Paths.
    BadInputCase("a corpus that leads to itself", f"{SAMPLE_WITH_MODEL} --corpus loop", "Too many levels",
         {"loop": lambda path: path.symlink_to("loop")}),
    BadInputCase("a corpus that is not there", f"{SAMPLE_WITH_MODEL} --corpus nope.jsonl", "'nope.jsonl' was not found"),
    BadInputCase("a user who is not there", f"{SAMPLE_WITH_MODEL} --corpus '~nobody-here/c'", "no such home folder"),
    BadInputCase("questions of a user who is not there", f"{SAMPLE_WITHOUT_QUESTION} --questions '~nobody-here/q'", "home folder"),
    BadInputCase("a path of 5000 characters", f"{SAMPLE_WITH_MODEL} --corpus {'x' * 5000}", "File name too long"),
    BadInputCase("a path of 300 characters", f"{SAMPLE_WITHOUT_QUESTION} --questions {'x' * 300}", "File name too long"),
    BadInputCase("a path through a file", f"{SAMPLE_WITH_MODEL} --corpus corpus.jsonl/c", "was not found"),
    BadInputCase("an index folder in a file", f"{SAMPLE_COMMAND} retrieval.index_dir=corpus.jsonl", "retrieval.index_dir"),
    BadInputCase("an index folder of nobody", f"{SAMPLE_COMMAND} retrieval.index_dir='~nobody-here'", "home folder"),
    BadInputCase("an index folder nested too deeply", f"{SAMPLE_COMMAND} retrieval.index_dir={'a/' * 3000}",
         ("retrieval.index_dir='a/a/", "cannot be read (File name too long)")),
    BadInputCase("a model of nobody", f"{SAMPLE_WITH_CORPUS} --model '~nobody-here/m'", "no such home folder"),
    BadInputCase("a model with a name of 5000 characters", f"{SAMPLE_WITH_CORPUS} --model {'x' * 5000}", "File name too long"),
    BadInputCase("a model that is not there", f"{SAMPLE_WITH_CORPUS} --model nope", "nope"),
    BadInputCase(
        "questions that are the corpus",
        f"{SAMPLE_WITHOUT_QUESTION} --questions corpus.jsonl",
        "corpus.jsonl",
    ),
    BadInputCase("out is the corpus", f"{SAMPLE_COMMAND} --out corpus.jsonl", "are the same file"),
    BadInputCase("out is the file of questions", f"{SAMPLE_WITHOUT_QUESTION} --questions questions.jsonl --out ./questions.jsonl",
         "are the same file"),
    # The environment.
    BadInputCase("a rank that is no number", TRAIN, "RANK='x' is not a whole number", env={"RANK": "x"}, slow=True),
    BadInputCase("a rank among none", TRAIN, "RANK=5 and WORLD_SIZE=1 in the environment are not torchrun's",
         env={"RANK": "5"}, slow=True),
    BadInputCase("two processes without torchrun", TRAIN, "RANK=0 and WORLD_SIZE=2 in the environment",
         env={"WORLD_SIZE": "2", "MASTER_ADDR": None}, slow=True),
    BadInputCase("W&B without a key", f"{TRAIN} train.wandb=online train.world_passages=100", "run `wandb login`",
         env={"WANDB_API_KEY": None, "WANDB_MODE": None, "HOME": "."}, slow=True),
    BadInputCase("a cache that is a file", SAMPLE_COMMAND, "retrieval.index_dir", env={"DLM_RAG_CACHE": "corpus.jsonl"}),
    BadInputCase("a cache that cannot be made", SAMPLE_COMMAND, "retrieval.index_dir", env={"DLM_RAG_CACHE": "/proc/x"}),
    BadInputCase("a cache of nobody", SAMPLE_COMMAND, "DLM_RAG_CACHE='~nobody-here': no such home folder",
         env={"DLM_RAG_CACHE": "~nobody-here"}),
    BadInputCase("a cache nested too deeply", SAMPLE_COMMAND, ("DLM_RAG_CACHE='a/a/", "cannot be read (File name too long)"),
         env={"DLM_RAG_CACHE": "a/" * 3000}),
    BadInputCase("a question of UTF-8 where the locale is ASCII", f"{SAMPLE_WITHOUT_QUESTION} 'Who wrote \u00c9mma?'", '\\u00c9mma', exit=0,
         env=ASCII, slow=True),
    BadInputCase("a question of Latin 1 where the locale is ASCII", f"{SAMPLE_WITHOUT_QUESTION} 'Who wrote \udcc9mma?'",
         "question 1: the text is not UTF-8", env=ASCII),
    BadInputCase("a file of UTF-8 where the locale is ASCII", f"{SAMPLE_WITHOUT_QUESTION} --questions \u00c9mma", "set PYTHONUTF8=1", env=ASCII),
    BadInputCase("a home that cannot be written", SAMPLE_COMMAND, "retrieval.index_dir",
         env={"DLM_RAG_CACHE": None, "HOME": "/proc/x"}),
    BadInputCase("no threads for numba", SAMPLE_COMMAND, "NUMBA_NUM_THREADS", env={"NUMBA_NUM_THREADS": "0"}, slow=True),
    BadInputCase("a word as threads for numba", SAMPLE_COMMAND, "NUMBA_NUM_THREADS", env={"NUMBA_NUM_THREADS": "x"}, slow=True),
    BadInputCase("numba without its compiler", SAMPLE_COMMAND, "unset it", env={"NUMBA_DISABLE_JIT": "1"}, slow=True),
    BadInputCase("a word as threads", SAMPLE_COMMAND, "Who wrote Emma?", exit=0, env={"OMP_NUM_THREADS": "abc"}, slow=True),
    BadInputCase("a dumb terminal one column wide", f"{EVALUATE} --out run", "run", exit=0, slow=True,
         env={"TERM": "dumb", "COLUMNS": "1"}),
    BadInputCase("output in ASCII", "sample 'Who wrote Zoë?' --model model --corpus corpus.jsonl decode.max_new_tokens=8",
         "Zo\\u00eb", exit=0, env={"PYTHONIOENCODING": "ascii"}, slow=True),
    # Programs of the checkout.
    BadInputCase("a benchmark told a fraction", "profiling/bench_retrieval.py index 2.5", "'2.5' is not a whole number"),
    BadInputCase("a benchmark told 0", "profiling/bench_threads.py 0", "'0' is not a whole number", slow=True),
    BadInputCase("a benchmark of another kind", (
        "profiling/bench_retrieval.py recall --questions questions.jsonl --corpus corpus.jsonl --kinds bm52"
    ), "--kinds: 'bm52' is none of bm25, dense, hybrid (nearest: 'bm25')"),
    BadInputCase("a profile of nothing", "profiling/nsys.py", "the following arguments are required: program"),
    BadInputCase("a profile of what is no program", "profiling/nsys.py smaple", "invalid choice: 'smaple'"),
    BadInputCase("a report that is not there", "profiling/attribute.py nope.sqlite", "nope.sqlite"),
    BadInputCase("joules of a run without", "profiling/attribute.py x.sqlite --energy x.json", "holds no joules: name the stamp", {"x.json": '{"energy": null}'}),
    BadInputCase("a program nearly of that name", "docter", "nearest: 'doctor'"),
    BadInputCase("a key of the doctor's", "doctor model.devise=cpu", "nearest: 'model.device'"),
    BadInputCase("a question to the doctor", "doctor 'Who wrote Emma?'", "is neither a flag nor KEY=VALUE"),
]  # fmt: skip
