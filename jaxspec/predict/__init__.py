"""Predicting how many tokens a model will answer a prompt with."""
