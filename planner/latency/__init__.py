"""How long a step takes: one interface, answered by a measured table, a fit, or a roofline."""
