"""What daemon and workers share: words, messages, sockets, KV layouts. Imports nothing of ours."""
