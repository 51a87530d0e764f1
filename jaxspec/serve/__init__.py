"""The OpenAI-compatible server: `python -m jaxspec.serve`."""
