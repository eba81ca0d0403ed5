"""A memory's folder: code that stands alone, decoding with a carried state, and what cannot be decoded so."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

ALONE = """
import sys
for name in ("olmo_ext", "olmo"):
    sys.modules[name] = None
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float32).eval()
torch.save(model(torch.arange(2, 40)[None]).logits.detach(), sys.argv[2])
"""


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()


def prompts(rows=2):
    return torch.randint(2, 300, (rows, 9), generator=torch.Generator().manual_seed(7))


@pytest.mark.timeout(1200)
def test_the_folders_code_runs_where_our_package_is_not(exported, tmp_path):
    import os

    from olmo_ext.training.load_model import load_model_from_run

    run, folder = exported("titans mag")
    result = subprocess.run(
        [sys.executable, "-c", ALONE, str(folder), str(tmp_path / "logits.pt")],
        env={**os.environ, "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    expected = load_model_from_run(run)[0](torch.arange(2, 40)[None]).logits
    found = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_the_folders_code_is_ours_but_for_the_place_of_its_neighbours(exported):
    import importlib
    from pathlib import Path

    from olmo_ext.export.folder import CODE

    folder = exported("titans")[1]
    for module in CODE:
        ours = Path(importlib.import_module(module).__file__).read_text().splitlines()
        theirs = (folder / f"{module.rpartition('.')[2]}.py").read_text().splitlines()
        assert len(ours) == len(theirs)
        for before, after in zip(ours, theirs, strict=True):
            if before != after:
                assert re.fullmatch(r"from \.(\w+) (import .*)", after) and before.startswith("from olmo_ext.")
                assert before.endswith(after.removeprefix("from "))
        assert not any(re.match(r"\s*(from|import) olmo", line) for line in theirs)


@pytest.mark.parametrize("kind", ["titans", "titans mag", "titans mal", "titans among attention"])
def test_beams_carry_their_own_memories(kind, exported):
    model = load(exported(kind)[1])
    ids = prompts()
    ids[0, :3] = 1
    arguments = {
        "attention_mask": (ids != 1).long(),
        "num_beams": 3,
        "num_return_sequences": 2,
        "max_new_tokens": 7,
        "do_sample": False,
    }
    cached, plain = (model.generate(ids, use_cache=use, **arguments) for use in (True, False))
    assert torch.equal(cached, plain)
    assert len({tuple(row.tolist()) for row in cached}) == 4


def test_a_decoding_state_can_be_repeated_and_chosen_from(exported):
    from transformers import DynamicCache

    model, ids = load(exported("titans mag")[1]), prompts()
    cache = DynamicCache(config=model.config)
    more = torch.tensor([[5, 6], [7, 8], [9, 10]])
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        assert cache.get_seq_length() == 8
        cache.batch_repeat_interleave(2)
        chosen = torch.tensor([3, 0, 1])
        cache.batch_select_indices(chosen)
        found = model(more, past_key_values=cache).logits
        whole = model(torch.cat((ids[:, :8][chosen // 2], more), dim=1)).logits[:, 8:]
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-5 * whole.abs().max().item())


def test_what_a_memory_cannot_do_is_said(exported):
    from transformers import DynamicCache, StaticCache

    model, ids = load(exported("titans among attention")[1]), prompts(1)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(ids, prompt_lookup_num_tokens=2, max_new_tokens=4)
    with pytest.raises(ValueError, match="layer 1 carries a memory: give a DynamicCache"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=20))
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="cannot forget its last tokens"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="attention_mask of 9 positions"):
        model(ids, attention_mask=torch.ones(1, 1, 9, 9))


@pytest.mark.parametrize(
    "chunk,window,added,longest", [(64, 0, 0, 2048), (16, 0, 0, 2048), (16, 100, 3, 512), (20, 6, 2, 48)]
)
def test_the_compared_tokens_end_beyond_the_end_of_a_chunk(chunk, window, added, longest):
    from olmo_ext.config.run_config import load_run_config
    from olmo_ext.export import equality as verify

    options = {"form": "mag", "window": window} if window else {}
    attention = {"type": "titans", "chunk_size": chunk, "persistent_tokens": added, **options}
    model = {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_sequence_length": longest, "attention": attention}
    length = verify.length_for(load_run_config({"model": model}).shape, least=64)
    assert window < length <= longest and chunk < length
    ends = [token for token in range(length - verify.CACHED_TOKENS + 1, length) if (token + added) % chunk == 0]
    assert ends and length >= min(64, longest - 8)


def test_a_state_that_is_wrong_only_after_a_chunk_has_ended_is_refused(make_run, tmp_path, monkeypatch):
    from olmo_ext.base.errors import WorkError
    from olmo_ext.cli import cli
    from olmo_ext.export import folder
    from olmo_ext.hf import register

    # Where our own classes are known, it is still the folder's code that is tried.
    register()
    whole = folder.standing_alone
    right = "seen = (before.seen + count) % self.sizes.chunk_size"

    def wrong(module):
        source = whole(module)
        assert module != "olmo_ext.blocks.titans_layer" or right in source
        return source.replace(right, "seen = before.seen * 0")

    monkeypatch.setattr(folder, "standing_alone", wrong)
    with pytest.raises(WorkError, match="decoding after a prompt: logits differ"):
        cli.main(["export", str(make_run("titans mag")), "-o", str(tmp_path / "out")], standalone_mode=False)
    assert list(tmp_path.iterdir()) == []


def test_the_rounding_that_is_allowed_for_is_the_models_own(exported):
    from olmo_ext.export import equality as verify
    from olmo_ext.training.load_model import load_model_from_run

    model, _ = load_model_from_run(exported("titans mag")[0])
    with torch.no_grad():
        before = model(prompts()).logits
        assert 1e-8 < verify._rounding(model, prompts(), before) < 5e-6
        assert torch.equal(model(prompts()).logits, before)


def test_a_model_that_computes_no_numbers_is_not_called_different(make_run, tmp_path):
    from olmo_ext.base.errors import WorkError
    from olmo_ext.export.card import origin_of
    from olmo_ext.export.folder import export_model
    from olmo_ext.training.load_model import load_model_from_run

    run = make_run("titans")
    model, config = load_model_from_run(run)
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = torch.nan
    from olmo_ext.base.sections import plain_section
    from olmo_ext.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.tokenizer.identifier, eos_token_id=0, pad_token_id=1)
    with pytest.raises(WorkError, match="own logits are not finite"):
        export_model(
            model,
            model=plain_section(config.model),
            shape=config.shape,
            tokenizer=tokenizer,
            target=tmp_path / "o",
            origin=origin_of(run / "checkpoints/step5", "a-run"),
        )
    assert list(tmp_path.iterdir()) == []


def test_a_fresh_hugging_face_model_starts_as_ours_do(exported):
    """The gates' biases, which nothing but the memory's own code knows."""
    from transformers import AutoConfig

    from olmo_ext.hf.modeling_olmo_ext import OlmoExtForCausalLM

    config = AutoConfig.from_pretrained(exported("titans")[1], trust_remote_code=True)
    from olmo_ext.hf.configuration_olmo_ext import OlmoExtConfig

    torch.manual_seed(0)
    model = OlmoExtForCausalLM(OlmoExtConfig(**config.to_dict())).eval()
    memory = model.model.layers[0].attention.memory
    assert memory.memory_gates.bias.tolist() == 4 * [-4.0] + 8 * [0.0]
    assert 0 < memory.memory_gates.weight.std() < 0.05 and memory.memory_in.weight.std() > 0.2
    assert model(torch.arange(2, 40)[None]).logits.isfinite().all()
