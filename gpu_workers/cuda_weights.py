"""Weights on their way to a GPU: heads padded to a width that attention is compiled for.

A padded head has zeros in the rows of q, k and v beyond its own, and zeros in the columns of the
output projection that meet them: nothing of the padding ever reaches the residual stream.
"""

import re

import torch
import torch.nn.functional as F

from gpu_workers.weights import Cut, WeightSource

HEAD_ROWS = re.compile(r"\.self_attn\.[qkv]_proj\.(weight|bias)$")
HEAD_COLUMNS = re.compile(r"\.self_attn\.(o|out)_proj\.weight$")


class DeviceWeights:
    """A `WeightSource` whose tensors are on a device, with heads of `stored` elements.

    Args:
        source: gives them on the host, with heads of `head_dim`.
    """

    def __init__(
        self, source: WeightSource, device: torch.device, *, head_dim: int, stored: int
    ) -> None:
        self._source = source
        self._device = device
        self._head_dim, self._stored = head_dim, stored

    def take(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        found = self._source.take(name, cut).to(self._device)
        if self._head_dim == self._stored:
            return found
        if HEAD_ROWS.search(name):
            return self._pad_rows(found)
        if HEAD_COLUMNS.search(name):
            return self._pad_rows(found.t()).t().contiguous()
        return found

    def _pad_rows(self, found: torch.Tensor) -> torch.Tensor:
        """(heads * head_dim, ...) -> (heads * stored, ...)"""
        width = found[0].numel()  # 1 for a bias
        heads = found.reshape(-1, self._head_dim, width)
        longer = F.pad(heads, (0, 0, 0, self._stored - self._head_dim))
        return longer.reshape(-1, *found.shape[1:])
