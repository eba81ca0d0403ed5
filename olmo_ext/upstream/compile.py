"""`torch.compile` block by block, for any number of different widths. Dynamo is imported only where it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from olmo.model import OLMo, OLMoBlock

GRAPHS_PER_BLOCK = 8
"""Graphs allowed per block: training and evaluation, with and without a cache, a dynamic length."""


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """Counts what the compiler has done; the counts are final only after the first steps."""

    num_blocks: int
    num_shapes: int
    """Number of different layers among the blocks: at least this many graphs are compiled."""

    start: int

    def graphs(self) -> int:
        """Graphs compiled since this report was made."""
        return _graphs() - self.start

    def recompile_limit_hit(self) -> bool:
        """Whether some block runs uncompiled because there were too many variants."""
        from torch._dynamo.utils import counters

        return any("recompile_limit" in key or "cache_size_limit" in key for key in counters["unimplemented"])

    def lines(self, seconds: float) -> list[str]:
        """Lines for the user about the compilation.

        :param seconds: of the first step, which compiled.
        """
        report = [f"compiled {self.graphs()} graphs for {self.num_blocks} layers in {seconds:.0f} s"]
        if self.recompile_limit_hit():
            report.append("note: some layers run uncompiled: there are more variants than the compiler keeps")
        return report


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _raise_limits(graphs: int) -> None:
    """All blocks share one `forward`, and dynamo keeps 8 graphs per function before it gives up without an error."""
    import torch._dynamo.config as dynamo

    # Renamed between torch 2.6 and 2.7.
    for new, old in (
        ("recompile_limit", "cache_size_limit"),
        ("accumulated_recompile_limit", "accumulated_cache_size_limit"),
    ):
        name = new if hasattr(dynamo, new) else old
        setattr(dynamo, name, max(getattr(dynamo, name), graphs))


def compile_blocks(model: OLMo, compiler_config: Any | None = None) -> CompileReport:
    """Compile every block of a model in place (parameter names stay).

    :param compiler_config: OLMo's CompilerConfig (mode, fullgraph, backend, dynamic), or None for its defaults.
    """
    blocks = [module for module in model.modules() if isinstance(module, OLMoBlock)]
    shapes = {repr(getattr(block, "layer", None) or block.config) for block in blocks}
    _raise_limits(GRAPHS_PER_BLOCK * len(blocks))
    options = {} if compiler_config is None else compiler_config.asdict()
    for block in blocks:
        block.compile(**options)
    return CompileReport(num_blocks=len(blocks), num_shapes=len(shapes), start=_graphs())
