"""The error about a training that cannot be converted."""


class NotConvertible(ValueError):
    """The given training has no counterpart, or is not one of the framework; nothing was written."""
