"""What goes wrong while a model is loaded."""


class ModelLoadError(ValueError):
    """A model that can't be loaded; the message names the file or tensor and says what to do."""
