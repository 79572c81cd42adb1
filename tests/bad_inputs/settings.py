"""Settings, flags, config files, the environment."""

import os

from bad_inputs import ASK, ASK_CORPUS, ASK_FILE, ASK_MODEL, Case

YAML = f"{ASK} --config c.yaml"
EVALUATE = (
    "evaluate --model model --corpus corpus.jsonl --questions questions.jsonl decode.canvas_length=8"
    " retrieval.top_k=1"
)
TRAIN = "train --out run"
MANY = "1" * 5000
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


def yaml(what: str, text: str | bytes, says: str | tuple[str, ...]) -> Case:
    """A config file."""
    return Case(what, YAML, says, {"c.yaml": text})


def word(word: str, says: str | tuple[str, ...]) -> Case:
    """One word more."""
    return Case(f"the word {word[:40]!r}", f"{ASK} {word}", says)


CASES = [
    # Keys and values.
    Case("an unknown key", f"{ASK} decode.comit_threshold=0.9", "nearest: 'decode.commit_threshold'"),
    word("commit_threshold=0.9", "nearest: 'decode.commit_threshold'"),
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
    word("engine.host_pool_gib=1 engine.pool_gib=0", "set pool_gib too"),
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
    Case("questions for training", f"{TRAIN} --questions questions.jsonl", "give these, not --questions"),
    Case("passages for training", f"{TRAIN} --corpus corpus.jsonl", "data.corpus: give these, not --corpus"),
    Case("a trace for training", f"{TRAIN} --trace t.jsonl", "training has no use for trace"),
    Case("a comparison for training", f"{TRAIN} --compare all", "training has no use for compare"),
    Case("a world of a billion", f"{TRAIN} train.world_passages=1000000000", "between 100 and 1000000"),
    Case("a step of a billion", f"{TRAIN} train.groups=1000000000", "groups=1000000000 is out of range"),
    Case("a model for the doctor", "doctor --model model", "leave model.path out"),
    Case("quick for training", f"{TRAIN} quick=true", "leave limit and quick out"),
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
    yaml("YAML nested deeply", "decode: " + "[" * 5000 + "]" * 5000, "beyond all measure"),
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
            "''": "--compare is given without a value",
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
    # Values that a shell has lost, and flags of another program.
    *(
        Case(f"{flag} of nothing", f"{command} {flag} ''",
             f"{flag} is given without a value")
        for flag, command in (("--corpus", ASK_MODEL), ("--model", ASK_CORPUS), ("--out", EVALUATE),
                              ("--questions", ASK_FILE), ("--limit", f"{ASK_FILE} --questions questions.jsonl"))
    ),
    Case("a corpus of nothing", f"{ASK_MODEL} retrieval.corpus=", "the name of a file is empty"),
    Case("evaluate into -", f"{EVALUATE} --out -", "evaluation needs --out FOLDER"),
    Case("sample told to compare", f"{ASK} --compare all", "compare is for evaluate"),
    *(
        Case(f"training with --{name}", f"{TRAIN} --{name} {value}", f"training does not read --{name}")
        for name, value in (("questions", "questions.jsonl"), ("corpus", "corpus.jsonl"), ("trace", "t"),
                            ("compare", "all"))
    ),
    Case("documents for sft", f"{TRAIN} data.documents.a=corpus.jsonl", "data.documents are not read by sft"),
    Case("questions for documents", f"{TRAIN} train.objective=pretrain data.questions=questions.jsonl"
         " data.corpus=corpus.jsonl", "data.questions are read by sft alone"),
    # Paths.
    Case("a corpus that leads to itself", f"{ASK_MODEL} --corpus loop", "'loop' was not found",
         {"loop": lambda path: path.symlink_to("loop")}),
    Case("a corpus that is not there", f"{ASK_MODEL} --corpus nope.jsonl", "'nope.jsonl' was not found"),
    Case("a user who is not there", f"{ASK_MODEL} --corpus '~nobody-here/c'", "no such home folder"),
    Case("questions of a user who is not there", f"{ASK_FILE} --questions '~nobody-here/q'", "home folder"),
    Case("a path of 5000 characters", f"{ASK_MODEL} --corpus {'x' * 5000}", "File name too long"),
    Case("a path of 300 characters", f"{ASK_FILE} --questions {'x' * 300}", "File name too long"),
    Case("a path through a file", f"{ASK_MODEL} --corpus corpus.jsonl/c", "was not found"),
    Case("an index folder in a file", f"{ASK} retrieval.index_folder=corpus.jsonl", "retrieval.index_folder"),
    Case("an index folder of nobody", f"{ASK} retrieval.index_folder='~nobody-here'", "home folder"),
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
    Case("a cache of nobody", ASK, "home folder", env={"DLM_RAG_CACHE": "~nobody-here"}),
    Case("a home that cannot be written", ASK, "retrieval.index_folder",
         env={"DLM_RAG_CACHE": None, "HOME": "/proc/x"}),
    Case("no threads for numba", ASK, "NUMBA_NUM_THREADS", env={"NUMBA_NUM_THREADS": "0"}, slow=True),
    Case("a word as threads for numba", ASK, "NUMBA_NUM_THREADS", env={"NUMBA_NUM_THREADS": "x"}, slow=True),
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
    Case("a profile of nothing", "profiling/nsys.py", "the following arguments are required: program"),
    Case("a profile of what is no program", "profiling/nsys.py smaple", "invalid choice: 'smaple'"),
    Case("a report that is not there", "profiling/attribute.py nope.sqlite", "nope.sqlite"),
    Case("a program nearly of that name", "docter", "nearest: 'doctor'"),
    Case("a key of the doctor's", "doctor model.devise=cpu", "nearest: 'model.device'"),
    Case("a question to the doctor", "doctor 'Who wrote Emma?'", "is neither a flag nor KEY=VALUE"),
]  # fmt: skip
