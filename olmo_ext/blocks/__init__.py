"""FFN and attention types. Importing this package registers the built-in ones and imports no torch."""

import olmo_ext.blocks.conventional
import olmo_ext.blocks.gated
import olmo_ext.blocks.hourglass
import olmo_ext.blocks.softmax  # noqa: F401
