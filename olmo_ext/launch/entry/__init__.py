"""Scripts that run by their path: `python -m` would put the folder they are called in before the frozen code."""
