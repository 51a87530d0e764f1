"""Drafters: n-gram lookup and draft models, which propose the tokens that the target model verifies."""
