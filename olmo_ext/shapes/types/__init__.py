"""The built-in FFN and attention types. Importing this package registers them; their torch modules are in `blocks/`."""

import olmo_ext.shapes.types.conventional
import olmo_ext.shapes.types.gated
import olmo_ext.shapes.types.hope
import olmo_ext.shapes.types.hourglass
import olmo_ext.shapes.types.softmax
import olmo_ext.shapes.types.titans  # noqa: F401
