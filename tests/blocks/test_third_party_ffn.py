"""A package of someone else's registers an FFN type in under 40 lines, named in the YAML alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

FIXTURES = Path(__file__).parents[1] / "fixtures"
YAML = """\
plugins: [low_rank_ffn]
model:
  d_model: 32
  n_layers: 3
  n_heads: 4
  rope: true
  include_bias: false
  layer_norm_type: rms
  init_fn: full_megatron
  init_cutoff_factor: 3
  vocab_size: 64
  embedding_size: 64
  max_sequence_length: 16
  ffn: {type: low_rank, rank: 6, d_ff: 48, num_sub_mlps: 2, taper: {widths: [64, 48, 32]}}
"""


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FIXTURES))
    path = tmp_path / "low_rank.yaml"
    path.write_text(YAML)
    return path


def test_the_package_is_under_40_lines():
    assert len((FIXTURES / "low_rank_ffn" / "__init__.py").read_text().splitlines()) < 40


def test_it_is_built_counted_initialised_trained_and_tapered(config_file):
    from olmo.config import TrainConfig
    from olmo.optim import get_param_groups

    from olmo_ext.config.run_config import load_run_config
    from olmo_ext.upstream import build_model

    config = load_run_config(config_file)
    model = build_model(config)
    blocks = model.transformer.blocks
    assert [[mlp.ff_out.in_features for mlp in block.sub_mlps] for block in blocks] == [[64] * 2, [48] * 2, [32] * 2]
    assert sum(p.numel() for p in model.parameters()) == config.counts.total
    ours = blocks[0].sub_mlps[0]
    # Two sub-MLPs and attention are three branches a layer: nine in all.
    assert ours.ff_out.weight.std().item() == pytest.approx(0.9866 * 0.02 / 9**0.5, rel=0.05)
    assert ours.widen.weight.std().item() == pytest.approx(0.9866 * 0.02, rel=0.15)
    assert torch.equal(ours.norm.weight, torch.ones(64))
    assert get_param_groups(TrainConfig.new(), model)
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = torch.nn.functional.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    # A submodule named `norm` is what OLMo's checkpoint reader takes for a norm of 2023.
    state, _ = model._make_state_dict_compatible(dict(model.state_dict()))
    assert set(state) == set(model.state_dict())


def test_its_counts_are_made_without_torch(config_file):
    code = (
        f"import sys; sys.path.insert(0, {str(FIXTURES)!r})\n"
        f"from olmo_ext.config.run_config import load_run_config\n"
        f"print(load_run_config({str(config_file)!r}).counts.ffn, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    per_width = [6 * 32 + w * 6 + 32 * w + w for w in (64, 48, 32)]
    assert result.stdout.split() == [str(2 * sum(per_width)), "False"]


def test_its_wrong_options_are_refused_by_name(config_file):
    from olmo_ext.base.errors import InputError
    from olmo_ext.config.run_config import load_run_config

    with pytest.raises(InputError, match=r"model\.ffn.*rank 40"):
        load_run_config(config_file, ["model.ffn.rank=40"])
    with pytest.raises(InputError, match=r"rnk.*did you mean 'rank'"):
        load_run_config(config_file, ["model.ffn.rnk=4"])


def test_a_module_that_initialises_itself_is_left_to_it_and_raw_weights_are_refused(tiny, monkeypatch):
    from torch import nn

    from olmo_ext.base.errors import InputError
    from olmo_ext.shapes.registry import FFN_TYPES
    from olmo_ext.upstream import build_model

    calls = []

    class Own(nn.Linear):
        def reset_parameters(self, config=None, layer_id=None):
            if layer_id is not None:
                calls.append(layer_id)
                nn.init.constant_(self.weight, layer_id)

    kind = FFN_TYPES.get("hourglass")
    monkeypatch.setattr(type(kind), "build", lambda self, d, f, s, c: Own(d, d, bias=False))
    model = build_model(tiny(ffn={"type": "hourglass", "d_ff": 16}))
    assert calls == [0, 1, 2] and (model.transformer.blocks[2].sub_mlps[0].weight == 2).all()

    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    monkeypatch.setattr(type(kind), "build", lambda self, d, f, s, c: Raw())
    with pytest.raises(InputError, match="scale.*optimizer group"):
        build_model(tiny(ffn={"type": "hourglass", "d_ff": 16}))
