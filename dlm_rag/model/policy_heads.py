"""Policy heads: two small networks that decide what to commit and when to search.

They see a few numbers that the decoder has anyway (`decode/policy_features.py`), never hidden states: the
denoiser may stay frozen, and an update needs no pass of it (cf. arXiv 2512.09106). A fresh head is the rule
that training starts from: the soft commit threshold; to search nearly always.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dlm_rag.errors import CheckpointError, translate_failures
from dlm_rag.randomness import make_keyed_generator

HEADS_FILE = "heads.safetensors"
COMMIT_FEATURES = (
    "confidence", "distance", "lowest_left", "doubt_left", "left_written", "ends", "fresh_evidence", "step",
)  # fmt: skip
SEARCH_FEATURES = ("new_words", "new_share", "committed", "since_search", "lowest", "step")
_FEATURE_NAMES = {"commit": " ".join(COMMIT_FEATURES), "search": " ".join(SEARCH_FEATURES)}
HEAD_HIDDEN_SIZE = 16
HEADS_PREFIX = "heads."


class PolicyHead(nn.Module):
    """features (n, F) -> what is added (n,) to the logit of a yes; 0 at first.

    In float64: it is small, and decides the same alone and in a batch.
    """

    def __init__(self, features: Sequence[str]) -> None:
        super().__init__()
        self.inner = nn.Linear(len(features), HEAD_HIDDEN_SIZE, dtype=torch.float64)
        self.outer = nn.Linear(HEAD_HIDDEN_SIZE, 1, dtype=torch.float64)

    def forward(self, features: Tensor) -> Tensor:
        found: Tensor = self.outer(torch.tanh(self.inner(features))).squeeze(-1)
        return found


class PolicyHeads(nn.Module):
    """The head on commits and the head on searches."""

    def __init__(self) -> None:
        super().__init__()
        self.commit, self.search = PolicyHead(COMMIT_FEATURES), PolicyHead(SEARCH_FEATURES)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fresh weights, by a seed: the outer ones are 0."""
        for name, value in self.named_parameters():
            value.zero_()
            if name.endswith("inner.weight"):
                value.normal_(
                    0.0, value.shape[1] ** -0.5, generator=make_keyed_generator("heads", seed, name)
                )


def copy_heads_to_cpu(heads: PolicyHeads) -> PolicyHeads:
    """The heads as they are now, on the CPU, where decoding asks them row by row."""
    with torch.device("meta"):
        there = PolicyHeads()
    values = {name: value.detach().cpu() for name, value in heads.named_parameters()}
    there.load_state_dict(values, assign=True)
    return there.requires_grad_(False)


def save_heads(tensors: dict[str, Tensor], folder: Path) -> None:
    """Writes `heads.safetensors` from tensors by their names in a denoiser, where there are any."""
    named = {name.removeprefix(HEADS_PREFIX): value.contiguous() for name, value in tensors.items()}
    (folder / HEADS_FILE).unlink(missing_ok=True)
    if named:
        save_file(named, folder / HEADS_FILE, metadata={"format": "pt", **_FEATURE_NAMES})


def read_heads(folder: Path) -> PolicyHeads | None:
    """The heads in a checkpoint's folder, on the CPU, or None; raises `CheckpointError` for other ones."""
    path, heads = folder / HEADS_FILE, PolicyHeads()
    if not path.is_file():
        return None
    with translate_failures(CheckpointError, f"{path} is not a safetensors file"):
        with safe_open(path, framework="pt") as file:
            features = {key: (file.metadata() or {}).get(key) for key in _FEATURE_NAMES}
        found = load_file(path)
    shapes, wanted = ({n: x.shape for n, x in some.items()} for some in (found, heads.state_dict()))
    if shapes != wanted or features != _FEATURE_NAMES:
        raise CheckpointError(f"{path} is of another version: train the heads again, or remove the file")
    if not all(bool(value.isfinite().all()) for value in found.values()):
        raise CheckpointError(f"{path} has values that are not finite")
    heads.load_state_dict(found)
    return heads.requires_grad_(False)
