"""A measured table, on the terminal."""

from rich.console import Console
from rich.table import Table

from ipc.profile_table import MixedPoint, ProfileTable
from ipc.vocabulary import DeviceKind

PATHS = {"local": "within a GPU", "peer": "from another GPU", "host": "through the host"}


def show(table: ProfileTable, console: Console) -> None:
    console.print(
        f"{table.model}{_shape(table)}, {table.dtype}, {table.kernels} kernels, "
        f"{table.num_threads} thread(s), {table.device}\n"
        f"L_m = [bold]{table.saturation_tokens}[/bold] tokens, "
        f"{table.kv_bytes_per_token:,} bytes of keys and values per token\n"
        f"{_spread(table)}; {_waited(table)}{_slowest(table)}{_path(table)}",
        highlight=False,
    )
    console.print(_prefill(table), _decode(table), _mixed(table), _transfer(table))


def _shape(table: ProfileTable) -> str:
    return f" at tp {table.tp}, pp {table.pp}" if table.tp * table.pp > 1 else ""


def _spread(table: ProfileTable) -> str:
    if table.spread == 0:
        return "no time to repeat steps often enough to know their spread"
    return f"repeated steps differ by {table.spread:.1%} (standard deviation)"


def _waited(table: ProfileTable) -> str:
    if table.device_kind is DeviceKind.CUDA:
        return f"the host waited for its core for {table.waited:.0%} of the time, which is counted"
    if table.tp * table.pp > 1:
        return (
            f"the leader waited for its core for {table.waited:.0%} of the time, which is counted"
        )
    return f"other programs had the core for {table.waited:.0%} of the time"


def _slowest(table: ProfileTable) -> str:
    if table.slowest_stage is None:
        return ""
    shares = table.slowest_stage
    return (
        f"\nthe slowest of {table.pp} stages takes {shares.prefill:.0%} of a prefill step and "
        f"{shares.decode:.0%} of a decode step"
    )


def _prefill(table: ProfileTable) -> Table:
    shown = Table("prompts", "tokens each", "ms", "tokens/s", title="prefill")
    for point in table.prefill:
        rate = f"{point.tokens_per_s:,.0f}"
        shown.add_row(str(point.num_prompts), str(point.num_tokens), _ms(point.ms), rate)
    return shown


def _decode(table: ProfileTable) -> Table:
    """A line per context, a column per batch."""
    batches = sorted({point.batch for point in table.decode})
    ms = {(point.batch, point.context): _ms(point.ms) for point in table.decode}
    shown = Table("context", *(f"batch {batch}" for batch in batches), title="decode, ms per step")
    for context in sorted({point.context for point in table.decode}):
        shown.add_row(str(context), *(ms.get((batch, context), "") for batch in batches))
    return shown


def _mixed(table: ProfileTable) -> Table:
    """A line per chunk, a column per batch and context beside it."""
    besides = sorted({(point.batch, point.context) for point in table.mixed})
    titles = [f"{batch} of {context}" if batch else "alone" for batch, context in besides]
    shown = Table("chunk", "cached", *titles, title="a chunk beside decodes, ms per step")
    for chunk in sorted({(point.num_new, point.num_cached) for point in table.mixed}):
        ms = {_beside(p): _ms(p.ms) for p in table.mixed if (p.num_new, p.num_cached) == chunk}
        shown.add_row(*map(str, chunk), *(ms.get(beside, "") for beside in besides))
    return shown


def _path(table: ProfileTable) -> str:
    told = PATHS.get(table.pull_path)
    return f"\npulls are {told}" if told else ""


def _ms(ms: float) -> str:
    """Steps of GPUs take single milliseconds, pulls parts of one."""
    return f"{ms:.{3 if ms < 1 else 2 if ms < 10 else 1}f}"


def _beside(point: MixedPoint) -> tuple[int, int]:
    return point.batch, point.context


def _transfer(table: ProfileTable) -> Table:
    shown = Table("tokens", "ms", "GB/s", title="pull from another pool")
    for point in table.transfer:
        num_bytes = point.num_tokens * table.kv_bytes_per_token
        shown.add_row(str(point.num_tokens), _ms(point.ms), f"{1e-6 * num_bytes / point.ms:.1f}")
    return shown
