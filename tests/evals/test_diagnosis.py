"""Diagnosis: a hand-made model with known cosines, and every known architecture against its own hidden states."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from olmo_ext.base.errors import InputError
from olmo_ext.evals.diagnosis import DEAD_BELOW, diagnose, effective_rank, pearson_with_depth
from olmo_ext.evals.diagnosis_report import diagnosis_table, write_plot
from olmo_ext.evals.taps import find_taps
from olmo_ext.evals.target import EvaluatedModel

from .conftest import build_olmo

WIDTH = 8


class Turn(nn.Module):
    """Turns every pair of coordinates by an angle and scales: the cosine with the input is cos(angle) for any input."""

    def __init__(self, degrees: float, scale: float, *, tuple_output: bool = False) -> None:
        super().__init__()
        angle, self.scale, self.tuple_output = math.radians(degrees), scale, tuple_output
        turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        self.matrix = torch.block_diag(*[turn] * (WIDTH // 2))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.scale * x @ self.matrix.T
        return (y, None) if self.tuple_output else y


class HandMadeBlock(nn.Module):
    """Our block's form with norms that do nothing: attention turns by `a`, each sub-MLP by its own angle."""

    def __init__(self, attention: float, mlps: list[tuple[float, float]]) -> None:
        super().__init__()
        self.attn_norm = nn.Identity()
        self.attention = Turn(attention, 0.5, tuple_output=True)
        self.ff_norms = nn.ModuleList(nn.Identity() for _ in mlps)
        self.sub_mlps = nn.ModuleList(Turn(degrees, scale) for degrees, scale in mlps)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = x + self.attention(self.attn_norm(x))[0]
        for norm, mlp in zip(self.ff_norms, self.sub_mlps, strict=True):
            x = x + mlp(norm(x))
        return x, None


class HandMadeModel(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(20, WIDTH)
        self.transformer = nn.Module()
        self.transformer.blocks = nn.ModuleList(blocks)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.wte(ids)
        for block in self.transformer.blocks:
            x, _ = block(x)
        return SimpleNamespace(logits=x)


def ids(vocabulary: int, *, batches: int = 2, rows: int = 3, time: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, vocabulary, (rows, time), generator=generator) for _ in range(batches)]


def test_a_hand_made_model_gives_its_known_cosines_and_sizes() -> None:
    model = HandMadeModel(
        HandMadeBlock(90, [(60, 1.0)]), HandMadeBlock(0, [(120, 0.5)]), HandMadeBlock(45, [(180, 0.25), (90, 2.0)])
    )
    found = diagnose(EvaluatedModel(model, max_sequence_length=16), ids(20))
    first, second, third = found["layers"]
    assert first["rho_mlp"] == pytest.approx(math.cos(math.radians(60)), abs=1e-6)
    assert first["rho_attention"] == pytest.approx(0, abs=1e-6)
    assert second["rho_mlp"] == pytest.approx(-0.5, abs=1e-6)
    assert second["rho_attention"] == pytest.approx(1, abs=1e-6)
    assert [part["rho"] for part in third["sub_mlps"]] == pytest.approx([-1, 0], abs=1e-6)
    # In the plane of complex numbers a turn is a product, so the whole layer's update is known too.
    after_attention = 1 + 0.5 * np.exp(1j * math.radians(45))
    updates = [-0.25 * after_attention, 2j * 0.75 * after_attention]
    block = 0.5 * np.exp(1j * math.radians(45)) + sum(updates)
    assert third["rho_block"] == pytest.approx(block.real / abs(block), abs=1e-6)
    summed = sum(updates) / after_attention
    assert third["rho_mlp"] == pytest.approx(summed.real / abs(summed), abs=1e-6)
    # Second layer: attention adds half of x, the FFN half of 1.5 x.
    assert second["ffn_over_attention"] == pytest.approx(1.5, rel=1e-6)
    assert second["residual_norm"] == pytest.approx(
        first["residual_norm"] * abs((1 + 0.5j) * (1 + np.exp(1j * math.radians(60)))), rel=1e-5
    )
    assert found["tokens"] == 96 and found["pooling"] == "mean over tokens of the cosine"


def test_pearson_with_depth_is_scipys() -> None:
    values = [0.1, 0.3, 0.2, 0.5, 0.45]
    assert pearson_with_depth(values) == pytest.approx(stats.pearsonr(range(5), values).statistic)
    assert pearson_with_depth([0.5] * 5) is None and pearson_with_depth([1.0, 2.0]) is None


def test_effective_rank_of_known_spectra() -> None:
    assert effective_rank(torch.eye(7)[:5]) == pytest.approx(5)
    assert effective_rank(torch.ones(9, 4)) == pytest.approx(1)
    spectrum = np.array([3.0, 2.0, 1.0])
    share = spectrum / spectrum.sum()
    assert effective_rank(torch.diag(torch.tensor(spectrum))) == pytest.approx(np.exp(stats.entropy(share)))


@pytest.mark.parametrize("norm_after", [False, True])
def test_stock_olmo_agrees_with_its_layers_computed_by_hand(tokenizer: Any, norm_after: bool) -> None:
    module = build_olmo(tokenizer, norm_after=norm_after)
    batches = ids(tokenizer.vocab_size)
    found = diagnose(EvaluatedModel(module, max_sequence_length=256), batches)
    expected: list[list[torch.Tensor]] = [[] for _ in range(3)]
    with torch.no_grad():
        for batch in batches:
            x = module.transformer.wte(batch)
            for number, block in enumerate(module.transformer.blocks):
                end, _ = block(x)
                q, k, v = block.att_proj(x if norm_after else block.attn_norm(x)).split(block.fused_dims, dim=-1)
                attention, _ = block.attention(q, k, v)
                middle = x + (block.attn_norm(attention) if norm_after else attention)
                update = end - middle
                cosines = [
                    torch.cosine_similarity(update, middle, dim=-1),
                    torch.cosine_similarity(end - x, x, dim=-1),
                ]
                expected[number].append(torch.stack([*cosines, update.norm(dim=-1)]))
                x = end
    for layer, values in zip(found["layers"], expected, strict=True):
        means = torch.cat([value.flatten(1) for value in values], dim=1).mean(dim=1)
        measured = torch.tensor([layer["rho_mlp"], layer["rho_block"], layer["ffn_update_norm"]])
        torch.testing.assert_close(measured, means, rtol=1e-4, atol=1e-5)
        assert layer["d_ff"] == 48 and 1 < layer["effective_rank"] <= 48


def hugging_face_models() -> dict[str, nn.Module]:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
    common = {"vocab_size": 60, "initializer_range": 0.3, "max_position_embeddings": 64, **sizes}
    torch.manual_seed(0)
    gpt2 = transformers.GPT2Config(
        vocab_size=60, n_embd=32, n_layer=3, n_head=4, n_inner=40, n_positions=64, initializer_range=0.3
    )
    return {
        "gpt2": transformers.GPT2LMHeadModel(gpt2).eval(),
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**common)).eval(),
        "olmo2": transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**common)).eval(),
    }


@pytest.mark.parametrize("name", ["gpt2", "llama", "olmo2"])
def test_hugging_face_models_agree_with_their_hidden_states(name: str) -> None:
    module = hugging_face_models()[name]
    batches = ids(60)
    found = diagnose(EvaluatedModel(module, max_sequence_length=64), batches)
    with torch.no_grad():
        states = [module(batch, output_hidden_states=True).hidden_states for batch in batches]
    # The last state comes after the final norm, so the last layer's update cannot be read from it.
    for number in range(2):
        cosines = [torch.cosine_similarity(s[number + 1] - s[number], s[number], dim=-1).flatten() for s in states]
        assert found["layers"][number]["rho_block"] == pytest.approx(float(torch.cat(cosines).mean()), abs=1e-5)
        parts = [found["layers"][number][key] for key in ("rho_mlp", "rho_attention", "effective_rank", "d_ff")]
        assert parts[3] == 40 and all(math.isfinite(part) for part in parts)


def test_units_that_are_never_active_are_counted(tokenizer: Any) -> None:
    module = build_olmo(tokenizer)
    with torch.no_grad():
        module.transformer.blocks[1].ff_proj.weight[:12] = 0  # the first 12 of 48 units of one half
    found = diagnose(EvaluatedModel(module, max_sequence_length=256), ids(tokenizer.vocab_size))
    assert found["layers"][1]["dead_share"] == pytest.approx(12 / 48)
    assert found["layers"][0]["dead_share"] == 0
    assert found["dead_below"] == DEAD_BELOW


def test_batches_do_not_matter(tokenizer: Any) -> None:
    model = EvaluatedModel(build_olmo(tokenizer), max_sequence_length=256)
    batches = ids(tokenizer.vocab_size, batches=4)
    one = diagnose(model, [torch.cat(batches)])
    four = diagnose(model, batches)
    for layer, other in zip(one["layers"], four["layers"], strict=True):
        for key in ("rho_mlp", "rho_block", "residual_norm", "dead_share", "effective_rank"):
            assert layer[key] == pytest.approx(other[key], rel=1e-5), key


def test_an_unknown_architecture_names_the_layer() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])
    with pytest.raises(InputError, match="layer 0 is a Sequential"):
        find_taps(model)


def test_hooks_are_gone_afterwards(tokenizer: Any) -> None:
    module = build_olmo(tokenizer)
    diagnose(EvaluatedModel(module, max_sequence_length=256), ids(tokenizer.vocab_size))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_the_table_and_the_plot_show_every_layer_and_sub_mlp(tmp_path: Any) -> None:
    model = HandMadeModel(*(HandMadeBlock(30, [(60, 1.0), (20, 0.1)]) for _ in range(3)))
    found = json.loads(json.dumps(diagnose(EvaluatedModel(model, max_sequence_length=16), ids(20))))
    lines = diagnosis_table(found).splitlines()
    assert [line.split()[0] for line in lines[1:10]] == ["0", ".0", ".1", "1", ".0", ".1", "2", ".0", ".1"]
    assert "0.5000" in lines[2]
    write_plot(found, tmp_path / "plot.html", title="hand-made")
    page = (tmp_path / "plot.html").read_text()
    assert "rho_mlp" in page and '<script src="http' not in page


@pytest.mark.parametrize("norm_after", [False, True])
def test_our_blocks_are_read_sub_mlp_by_sub_mlp(norm_after: bool) -> None:
    """A tapered hourglass: three sub-MLPs a layer, other widths in every layer."""
    from olmo_ext.config.run_config import load_run_config
    from olmo_ext.upstream import build_model

    section = {"d_model": 32, "n_heads": 4, "n_layers": 3, "norm_after": norm_after, "max_sequence_length": 64}
    section |= {"vocab_size": 60, "embedding_size": 64, "eos_token_id": 0, "pad_token_id": 1, "init_std": 0.3}
    section |= {"rope": True, "include_bias": False, "layer_norm_type": "rms", "activation_type": "swiglu"}
    section |= {f"{name}_dropout": 0.0 for name in ("attention", "residual", "embedding")}
    taper = {"schedule": "linear", "start": 1.5, "end": 0.5, "multiple_of": 4}
    section["ffn"] = {"type": "hourglass", "d_ff": 24, "num_sub_mlps": 3, "taper": taper}
    module = build_model(load_run_config({"model": section}), seed=0).eval()
    batches = ids(60)
    found = diagnose(EvaluatedModel(module, max_sequence_length=64), batches)
    assert [[part["d_ff"] for part in layer["sub_mlps"]] for layer in found["layers"]] == [[36] * 3, [24] * 3, [12] * 3]
    x = module.transformer.wte(batches[0])
    block = module.transformer.blocks[0]
    with torch.no_grad():
        end, _ = block(x)
        # The second sub-MLP from the stream that it meets.
        middle = x + (block.attn_norm(block.attention(x)[0]) if norm_after else block.attention(block.attn_norm(x))[0])
        rho = []
        for norm, mlp in zip(block.ff_norms, block.sub_mlps, strict=True):
            update = norm(mlp(middle)) if norm_after else mlp(norm(middle))
            rho.append(float(torch.cosine_similarity(update, middle, dim=-1).mean()))
            middle = middle + update
        torch.testing.assert_close(middle, end)
    one = diagnose(EvaluatedModel(module, max_sequence_length=64), batches[:1])
    assert [part["rho"] for part in one["layers"][0]["sub_mlps"]] == pytest.approx(rho, abs=1e-5)
