"""One process per device: receives commands, runs steps, reports. Never imports the daemon."""
