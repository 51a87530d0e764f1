"""Draft choice: which of several drafters drafts for which request (SPIN §IV). One policy per file."""
