"""Drafters: suffix drafting and draft models, which propose the tokens that the target model verifies."""
