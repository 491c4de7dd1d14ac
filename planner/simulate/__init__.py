"""`distserve simulate`: from words to a service, its runs, and the report on them."""
