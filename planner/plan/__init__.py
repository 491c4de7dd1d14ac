"""`distserve plan`: from words to a search, its placement on the nodes, and the report on it."""
