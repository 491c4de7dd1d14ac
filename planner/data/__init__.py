"""Published figures that the planner ships: compact summaries, each naming its source."""
