"""A node's status as tables for people.

Each fits 80 columns; no cell is read as markup.
"""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from daemon.admin_views import InstanceStatus, NodeState, Status

_COLOURS = {
    NodeState.STARTING: "yellow",
    NodeState.READY: "green",
    NodeState.DEGRADED: "red",
    NodeState.DRAINING: "yellow",
}


def tables_of(status: Status) -> list[Table]:
    """The node, its instances as processes, and what they have to do; the workers of instances
    that have several. Each fits 80 columns."""
    instances = status.instances
    tables = [_node_table(status), process_table(instances), load_table(instances)]
    parallel = [instance for instance in instances if len(instance.workers) > 1]
    return [*tables, worker_table(parallel)] if parallel else tables


def _node_table(status: Status) -> Table:
    table = Table.grid(padding=(0, 2))
    requests = ", ".join(f"{count} {phase}" for phase, count in status.requests.items() if count)
    table.add_row("node", Text(status.state, style=_COLOURS[status.state]))
    table.add_row("model", Text(status.model))
    table.add_row("version", Text(f"{status.version}, process {status.pid}"))
    table.add_row("up", _duration(status.uptime_s))
    table.add_row("requests", Text(requests or "none"))
    return table


def process_table(instances: tuple[InstanceStatus, ...]) -> Table:
    """Processes are the leaders'."""
    table = table_of("instance", "role", "state", "pid", "restarts", "last exit", "kernels")
    for instance in instances:
        add_row(
            table,
            instance.name,
            instance.role,
            instance.state,
            instance.pid or "-",
            instance.restarts,
            instance.last_exit or "-",
            instance.kernels or "-",
        )
    return table


def worker_table(instances: Sequence[InstanceStatus]) -> Table:
    table = table_of("instance", "tp", "pp", "stage", "tp rank", "device", "pid")
    for instance in instances:
        for worker in instance.workers:
            add_row(
                table,
                instance.name,
                instance.tp,
                instance.pp,
                worker.stage,
                worker.tp_rank,
                worker.device,
                worker.pid,
            )
    return table


def load_table(instances: tuple[InstanceStatus, ...]) -> Table:
    table = table_of(
        "instance",
        "queue",
        "wait",
        "run",
        "blocks used/held/all",
        "steps P/D",
        "tokens P/D",
        "pulls",
    )
    for instance in instances:
        blocks = instance.blocks
        add_row(
            table,
            instance.name,
            instance.queue_tokens,
            instance.waiting,
            instance.running,
            f"{blocks.in_use}/{blocks.held}/{blocks.total}",
            f"{instance.prefill_steps}/{instance.decode_steps}",
            f"{instance.prefill_tokens}/{instance.decode_tokens}",
            instance.pulls,
        )
    return table


def table_of(*columns: str) -> Table:
    return Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")


def add_row(table: Table, *cells: object) -> None:
    # Text: no cell is read as markup, whatever a worker wrote into it.
    table.add_row(*(Text(str(cell)) for cell in cells))


def block_table(instances: Sequence[InstanceStatus]) -> Table:
    """The books of each pool."""
    table = table_of("instance", "role", "blocks", "free", "held", "in use", "used")
    for instance in instances:
        blocks = instance.blocks
        share = (blocks.held + blocks.in_use) / blocks.total if blocks.total else 0.0
        add_row(
            table,
            instance.name,
            instance.role,
            blocks.total,
            blocks.free,
            blocks.held,
            blocks.in_use,
            f"{share:.1%}",
        )
    return table


def detail_tables(instance: InstanceStatus) -> list[Table]:
    """All that is known of one."""
    grid = Table.grid(padding=(0, 2))
    for name in instance.__struct_fields__:
        value = getattr(instance, name)
        if name not in ("workers", "blocks"):
            grid.add_row(
                Text(name.replace("_", " ")), Text("-" if value in (None, "") else str(value))
            )
    return [grid, block_table([instance]), worker_table([instance])]


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}"
    return f"{days} d {clock}" if days else clock
