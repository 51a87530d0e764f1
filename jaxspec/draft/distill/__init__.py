"""Training draft models on the target's own text: `python -m jaxspec.draft.distill --config configs/distill/X.yaml`."""
