"""Which pages there are, in the paper's order, and who makes each."""

from collections.abc import Callable

from planner.report.ablation import figure_11
from planner.report.accuracy import table_2
from planner.report.batches import figure_2, figure_3, figure_5
from planner.report.contents import Page
from planner.report.end_to_end import figure_8, figure_9
from planner.report.motivation import figure_1
from planner.report.placements import table_3
from planner.report.queues import figure_4
from planner.report.search_time import figure_12
from planner.report.stages import figure_10
from planner.report.terms import Terms

CHAPTERS: dict[str, Callable[[Terms], Page]] = {
    "fig1": figure_1,
    "fig2": figure_2,
    "fig3": figure_3,
    "fig4": figure_4,
    "fig5": figure_5,
    "fig8": figure_8,
    "fig9": figure_9,
    "fig10": figure_10,
    "fig11": figure_11,
    "fig12": figure_12,
    "table2": table_2,
    "table3": table_3,
}
