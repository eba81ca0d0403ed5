"""An exported folder computes what the run computes, for every shape, or does not exist."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

CONFTEST = importlib.util.spec_from_file_location("export_kinds", Path(__file__).with_name("conftest.py"))
assert CONFTEST and CONFTEST.loader
kinds = importlib.util.module_from_spec(CONFTEST)
CONFTEST.loader.exec_module(kinds)
KINDS, NATIVE, TITANS = kinds.KINDS, kinds.NATIVE, kinds.TITANS


def load_auto(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_loads_and_gives_the_runs_logits(kind, exported):
    from olmo_ext.training.load_model import load_model_from_run

    run, folder = exported(kind)
    model, _ = load_model_from_run(run)
    native = kind in NATIVE
    loaded = load_auto(folder, **({} if native else {"trust_remote_code": True}))
    assert type(loaded).__name__ == ("Olmo2ForCausalLM" if native else "OlmoExtForCausalLM")
    tokens = torch.randint(2, 300, (2, 48), generator=torch.Generator().manual_seed(5))
    expected = model(tokens).logits.detach()
    scale = expected.abs().max().item()
    torch.testing.assert_close(loaded(tokens).logits, expected, rtol=0, atol=1e-5 * scale)
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert ("modeling_olmo_ext.py" in names) is not native


@pytest.mark.parametrize("kind", ["hourglass", "gated taper", *NATIVE])
def test_the_card_names_the_checkpoint_and_its_lines_load_the_folder(kind, exported, monkeypatch):
    """Read as a hub would: a YAML header, Markdown, and code that runs beside the files."""
    run, folder = exported(kind)
    header, card = (folder / "README.md").read_text().removeprefix("---\n").split("---\n", 1)
    assert yaml.safe_load(header)["library_name"] == "transformers"
    weights = (run / "checkpoints/step5/model.safetensors").read_bytes()
    assert "| run, step | a-run, 5 |" in card and hashlib.sha256(weights).hexdigest() in card
    code = card.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(folder)
    names: dict = {}
    *imports, model, tokenizer = code.strip().splitlines()
    exec("\n".join([*imports, f"model = {model}", f"tokenizer = {tokenizer}"]), names)
    assert f"{sum(p.numel() for p in names['model'].parameters()):,} parameters" in card
    assert names["tokenizer"]("text").input_ids


@pytest.mark.parametrize("kind", ["hourglass", "gated taper", "gpt2", *TITANS])
def test_generation_with_left_padding_continues_as_the_run_does(kind, exported):
    from transformers import AutoTokenizer

    from olmo_ext.training.load_model import load_model_from_run

    run, folder = exported(kind)
    model, _ = load_model_from_run(run)
    loaded = load_auto(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=True)
    batch = tokenizer(["def export(", "return the folder of a run"], return_tensors="pt", padding=True)
    assert batch["attention_mask"].min() == 0
    generated = loaded.generate(**batch, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    for row, mask in zip(generated, batch["attention_mask"], strict=True):
        prompt = row[: len(mask)][mask.bool()]
        for token in row[len(mask) :]:
            logits = model(prompt[None]).logits[0, -1]
            logits[0] = -torch.inf  # the end of text, held back by min_new_tokens
            assert token == logits.argmax()
            prompt = torch.cat((prompt, token[None]))


@pytest.mark.parametrize("kind", ["tapered", "hourglass", "gated taper"])
def test_plain_olmo2_refuses_the_folder(kind, exported):
    from transformers import Olmo2ForCausalLM

    with pytest.raises(Exception, match="intermediate_size|int"):
        Olmo2ForCausalLM.from_pretrained(exported(kind)[1])


def test_the_declared_widths_are_the_configs(exported):
    config = json.loads((exported("tapered")[1] / "config.json").read_text())
    assert config["intermediate_size"] == [96, 64, 32]
    config = json.loads((exported("hourglass")[1] / "config.json").read_text())
    assert config["intermediate_size"] == [[16, 24]] * 3 and config["num_sub_mlps"] == 2
    assert (config["head_dim"], config["num_key_value_heads"], config["norm_after"]) == (12, 2, False)
    config = json.loads((exported("olmo2")[1] / "config.json").read_text())
    assert config["intermediate_size"] == 64


@pytest.mark.parametrize("kind", ["olmo2", "hourglass"])
def test_the_tokenizer_loads_as_export_says_without_a_question_or_a_warning(kind, exported, capfd, monkeypatch):
    import builtins

    import transformers

    from olmo_ext.export.card import loading_lines

    run, folder = exported(kind)
    line = loading_lines(folder, own_code=kind not in NATIVE)[1]
    name, _, arguments = line.partition(".from_pretrained")
    assert arguments == f'("{folder}")'
    asked = []
    monkeypatch.setattr(builtins, "input", lambda text: asked.append(text) or "n")
    capfd.readouterr()
    loaded = getattr(transformers, name).from_pretrained(folder)
    assert not asked and capfd.readouterr().err == ""
    plain = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    text = "return the folder of a run"
    assert loaded(text)["input_ids"] == plain(text)["input_ids"] and loaded.eos_token == plain.eos_token
    assert (loaded.pad_token_id, loaded.model_max_length) == (1, 48)


def test_our_package_registers_the_class_so_that_no_remote_code_is_needed(exported):
    from transformers import AutoConfig

    from olmo_ext.hf import register

    register()
    register()
    folder = exported("tapered")[1]
    assert AutoConfig.from_pretrained(folder).intermediate_size == [96, 64, 32]
    assert load_auto(folder).__class__.__module__ == "olmo_ext.hf.modeling_olmo_ext"


@pytest.mark.parametrize("kind", ["gated taper", "titans mag", "titans mal"])
def test_training_on_labels_and_bf16_work(kind, exported):
    loaded = load_auto(exported(kind)[1], trust_remote_code=True).to(torch.bfloat16)
    tokens = torch.randint(2, 300, (2, 16))
    output = loaded(tokens, labels=tokens)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())
    assert output.logits.dtype == torch.bfloat16 and abs(output.loss.item()) < 50


def swap_halves(state):
    """Gate and up the wrong way round, in layer 1 alone."""
    name = next(n for n in state if "blocks.1." in n and n.endswith("ff_proj.weight"))
    state[name] = torch.cat(state[name].chunk(2)[::-1])


def swap_layers(state):
    """Layers 0 and 2, of equal width, change places."""
    for name in [n for n in state if "blocks.0." in n]:
        other = name.replace("blocks.0.", "blocks.2.")
        state[name], state[other] = state[other], state[name]


def turn_around(state):
    """The convolution of a memory, in layer 2 alone, reads its tokens backwards."""
    name = next(n for n in state if "blocks.2." in n and n.endswith("conv.weight"))
    state[name] = state[name].flip(1)


HALVES, LAYERS = (swap_halves, "layer 1 "), (swap_layers, "layer 0 .*layer 2 ")


@pytest.mark.parametrize(
    "kind,std,damage,named",
    [
        *(
            row
            for kind in [("olmo2", 0.2), ("olmo2", 0.02), ("pre-norm", 0.02)]
            for row in (kind + HALVES, kind + LAYERS)
        ),
        ("titans", 0.02, turn_around, "^layer 2 "),
    ],
)
def test_a_wrong_conversion_is_refused_by_layer_and_leaves_nothing(
    kind, std, damage, named, make_run, tmp_path, monkeypatch, tokenizer_file
):
    from olmo_ext.base.errors import WorkError
    from olmo_ext.cli import cli
    from olmo_ext.export import folder as module

    convert = module.to_hugging_face

    def wrong(state, table):
        state = {name: tensor.clone() for name, tensor in state.items()}
        damage(state)
        return convert(state, table)

    monkeypatch.setattr(module, "to_hugging_face", wrong)
    with pytest.raises(WorkError, match=named):
        cli.main(["export", str(make_run(kind, std=std)), "-o", str(tmp_path / "out")], standalone_mode=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["tapered", "titans mal"])
def test_a_cache_that_forgets_is_refused(kind, make_run, tmp_path, monkeypatch):
    from olmo_ext.base.errors import WorkError
    from olmo_ext.cli import cli
    from olmo_ext.export import equality as verify

    monkeypatch.setattr(verify, "_cache_of", lambda output: None)
    with pytest.raises(WorkError, match="decoding with the cache: logits differ"):
        cli.main(["export", str(make_run(kind)), "-o", str(tmp_path / "out")], standalone_mode=False)
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_exists_is_not_touched(make_run, tmp_path):
    from olmo_ext.base.errors import InputError
    from olmo_ext.cli import cli

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(InputError, match="exists already"):
        cli.main(["export", str(make_run("olmo2")), "-o", str(tmp_path / "out")], standalone_mode=False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


def test_a_tokenizer_that_makes_nothing_of_text_is_told():
    from olmo_ext.base.errors import WorkError
    from olmo_ext.export.equality import real_tokens

    with pytest.raises(WorkError, match="no token of English text"):
        real_tokens(lambda text: [], length=8)


def test_every_file_of_the_folder_has_the_mode_of_its_config(exported):
    modes = {path.name: path.stat().st_mode & 0o777 for path in exported("titans")[1].iterdir()}
    assert set(modes.values()) == {modes["config.json"]}, modes


def test_large_models_are_sharded_with_an_index(exported, tmp_path):
    from safetensors.torch import load_file

    from olmo_ext.export.folder import write_weights

    folder = exported("tapered")[1]
    shutil.copytree(folder, tmp_path / "sharded")
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "sharded" / "model.safetensors").unlink()
    write_weights(tmp_path / "sharded", tensors, shard_bytes=40_000)
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    tokens = torch.arange(2, 30)[None]
    models = [load_auto(path, trust_remote_code=True) for path in (folder, tmp_path / "sharded")]
    assert torch.equal(models[0](tokens).logits, models[1](tokens).logits)


def test_types_without_a_hugging_face_form_are_named(exported, monkeypatch):
    import dataclasses

    from olmo_ext.base.errors import InputError
    from olmo_ext.hf.names import CUSTOM, entries
    from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES, AttentionType, FFNType
    from olmo_ext.shapes.types.conventional import ConventionalFFN
    from olmo_ext.training.load_model import load_model_from_run

    class Mine(FFNType):
        name = "mine"
        matrices = build = lambda *_: None

    class Mixer(AttentionType):
        name = "mixer"
        matrices = build = lambda *_: None

    class Renamed(ConventionalFFN):
        name = "renamed"

    for registry, kind in [(FFN_TYPES, Mine), (FFN_TYPES, Renamed), (ATTENTION_TYPES, Mixer)]:
        monkeypatch.setitem(registry._types, kind.name, kind())
    shape = load_model_from_run(exported("tapered")[0])[1].shape

    def table(**kind):
        layer = shape.layers[1]
        changed = {part: dataclasses.replace(getattr(layer, part), type=name) for part, name in kind.items()}
        layers = (shape.layers[0], dataclasses.replace(layer, **changed), shape.layers[2])
        return entries(dataclasses.replace(shape, layers=layers), stock=[True] * 3, names=CUSTOM)

    with pytest.raises(InputError, match="layer 1: FFN type 'mine'.*exported: conventional, hope, hourglass, renamed$"):
        table(ffn="mine")
    with pytest.raises(InputError, match="layer 1: attention type 'mixer'.*exported: gated, softmax, titans$"):
        table(attention="mixer")
    # A type that computes what a known one does brings that one's names along.
    assert table(ffn="renamed") == table()
