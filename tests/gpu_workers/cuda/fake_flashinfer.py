"""FlashInfer with the real faces, on CPU tensors: as strict as the library and its kernels are.

It computes by torch from the very indptr, indices and last-page arguments it is given. Refused are:
calls that the real signature does not take, other element types, page tables on the wrong side,
keys and values of unequal strides, a run without a plan, a plan while the copy of the one before
may be under way, a plan inside a capture, fixed buffers and workspaces that are too small, kernels
over no rows, of too many threads, or off the edges of whole vectors.
"""

from itertools import pairwise
from typing import Any

import torch

from tests.gpu_workers.cuda.faces import signature, stored
from tests.gpu_workers.cuda.fake_device import FakeDevice, UsedTooEarly
from tests.gpu_workers.cuda.flashinfer_checks import (
    Pages,
    attention_of,
    check_cache,
    check_pages,
    flat,
    gated,
    pages_of,
    require_16_bit,
    require_16_bit_type,
    require_int32,
    require_rows,
)
from tests.gpu_workers.cuda.flashinfer_planner import heads_of, partial_bytes

PLAN_BYTES = 8 << 20  # a wrapper's own workspace, until it is given another
VECTOR = 8  # 16-bit elements
BLOCK_THREADS = 1024


class FakeFlashInfer:
    """The library as a module would be, tied to a fake device's clock."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.__version__ = stored()["version"]
        self.calls: dict[str, int] = {}
        self.shapes: set[tuple[str, int, frozenset[str]]] = set()  # arguments by place, by name
        self.wrappers: list[_Wrapper] = []

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
        if keys.shape[1] * keys.shape[2] // VECTOR > BLOCK_THREADS:
            raise RuntimeError("AppendPagedKVCache failed with error: invalid configuration")
        indptr, indices, _ = pages
        size = own_keys.shape[2]

        def append() -> None:
            places = zip(owners.tolist(), positions.tolist(), strict=True)
            for token, (owner, position) in enumerate(places):
                page = int(indices[int(indptr[owner]) + position // size])
                own_keys[page, :, position % size] = keys[token]
                own_values[page, :, position % size] = values[token]
            self.device.watch(owners, positions, *pages)

        self.device.do(append)

    def apply_rope_with_cos_sin_cache_inplace(self, *given: Any, **named: Any) -> None:
        call = self.bind("apply_rope_with_cos_sin_cache_inplace", *given, **named)
        table, positions, size = call["cos_sin_cache"], call["positions"], call["head_size"]
        if table.dtype != torch.float32:
            raise ValueError("cos_sin_cache should be float32")
        assert call["is_neox"] is True, "halves rotate in our models"
        assert table.shape[1] // 2 % 8 == 0, "a half is not made of whole vectors"
        turned = (call["query"], call["key"])
        for tensor in turned:
            require_16_bit(tensor)

        def rotate() -> None:
            cos, sin = table[positions.long()][:, None].chunk(2, dim=-1)
            for tensor in turned:
                heads = tensor.view(len(tensor), -1, size)[..., : table.shape[1]]
                x1, x2 = heads.float().chunk(2, dim=-1)
                heads.copy_(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1))
            self.device.watch(positions, table)

        self.device.do(rotate)

    def silu_and_mul(self, *given: Any, **named: Any) -> torch.Tensor:
        call = self.bind("silu_and_mul", *given, **named)
        gate, up = call["input"].chunk(2, dim=-1)
        require_16_bit(gate)
        require_rows(gate)
        assert gate.shape[-1] % VECTOR == 0, "the second half must begin at a whole vector"
        out = call.get("out")
        if not isinstance(out, torch.Tensor):
            return gated(gate, up).to(gate.dtype)

        def multiply() -> None:
            out.copy_(gated(gate, up))
            self.device.watch(out)

        self.device.adopt(out)
        self.device.do(multiply)
        return out

    def rmsnorm(self, *given: Any, **named: Any) -> torch.Tensor:
        call = self.bind("rmsnorm", *given, **named)
        return self._norm(call["input"], call["weight"], call["eps"])

    def fused_add_rmsnorm(self, *given: Any, **named: Any) -> None:
        call = self.bind("fused_add_rmsnorm", *given, **named)
        x, residual = call["input"], call["residual"]
        assert x.is_contiguous(), "the result replaces the input"
        require_rows(x)
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
        self.partial_room, self.plan_room = len(workspace), PLAN_BYTES
        library.wrappers.append(self)
        assert self.settings["kv_layout"] == "HND"
        assert self.settings["backend"] == "fa2", "FA3 takes minutes to compile"
        self.planned_at = 0
        self.pages: Pages | None = None
        self.call: dict[str, Any] = {}

    def reset_workspace_buffer(self, *given: Any, **named: Any) -> None:
        call = self.library.bind(f"{self.name}.reset_workspace_buffer", self, *given, **named)
        partial, plan = call["float_workspace_buffer"], call["int_workspace_buffer"]
        assert partial.dtype == plan.dtype == torch.uint8
        assert not self.planned_at, "the plan that was made lies in the buffer before"
        self.partial_room, self.plan_room = len(partial), len(plan)

    def require_room(self, num_new: list[int], indptr: torch.Tensor) -> None:
        """For the partial results, and for a plan of some 30 bytes for each row."""
        num_pages = indptr.diff().tolist()
        shape, page_size = heads_of(self.call), self.call["page_size"]
        is_captured = self.settings["use_cuda_graph"] is True
        wanted = partial_bytes(num_new, num_pages, shape, page_size, is_captured=is_captured)
        if wanted > self.partial_room:
            raise RuntimeError(
                f"Buffer overflow when allocating memory for batch_prefill_tmp_v with size {wanted}"
            )
        assert 32 * sum(num_new) <= self.plan_room

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
        table = self.pages

        def mix() -> None:
            for row, (start, stop) in enumerate(pairwise(starts)):
                pages, last = pages_of(table, row)
                total = (len(pages) - 1) * plan["page_size"] + last
                own_keys, own_values = (flat(cache[pages], total) for cache in (keys, values))
                mixed = attention_of(
                    q[start:stop], own_keys, own_values, plan["sm_scale"], is_causal
                )
                out[start:stop] = mixed.to(out.dtype)
            self.device.watch(out, *table)

        self.device.adopt(out)
        self.device.do(mix)


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
            self.device.adopt(*buffers)
            assert len(buffers[0]) == len(buffers[2]) + 1

    def plan(self, *given: Any, **named: Any) -> None:
        call = self.library.bind(f"{self.name}.plan", self, *given, **named)
        pages = (call["indptr"], call["indices"], call["last_page_len"])
        self.take_plan(call, list(pages))
        check_pages(pages, call["page_size"])
        self.require_room([1] * len(pages[2]), pages[0])
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
        self.require_room(call["qo_indptr"].diff().tolist(), indptr)
        self.pages = (indptr.clone(), indices.clone(), last_page_len.clone())

    def run(self, *given: Any, **named: Any) -> torch.Tensor:
        call = self.library.bind(f"{self.name}.run", self, *given, **named)
        self.attend(call, self.starts, is_causal=True)
        out: torch.Tensor = call["out"]
        return out
