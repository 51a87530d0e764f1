"""Trains draft models on the target's answers: `python -m jaxspec.draft.distill --config configs/distill/X.yaml`."""
