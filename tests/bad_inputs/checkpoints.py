"""Checkpoint folders, tokenizers, chat templates, dense models."""

import json
import os
import struct
from pathlib import Path

from tests.bad_inputs import ABSENT, SAMPLE_COMMAND, SAMPLE_WITH_CORPUS, table
from tests.support.tiny_diffusion_gemma import TEXT, VISION, write_tiny_gemma

CONFIG, WEIGHTS, TOKENIZER = "model/config.json", "model/model.safetensors", "model/tokenizer.json"
TOKENIZER_CONFIG, GENERATION = "model/tokenizer_config.json", "model/generation_config.json"
INDEX = "model/model.safetensors.index.json"
ASK_GEMMA = "sample 'Who wrote Emma?' --model gemma --corpus corpus.jsonl"
DENSE = f"{SAMPLE_COMMAND} retrieval.method=dense retrieval.embedding_model="
# What makes a config of that family of the tiny model's.
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-6}
LLADA = {
    "model_type": "llada", "n_heads": 4, "d_model": 32, "n_layers": 2, "mlp_hidden_size": 64,
    "max_sequence_length": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
SDAR = LLAMA | {"model_type": "sdar", "block_size": 4}
LLADA2 = LLAMA | {
    "model_type": "llada2_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5,
}  # fmt: skip
LLADA_MOE = LLAMA | {  # the public one calls itself llada
    "model_type": "llada", "num_experts": 8, "num_experts_per_tok": 2, "expert_intermediate_size": 16,
    "moe_layer_freq": [1, 1], "qk_layernorm": True,
}  # fmt: skip
GEMMA = {
    "model_type": "diffusion_gemma", "canvas_length": 12, "text_config": TEXT,
    "vision_config": VISION | {"model_type": "gemma4_vision"},
}  # fmt: skip
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4920\n"
OVERLAPPING = {
    name: {"dtype": "F32", "shape": [2], "data_offsets": [start, start + 8]}
    for name, start in (("a", 0), ("b", 4))
}
DOUBLE_O = {"type": "Replace", "pattern": {"String": "o"}, "content": "oo"}
BOOK_FOR_A = {"type": "Replace", "pattern": {"String": "a"}, "content": "x" * 10**6}


def make_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_hole(path: Path) -> None:
    """A file of 300 MB that takes no room."""
    with path.open("wb") as file:
        file.truncate(300 << 20)


def make_broken_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("gone")


def change_tensor(name, change):
    """A function that gives a tensor of a file other contents, made of the old ones."""

    def apply(path: Path) -> None:
        from safetensors.torch import load_file, save_file

        found = load_file(path)
        save_file(found | {name: change(found[name])}, path)

    return apply


def add_token(path: Path) -> None:
    """One more row for the weights of the vocabulary."""
    for name in ("embed_tokens.weight", "lm_head.weight"):
        change_tensor(name, lambda old: old[[*range(len(old)), 0]])(path)


def change_text(old: str, new: str):
    return lambda path: path.write_text(path.read_text().replace(old, new))


def header(text: bytes, length: int | None = None) -> bytes:
    """A safetensors file of nothing but a header."""
    return struct.pack("<Q", len(text) if length is None else length) + text


CASES = [
    *table(SAMPLE_COMMAND, *(
        (says, {CONFIG: content}) for says, content in (
            ("'secret' model", {"model_type": "secret"}),
            ("code of its own that is never executed", {"model_type": "secret", "auto_map": {"AutoModel": "evil.M"}}),
            ("is a '['llama']' model", {"model_type": ["llama"]}),
            ("nearest: 'llada'", {"model_type": "LLaDA"}),
            ("config.json: the key 'model_type' is missing", {"model_type": ABSENT}),
            ("config.json: the file is not JSON", "[" * 100_000),
            ("config.json: the file is not JSON", "9" * 5000),
            ("the key 'a' occurs a second time", '{"a": 1, "a": 2}'),
            ("config.json: the file is not UTF-8", b"\xff\xfe{}"),
            ("config.json is not a regular file", make_pipe),
            ("config.json is not a regular file", make_folder),
            ("config.json is larger than", make_hole),
            ("for 10000000 layers", {"num_hidden_layers": 10**7}),
            ("num_attention_heads='4' must be a whole", LLAMA | {"num_attention_heads": "4"}),
            ("has shape [64, 32], its config asks for [65, 32]", {"intermediate_size": 65}),
            ("num_attention_heads=0 must be", {"num_attention_heads": 0}),
            ("evidence_layout=jiont must be", {"evidence_layout": "jiont"}),
            *((f"mask_token_id={token} ", {"mask_token_id": token}) for token in (-1, 9999)),
            ("mask_token_id=257 is a token that ends", {"mask_token_id": 257}),
            *(("must be ids from 0", {"eos_token_id": value}) for value in (1.5, 258, True)),
            *(
                (f"{key}={shown}", f'{{"model_type": "dlm_rag", "vocab_size": 258, "{key}": {value}}}')
                for key, value, shown in (
                    ("rms_norm_eps", "NaN", "nan must be"), ("rope_theta", '"x"', "x must be"),
                    ("rope_theta", "1" + "0" * 400, "1000"),
                )
            ),
            ("type 'dynamic' is not supported", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
            ("gives no rotary positions", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}}),
            ("layer_types may be", LLAMA | {"layer_types": ["full_attention", "sliding_attention"]}),
            ("tie_word_embeddings=no must be", LLADA | {"weight_tying": "no"}),
            ("canvas_length=0.5 must be", {"canvas_length": 0.5}),
            ("noise={'steps': 4} is not supported", {"noise": {"steps": 4}}),
            # Attention in blocks.
            ("'block_size' is missing: set model.block_size", SDAR | {"block_size": None}),
            *((f"block_size={value} must be", SDAR | {"block_size": value}) for value in (-4, True)),
            ("attention_bias=True is not supported", SDAR | {"attention_bias": True}),
            # Experts.
            ("the tensor model.word_embeddings.weight is missing", LLADA2),
            ("(7, 999999) are not in the vocabulary", LLADA2 | {"delete_token_id": 7, "split_token_id": 999_999}),
            ("the key 'num_experts_per_tok' is missing", LLADA2 | {"num_experts_per_tok": None}),
            *(
                (f"{key}={value!r} is not supported", family | {key: value})
                for family, key, value in (
                    (LLADA2, "score_function", "softmax"), (LLADA_MOE, "clip_qkv", 8.0),
                    (SDAR | {"model_type": "sdar_moe"}, "mlp_only_layers", [0]),
                )
            ),
            *(
                (says, LLADA2 | {key: value})
                for key, value, says in (
                    ("num_experts", "8", "num_experts=8 must be"),
                    ("num_experts", 9, "n_group=4 must divide num_experts=9"),
                    ("num_experts", 10**9, "too few for 1000000000 experts"),
                )
            ),
            ("moe_layer_freq=[1] must have an entry for each layer", LLADA_MOE | {"moe_layer_freq": [1]}),
        )
    )),
    *table(SAMPLE_COMMAND,
        ("generation_config.json: eos_token_id=999", {GENERATION: '{"eos_token_id": 999}'}),
        ("has not added '<|MASK|>': add the key", {CONFIG: SDAR | {"mask_token_id": None}, TOKENIZER_CONFIG: "{}"}),
        *((f"{path} is a pointer of Git LFS", {path: POINTER}) for path in (CONFIG, WEIGHTS)),
        *((f"{path} is a link that leads to nothing", {path: make_broken_link}) for path in (CONFIG, WEIGHTS)),
        ("does not name its base_model_name_or_path", {"model/adapter_config.json": "{}"}),
        ("cannot be merged into its base .", {
            "model.safetensors": header(b"{}"),
            "model/adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": ".", "r": 1, "lora_alpha": 1},
        }),
        # Weights.
        *(
            ("not a complete safetensors file", {WEIGHTS: content})
            for content in (b"", header(b"{}", 2**60), header(json.dumps(OVERLAPPING).encode()) + bytes(12))
        ),
        ("model.safetensors is not a regular file", {WEIGHTS: make_pipe}),
        ("mask_token_id=258 is not a token", {CONFIG: {"mask_token_id": 258, "vocab_size": 259}, WEIGHTS: add_token}),
        ("norm.weight has the type I16", {WEIGHTS: change_tensor("norm.weight", lambda old: old.short())}),
        ("pickled", {WEIGHTS: None, "model/pytorch_model.bin": b"\x80\x04"}),
        ("GGUF is not read: take the model's own safetensors", {WEIGHTS: None, "model/model.gguf": b"GGUF"}),
        *(
            ((says, "model.quantize=int8 for less memory"), {CONFIG: {"quantization_config": config}, **files})
            for says, config, files in (
                ("{'quant_method': 'gptq', 'bits': 4} is not read", {"quant_method": "gptq", "bits": 4}, {}),
                ("q_proj.weight has the type I8", {"quant_method": "fp8"}, {
                    WEIGHTS: change_tensor("layers.0.self_attn.q_proj.weight", lambda old: old.char()),
                }),
            )
        ),
        ("fetch model.safetensors.index.json",
         {WEIGHTS: None, "model/model-00001-of-00002.safetensors": header(b"{}")}),
        ("remove the older one",
         {INDEX: '{"weight_map": {"norm.weight": "old.safetensors"}}', "model/old.safetensors": header(b"{}")}),
        *(
            (says, {INDEX: json.dumps({"weight_map": {"norm.weight": name}})})
            for says, name in (
                ("index.json names '../corpus.jsonl'", "../corpus.jsonl"), ("index.json names '/dev/zero'", "/dev/zero"),
                ("the shard model-00002-of-00002", "model-00002-of-00002.safetensors"), ("the shard aaa", "a" * 5000),
            )
        ),
        # Tokenizers and chat templates.
        ("tokenizer.json is not a regular file", {TOKENIZER: make_pipe}),
        ("makes no tokens of the question", {TOKENIZER: {"model": {"vocab": {f"unused{n}": n for n in range(256)}}}}),
        ("gives the id 9087, but the model has 258", {TOKENIZER: change_text('"W": 87', '"W": 9087')}),
        *(
            (f"{part} makes texts more than 1000 times", {TOKENIZER: {part: {"type": "Sequence", f"{part}s": rules}}})
            for part, rules in (("normalizer", [DOUBLE_O] * 32), ("decoder", [{"type": "Fuse"}, BOOK_FOR_A]))
        ),
        *(
            (f"model/{name}", {f"model/{name}": text})
            for name, text in (("tokenizer_config.json", "[]"), ("added_tokens.json", "{"))
        ),
        ("is not a regular file", {"model/chat_template.jinja": make_pipe}),
        ("chat template must show", {"model/chat_template.jinja": "hello"}),
        *(
            (f"chat template{says}", {TOKENIZER_CONFIG: {"chat_template": template}})
            for says, template in (("", 7), (" cannot be rendered: no", "{{ raise_exception('no') }}"))
        ),
    ),
    *table(SAMPLE_COMMAND,
        *(
            (f"{name} has {says}", words, {WEIGHTS: change_tensor(name, change)})
            for name, says, words, change in (
                ("norm.weight", "only zeros", "", lambda old: old * 0),
                ("layers.1.mlp.up_proj.weight", "values that are not finite in float32", "", lambda old: old / 0),
                ("layers.0.mlp.up_proj.weight", "values that are not finite in float16", "model.dtype=float16",
                 lambda old: old * 1e9),
            )
        ),
        loads=True,
    ),
    *table("sample Who? --model model --corpus corpus.jsonl",
        ("max_new_tokens=1000000000", {CONFIG: {"canvas_length": 10**9, "max_position_embeddings": 10**12}}),
    ),
    *table("train --out run --model model train.objective=pretrain",
        ("has the id 3000000000", {
            CONFIG: {"mask_token_id": ABSENT}, TOKENIZER_CONFIG: {"mask_token": "far"},
            TOKENIZER: change_text('"W": 87', '"far": 3000000000, "W": 87'),
        }),
        ("names no end token: add eos_token_id", {CONFIG: {"eos_token_id": ABSENT}, TOKENIZER_CONFIG: {"eos_token": ABSENT}}),
    ),
    *table(f"{SAMPLE_WITH_CORPUS} --model",
        ("run `hf download some/body`", "some/body"),
        ("no config.json: did you mean model?", "."),
        ("is a file: name the folder that it is in", CONFIG),
        *(("neither a folder nor a hub id", f"'{name}'") for name in ("../../x", "$(touch was-run)/y", "a/..")),
    ),
    *table(f"{DENSE}dense",
        (("embedding_model 'dense'", "evil.Evil"), {
            "dense/modules.json": '[{"name": "0", "path": "", "type": "evil.Evil"}]',
            "dense/evil.py": "open('was-run', 'w')", "dense/config.json": "{}",
        }),
        ("not a regular file", {"dense/config.json": "{}", "dense/tokenizer.json": make_pipe}),
    ),
    *table(SAMPLE_COMMAND,
        ("run `hf download", "retrieval.method=dense retrieval.embedding_model=not-to/no-where"),
    ),
    # DiffusionGemma, whose weights must not be reached.
    *table(ASK_GEMMA, *(
        (says, {"gemma/config.json": GEMMA | top | {"text_config": TEXT | text}, "gemma/generation_config.json": said})
        for says, top, text, said in (
            ("has no generation_config.json", {}, {}, lambda path: None),
            ("the key 'canvas_length' is missing", {"canvas_length": None}, {}, "{}"),
            ("layer_types has 'full_atention', known are sliding_attention, full_attention (nearest: 'full_attention')",
             {}, {"layer_types": ["full_atention"] * 3}, "{}"),
            ("config.json: the model cannot be built", {}, {"num_experts": None}, "{}"),
            ("gemma/generation_config.json: `t_max` must be >=", {}, {}, '{"t_min": 2.0, "t_max": 1.0}'),
        )
    )),
    *table(ASK_GEMMA, *(
        (says, f"{key}={value}", {"gemma/config.json": lambda path: write_tiny_gemma(path.parent)})
        for key, value, says in (
            ("decode.block_length", 4, "block_length=4 has no effect on a model that denoises from uniform noise"),
            ("decode.commit_rule", "threshold", "commit_rule=threshold has no effect on a model that"),
            ("model.attn_implementation", "varlen", "=varlen has no effect on a model that denoises from"),
            ("model.quantize", "int8", "quantize=int8 has no effect on a model that denoises from uniform noise"),
        )
    )),
]  # fmt: skip
