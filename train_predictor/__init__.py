"""Trains length predictors: `python -m jaxspec.train_predictor --config configs/predictor/X.yaml`."""
