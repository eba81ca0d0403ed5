"""FFN and attention types. Importing this package registers the built-in ones and imports no torch."""

import olmo_ext.blocks.conventional
import olmo_ext.blocks.gated
import olmo_ext.blocks.hope
import olmo_ext.blocks.hourglass
import olmo_ext.blocks.softmax
import olmo_ext.blocks.titans  # noqa: F401
