"""Training draft models on the target's own text: `python -m jaxspec.distill --config configs/distill/X.yaml`."""
