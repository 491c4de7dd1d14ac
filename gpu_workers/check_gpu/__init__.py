"""`distserve check-gpu`: proves a device in a few minutes, stage by stage."""
