"""Model shapes for OLMo, trained at equal budget and compared with their uncertainty."""

__version__ = "0.1.0"
