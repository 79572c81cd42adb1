"""Checkpoint folders, tokenizers, chat templates, dense models."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from tests.bad_inputs import SAMPLE_COMMAND, SAMPLE_WITH_CORPUS, BadInputCase
from tests.support.tiny_diffusion_gemma import TEXT, write_tiny_gemma

CONFIG, WEIGHTS, TOKENIZER = "model/config.json", "model/model.safetensors", "model/tokenizer.json"
TOKENIZER_CONFIG, GENERATION = "model/tokenizer_config.json", "model/generation_config.json"
INDEX = "model/model.safetensors.index.json"
TRAIN = "train --out run --model model"
GEMMA, ASK_GEMMA = "gemma/config.json", "sample 'Who wrote Emma?' --model gemma --corpus corpus.jsonl"
DENSE = f"{SAMPLE_COMMAND} retrieval.method=dense retrieval.embedding_model=dense"


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def huge(path: Path) -> None:
    """A file that is nothing but a hole: it takes no room."""
    with path.open("wb") as file:
        file.truncate(300 << 20)


def tensors(change):
    """A function that changes the tensors of a file."""

    def harm(path: Path) -> None:
        from safetensors.torch import load_file, save_file

        found = load_file(path)
        change(found)
        save_file(found, path)

    return harm


def one(name: str, make) -> Any:
    """Gives one tensor other contents, made of the old ones."""
    return tensors(lambda found: found.update({name: make(found[name])}))


def header(text: bytes, length: int | None = None) -> bytes:
    """A safetensors file of nothing but a header."""
    return struct.pack("<Q", len(text) if length is None else length) + text


def llama(**settings: Any) -> dict[str, Any]:
    """What makes a Llama config of the tiny model's."""
    return {"model_type": "llama", "rms_norm_eps": 1e-6} | settings


def blocks(family: str, **settings: Any) -> dict[str, Any]:
    """What makes a config of that family of the tiny model's, whose attention is in blocks."""
    return llama(model_type=family, block_size=4, bd_size=8) | settings


def llada2(**settings: Any) -> dict[str, Any]:
    """What makes a LLaDA2 config of the tiny model's."""
    return llama(
        model_type="llada2_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
        num_shared_experts=1, first_k_dense_replace=1, n_group=4, topk_group=2, routed_scaling_factor=2.5,
        partial_rotary_factor=0.5,
    ) | settings  # fmt: skip


def llada_moe(**settings: Any) -> dict[str, Any]:
    """What makes a LLaDA-MoE config of the tiny model's; the public one calls itself llada."""
    return llama(
        model_type="llada", num_experts=8, num_experts_per_tok=2, expert_intermediate_size=16,
        moe_layer_freq=[1, 1], qk_layernorm=True,
    ) | settings  # fmt: skip


def gemma(**text: Any) -> dict[str, Any]:
    """A DiffusionGemma's config."""
    return {"model_type": "diffusion_gemma", "canvas_length": 12, "text_config": TEXT | text}


def whole_gemma(path: Path) -> None:
    write_tiny_gemma(path.parent)


def link(target: str):
    """A function that puts a link in the place of a file."""

    def put(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return put


def without(key: str):
    """A function that takes a key out of a JSON object."""
    return lambda path: path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != key})
    )


def backend(**changes: Any):
    """A function that changes `tokenizer.json`."""

    def harm(path: Path) -> None:
        raw = json.loads(path.read_text())
        raw["model"] |= changes
        path.write_text(json.dumps(raw))

    return harm


def replacements(key: str, *rules: dict[str, Any]):
    """A function that gives `tokenizer.json` these rules as its normalizer or decoder."""
    kind = {"type": "Sequence", {"normalizer": "normalizers", "decoder": "decoders"}[key]: list(rules)}
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {key: kind}))


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4920\n"

CASES = [
    BadInputCase("a model type of nobody", SAMPLE_COMMAND, "'secret' model", {CONFIG: {"model_type": "secret"}}),
    BadInputCase("a model type that is a list", SAMPLE_COMMAND, "is a '['llama']' model", {CONFIG: {"model_type": ["llama"]}}),
    BadInputCase("a config of a number with 5,000 digits", SAMPLE_COMMAND, "the file is not JSON", {CONFIG: "9" * 5000}),
    BadInputCase("a config nested 100,000 deep", SAMPLE_COMMAND, "config.json: the file is not JSON", {CONFIG: "[" * 100_000}),
    BadInputCase("a config that has a key twice", SAMPLE_COMMAND, "the key 'a' occurs a second time", {CONFIG: '{"a": 1, "a": 2}'}),
    BadInputCase("a config that is no UTF-8", SAMPLE_COMMAND, "config.json: the file is not UTF-8", {CONFIG: b"\xff\xfe{}"}),
    BadInputCase("a config that is a pipe", SAMPLE_COMMAND, "config.json is not a regular file", {CONFIG: pipe}),
    BadInputCase("a config that is a folder", SAMPLE_COMMAND, "config.json is not a regular file", {CONFIG: folder}),
    BadInputCase("a config of 300 MB", SAMPLE_COMMAND, "config.json is larger than", {CONFIG: huge}),
    BadInputCase("weights that are a pipe", SAMPLE_COMMAND, "model.safetensors is not a regular file", {WEIGHTS: pipe}),
    BadInputCase("a tokenizer that is a pipe", SAMPLE_COMMAND, "tokenizer.json is not a regular file", {TOKENIZER: pipe}),
    BadInputCase("a chat template that is a pipe", SAMPLE_COMMAND, "is not a regular file", {"model/chat_template.jinja": pipe}),
    BadInputCase("ten million layers", SAMPLE_COMMAND, "for the 10000000 layers", {CONFIG: {"num_hidden_layers": 10**7}}),
    BadInputCase("heads as a text", SAMPLE_COMMAND, "num_attention_heads='4' must be a whole", {
        CONFIG: llama(num_attention_heads="4")
    }),
    BadInputCase("a width of true", SAMPLE_COMMAND, "hidden_size=True must be", {CONFIG: {"hidden_size": True}}),
    BadInputCase("a mask of true", SAMPLE_COMMAND, "mask_token_id=True must be", {CONFIG: {"mask_token_id": True}}),
    BadInputCase("a mask below 0", SAMPLE_COMMAND, "mask_token_id=-1 must be", {CONFIG: {"mask_token_id": -1}}),
    BadInputCase("a mask that is no token", SAMPLE_COMMAND, "mask_token_id=258 is not a token", {
        CONFIG: {"mask_token_id": 258, "vocab_size": 259},
        WEIGHTS: tensors(lambda found: found.update(
            {name: found[name][[*range(258), 0]] for name in ("embed_tokens.weight", "lm_head.weight")}
        )),
    }),
    *(
        BadInputCase(f"an end of {value!r}", SAMPLE_COMMAND, "must be ids from 0", {CONFIG: {"eos_token_id": value}})
        for value in (1.5, "257", [[1]], -1, 258, True, {"id": 1})
    ),
    BadInputCase("an end in the settings of generation", SAMPLE_COMMAND, "generation_config.json: eos_token_id=999", {
        GENERATION: '{"eos_token_id": 999}'
    }),
    *(
        BadInputCase(f"{key} of {value}", SAMPLE_COMMAND, f"{key}={shown} must be a number", {
            CONFIG: f'{{"model_type": "dlm_rag", "vocab_size": 258, "{key}": {value}}}'
        })
        for key, value, shown in (
            ("rms_norm_eps", "NaN", "nan"), ("rms_norm_eps", "Infinity", "inf"), ("rope_theta", "-1", "-1"),
            ("rope_theta", "1e999", "inf"), ("rope_theta", '"x"', "'x'"),
        )
    ),
    BadInputCase("scaled positions as a text", SAMPLE_COMMAND, "rope_scaling='yarn' must be", {
        CONFIG: llama(rope_scaling="yarn")
    }),
    BadInputCase("scaled positions that depend on the length", SAMPLE_COMMAND, "type 'dynamic' is not supported", {
        CONFIG: {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    }),
    BadInputCase("scaled positions without their factor", SAMPLE_COMMAND, "factor=None must be", {
        CONFIG: {"rope_scaling": {"rope_type": "yarn"}}
    }),
    BadInputCase("scaled positions without their bounds", SAMPLE_COMMAND, "low_freq_factor=None must be", {
        CONFIG: llama(rope_scaling={"rope_type": "llama3", "factor": 8.0})
    }),
    BadInputCase("scaled positions that are no numbers", SAMPLE_COMMAND, "gives no rotary positions", {
        CONFIG: {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}}
    }),
    *(
        BadInputCase(f"a tie of {name} that is a word", SAMPLE_COMMAND, "tie_word_embeddings='no' must be true", {
            CONFIG: more | {"tie_word_embeddings": "no"}
        })
        for name, more in (("ours", {}), ("Llama", llama()))
    ),
    BadInputCase("a canvas of half a token", SAMPLE_COMMAND, "canvas_length=0.5 must be", {CONFIG: {"canvas_length": 0.5}}),
    BadInputCase("a prompt of numbers", SAMPLE_COMMAND, "must hold texts", {CONFIG: {"prompt": {"head": 3}}}),
    BadInputCase("weights of whole numbers", SAMPLE_COMMAND, "norm.weight has the type I16", {
        WEIGHTS: one("norm.weight", lambda old: old.short())
    }),
    BadInputCase("gains of zeros", SAMPLE_COMMAND, "norm.weight has only zeros", {
        WEIGHTS: one("norm.weight", lambda old: old * 0)
    }),
    BadInputCase("embeddings of zeros", SAMPLE_COMMAND, "embed_tokens.weight has only zeros", {
        WEIGHTS: one("embed_tokens.weight", lambda old: old * 0)
    }),
    BadInputCase("weights that are no numbers", SAMPLE_COMMAND, "up_proj.weight has values that are not finite in float32", {
        WEIGHTS: one("layers.1.mlp.up_proj.weight", lambda old: old / 0)
    }),
    BadInputCase("weights too large for the dtype", f"{SAMPLE_COMMAND} model.dtype=float16", "not finite in float16", {
        WEIGHTS: one("layers.0.mlp.up_proj.weight", lambda old: old * 1e9)
    }),
    BadInputCase("a header that is not JSON", SAMPLE_COMMAND, "not a complete safetensors file", {WEIGHTS: header(b"{oops")}),
    BadInputCase("a header of 2**60 bytes", SAMPLE_COMMAND, "not a complete safetensors file", {WEIGHTS: header(b"{}", 2**60)}),
    BadInputCase("an empty file of weights", SAMPLE_COMMAND, "not a complete safetensors file", {WEIGHTS: b""}),
    BadInputCase("tensors that overlap", SAMPLE_COMMAND, "not a complete safetensors file", {
        WEIGHTS: header(json.dumps({
            name: {"dtype": "F32", "shape": [2], "data_offsets": [start, start + 8]}
            for name, start in (("a", 0), ("b", 4))
        }).encode()) + bytes(12)
    }),
    BadInputCase("a shard outside of the folder", SAMPLE_COMMAND, "index.json names '../corpus.jsonl'", {
        INDEX: '{"weight_map": {"norm.weight": "../corpus.jsonl"}}'
    }),
    BadInputCase("a shard at the root of all", SAMPLE_COMMAND, "index.json names '/dev/zero'", {
        INDEX: '{"weight_map": {"norm.weight": "/dev/zero"}}'
    }),
    BadInputCase("an index that is a list", SAMPLE_COMMAND, "index.json must hold a JSON object", {INDEX: "[]"}),
    BadInputCase("a tokenizer of garbage", SAMPLE_COMMAND, "tokenizer in model cannot be read", {TOKENIZER: b"\x00garbage"}),
    BadInputCase("a tokenizer of nothing", SAMPLE_COMMAND, "tokenizer in model cannot be read", {TOKENIZER: "{}"}),
    BadInputCase("a tokenizer of no tokens", SAMPLE_COMMAND, "makes no tokens of the question", {
        TOKENIZER: backend(vocab={f"unused{n}": n for n in range(256)})
    }),
    BadInputCase("a tokenizer of another model", SAMPLE_COMMAND, "gives the id 9087, but the model has 258", {
        TOKENIZER: lambda path: path.write_text(path.read_text().replace('"W": 87', '"W": 9087'))
    }),
    BadInputCase("a template that fails", SAMPLE_COMMAND, "chat template cannot be rendered: no", {
        TOKENIZER_CONFIG: {"chat_template": "{{ raise_exception('no') }}"}
    }),
    BadInputCase("a template without end", SAMPLE_COMMAND, "chat template cannot be rendered: it takes more than", {
        TOKENIZER_CONFIG: {"chat_template": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3}
    }),
    BadInputCase("a template that is a number", SAMPLE_COMMAND, "chat template", {TOKENIZER_CONFIG: {"chat_template": 7}}),
    BadInputCase("a template that shows nothing", SAMPLE_COMMAND, "chat template must show", {
        "model/chat_template.jinja": "hello"
    }),
    BadInputCase("a hub id without a network", f"{SAMPLE_WITH_CORPUS} --model some/body", "run `hf download some/body`"),
    BadInputCase("a model that is no name", f"{SAMPLE_WITH_CORPUS} --model ../../x", "neither a folder nor a hub id"),
    BadInputCase("an encoder without a network", f"{DENSE}-to/no-where", "run `hf download"),
    BadInputCase("an encoder with code of its own", DENSE, ("embedding_model 'dense'", "evil.Evil"), {
        "dense/modules.json": '[{"name": "0", "path": "", "type": "evil.Evil"}]',
        "dense/evil.py": "open('was-run', 'w')",
        "dense/config.json": "{}",
    }),
    BadInputCase("an encoder of nothing", DENSE, "'dense' could not be loaded", {"dense/config.json": "{}"}),
    BadInputCase("an encoder that is a pipe", DENSE, "not a regular file", {
        "dense/config.json": "{}", "dense/tokenizer.json": pipe,
    }),
    BadInputCase("a model type in other letters", SAMPLE_COMMAND, "nearest: 'llada'", {CONFIG: {"model_type": "LLaDA"}}),
    BadInputCase("a config without its model type", SAMPLE_COMMAND, "config.json: the key 'model_type' is missing", {
        CONFIG: without("model_type")
    }),
    BadInputCase("a config without its vocabulary", SAMPLE_COMMAND, "the key 'vocab_size' is missing", {
        CONFIG: without("vocab_size")
    }),
    *(
        BadInputCase(f"{key} of {shown}", SAMPLE_COMMAND, f"{key}={shown}", {CONFIG: {key: value}})
        for key, value, shown in (
            ("rope_theta", 10**400, "1000"), ("rope_theta", 5e-324, "5e-324"), ("rms_norm_eps", 1e300, "1e+300"),
            ("num_key_value_heads", 3, "3 must divide num_attention_heads=4"), ("head_dim", 7, "7 must be even"),
        )
    ),
    BadInputCase("a scaling by a number of 400 digits", SAMPLE_COMMAND, "must be a number above 0", {
        CONFIG: llama(rope_scaling={"rope_type": "linear", "factor": 10**400})
    }),
    BadInputCase("rotary positions as a text", SAMPLE_COMMAND, "rope_parameters='x' must be", {CONFIG: llama(rope_parameters="x")}),
    BadInputCase("positions of half a head", SAMPLE_COMMAND, "partial_rotary_factor=0.5", {CONFIG: llama(partial_rotary_factor=0.5)}),
    BadInputCase("positions of half a head, as newer folders say it", SAMPLE_COMMAND, "partial_rotary_factor=0.5", {
        CONFIG: llama(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})
    }),
    BadInputCase("layers that see a window", SAMPLE_COMMAND, "layer_types may be", {
        CONFIG: llama(layer_types=["full_attention", "sliding_attention"])
    }),
    BadInputCase("a canvas of a billion", "sample Who? --model model --corpus corpus.jsonl", "max_new_tokens=1000000000", {
        CONFIG: {"canvas_length": 10**9, "max_position_embeddings": 10**12}
    }),
    BadInputCase("a mask that ends texts", SAMPLE_COMMAND, "mask_token_id=257 is a token that ends", {CONFIG: {"mask_token_id": 257}}),
    *(
        BadInputCase(f"{path} that git has not fetched", SAMPLE_COMMAND, f"{path} is a pointer of Git LFS", {path: POINTER})
        for path in (CONFIG, WEIGHTS, TOKENIZER, INDEX)
    ),
    *(
        BadInputCase(f"{path} as a link to nothing", SAMPLE_COMMAND, f"{path} is a link that leads to nothing", {path: link("gone")})
        for path in (CONFIG, WEIGHTS)
    ),
    BadInputCase("shards without their index", SAMPLE_COMMAND, "fetch model.safetensors.index.json", {
        WEIGHTS: None, "model/model-00001-of-00002.safetensors": header(b"{}")
    }),
    BadInputCase("weights of another program", SAMPLE_COMMAND, "there is model.gguf", {
        WEIGHTS: None, "model/model.gguf": b"GGUF"
    }),
    BadInputCase("an index of shards that were here before", SAMPLE_COMMAND, "remove the older one", {
        INDEX: '{"weight_map": {"norm.weight": "old.safetensors"}}', "model/old.safetensors": header(b"{}")
    }),
    BadInputCase("a shard with a name of 5,000 letters", SAMPLE_COMMAND, "the shard aaa", {
        INDEX: json.dumps({"weight_map": {"norm.weight": "a" * 5000}})
    }),
    BadInputCase("an adapter beside weights", SAMPLE_COMMAND, "model is an adapter: merge it", {"model/adapter_config.json": "{}"}),
    *(
        BadInputCase(f"{name} that is {what}", SAMPLE_COMMAND, f"model/{name}", {f"model/{name}": text})
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
        for what, text in (("a list", "[]"), ("no JSON", "{"))
    ),
    BadInputCase("a normalizer that doubles a letter 32 times", SAMPLE_COMMAND, "normalizer makes texts more than 1000 times", {
        TOKENIZER: replacements("normalizer", *[replace("o", "oo")] * 32)
    }),
    BadInputCase("a normalizer that puts a book before texts", SAMPLE_COMMAND, "normalizer makes texts more than 1000 times", {
        TOKENIZER: replacements("normalizer", {"type": "Prepend", "prepend": "x" * 10**6})
    }),
    BadInputCase("a decoder that writes books", SAMPLE_COMMAND, "decoder makes texts more than 1000 times", {
        TOKENIZER: replacements("decoder", BYTES, replace("a", "x" * 10**6))
    }),
    BadInputCase("a mask far behind the vocabulary", f"{TRAIN} train.objective=adapt", "has the id 3000000000", {
        CONFIG: without("mask_token_id"),
        TOKENIZER_CONFIG: {"mask_token": "far"},
        TOKENIZER: lambda path: path.write_text(path.read_text().replace('"W": 87', '"far": 3000000000, "W": 87')),
    }),
    BadInputCase("an encoder that is the root of all", f"{SAMPLE_COMMAND} retrieval.method=dense retrieval.embedding_model=/", (
        "/ is not a sentence-transformers model"
    )),
    BadInputCase("the folder around the model", f"{SAMPLE_WITH_CORPUS} --model .", "no config.json: did you mean model?"),
    BadInputCase("a file of the model", f"{SAMPLE_WITH_CORPUS} --model {CONFIG}", "is a file: name the folder that it is in"),
    *(
        BadInputCase(f"the hub id {name}", f"{SAMPLE_WITH_CORPUS} --model '{name}'", "neither a folder nor a hub id")
        for name in ("some/body else", "$(touch was-run)/y", "some/body@main", "a/..", "some--body/x", "a/b.")
    ),
    *(
        BadInputCase(f"the device {name}", f"{SAMPLE_COMMAND} model.device={name}", f"device={name} is not available here")
        for name in ("meta", "mps", "xla", "cpu:3", "cuda:-1", "hpu")
    ),
    BadInputCase("blocks of a length that nobody says", SAMPLE_COMMAND, "'block_size' is missing: set model.block_size", {
        CONFIG: blocks("sdar", block_size=None)
    }),
    BadInputCase("blocks of Fast-dLLM without their length", SAMPLE_COMMAND, "the key 'bd_size' is missing", {
        CONFIG: blocks("Fast_dLLM_Qwen", bd_size=None)
    }),
    *(
        BadInputCase(f"a block of {value!r}", SAMPLE_COMMAND, f"block_size={value!r} must be", {
            CONFIG: blocks("sdar", block_size=value)
        })
        for value in (-4, "4", True, 2.5)
    ),
    BadInputCase("a block of less than nothing", f"{SAMPLE_COMMAND} model.block_size=-1", "block_size=-1 must be"),
    BadInputCase("blocks from nowhere", SAMPLE_COMMAND, "block_grid='middle' must be one of prompt, canvas", {
        CONFIG: {"block_grid": "middle"}
    }),
    BadInputCase("biases that SDAR has not", SAMPLE_COMMAND, "attention_bias=True is not supported", {
        CONFIG: blocks("sdar", attention_bias=True)
    }),
    BadInputCase("a prompt that SDAR reads causally", SAMPLE_COMMAND, "use_regular_causal=True is not supported", {
        CONFIG: blocks("sdar", use_regular_causal=True)
    }),
    BadInputCase("a WeDLM of unknown ancestry", SAMPLE_COMMAND, "the key 'attention_bias' is missing", {CONFIG: blocks("wedlm")}),
    BadInputCase("a mask that neither config nor tokenizer knows", SAMPLE_COMMAND, "has not added '<|MASK|>': add the key", {
        CONFIG: blocks("sdar", mask_token_id=None),
        TOKENIZER_CONFIG: lambda path: path.write_text("{}"),
    }),
    BadInputCase("a mask that the tokenizer declares and lacks", SAMPLE_COMMAND, "has not added '<hole>', which it declares", {
        CONFIG: blocks("sdar", mask_token_id=None), TOKENIZER_CONFIG: {"mask_token": "<hole>"},
    }),
    BadInputCase("LLaDA2 without a tensor", SAMPLE_COMMAND, "the tensor model.word_embeddings.weight is missing", {CONFIG: llada2()}),
    *(
        BadInputCase(f"LLaDA2.2, as {key} says", SAMPLE_COMMAND, f"{key}=7 is of LLaDA2.2, which inserts and deletes", {
            CONFIG: llada2(**{key: 7})
        })
        for key in ("delete_token_id", "split_token_id", "expert_capacity")
    ),
    *(
        BadInputCase(f"LLaDA2 without {key}", SAMPLE_COMMAND, f"the key '{key}' is missing", {CONFIG: llada2(**{key: None})})
        for key in (
            "num_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace", "n_group",
            "topk_group", "routed_scaling_factor", "partial_rotary_factor",
        )
    ),
    *(
        BadInputCase(f"{family} with {key} of {value}", SAMPLE_COMMAND, f"{key}={value!r} is not supported", {
            CONFIG: make(**{key: value})
        })
        for family, make, key, value in (
            ("LLaDA2", llada2, "use_bias", True), ("LLaDA2", llada2, "norm_head", True),
            ("LLaDA2", llada2, "norm_topk_prob", False), ("LLaDA2", llada2, "score_function", "softmax"),
            ("LLaDA2", llada2, "moe_router_enable_expert_bias", False),
            ("LLaDA2", llada2, "rope_scaling", {"rope_type": "yarn"}),
            ("LLaDA-MoE", llada_moe, "norm_topk_prob", True), ("LLaDA-MoE", llada_moe, "clip_qkv", 8.0),
            ("LLaDA-MoE", llada_moe, "moe_router_score_function", "sigmoid"),
            ("LLaDA-MoE", llada_moe, "moe_router_enable_expert_bias", True),
            ("LLaDA-MoE", llada_moe, "router_num_group", 8),
            ("LLaDA-MoE", llada_moe, "routed_scaling_factor", 2.5),
        )
    ),
    *(
        BadInputCase(f"SDAR-MoE with {key} of {value}", SAMPLE_COMMAND, f"{key}={value!r} is not supported", {
            CONFIG: blocks("sdar_moe", **{key: value})
        })
        for key, value in (("decoder_sparse_step", 2), ("mlp_only_layers", [0]))
    ),
    *(
        BadInputCase(f"LLaDA2 with {key} of {value!r}", SAMPLE_COMMAND, says, {CONFIG: llada2(**{key: value})})
        for key, value, says in (
            ("num_experts", "8", "num_experts='8' must be"),
            ("num_experts", 9, "n_group=4 must divide num_experts=9"),
            ("num_experts", 4, "n_group=4 leaves groups of less than 2 experts"),
            ("topk_group", 5, "topk_group=5 is more than n_group=4"),
            ("num_experts_per_tok", 5, "num_experts_per_tok=5 is more than the 4"),
            ("moe_intermediate_size", 12, "moe_intermediate_size=12 must be a multiple of 8"),
            ("partial_rotary_factor", 0.4, "partial_rotary_factor=0.4 of head_dim=8 must be an even"),
            ("partial_rotary_factor", 1.5, "partial_rotary_factor=1.5 of head_dim=8 must be an even"),
            ("routed_scaling_factor", 1e300, "routed_scaling_factor=1e+300 must be"),
            ("num_shared_experts", "1", "shared_intermediate_size="),
            ("num_experts", 10**9, "too few for the 1000000000 experts"),
        )
    ),
    *(
        BadInputCase(f"LLaDA-MoE with layers {freq}", SAMPLE_COMMAND, says, {CONFIG: llada_moe(moe_layer_freq=freq)})
        for freq, says in (
            ([1, 0], "moe_layer_freq may be 0 for layers at the bottom"),
            (["x", 1], "moe_layer_freq may be 0"), ([0, 2], "moe_layer_freq may be 0"), (3, "moe_layer_freq may be 0"),
            ([1], "moe_layer_freq=[1] must have an entry for each layer"),
            ([0, 1], "the key 'dense_intermediate_size' is missing"),
        )
    ),
    *(
        BadInputCase(f"experts of our own that are {value!r}", SAMPLE_COMMAND, says, {CONFIG: {"experts": value}})
        for value, says in (
            ("many", "experts='many' must be"), ({"num_experts": 8}, "the key 'num_experts_per_tok' of experts"),
            ({"number": 8}, "experts has no key 'number' (nearest: 'num_experts')"),
        )
    ),
    BadInputCase("DiffusionGemma without its generation config", ASK_GEMMA, "has no generation_config.json", {GEMMA: gemma()}),
    BadInputCase("DiffusionGemma without a canvas", ASK_GEMMA, "the key 'canvas_length' is missing", {GEMMA: gemma() | {"canvas_length": None}}),
    *(
        BadInputCase(f"DiffusionGemma with {text}", ASK_GEMMA, says, {GEMMA: gemma(**text)})
        for text, says in (
            ({"layer_types": ["full_atention"] * 3}, "layer_types has 'full_atention', known are sliding_attention, full_attention (nearest: 'full_attention')"),
            ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
            ({"sliding_window": 1}, "sliding_window=1 must be at least 2"),
            ({"pad_token_id": None}, "the key 'pad_token_id' is missing"),
        )
    ),
    *(
        BadInputCase(f"DiffusionGemma whose generation config says {said}", ASK_GEMMA, says, {GEMMA: gemma(), "gemma/generation_config.json": said})
        for said, says in (
            ({"t_min": 2.0, "t_max": 1.0}, ("gemma/generation_config.json: `t_max` must be >=",)),
            ({"temperature": 1.0}, ("gemma/generation_config.json: Unexpected kwargs",)),
            ({"max_denoising_steps": 0}, ("`max_denoising_steps` must be a positive integer",)),
        )
    ),
    BadInputCase("DiffusionGemma without experts", ASK_GEMMA, "config.json: the model cannot be built", {GEMMA: gemma(num_experts=None), "gemma/generation_config.json": {}}),
    *(
        BadInputCase(f"DiffusionGemma and {words}", f"{ASK_GEMMA} {words}", says, {GEMMA: whole_gemma})
        for words, says in (
            ("decode.block_length=4", "block_length=4 has no effect on a model that denoises from uniform noise"),
            ("decode.copy_penalty=4", "copy_penalty=4.0 has no effect on a model that denoises from uniform noise"),
            ("decode.finished_block_context=no_evidence", "finished_block_context=no_evidence has no effect on a model that"),
            ("decode.commit_rule=threshold", "commit_rule=threshold has no effect on a model that"),
            ("decode.query_window=4", "query_window=4 has no effect"),
            ("decode.temperature=0.5", "temperature=0.5 has no effect"),
            ("decode.temperature_low=3", "temperature_low=3.0 is above temperature_high=0.8"),
            ("model.attn_implementation=varlen", "attn_implementation=varlen is not supported by a model of uniform noise"),
            ("model.evidence_layout=joint", "evidence_layout=joint is not supported by a model of uniform noise"),
            ("model.block_size=4", "block_size=4 has no effect on"),
            ("engine.prefix_cache_gib=1", "engine.prefix_cache_gib=1.0 has no effect"),
        )
    ),
    *(
        BadInputCase(f"a masked model and {name}", f"{SAMPLE_COMMAND} decode.{name}=1", (f"{name}=", "has no effect on a model that denoises from masks"))
        for name in ("temperature_high", "temperature_low", "convergence_steps", "stop_entropy")
    ),
    BadInputCase("a question that is an image", "sample --model model --corpus corpus.jsonl --questions asked.jsonl", "asked.jsonl, line 1: the question comes with an 'image', and only texts are answered", {"asked.jsonl": '{"id": "1", "image": "cat.png"}\n'}),
]  # fmt: skip
