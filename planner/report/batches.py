"""Figures 2, 3 and 5: what batches and degrees do to steps, from the latency model alone.

The paper's figures print no numbers, so there is nothing to lay beside; what their text says of
them is in the notes. Settings that the paper does not state are ours.
"""

from ipc.vocabulary import Parallelism
from planner.deployment import saturation_tokens
from planner.devices import device_sheet
from planner.latency.fitted import UNMEASURED_MIX
from planner.latency.interface import Chunk, LatencyModel
from planner.latency.published import DEVICE, published_latency
from planner.latency.roofline import RooflineLatency
from planner.model_catalog import model_shape
from planner.report.contents import Cell, Column, Drawing, Line, Origin, Page, Panel, Table
from planner.report.terms import Terms

MODEL = "opt-13b"
BATCHES = (1, 4, 8, 16, 32, 64, 96, 128)
PROMPTS = (128, 1024)  # one of them joins a decode batch, figure 2
LENGTHS = (128, 256, 512, 1024)  # figure 3
PREFILL_BATCHES = (1, 2, 4, 8)
FIGURE_5_BATCH, FIGURE_5_TOKENS = 128, 256
DEGREES = (1, 2, 4, 8)
Decoded = tuple[float, float]
"""Seconds of one token for each sequence, and tokens per second."""
KNOWN = "published coefficients, distserve-raw, OPT-13B on one A100"


def figure_2(terms: Terms) -> Page:
    """Interference: a decode batch, and the same with one prompt in the step."""
    model = _fitted(Parallelism())
    alone = {batch: _decode_s(model, batch, LENGTHS[1]) for batch in BATCHES}
    joined = {n: {b: _mixed_s(model, n, b) for b in BATCHES} for n in PROMPTS}
    rows: list[tuple[Cell, ...]] = []
    for batch in BATCHES:
        cells: list[Cell] = [f"{batch}", 1000 * alone[batch]]
        for num_tokens in PROMPTS:
            cells += [1000 * joined[num_tokens][batch], joined[num_tokens][batch] / alone[batch]]
        rows.append(tuple(cells))
    columns = [Column("batch"), Column("decode alone", ".1f")]
    for num_tokens in PROMPTS:
        columns += [Column(f"with {num_tokens} tokens", ".1f"), Column("times", ".1f")]
    lines = [_line("decode alone", alone)]
    lines += [_line(f"with a prompt of {n}", joined[n]) for n in PROMPTS]
    panel = Panel("One step", "Sequences that decode", "Step time (ms)", tuple(lines))
    return Page(
        "fig2",
        "Figure 2: a prompt in a decode batch",
        (f"step times in ms: {KNOWN}; contexts of {LENGTHS[1]} tokens (ours)",),
        (Table("step time, ms", tuple(columns), tuple(rows)),),
        (Drawing("fig2", (panel,)),),
        (
            f"a step with both is {UNMEASURED_MIX:g} times the sum of its parts, as measured on "
            "another engine: mixed steps of DistServe's were not published",
        ),
    )


def figure_3(terms: Terms) -> Page:
    """Throughput of each phase over its batch."""
    model = _fitted(Parallelism())
    prefill = {n: {b: b * n / _prefill_s(model, n, b) for b in PREFILL_BATCHES} for n in LENGTHS}
    decode = {n: {b: b / _decode_s(model, b, n) for b in BATCHES} for n in LENGTHS}
    saturated = saturation_tokens(model)
    axis = "Tokens/s"
    panels = (
        Panel("Prefill", "Prompts", axis, tuple(_rates(prefill))),
        Panel("Decode", "Sequences", axis, tuple(_rates(decode))),
    )
    return Page(
        "fig3",
        "Figure 3: throughput over the batch",
        (f"tokens per second: {KNOWN}",),
        (_by_length("prefill, tokens/s", prefill), _by_length("decode, tokens/s", decode)),
        (Drawing("fig3", panels),),
        (
            f"L_m, the shortest prompt at 90 % of the best prefill throughput: {saturated} tokens "
            "here, about 512 in the paper (section 3.1); batching decodes pays up to large batches",
        ),
    )


def figure_5(terms: Terms) -> Page:
    """Decode latency and throughput over degrees, tensor and pipeline parallel."""
    found = {name: [_at_degree(name, d) for d in DEGREES] for name in ("intra-op", "inter-op")}
    return Page(
        "fig5",
        "Figure 5: decode over degrees, batch 128, 256 tokens",
        (
            f"{KNOWN} (intra-op 1, 2, 4); intra-op 8: roofline, scaled to agree at 4; inter-op: "
            "stages of the same step, each with a batch of its own",
        ),
        (_by_degree(found),),
        (Drawing("fig5", _degree_panels(found)),),
        (
            "as in the paper, intra-op lowers the latency with diminishing returns, and inter-op "
            "leaves it and scales the throughput nearly linearly; the published step has no cost "
            "for sending from stage to stage, so that linear is exact here",
        ),
    )


def _by_degree(found: dict[str, list[Decoded]]) -> Table:
    rows = tuple(
        (name, f"{degree}", 1000 * latency_s, rate, rate / degree / some[0][1])
        for name, some in found.items()
        for degree, (latency_s, rate) in zip(DEGREES, some, strict=True)
    )
    columns = (
        Column("degree of"),
        Column("GPUs"),
        Column("latency, ms", ".1f"),
        Column("tokens/s", ".0f"),
        Column("of linear", ".2f"),
    )
    return Table("decode", columns, rows)


def _degree_panels(found: dict[str, list[Decoded]]) -> tuple[Panel, Panel]:
    at = tuple(float(degree) for degree in DEGREES)
    latency = tuple(
        Line(name, Origin.FITTED, at, tuple(1000 * latency_s for latency_s, _ in some))
        for name, some in found.items()
    )
    rates = [
        Line(name, Origin.FITTED, at, tuple(rate for _, rate in some))
        for name, some in found.items()
    ]
    linear = tuple(found["intra-op"][0][1] * degree for degree in DEGREES)
    rates.append(Line("linear", Origin.FORMULA, at, linear))
    return (
        Panel("Latency", "GPUs", "Step time (ms)", latency),
        Panel("Throughput", "GPUs", "Tokens/s", tuple(rates)),
    )


def _at_degree(name: str, degree: int) -> Decoded:
    if name == "inter-op":
        step_s = _decode_s(_fitted(Parallelism(1, degree)), FIGURE_5_BATCH, FIGURE_5_TOKENS)
        return degree * step_s, FIGURE_5_BATCH / step_s
    step_s = _intra_op_s(degree)
    return step_s, FIGURE_5_BATCH / step_s


def _intra_op_s(tp: int) -> float:
    if tp <= 4:
        return _decode_s(_fitted(Parallelism(tp)), FIGURE_5_BATCH, FIGURE_5_TOKENS)
    shape, device = model_shape(MODEL), device_sheet(DEVICE)
    here, known = (
        _decode_s(RooflineLatency(shape, device, Parallelism(n)), FIGURE_5_BATCH, FIGURE_5_TOKENS)
        for n in (tp, 4)
    )
    return _intra_op_s(4) * here / known


def _fitted(parallelism: Parallelism) -> LatencyModel:
    return published_latency("distserve", MODEL, parallelism, raw=True)


def _decode_s(model: LatencyModel, batch: int, num_tokens: int) -> float:
    context = batch * num_tokens
    return model.decode(batch, context).seconds(context)


def _prefill_s(model: LatencyModel, num_tokens: int, batch: int) -> float:
    return model.prefill([Chunk(num_tokens)] * batch).seconds


def _mixed_s(model: LatencyModel, num_tokens: int, batch: int) -> float:
    return model.mixed([Chunk(num_tokens)], batch, batch * LENGTHS[1]).seconds


def _line(label: str, seconds: dict[int, float]) -> Line:
    at, values = tuple(map(float, seconds)), tuple(1000 * s for s in seconds.values())
    return Line(label, Origin.FITTED, at, values)


def _rates(by_length: dict[int, dict[int, float]]) -> list[Line]:
    return [
        Line(f"{n} tokens", Origin.FITTED, tuple(map(float, rates)), tuple(rates.values()))
        for n, rates in by_length.items()
    ]


def _by_length(title: str, by_length: dict[int, dict[int, float]]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (f"{batch}", *(rates[batch] for rates in by_length.values()))
        for batch in next(iter(by_length.values()))
    ]
    columns = (Column("batch"), *(Column(f"{n} tokens", ".0f") for n in by_length))
    return Table(title, columns, tuple(rows))
