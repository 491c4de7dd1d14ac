"""Figure 4: mean TTFT of two A100s under OPT-66B, by equations 1 to 3 and simulated.

One device does not hold OPT-66B, so the single device's prefill time D is a roofline's, and so
are the simulated steps: equations and simulation are of the same times, and must agree where the
equations hold.
"""

from ipc.vocabulary import Parallelism, Role
from planner.deployment import Group, Settings, service
from planner.devices import device_sheet
from planner.latency.choose import Knowledge
from planner.latency.interface import Chunk
from planner.latency.published import DEVICE, published_latency
from planner.latency.roofline import RooflineLatency
from planner.model_catalog import model_shape
from planner.queueing import crossover_rate, inter_op_ttft_s, intra_op_ttft_s
from planner.report.contents import Column, Drawing, Line, Origin, Page, Panel, Table
from planner.report.terms import Terms
from planner.simulator.run import simulate
from planner.simulator.service import Service
from planner.workload.catalogue import parse_workload

MODEL = "opt-66b"
PROMPT_TOKENS = 512
LOAD = "synthetic:512,1"
NUM_REQUESTS = 2_000
LOADS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4)  # R * D
SPEEDUPS = (1.2, 1.4, 1.6, 1.8, 1.95)


def figure_4(terms: Terms) -> Page:
    """Inter-op against intra-op, and what the speed-up K does."""
    single_s = _prefill_s(Parallelism())
    speedup = single_s / _prefill_s(Parallelism(2))
    rates = [load / single_s for load in LOADS if load < 0.95 * speedup]
    shapes = {"inter-op": Parallelism(1, 2), "intra-op": Parallelism(2, 1)}
    simulated = {
        name: [_simulated_s(_service(shape), rate, terms) for rate in rates]
        for name, shape in shapes.items()
    }
    panels = (_measured_panel(rates, single_s, speedup, simulated), _speedup_panel(single_s))
    return Page(
        "fig4",
        "Figure 4: two GPUs for prefill, OPT-66B, 512-token prompts",
        (
            "formula: equations 2 and 3 of the paper (M/D/1, no batching)",
            f"simulated: the same times, {NUM_REQUESTS} requests, {terms.runs}; the paper's "
            "figure prints no numbers",
        ),
        (_table(rates, single_s, speedup, simulated), _crossovers(single_s, speedup)),
        (Drawing("fig4", panels),),
        (
            "as in the paper, intra-op is better while prompts hardly wait and inter-op from the "
            "crossover on; equation 2 takes both stages as half of D, while the roofline's also "
            "send from stage to stage",
        ),
    )


def _table(
    rates: list[float], single_s: float, speedup: float, simulated: dict[str, list[float]]
) -> Table:
    """Each equation beside its simulation."""
    rows = tuple(
        (
            rate,
            inter_op_ttft_s(rate, single_s),
            inter_s,
            intra_op_ttft_s(rate, single_s, speedup),
            intra_s,
        )
        for rate, inter_s, intra_s in zip(
            rates, simulated["inter-op"], simulated["intra-op"], strict=True
        )
    )
    columns = (
        Column("requests/s", ".2f"),
        Column("inter-op, Eq. 2", ".3f"),
        Column("simulated", ".3f"),
        Column("intra-op, Eq. 3", ".3f"),
        Column("simulated", ".3f"),
    )
    title = f"mean TTFT, s; D = {single_s:.3f} s and K = {speedup:.2f} (roofline)"
    return Table(title, columns, rows)


def _crossovers(single_s: float, speedup: float) -> Table:
    """What K is by each source, and from which rate on stages win."""
    known = {f"K = {k:g}": k for k in SPEEDUPS}
    known[f"roofline, {MODEL} tp 1 to 2"] = speedup
    for model, tp in (("opt-13b", 1), ("opt-13b", 2), (MODEL, 2)):
        known[f"published, {model} tp {tp} to {2 * tp}"] = _published_speedup(model, tp)
    rows = tuple((name, k, crossover_rate(single_s, k)) for name, k in known.items())
    columns = (
        Column("speed-up of two devices"),
        Column("K", ".2f"),
        Column("inter-op wins from, requests/s", ".2f"),
    )
    return Table("crossover of equations 2 and 3", columns, rows)


def _measured_panel(
    rates: list[float], single_s: float, speedup: float, simulated: dict[str, list[float]]
) -> Panel:
    at = tuple(rates)
    inter = tuple(inter_op_ttft_s(rate, single_s) for rate in rates)
    intra = tuple(intra_op_ttft_s(rate, single_s, speedup) for rate in rates)
    lines = [
        Line("inter-op", Origin.FORMULA, at, inter),
        Line("intra-op", Origin.FORMULA, at, intra),
        *(Line(name, Origin.ROOFLINE, at, tuple(s)) for name, s in simulated.items()),
    ]
    return Panel(f"K = {speedup:.2f}", "Requests/s", "Mean TTFT (s)", tuple(lines))


def _speedup_panel(single_s: float) -> Panel:
    """Equation 3 for several K beside equation 2."""
    at = tuple(load / single_s for load in LOADS)
    lines = [Line("inter-op", Origin.FORMULA, at, tuple(inter_op_ttft_s(r, single_s) for r in at))]
    for speedup in SPEEDUPS:
        some = tuple(rate for rate in at if rate * single_s < 0.95 * speedup)
        values = tuple(intra_op_ttft_s(rate, single_s, speedup) for rate in some)
        lines.append(Line(f"intra-op, K = {speedup:g}", Origin.FORMULA, some, values))
    return Panel("By speed-up", "Requests/s", "Mean TTFT (s)", tuple(lines), top=6 * single_s)


def _prefill_s(parallelism: Parallelism) -> float:
    """Through all stages."""
    model = RooflineLatency(model_shape(MODEL), device_sheet(DEVICE), parallelism)
    return model.num_stages * model.prefill([Chunk(PROMPT_TOKENS)]).seconds


def _published_speedup(model: str, tp: int) -> float:
    single, double = (
        published_latency("distserve", model, Parallelism(n), raw=True) for n in (tp, 2 * tp)
    )
    chunks = [Chunk(PROMPT_TOKENS)]
    return single.prefill(chunks).seconds / double.prefill(chunks).seconds


def _service(parallelism: Parallelism) -> Service:
    """Requests end with their prefill; the decode instance is there, for a service needs one."""
    groups = (Group(Role.PREFILL, 1, parallelism), Group(Role.DECODE, 1, Parallelism(4)))
    settings = Settings(prefill_tokens=PROMPT_TOKENS)
    return service(Knowledge(MODEL, device=DEVICE), groups, settings)


def _simulated_s(what: Service, rate: float, terms: Terms) -> float:
    terms.watch(f"mean TTFT at {rate:.2f}")
    load = parse_workload(LOAD)
    runs = [simulate(what, load.requests(NUM_REQUESTS, rate, seed)) for seed in terms.seeds]
    return float(sum(run.ttft_s.mean() for run in runs)) / len(runs)
