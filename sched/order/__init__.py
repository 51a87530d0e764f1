"""Orders: which request goes first, and whether it preempts. One policy per file."""
