"""FlashInfer with the real faces, on CPU tensors: as strict as the library and its kernels are.

It computes by torch from the very indptr, indices and last-page arguments it is given. Refused are:
calls that the real signature does not take, other element types, page tables on the wrong side,
keys and values of unequal strides, a run without a plan, a plan while the copy of the one before
may be under way, a plan inside a capture, and fixed buffers that are too small.
"""

from itertools import pairwise
from typing import Any

import torch

from tests.gpu_workers.cuda.faces import signature, stored
from tests.gpu_workers.cuda.fake_device import FakeDevice, UsedTooEarly

WORKSPACE_BYTES = 128 << 20
Pages = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class FakeFlashInfer:
    """The library as a module would be, tied to a fake device's clock."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.__version__ = stored()["version"]
        self.calls: dict[str, int] = {}
        self.shapes: set[tuple[str, int, frozenset[str]]] = set()  # arguments by place, by name

    def BatchDecodeWithPagedKVCacheWrapper(self, *given: Any, **named: Any) -> "_Decode":
        return _Decode(self, *given, **named)

    def BatchPrefillWithPagedKVCacheWrapper(self, *given: Any, **named: Any) -> "_Prefill":
        return _Prefill(self, *given, **named)

    def append_paged_kv_cache(self, *given: Any, **named: Any) -> None:
        call = self.bind("append_paged_kv_cache", *given, **named)
        keys, values = call["append_key"], call["append_value"]
        pages = tuple(call[f"kv_{name}"] for name in ("indptr", "indices", "last_page_len"))
        owners, positions = call["batch_indices"], call["positions"]
        require_int32(owners, positions, *pages)
        own_keys, own_values = check_cache(call["paged_kv_cache"], call["kv_layout"], keys.dtype)
        assert keys.stride(-1) == values.stride(-1) == 1, "rows must be runs"
        indptr, indices, _ = pages
        size = own_keys.shape[2]
        places = zip(owners.tolist(), positions.tolist(), strict=True)
        for token, (owner, position) in enumerate(places):
            page = int(indices[int(indptr[owner]) + position // size])
            own_keys[page, :, position % size] = keys[token]
            own_values[page, :, position % size] = values[token]
        self.device.watch(owners, positions, *pages)

    def apply_rope_with_cos_sin_cache_inplace(self, *given: Any, **named: Any) -> None:
        call = self.bind("apply_rope_with_cos_sin_cache_inplace", *given, **named)
        table, positions, size = call["cos_sin_cache"], call["positions"], call["head_size"]
        if table.dtype != torch.float32:
            raise ValueError("cos_sin_cache should be float32")
        assert call["is_neox"] is True, "halves rotate in our models"
        assert table.shape[1] // 2 % 8 == 0, "a half is not made of whole vectors"
        cos, sin = table[positions.long()][:, None].chunk(2, dim=-1)
        for tensor in (call["query"], call["key"]):
            require_16_bit(tensor)
            heads = tensor.view(len(tensor), -1, size)[..., : table.shape[1]]
            x1, x2 = heads.float().chunk(2, dim=-1)
            heads.copy_(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1))
        self.device.watch(positions, table)

    def silu_and_mul(self, *given: Any, **named: Any) -> torch.Tensor:
        call = self.bind("silu_and_mul", *given, **named)
        gate, up = call["input"].chunk(2, dim=-1)
        require_16_bit(gate)
        product = torch.nn.functional.silu(gate.float()) * up.float()
        out = call.get("out")
        if not isinstance(out, torch.Tensor):
            return product.to(gate.dtype)
        out.copy_(product)
        self.device.watch(out)
        return out

    def rmsnorm(self, *given: Any, **named: Any) -> torch.Tensor:
        call = self.bind("rmsnorm", *given, **named)
        return self._norm(call["input"], call["weight"], call["eps"])

    def fused_add_rmsnorm(self, *given: Any, **named: Any) -> None:
        call = self.bind("fused_add_rmsnorm", *given, **named)
        x, residual = call["input"], call["residual"]
        assert x.is_contiguous(), "the result replaces the input"
        residual.add_(x)
        x.copy_(self._norm(residual, call["weight"], call["eps"]))

    def bind(self, name: str, *given: Any, **named: Any) -> dict[str, Any]:
        """The call's arguments by the real signature's names, with its defaults (as text)."""
        self.calls[name] = self.calls.get(name, 0) + 1
        self.shapes.add((name, len(given), frozenset(named)))
        bound = signature(name).bind(*given, **named)
        bound.apply_defaults()
        self.device.tick()
        return dict(bound.arguments)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        require_16_bit(x)
        wide = x.float()
        scale = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
        return (wide * scale * weight.float()).to(x.dtype)


class _Wrapper:
    """What both wrappers have in common: a plan, its pinned memory, attention by the plan."""

    name: str

    def __init__(self, library: FakeFlashInfer, *given: Any, **named: Any) -> None:
        self.library, self.device = library, library.device
        self.settings = library.bind(f"{self.name}.__init__", self, *given, **named)
        workspace = self.settings["float_workspace_buffer"]
        assert workspace.dtype == torch.uint8
        assert len(workspace) >= WORKSPACE_BYTES
        assert self.settings["kv_layout"] == "HND"
        assert self.settings["backend"] == "fa2", "FA3 takes minutes to compile"
        self.planned_at = 0
        self.pages: Pages | None = None
        self.call: dict[str, Any] = {}

    def take_plan(self, call: dict[str, Any], host: list[torch.Tensor]) -> None:
        """Its plan goes through pinned memory that the last one's copy may still read."""
        if self.device.is_capturing:
            raise UsedTooEarly("a plan does not belong into a graph")
        if self.device.past < self.planned_at:
            raise UsedTooEarly("planned again before the last plan had gone to the device")
        require_int32(*host)
        require_16_bit_type(call["q_data_type"])
        assert call["kv_data_type"] == call["q_data_type"], "mixed types are another module"
        assert call["pos_encoding_mode"] == "'NONE'", "positions are ours"
        self.call = call
        self.planned_at = self.device.now

    def attend(self, call: dict[str, Any], starts: list[int], *, is_causal: bool) -> None:
        """Row by row, from the pages of the plan."""
        plan, out, q = self.call, call["out"], call["q"]
        assert self.pages is not None, "run without a plan"
        assert isinstance(out, torch.Tensor), "without `out`, each layer clears fresh memory"
        assert q.dtype == plan["q_data_type"]
        assert q.shape == out.shape
        assert q.shape[1] == plan["num_qo_heads"]
        assert len(q) == starts[-1], f"{len(q)} queries, {starts[-1]} planned"
        keys, values = check_cache(call["paged_kv_cache"], "HND", q.dtype)
        shape = (plan["num_kv_heads"], plan["page_size"], plan.get("head_dim_qk", q.shape[2]))
        assert keys.shape[1:] == values.shape[1:] == shape
        for row, (start, stop) in enumerate(pairwise(starts)):
            pages, last = _pages_of(self.pages, row)
            total = (len(pages) - 1) * plan["page_size"] + last
            own_keys, own_values = (_flat(cache[pages], total) for cache in (keys, values))
            mixed = _attention(q[start:stop], own_keys, own_values, plan["sm_scale"], is_causal)
            out[start:stop] = mixed.to(out.dtype)
        self.device.watch(out, *self.pages)


class _Decode(_Wrapper):
    name = "BatchDecodeWithPagedKVCacheWrapper"

    def __init__(self, library: FakeFlashInfer, *given: Any, **named: Any) -> None:
        super().__init__(library, *given, **named)
        assert self.settings["use_tensor_cores"] is True, "CUDA cores know few group sizes"
        names = ("indptr", "indices", "last_page_len")
        buffers = [self.settings[f"paged_kv_{name}_buffer"] for name in names]
        self.fixed: list[torch.Tensor] | None = None
        if self.settings["use_cuda_graph"] is True:
            require_int32(*buffers)
            self.fixed = buffers
            assert len(buffers[0]) == len(buffers[2]) + 1

    def plan(self, *given: Any, **named: Any) -> None:
        call = self.library.bind(f"{self.name}.plan", self, *given, **named)
        pages = (call["indptr"], call["indices"], call["last_page_len"])
        self.take_plan(call, list(pages))
        check_pages(pages, call["page_size"])
        if self.fixed is None:
            self.pages = (pages[0].clone(), pages[1].clone(), pages[2].clone())
            return
        indptr, indices, last_page_len = self.fixed
        if len(pages[2]) != len(last_page_len):
            raise ValueError("The batch size should be fixed in cudagraph mode")
        if len(pages[1]) > len(indices):
            raise ValueError("The size of indices should be less than or equal to the buffer")
        indptr.copy_(pages[0])
        last_page_len.copy_(pages[2])
        indices[: len(pages[1])].copy_(pages[1])
        self.pages = (indptr, indices, last_page_len)

    def run(self, *given: Any, **named: Any) -> torch.Tensor:
        call = self.library.bind(f"{self.name}.run", self, *given, **named)
        assert self.pages is not None, "run without a plan"
        self.attend(call, list(range(len(self.pages[2]) + 1)), is_causal=False)
        out: torch.Tensor = call["out"]
        return out


class _Prefill(_Wrapper):
    name = "BatchPrefillWithPagedKVCacheWrapper"

    def plan(self, *given: Any, **named: Any) -> None:
        call = self.library.bind(f"{self.name}.plan", self, *given, **named)
        names = ("indptr", "indices", "last_page_len")
        indptr, indices, last_page_len = (call[f"paged_kv_{name}"] for name in names)
        self.take_plan(call, [call["qo_indptr"], indptr, indices, last_page_len])
        check_pages((indptr, indices, last_page_len), call["page_size"])
        assert call["causal"] is True
        self.starts = call["qo_indptr"].tolist()
        assert len(self.starts) == len(indptr)
        self.pages = (indptr.clone(), indices.clone(), last_page_len.clone())

    def run(self, *given: Any, **named: Any) -> torch.Tensor:
        call = self.library.bind(f"{self.name}.run", self, *given, **named)
        self.attend(call, self.starts, is_causal=True)
        out: torch.Tensor = call["out"]
        return out


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


def require_16_bit(tensor: torch.Tensor) -> None:
    require_16_bit_type(tensor.dtype)
    assert tensor.stride(-1) == 1, "rows must be runs"


def require_16_bit_type(dtype: torch.dtype) -> None:
    assert dtype in (torch.float16, torch.bfloat16), f"{dtype} is not a kernel's type"


def _pages_of(pages: Pages, row: int) -> tuple[torch.Tensor, int]:
    indptr, indices, last_page_len = pages
    own = indices[int(indptr[row]) : int(indptr[row + 1])]
    return own.long(), int(last_page_len[row])


def _flat(pages: torch.Tensor, total: int) -> torch.Tensor:
    """(n, heads, size, D) -> fp32 (heads, total, D)"""
    return pages.transpose(0, 1).flatten(1, 2)[:, :total].float()


def _attention(
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
