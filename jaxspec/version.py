"""The version. pyproject.toml reads it from here, so that a checkout that is not installed knows it too."""

__version__ = "0.1.0"
