"""What evaluate, train, synthesize, the servers and the programs of the checkout are given."""

import os

from tests.bad_inputs import EVALUATE, BadInputCase, table
from tests.bad_inputs.settings import NO_MILVUS, NOBODY
from tests.support.tiny_diffusion_gemma import write_tiny_gemma

TRAIN = "train --out run"
RL = "--model model train.objective=rl"
WORLD = "dlm_rag.data.synthetic_world"
DECODED_ROWS = (
    "synthesize --model model --corpus corpus.jsonl --questions questions.jsonl decode.max_new_tokens=8"
)


CASES = [
    *table(EVALUATE,
        ("evaluation needs a folder", "--out -"), ("--out=-- gives no value", "--out=--"),
        ("model.path is set to one value, and by every setting too", "--out run --compare ircot+model.path=openai://h/m"),
        *(
            (says, f"--out run --compare {compare}")
            for compare, says in {
                "statik": "nearest: 'static'",
                "static,static": "'static' is named twice",
                "static,oracle": "question 'n0' has no supporting_ids",
            }.items()
        ),
        *(
            (says, f"--out run --sweep {sweep}")
            for sweep, says in {
                "decode.comit_threshold=0.9,0.8": "nearest: 'decode.commit_threshold'",
                "train.max_steps=1,2": "'train.max_steps' is not a key of model., retrieval., decode.",
                " ".join(f"{key}=1,2,3,4,5,6,7,8,9,10" for key in (
                    "decode.seed", "decode.batch_size", "retrieval.top_k", "decode.query_window"
                )): "sweep: 10000 settings are more than 1000",
            }.items()
        ),
    ),
    # The paper's table.
    *table("evaluate --out run --dataset",
        (("by the split rule sardi, which has 2wiki, hotpotqa", "nearest: '2wiki'"), "2wikki"),
        (("data/2wikimultihopqa/test.parquet is not there", "dlm-rag data get 2wiki --split sardi"), "2wiki"),
        # Data sets by name, with a corpus.
        (("'cofca' is no data set by the split rule search_r1", "bamboogle"), "cofca --corpus corpus.jsonl"),
        ("'hotpotqa,2wiki' is no data set", "hotpotqa,2wiki --corpus corpus.jsonl"),
        (("data/hotpotqa/dev.jsonl is not there", "`dlm-rag data get hotpotqa` brings it"),
         "hotpotqa --corpus corpus.jsonl"),
    ),
    *table("evaluate --out run",
        ("--corpus context is what comes with the questions of --questions FILE", "--corpus context"),
        (("questions.jsonl, line 1", "no passages come with this question"), "--corpus context --questions questions.jsonl"),
        ("--split has no effect without --dataset and --corpus", "--split sardi"),
        ("does not list its models",
         "--corpus corpus.jsonl --questions questions.jsonl --compare ircot+model.path=openai://127.0.0.1:1/v1/m"),
    ),
    # Training.
    *table(TRAIN,
        *(
            (f"{key} has no effect here", word)
            for key, word in (
                ("retrieval.url", f"retrieval.url={NOBODY}"), ("questions", "--questions questions.jsonl"),
                ("workers", "workers=2"),
            )
        ),
        ("data.questions and data.corpus go together", "data.corpus=corpus.jsonl"),
        ("train.world_passages=1000000000", "train.world_passages=1000000000"),
        (("unknown key 'data.documents.a'", "nearest: 'data.documents'"), "data.documents.a=corpus.jsonl"),
        ("rl begins with a model that answers: set model.path", "train.objective=rl"),
        ("retrieval.bm25_query needs data.corpus", "retrieval.bm25_query=sentences"),
        ("set model.block_size=0, or train.objective=sft", "train.objective=pretrain model.block_size=8"),
        ("has no 'golden_answers'",
         f"{RL} train.passage_length=96 data.questions=questions.jsonl data.corpus=corpus.jsonl",
         {"questions.jsonl": '{"id": "a", "question": "Who?"}\n'}),
    ),
    BadInputCase(f"{TRAIN} engine.memory_gib=0.001", "engine.memory_gib=0.001 is 0.00107 GB", changes=("run",)),
    *(
        BadInputCase(f"{TRAIN} {words}", says, env=env)
        for words, says, env in (
            ("", "RANK='x' is not a whole number", {"RANK": "x"}),
            ("", "RANK=0 and WORLD_SIZE=2 in the environment", {"WORLD_SIZE": "2", "MASTER_ADDR": None}),
            ("train.wandb=online train.world_passages=100", "run `wandb login`",
             {"WANDB_API_KEY": None, "WANDB_MODE": None, "HOME": "."}),
        )
    ),
    *table(f"{TRAIN} train.max_steps=1",
        ("run holds no run to go on with", "--resume"),
        ("step-00000001 has format 1", "--resume",
         {"run/checkpoints/step-00000001/state.json": '{"state": {}}'}),
        ("holds 'notes.txt'", {"run/notes.txt": "mine"}),
        ("add --resume to go on", {"run/metrics.jsonl": "{}\n"}),
        ("cannot be a folder", {"run": "mine"}),
        ("cannot be locked by run/train.lock", {"run/train.lock/x": ""}),
    ),
    # A model that decodes here and is not trained.
    *table(f"{TRAIN} --model noisy",
        ("noisy denoises from uniform noise, and only decodes here", {"noisy": write_tiny_gemma}),
    ),
    # Servers, indexes.
    *table("serve",
        ("cannot listen at", "--host 192.0.2.1"),
        ("cannot listen at", f"--host {'é' * 80}"),
        ("is neither a flag nor KEY=VALUE", "'Who wrote Emma?'"),
        ("keys file 'a.txt' was not found", "serving.api_keys_file=a.txt"),
        ("a.txt, line 2: a key has", "serving.api_keys_file=a.txt", {"a.txt": "\nabc"}),
    ),
    *table("retrieve-server",
        ("a corpus is searched",),
        ("--port '0' is not a whole number above 0", "--corpus corpus.jsonl --port 0"),
        ("cannot listen at 192.0.2.1:8000", "--corpus corpus.jsonl --host 192.0.2.1"),
    ),
    *table("index",
        ("a corpus is indexed",),
        ("set retrieval.method=dense, not bm25", f"--corpus nowhere.jsonl --to {NO_MILVUS}"),
        ("cannot be searched: Connection refused", f"--corpus no.jsonl --to {NO_MILVUS} retrieval.method=dense"),
    ),
    # Synthesis.
    *table(DECODED_ROWS,
        ("synthesis needs --out FOLDER",),
        ("have no golden_answers ('n0'): which answer is right is not known", "--out rows",
         {"questions.jsonl": '{"id": "n0", "question": "Who?"}'}),
        ("mine holds 'thesis.tex', which is of no rows", "--out mine", {"mine/thesis.tex": "x"}),
        ("out=corpus.jsonl cannot be a folder", "--out corpus.jsonl"),
    ),
    *table("synthesize --out rows",
        ("needs --questions", "--model model --corpus corpus.jsonl"),
        ("synthesis.method' in the command line", "synthesis.method=corpus"),
    ),
    # Worlds.
    *table(WORLD,
        ("arguments are required: --seed", "--out w"), ("--out=-- gives no value", "--seed 1 --out=--"),
        ("corpus.jsonl exists with other content", "--seed 1 --passages 100 --per-hop 1 --out ."),
        ("corpus.jsonl exists with other content", "--seed 1 --passages 100 --per-hop 1 --out w",
         {"w/corpus.jsonl": os.mkfifo}),
    ),
    # Names of programs; programs of the checkout.
    *table("",
        ("is neither a flag nor KEY=VALUE", "doctor 'Who wrote Emma?'"),
        ("'2.5' is not a whole number", "profiling/bench_retrieval.py remote --limit 2.5"),
        ("nope.sqlite", "profiling/attribute.py nope.sqlite"),
    ),
]  # fmt: skip
