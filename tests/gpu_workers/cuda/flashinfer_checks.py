"""What FlashInfer's kernels ask of their arguments, and what they compute, by torch."""

import torch

Pages = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def check_cache(
    cache: object, layout: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What append and attention ask of a layer's keys and values."""
    assert layout == "HND"
    assert isinstance(cache, tuple), "a list of keys and values is no pair to the library"
    keys, values = cache
    assert keys.dtype == values.dtype == dtype
    if keys.stride() != values.stride():
        raise ValueError("k/v strides must be identical")
    assert keys.stride(-1) == 1, "rows must be runs"
    return keys, values


def check_pages(pages: Pages, page_size: int) -> None:
    indptr, indices, last_page_len = pages
    assert int(indptr[0]) == 0
    assert len(indices) == int(indptr[-1])
    assert bool((indptr.diff() > 0).all()), "every row has a page"
    assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())


def require_int32(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32, f"{tensor.dtype} is no index type"
        assert tensor.is_contiguous()


def require_rows(tensor: torch.Tensor) -> None:
    if not len(tensor):
        raise RuntimeError("Failed to launch kernel: invalid configuration argument")


def require_16_bit(tensor: torch.Tensor) -> None:
    require_16_bit_type(tensor.dtype)
    assert tensor.stride(-1) == 1, "rows must be runs"


def require_16_bit_type(dtype: torch.dtype) -> None:
    assert dtype in (torch.float16, torch.bfloat16), f"{dtype} is not a kernel's type"


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate.float()) * up.float()


def pages_of(pages: Pages, row: int) -> tuple[torch.Tensor, int]:
    indptr, indices, last_page_len = pages
    own = indices[int(indptr[row]) : int(indptr[row + 1])]
    return own.long(), int(last_page_len[row])


def flat(pages: torch.Tensor, total: int) -> torch.Tensor:
    """(n, heads, size, D) -> fp32 (heads, total, D)"""
    return pages.transpose(0, 1).flatten(1, 2)[:, :total].float()


def attention_of(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, is_causal: bool
) -> torch.Tensor:
    num_new, num_heads, _ = q.shape
    group = num_heads // len(keys)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) * scale  # (H, N, S)
    if is_causal:
        past = keys.shape[1] - num_new
        ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu_(past + 1)
        scores = scores.masked_fill(ahead, -torch.inf)
    return (scores.softmax(dim=-1) @ values).transpose(0, 1)
