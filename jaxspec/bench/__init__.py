"""Measuring: `python -m jaxspec.bench offline|serve|peers`, each with a table on screen and a JSON file on request."""
