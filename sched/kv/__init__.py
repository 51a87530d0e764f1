"""KV cache management: pages of requests, and what happens when pages run out (`memory`)."""
