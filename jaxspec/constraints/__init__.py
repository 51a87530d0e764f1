"""Constraints on the tokens of an answer: grammars, minimum length, allowed tokens, bad words."""
