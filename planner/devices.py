"""Device sheets: what a device sustains, for a roofline where nothing was measured.

Rates are what kernels reach, not what data sheets promise; each sheet names its sources. The
sheets are package data, so that a further device is a further entry and no code.
"""

import difflib
from functools import cache
from itertools import pairwise

import msgspec

from planner.errors import PlannerError
from planner.json_files import shipped_json

Curve = tuple[tuple[float, float], ...]
"""Points (x, y) with x rising; straight between them, level outside."""


def on_curve(curve: Curve, x: float) -> float:
    """The curve's value at x."""
    if x <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return curve[-1][1]


class DeviceSheet(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of device and the links between two of its kind.

    Args:
        memory_gib: what a process may take at most.
        bytes_per_s: reading weights in a matrix product of one row.
        attention_bytes_per_s: reading keys and values in a decode.
        gemm_flops: rate of matrix products by rows, where they are bound by arithmetic.
        gemm_flops_8bit: the same in fp8; empty where the device has none.
        attention_flops: rate of causal prefill attention by length (half a square is computed).
        gemm_floor_s, attention_floor_s: the shortest such kernel.
        all_reduce_s: by number of devices, seconds by bytes; empty where a ring over the link is
            all that is known.
        intra_bytes_per_s, inter_bytes_per_s: one pair's link within a node and across nodes.
        intra_handshake_s, inter_handshake_s: the smallest message over them.
    """

    name: str
    aliases: tuple[str, ...]
    memory_gib: float
    bytes_per_s: float
    attention_bytes_per_s: float
    gemm_flops: Curve
    gemm_flops_8bit: Curve
    attention_flops: Curve
    gemm_floor_s: float
    attention_floor_s: float
    all_reduce_s: dict[int, Curve]
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    intra_handshake_s: float
    inter_handshake_s: float
    sources: tuple[str, ...]

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * 2**30

    def gemm_rate(self, num_rows: float, compute_bits: int = 16) -> float:
        """Sustained FLOPS of a product with that many rows."""
        eight_bit = compute_bits == 8 and self.gemm_flops_8bit
        return on_curve(self.gemm_flops_8bit if eight_bit else self.gemm_flops, num_rows)

    def all_reduce(self, num_bytes: float, num_devices: int) -> float:
        """Seconds to sum that many bytes over devices of one node."""
        if num_devices == 1:
            return 0.0
        curve = self._nearest_table(num_devices)
        return _along(curve, num_bytes) if curve else self._ring(num_bytes, num_devices)

    def _nearest_table(self, num_devices: int) -> Curve | None:
        """The table of the next larger group: 3 devices take what 4 do."""
        groups = [n for n in sorted(self.all_reduce_s) if n >= num_devices]
        return self.all_reduce_s[groups[0]] if groups else None

    def _ring(self, num_bytes: float, num_devices: int) -> float:
        """2 (n - 1) messages of a 1/n-th each, one after the other."""
        rounds = 2 * (num_devices - 1)
        message_s = num_bytes / num_devices / self.intra_bytes_per_s
        return rounds * (self.intra_handshake_s + message_s)


def _along(curve: Curve, x: float) -> float:
    """Like `on_curve`, and beyond the last point on along the last segment."""
    (x0, y0), (x1, y1) = curve[-2:]
    return y1 + (y1 - y0) * (x - x1) / (x1 - x0) if x > x1 else on_curve(curve, x)


@cache
def device_sheets() -> dict[str, DeviceSheet]:
    """All sheets by name."""
    sheets = shipped_json("planner", "devices.json", tuple[DeviceSheet, ...])
    return {sheet.name: sheet for sheet in sheets}


def device_sheet(name: str) -> DeviceSheet:
    """A sheet by its name or an alias; PlannerError lists what there is."""
    wanted = name.lower().replace("_", "-")
    for sheet in device_sheets().values():
        if wanted == sheet.name or wanted in sheet.aliases:
            return sheet
    known = list(device_sheets())
    close = difflib.get_close_matches(wanted, known, n=2)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise PlannerError(f"unknown device {name!r}: {hint}known are {', '.join(known)}")
