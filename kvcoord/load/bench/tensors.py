"""The peer of copies: torch indexing over the same memory. The only part of `bench copy` that needs torch."""

import warnings
from collections.abc import Sequence

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

from kvcoord.memory.pages import PageMemory


class TensorCopy:
    """One `destination[:, there] = source[:, here]` over tensors of (layer, page, byte). Layer-first layouts only."""

    def __init__(self, source: PageMemory, destination: PageMemory, here: Sequence[int], there: Sequence[int]) -> None:
        torch.set_num_threads(1)
        self._source, self._destination = _tensor(source), _tensor(destination)
        self._here, self._there = torch.tensor(here), torch.tensor(there)

    def run(self) -> None:
        self._destination[:, self._there] = self._source[:, self._here]


def _tensor(memory: PageMemory) -> torch.Tensor:
    geometry = memory.geometry
    flat = torch.frombuffer(memory.buffer(), dtype=torch.uint8, count=memory.size_bytes)
    return flat.view(geometry.layer_count, memory.capacity, geometry.page_bytes)
