"""FFN and attention types. Importing this package registers the built-in ones and imports no torch."""

from olmo_ext.blocks import conventional, gated, hourglass, softmax  # noqa: F401
