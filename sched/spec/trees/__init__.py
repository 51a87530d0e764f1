"""Tree policies: which of a drafter's candidates the target verifies. One policy per file."""
