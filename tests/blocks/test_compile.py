"""torch.compile block by block: every width is compiled, and that is reported."""

from __future__ import annotations

import pytest
import torch

WIDTHS = list(range(8, 136, 8))


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Dynamo as a new process has it."""
    import torch._dynamo
    import torch._dynamo.config
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch._dynamo.reset()


@pytest.fixture
def sixteen(built):
    """Sixteen layers of sixteen widths, ShapedBlocks."""

    def build(**model):
        return built(n_layers=16, ffn={"type": "hourglass", "d_ff": None, "taper": {"widths": WIDTHS}}, **model)

    return build


def test_sixteen_widths_all_compile_in_training_and_evaluation(sixteen, tokens, grads):
    from olmo.config import CompilerConfig

    from olmo_ext.upstream import compile_blocks

    expected = grads(sixteen(), tokens)
    model = sixteen()
    names = [name for name, _ in model.named_parameters()]
    report = compile_blocks(model, CompilerConfig(backend="eager"))
    found = grads(model, tokens)
    assert (report.num_blocks, report.num_shapes, report.graphs()) == (16, 16, 16)
    with torch.no_grad():
        model.eval()(tokens)
    assert report.graphs() == 32 and not report.recompile_limit_hit()
    assert names == [name for name, _ in model.named_parameters()]
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_upstreams_own_limit_is_what_it_guards_against(sixteen, tokens):
    from olmo_ext.upstream.compile import CompileReport

    model = sixteen()
    for block in model.transformer.blocks:
        block.compile(backend="eager")
    model(tokens)
    report = CompileReport(num_blocks=16, num_shapes=16, start=0)
    assert report.graphs() == 8 and report.recompile_limit_hit()


def test_a_tapered_conventional_model_compiles_every_stock_block(built, tokens):
    from olmo.config import CompilerConfig

    from olmo_ext.upstream import compile_blocks

    model = built(n_layers=16, ffn={"d_ff": None, "taper": {"widths": WIDTHS}})
    expected = model(tokens).logits
    report = compile_blocks(model, CompilerConfig(backend="eager"))
    torch.testing.assert_close(model(tokens).logits, expected)
    assert (report.num_shapes, report.graphs(), report.recompile_limit_hit()) == (16, 16, False)
