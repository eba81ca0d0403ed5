"""The way back: exported folders, released OLMo-2 folders, unsharded OLMo checkpoints."""

from __future__ import annotations

import json
import shutil

import pytest
import torch


def run_import(source, target):
    from olmo_ext.cli import cli

    cli.main(["import", str(source), "-o", str(target), "--json"], standalone_mode=False)


def logits_of(run):
    from olmo_ext.training.load_model import load_model_from_run

    model, config = load_model_from_run(run)
    tokens = torch.randint(2, 300, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model(tokens).logits, config


@pytest.mark.parametrize(
    "kind",
    [
        *("olmo2 gqa, tied", "hourglass", "gated taper", "gpt2", "rarities", "independent levels"),
        *("titans", "linear memory, persistent tokens", "titans mag", "titans mal"),
    ],
)
def test_export_then_import_is_the_same_model_bit_for_bit(kind, exported, tmp_path, capsys):
    from olmo_ext.base.run_directory import RunDirectory
    from olmo_ext.training.load_model import load_model_from_run

    run, folder = exported(kind)
    run_import(folder, tmp_path / "back")
    assert json.loads(capsys.readouterr().out)["verified"] is True
    ours, theirs = (load_model_from_run(path)[0].state_dict() for path in (run, tmp_path / "back"))
    # Groups of blocks are a wrapper's business and do not travel.
    plain = {name: tensor for name, tensor in theirs.items()}
    assert sorted(plain) == sorted(ours) and all(torch.equal(plain[name], ours[name]) for name in ours)
    before, after = (RunDirectory(path).read_config()["model"] for path in (run, tmp_path / "back"))
    if kind != "olmo2 gqa, tied":
        assert before == after
    state = RunDirectory(tmp_path / "back").read_state()
    assert state.status == "done" and "imported" in state.reason
    assert RunDirectory(tmp_path / "back").read_shape()["parameters"]["total"] == sum(t.numel() for t in ours.values())


def test_a_released_olmo2_folder_becomes_a_run_with_equal_logits(tmp_path, tokenizer_file):
    """As the released ones are: written by transformers in bf16, with a padded vocabulary."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    torch.manual_seed(0)
    config = Olmo2Config(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        eos_token_id=0,
        pad_token_id=1,
        initializer_range=0.2,
    )
    model = Olmo2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "released", max_shard_size="40KB")
    assert (tmp_path / "released" / "model.safetensors.index.json").is_file()
    shutil.copyfile(tokenizer_file, tmp_path / "released" / "tokenizer.json")
    run_import(tmp_path / "released", tmp_path / "run")
    logits, loaded = logits_of(tmp_path / "run")
    tokens = torch.randint(2, 300, (2, 40), generator=torch.Generator().manual_seed(5))
    # Loaded again: `.to(bfloat16)` has rounded the rotary frequencies too, which are no weights.
    again = Olmo2ForCausalLM.from_pretrained(tmp_path / "released", dtype=torch.float32).eval()
    expected = again(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    section = loaded.model
    assert (section.vocab_size, section.embedding_size, section.rope_theta) == (300, 384, 500000)
    assert loaded.tokenizer.identifier == str((tmp_path / "run" / "tokenizer.json").resolve())


def write_olmo_checkpoint(source, *, suffix="pt", tokenizer=None, init_fn=None):
    """As OLMo saves one; returns the model."""
    from olmo.config import InitFnType, TrainConfig
    from olmo.model import OLMo
    from safetensors.torch import save_file

    config = TrainConfig.new(
        tokenizer={"identifier": str(tokenizer)} if tokenizer else {},
        model={
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 4,
            "rope": True,
            "vocab_size": 300,
            "embedding_size": 384,
            "max_sequence_length": 48,
            "include_bias": False,
            "block_group_size": 2,
            "init_device": "cpu",
            "attention_dropout": 0.0,
            "residual_dropout": 0.0,
            "embedding_dropout": 0.0,
        },
    )
    model = OLMo(config.model).eval()
    source.mkdir()
    if init_fn:
        config.model.init_fn = InitFnType(init_fn)
    config.save(source / "config.yaml")
    state = model.state_dict()
    if suffix == "pt":
        torch.save(state, source / "model.pt")
    else:
        save_file(state, source / "model.safetensors")
    return model


@pytest.mark.parametrize(("suffix", "init_fn"), [("pt", None), ("safetensors", None), ("pt", "kaiming_normal")])
def test_an_unsharded_olmo_checkpoint_becomes_a_run(suffix, init_fn, tmp_path):
    """Also one whose weights were once drawn by a rule that OLMo no longer has."""
    source = tmp_path / "step10-unsharded"
    model = write_olmo_checkpoint(source, suffix=suffix, init_fn=init_fn)
    run_import(source, tmp_path / "run")
    logits, _ = logits_of(tmp_path / "run")
    tokens = torch.randint(2, 300, (2, 40), generator=torch.Generator().manual_seed(5))
    assert torch.equal(logits, model(tokens).logits)


def test_what_a_run_has_to_do_without_is_said(tmp_path, tokenizer_file, capsys):
    torn = tmp_path / "torn.json"
    torn.write_text(tokenizer_file.read_text()[:100])
    for name, tokenizer, said in (
        ("whole", tokenizer_file, ""),
        ("torn", torn, f"note: imported without a tokenizer, which cannot be read: {torn}: not a tokenizer.json"),
        ("gone", "gone.json", "note: imported without a tokenizer, which cannot be read: tokenizer: no tokenizer at"),
    ):
        write_olmo_checkpoint(tmp_path / name, tokenizer=tokenizer)
        run_import(tmp_path / name, tmp_path / f"run-{name}")
        printed = capsys.readouterr()
        assert json.loads(printed.out)["kind"] == "OLMo checkpoint"
        assert said in printed.err and ("note:" in printed.err) is bool(said), printed.err


def break_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def add_token(path, number):
    """One more token, with an id beyond the embedding."""
    content = json.loads(path.read_text())
    added = {"id": number, "content": "<|more|>", "special": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append(added)
    content["model"]["vocab"]["<|more|>"] = number
    path.write_text(json.dumps(content))


def test_what_cannot_be_imported_is_said_in_one_line_and_leaves_nothing(exported, tmp_path):
    from olmo_ext.base.errors import InputError, WorkError
    from olmo_ext.export.importer import import_model

    copies = {}
    for name, kind in [
        ("scaled", "olmo2"),
        ("other", "olmo2"),
        ("rows", "olmo2"),
        ("norms", "hourglass"),
        ("cut", "olmo2"),
        ("short", "olmo2"),
        ("index", "olmo2"),
        ("ids", "olmo2"),
    ]:
        copies[name] = shutil.copytree(exported(kind)[1], tmp_path / name)
    break_config(copies["scaled"], rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0})
    break_config(copies["other"], model_type="llama")
    break_config(copies["rows"], intermediate_size=65)
    break_config(copies["norms"], norm_after=True)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text('{"model_type": "ol')
    (copies["cut"] / "model.safetensors").unlink()
    weights = copies["short"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (copies["index"] / "model.safetensors.index.json").write_text('{"metadata": {}}')
    add_token(copies["ids"] / "tokenizer.json", 384)
    for name, text in (("yaml", "model: [1, "), ("no state", "model: {d_model: 32, n_heads: 4, n_layers: 1}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
        torch.save([torch.zeros(1)], tmp_path / name / "model.pt")
    (tmp_path / "empty").mkdir()
    for name, error, message in [
        ("scaled", InputError, "yarn"),
        ("other", InputError, "model_type 'llama'"),
        ("rows", InputError, "up_proj.*64 rows, not 65"),
        ("norms", WorkError, "layer 0"),
        ("cut", InputError, "no model.safetensors"),
        ("empty", InputError, "neither a Hugging Face folder"),
        ("torn", InputError, "not JSON"),
        ("short", InputError, "model.safetensors: not safetensors, or torn"),
        ("index", InputError, "index.json: no index of shards .*weight_map"),
        ("ids", InputError, "tokenizer.json: 385 ids, the model has 384 rows"),
        ("yaml", InputError, "config.yaml: not YAML"),
        ("no state", InputError, "model.pt: holds no tensors by name"),
        ("nowhere", InputError, "no such folder"),
    ]:
        with pytest.raises(error, match=message):
            import_model(tmp_path / name, tmp_path / "runs" / name)
    assert not (tmp_path / "runs").exists() or list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "key", "change"),
    [
        ("titans", "titans", lambda sizes: {**sizes, "theta_max": 0.01}),
        # As a folder from before the option would be read.
        ("titans", "titans", lambda sizes: {k: v for k, v in sizes.items() if k != "value_norm"}),
        ("gated taper", "attention_gate", lambda gate: "headwise" if gate == "elementwise" else "elementwise"),
        ("gated taper", "intermediate_size", lambda widths: widths[::-1]),
    ],
)
def test_a_folder_whose_layers_are_not_those_of_its_olmo_model_is_refused(kind, key, change, exported, tmp_path):
    from olmo_ext.base.errors import InputError
    from olmo_ext.export.importer import import_model

    folder = shutil.copytree(exported(kind)[1], tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    config[key] = change(config[key])
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=f"{key} is .*its olmo_model makes it"):
        import_model(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_code_in_a_folder_is_not_run_by_an_import(exported, tmp_path):
    from olmo_ext.export.folder import CODE
    from olmo_ext.export.importer import import_model

    folder = shutil.copytree(exported("titans")[1], tmp_path / "folder")
    code = list(folder.glob("*.py"))
    assert len(code) == len(CODE)
    for path in code:
        path.write_text("raise SystemExit('this is not our code')\n")
    assert import_model(folder, tmp_path / "run").verified


def test_a_pickle_with_code_in_it_is_not_run(tmp_path):
    from olmo_ext.base.errors import InputError
    from olmo_ext.export.importer import import_model

    class Bomb:
        def __reduce__(self):
            return (print, ("boom",))

    torch.save({"w": Bomb()}, tmp_path / "model.pt")
    (tmp_path / "config.yaml").write_text("model: {d_model: 32, n_heads: 4, n_layers: 1}\n")
    with pytest.raises(InputError, match="more than tensors"):
        import_model(tmp_path, tmp_path / "run")
