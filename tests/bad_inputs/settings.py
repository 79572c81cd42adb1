"""Settings, flags, config files, the environment: what `sample` is given."""

import os

from tests.bad_inputs import SAMPLE_COMMAND, SAMPLE_WITH_MODEL, SAMPLE_WITHOUT_QUESTION, BadInputCase, table

BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NOBODY, NO_MILVUS = "http://127.0.0.1:1/retrieve", "milvus://127.0.0.1:1/world"

CASES = [
    BadInputCase(SAMPLE_COMMAND, "torchrun has started 2 processes", env={"WORLD_SIZE": "2"}),
    # Keys and values; tests/config/ has more of what needs no program.
    *table(SAMPLE_COMMAND,
        ("'decode. [31m=3' is not a question", "'decode.\x1b[31m=3'"),
        ("below 2^63", "decode.seed=99999999999999999999"),
        (("prompt=flash_rag is neither a file", "nearest: 'flashrag'"), "prompt=flash_rag"),
        ("the prompt leaves no room for evidence", "prompt=search_r1 decode.max_new_tokens=4000"),
        (("edit_threshold=0.9 has no effect", "leave it out"), "decode.edit_threshold=0.9"),
        ("needs evidence_layout=independent", "model.block_size=4 decode.finished_block_context=no_evidence"),
        (("model.quantize=int4 is not one of none, int8", "nearest: 'int8'"), "model.quantize=int4"),
        ("engine.memory_gib=1e-05 is too little", "engine.memory_gib=1e-5"),
        ("alone take", "engine.memory_gib=1 engine.prefix_cache_gib=2"),
        ("attn_implementation=flash cannot be used here", "model.attn_implementation=flash"),
        ("attn_implementation=indexed cannot be used here", "model.attn_implementation=indexed"),
        ("engine.cuda_graphs=true needs", "engine.cuda_graphs=true"),
        *(
            (f"device={name} is not available here", f"model.device={name}")
            for name in ("meta", "toaster", "cuda:99")
        ),
        *(("must be from 1 to 999, auto", f"--out a workers='{text}'") for text in ("0", "ray://:1")),
    ),
    # A space where an equals sign belongs, a file without its flag, one dash of two.
    *table(SAMPLE_COMMAND, *(
        ("is not a question", words) for words in (
            "decode.batch_size 16", "questions.jsonl", "'decode.seed = 3'", "“decode.seed=3”", "—out a.jsonl", "-",
        )
    )),
    *table(SAMPLE_COMMAND,
        ("is not a question but a file: write --questions FILE", "'frågor 1.jsonl'", {"frågor 1.jsonl": "Who?"}),
    ),
    # Flags.
    *table(SAMPLE_COMMAND,
        ("out= is empty: give it a value, or leave it out", "--out ''"),
        ("is not UTF-8", "out=\udcff"),
        ("unrecognized arguments: --top-k 3; `dlm-rag sample --help`", "--top-k 3"),
        ("argument --out: expected one argument", "--out"),
        ("retrieval.corpus is given twice by flags", "--corpus corpus.jsonl"),
    ),
    *table(SAMPLE_WITHOUT_QUESTION,
        ("no question: type one",),
        ("question 1: the text is not UTF-8", "caf\udce9?"),
        ("question 'q1': the question is", f"'{'why ' * 25_000}'"),
    ),
    # Search by URL.
    *table(SAMPLE_WITH_MODEL,
        ("cannot be searched: Connection refused", f"retrieval.url={NOBODY}"),
        ("retrieval.url=htp://127.0.0.1:8000/retrieve", "retrieval.url=htp://127.0.0.1:8000/retrieve"),
        ("a token is $DLM_RAG_RETRIEVAL_TOKEN", "retrieval.url=http://me:secret@127.0.0.1:1/retrieve"),
        ("milvus://127.0.0.1:1/world cannot be searched: Connection refused", f"retrieval.method=dense retrieval.url={NO_MILVUS}"),
        ("set retrieval.method=dense, not bm25", f"retrieval.url={NO_MILVUS}"),
        ("names no collection: milvus://HOST:PORT/NAME", "retrieval.method=dense retrieval.url=milvus://127.0.0.1:1"),
    ),
    # Config files.
    *table(SAMPLE_COMMAND,
        ("nearest: 'sardi.yaml'", "--config sardy"),
        (("tiny.yaml says how to train", "--model runs/tiny/model"), "--config tiny.yaml"),
        ("config 'pipe' was not found as a file", "--config pipe", {"pipe": os.mkfifo}),
    ),
    *table(f"{SAMPLE_COMMAND} --config c.yaml", *(
        (says, {"c.yaml": content}) for says, content in (
            ("c.yaml cannot be read", bytes(range(256))),
            (("c.yaml is not valid YAML", "nested"), "decode: " + "[" * 5000 + "]" * 5000),
            ("unknown key 'a0' in c.yaml", BOMB),
            ("line 1: could not", "decode: !!python/object/apply:os.system [ls]"),
            ("unknown key 'a [31m' in c.yaml", '"a\\x1b[31m": 3'),
            ("unknown key 'decode.seed' in c.yaml: write `decode: {seed:", "decode.seed: 1"),
            ("train.learning_rate=nan", "train: {learning_rate: .nan}"),
            ("unknown key 'train.phases' in c.yaml", "train: {phases: {a: {max_steps: 3}}}"),
        )
    )),
    # Paths.
    *table(SAMPLE_WITH_MODEL,
        ("no corpus: give --corpus",),
        ("Too many levels", "--corpus loop", {"loop": lambda path: path.symlink_to("loop")}),
        ("corpus 'nope.jsonl' was not found", "--corpus nope.jsonl"),
        ("no such home folder", "--corpus '~nobody-here/c'"),
    ),
    *table(SAMPLE_COMMAND,
        ("retrieval.index_dir", "retrieval.index_dir=corpus.jsonl"),
        (("retrieval.index_dir='a/a/", "(File name too long)"), f"retrieval.index_dir={'a/' * 3000}"),
    ),
    # The environment.
    *(
        BadInputCase(SAMPLE_COMMAND, says, env=env)
        for says, env in (
            ("retrieval.index_dir", {"DLM_RAG_CACHE": "corpus.jsonl"}),
            ("retrieval.index_dir", {"DLM_RAG_CACHE": None, "HOME": "/proc/x"}),
            ("DLM_RAG_CACHE='~nobody-here': no such home folder", {"DLM_RAG_CACHE": "~nobody-here"}),
        )
    ),
    BadInputCase(SAMPLE_COMMAND, "NUMBA_NUM_THREADS", env={"NUMBA_NUM_THREADS": "0"}, alone=True),
    *(
        BadInputCase(f"{SAMPLE_WITHOUT_QUESTION} {words}", says, env=ASCII, exit=code, alone=True)
        for words, says, code in (
            ("'Who wrote \u00c9mma?'", "\\u00c9mma", 0),
            ("--questions \u00c9mma", "set PYTHONUTF8=1", 2),
        )
    ),
]  # fmt: skip
