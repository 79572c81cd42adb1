"""Passage vectors in files: float32, float16, int8 with a scale each, or a flat index of FAISS."""

import numpy as np
import torch
from torch import Tensor

from dlm_rag.errors import CorpusError
from dlm_rag.files.paths import resolve_regular_file

FAISS_FLAT_KINDS = (b"IxFI", b"IxF2", b"IxFl")  # inner product, squared distance, either
# What follows the kind: width, count, two numbers without use, whether it is trained, metric, and how many
# float32 there are.
_FAISS_HEADER = np.dtype(
    [("kind", "S4"), ("width", "<i4"), ("count", "<i8"), ("unused", "<i8", 2), ("trained", "?"),
     ("metric", "<i4"), ("floats", "<u8")]
)  # fmt: skip
UNIT_LENGTH_TOLERANCE = 0.01
SAMPLED_ROWS = 1024  # whose length is looked at


def describe_rows(dtype: str, width: int) -> tuple[np.dtype, tuple[int, ...]]:
    """The type of the numbers of a file of vectors, and the shape of a row of it."""
    if dtype == "int8":
        return np.dtype([("codes", "i1", (width,)), ("scale", "<f4")]), ()
    return np.dtype({"float32": "<f4", "float16": "<f2"}[dtype]), (width,)


def pack_rows(vectors: Tensor, dtype: str) -> np.ndarray:
    """Rows of a file from vectors (n, width) float32."""
    kind, shape = describe_rows(dtype, vectors.shape[1])
    values = vectors.cpu().numpy()
    if dtype != "int8":
        return values.astype(kind)
    rows = np.empty((len(values), *shape), kind)
    rows["scale"] = np.abs(values).max(1) / 127
    rows["codes"] = np.rint(values / np.maximum(rows["scale"], 1e-30)[:, None])
    return rows


class PassageVectors:
    """Rows of a file, by number, as float32. On a CPU the file is mapped, and pages come and go."""

    def __init__(self, rows: np.ndarray, device: torch.device) -> None:
        packed = rows.dtype.names is not None
        self._values = torch.from_numpy(rows["codes"] if packed else rows)
        self._scales = torch.from_numpy(rows["scale"].copy()) if packed else None
        self._device = device
        if device.type == "cuda" and rows.nbytes < torch.cuda.mem_get_info(device)[0] // 2:
            self._values = self._values.to(device)

    def __len__(self) -> int:
        return len(self._values)

    def read(self, start: int, stop: int) -> Tensor:
        """Vectors (n, width) from `start` on and before `stop`, on the device."""
        found = self._values[start:stop].to(self._device).float()
        return found if self._scales is None else found * self._scales[start:stop, None].to(self._device)


def open_faiss_flat_index(name: str, width: int, count: int) -> np.ndarray:
    """The vectors (count, width) float32 of a flat index that FAISS has written, mapped.

    Raises `CorpusError` for another index, other numbers of passages or width, and vectors that are not of
    unit length, whose order by inner product is not that of similarity.
    """
    path, size = resolve_regular_file(name, "retrieval.faiss_index", CorpusError), _FAISS_HEADER.itemsize
    with path.open("rb") as file:
        head = np.frombuffer(file.read(size).ljust(size), _FAISS_HEADER)[0]
    if head["kind"] not in FAISS_FLAT_KINDS or head["metric"] not in (0, 1):
        raise CorpusError(f"{path} is no flat index of FAISS: name one that faiss.IndexFlatIP has written")
    if (head["width"], head["count"]) != (width, count):
        raise CorpusError(
            f"{path} has {head['count']:,} vectors of {head['width']} numbers, and does not belong to "
            f"{count:,} passages and an encoder of {width} numbers"
        )
    if head["floats"] != count * width or path.stat().st_size != size + 4 * count * width:
        raise CorpusError(f"{path} is incomplete: fetch it again, and join its parts in order")
    vectors = np.memmap(path, "<f4", "c", size, (count, width))
    lengths = np.linalg.norm(vectors[:: max(1, count // SAMPLED_ROWS)], axis=1)
    if not np.allclose(lengths, 1, atol=UNIT_LENGTH_TOLERANCE):
        raise CorpusError(f"{path} holds vectors that are not of unit length: normalise them first")
    return vectors
