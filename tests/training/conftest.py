"""The children and tiny runs that tests of training share."""

from tests.training_fixtures import (  # noqa: F401
    config,
    forked,
    heavy,
    metric_rows,
    on_ranks,
    same_checkpoint,
    sample_ids,
    tokens,
)
