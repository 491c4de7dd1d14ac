"""What goes wrong, at every moment, and what may not come of it."""
