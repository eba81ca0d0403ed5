"""The commands on a run and on a Hugging Face folder: rows land where `compare` looks, wrong input is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import RunDirectory, RunState
from olmo_ext.evals import target as evaluated
from olmo_ext.evals.eval_command import diagnose, evaluate, generate
from olmo_ext.evals.results import Result, results_table, write_results
from tests.sections import typed

from .conftest import TEXT


@pytest.fixture
def run(olmo: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run with one checkpoint, its model put in place of the loading of a run."""
    np.asarray(tokenizer.encode(TEXT), dtype=np.uint16).tofile(tmp_path / "validation.bin")
    directory = RunDirectory(tmp_path / "sweep" / "run-s1")
    data = {"datasets": {"validation": [str(tmp_path / "validation.bin")]}, "memmap_dtype": "uint16"}
    values = {"evaluators": [{"label": "validation", "type": "lm", "data": data}], "data": {"memmap_dtype": "uint16"}}
    directory.write_config(values)

    def load(path: Path, step: int | None, device: str, precision: str) -> evaluated.Target:
        return evaluated.Target(
            name="run-s1",
            model=evaluated.EvaluatedModel(olmo, max_sequence_length=512, precision=precision),
            tokenizer=tokenizer,
            stop_token_ids=(tokenizer.eos_token_id,),
            step=7 if step is None else step,
            checkpoint_sha256="c" * 64,
            run=directory,
            config=typed(values),
        )

    monkeypatch.setattr(evaluated, "_load_run", load)
    return directory


def make_corpus(folder: Path) -> None:
    """A corpus folder of another vocabulary than the run's."""
    from olmo_ext.data.tokenizer import train_bpe

    other = train_bpe(["quite another text"], vocab_size=300)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(other.to_json_text())
    split = {"file": "validation.bin", "documents": 1, "bytes": 1, "tokens": 1, "sha256": "0"}
    sizes = {"vocab_size": other.vocab_size, "eos_token_id": 0, "pad_token_id": 1, "dtype": "uint16"}
    names = {"fingerprint": "f", "request": "r", "tokenizer": {"name": "bpe:300", "fingerprint": other.fingerprint}}
    manifest = {"format": 1, **sizes, **names, "splits": {"validation": split}}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def call(command: Any, *arguments: object) -> str:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def rows_of(run: RunDirectory, family: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.evals / f"{family}.jsonl").read_text().splitlines()]


def test_rows_of_a_run_land_in_its_folder_and_a_second_evaluation_replaces_them(run: RunDirectory) -> None:
    shown = call(
        evaluate, run.path, "--tasks", "perplexity,copa,niah_single_1", "--depths", "0,1", "--needle-samples", 1
    )
    assert [line.split()[:2] for line in shown.splitlines()[2:5]] == [
        ["validation", name] for name in ("CrossEntropyLoss", "Perplexity", "BitsPerByte")
    ]
    perplexity, downstream, needle = (rows_of(run, family) for family in ("perplexity", "downstream", "needle"))
    assert [row["metric"] for row in perplexity] == ["CrossEntropyLoss", "Perplexity", "BitsPerByte"]
    assert {"task", "task_version", "metric", "value", "stderr", "items", "step", "checkpoint_sha256"} <= set(
        perplexity[0]
    )
    assert len(perplexity[0]["document_losses"]) == perplexity[0]["items"]
    assert (downstream[0]["task"], downstream[0]["items"], downstream[0]["step"]) == ("copa", 100, 7)
    assert [(row.get("length"), row.get("depth")) for row in needle] == [(512, 0.0), (512, 1.0), (None, None)]
    call(evaluate, run.path, "--tasks", "copa")
    assert rows_of(run, "downstream") == downstream
    call(evaluate, run.path, "--tasks", "copa", "--step", 9)
    assert len(rows_of(run, "downstream")) == 2 * len(downstream)


def test_a_quick_look_does_not_take_the_place_of_a_whole_evaluation(run: RunDirectory) -> None:
    call(evaluate, run.path, "--tasks", "perplexity,copa")
    whole = rows_of(run, "perplexity") + rows_of(run, "downstream")
    call(evaluate, run.path, "--tasks", "perplexity,copa", "--limit", 3)
    call(evaluate, run.path, "--tasks", "perplexity", "--sequence-length", 64, "--limit", 9)
    rows = rows_of(run, "perplexity") + rows_of(run, "downstream")
    assert all(row in rows for row in whole) and len(rows) == 2 * len(whole) + 3
    assert len({(row["task"], row["metric"], row["task_version"]) for row in rows}) == len(rows)


def test_numbers_of_bf16_are_not_those_of_fp32(run: RunDirectory) -> None:
    arguments = ("--tasks", "perplexity", "--limit", 3)
    for precision in ("fp32", "bf16"):
        call(evaluate, run.path, *arguments, "--precision", precision)
    rows = rows_of(run, "perplexity")
    assert len(rows) == 6 and [row["task_version"].endswith("/bf16") for row in rows] == [False] * 3 + [True] * 3
    assert rows[0]["task_version"] + "/bf16" == rows[3]["task_version"]


def test_models_in_one_call_keep_apart(run: RunDirectory, tmp_path: Path) -> None:
    steps = (run.path / "checkpoints" / "step3", run.path / "checkpoints" / "step7")
    arguments = ("--tokens", 256, "--sequence-length", 64, "--no-plot", "-o", tmp_path / "out")
    call(diagnose, *steps, *arguments)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run-s1-step3.json", "run-s1-step7.json"]
    with pytest.raises(InputError, match="run-s1-step7"):
        CliRunner().invoke(diagnose, [str(a) for a in (steps[1], run.path, *arguments)], catch_exceptions=False)
    needles = ("--tasks", "niah_single_1", "--depths", 0, "--needle-samples", 1)
    call(evaluate, *steps, *needles, "--heat-map", tmp_path / "map.html")
    page = (tmp_path / "map.html").read_text()
    assert "run-s1, step 3: niah_single_1" in page and "run-s1, step 7: niah_single_1" in page
    with pytest.raises(InputError, match="--step 3 and a checkpoint of step 7"):
        CliRunner().invoke(evaluate, [str(steps[1]), "--step", "3"], catch_exceptions=False)


def test_compare_finds_the_rows(run: RunDirectory) -> None:
    from olmo_ext.compare.collect import Run
    from olmo_ext.compare.documents import document_losses
    from olmo_ext.compare.downstream import run_scores

    call(evaluate, run.path, "--tasks", "perplexity,copa")
    rows = rows_of(run, "perplexity") + rows_of(run, "downstream")
    found = Run.__new__(Run)
    object.__setattr__(found, "evaluations", rows)
    object.__setattr__(found, "series", {})
    object.__setattr__(found, "state", RunState(status="done", step=7))
    assert document_losses(found, "validation") is not None
    assert any(key[0] == "copa" and value[2] == 100 for key, value in run_scores(found).items())


def test_a_hugging_face_folder_is_evaluated_diagnosed_and_continued(
    tokenizer: Any, tmp_path: Path, text_file: Path
) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=tokenizer.vocab_size, n_positions=128, n_embd=32, n_layer=3, n_head=2, eos_token_id=0, pad_token_id=1
    )
    folder = tmp_path / "model"
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_json_text())
    np.asarray(tokenizer.encode(TEXT), dtype=np.uint16).tofile(tmp_path / "set.bin")
    lines = call(
        evaluate, folder, "--tasks", "perplexity", "--set", f"mine={tmp_path / 'set.bin'}", "--json"
    ).splitlines()
    row = json.loads(lines[0])
    assert (row["target"], row["task"], row["step"]) == ("model", "mine", None)
    assert row["value"] == pytest.approx(np.log(tokenizer.vocab_size), abs=0.3)
    assert "rho MLP" in call(diagnose, folder, "--text", text_file, "--tokens", 512, "-o", tmp_path / "out")
    assert (tmp_path / "out" / "model.json").is_file() and (tmp_path / "out" / "model.html").is_file()
    shown = call(generate, folder, "The river", "--max-tokens", 5)
    assert shown.startswith("The river") and len(shown) > len("The river\n")
    # A folder that names several ends of text, as chat models do, stops at each.
    prompt = torch.tensor([tokenizer.encode("The river")])
    first = int(evaluated.load_target(folder).model.logits(prompt)[0, -1].argmax())
    ends = json.loads((folder / "generation_config.json").read_text()) | {"eos_token_id": [0, first]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    assert evaluated.load_target(folder).stop_token_ids == (0, first)
    assert call(generate, folder, "The river", "--max-tokens", 5) == "The river\n"


def test_diagnosis_of_a_run_is_where_the_report_looks(run: RunDirectory) -> None:
    from olmo_ext.compare.report.heatmaps import QUANTITIES, layer_values

    call(diagnose, run.path, "--tokens", 1000, "--sequence-length", 64)
    content = json.loads((run.diagnosis / "step7.json").read_text())
    assert set(QUANTITIES) <= set(layer_values(content))
    assert content["tokens"] == 960 and content["tokens_left_out"] == 40 and content["step"] == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "hellaswagg"], "did you mean 'hellaswag"),
        (["--tasks", ""], "no task is named"),
        (["--tasks", "niah_single_1", "--lengths", "4096"], "takes 512 tokens, 4096 were asked for"),
        (["--tasks", "niah_single_1", "--lengths", "30"], "needs .* tokens with this tokenizer"),
        (["--depths", "0,2"], "numbers from 0 to 1"),
        (["--lengths", "1.5"], "not a whole number"),
        (["--device", "tpu7"], "auto, cpu, cuda"),
        (["--device", "meta"], "auto, cpu, cuda"),
        (["--device", "cuda:99"], "cuda:99|no CUDA device"),
        (["--batch-tokens", "1,2"], "one number, at least 1"),
        (["--batch-tokens", "0"], "one number, at least 1"),
        (["--sequence-length", "513"], "instances of 513 tokens, the model takes 512"),
        (["--tasks", "niah_single_1", "--depths", "0,0.5,0"], "--depths: .*twice"),
        (["--tasks", "niah_single_1", "--lengths", "400,0.4K"], "--lengths: .*twice"),
        (["--tasks", "copa", "--heat-map", "map.html"], "no needle task"),
        (["--tasks", "niah_single_2", "--text", "latin1.txt"], "latin1.txt: cannot be read .*UTF-8"),
        (["--set", "a/v.bin", "--set", "b/v.bin"], "a/v.bin and b/v.bin are both called 'v'"),
        (["--set", "=a/v.bin"], "no name"),
        (["--tasks", "wikitext_103", "--prepared", "."], "tokens of .*dolma2.*the model reads bpe:512"),
        (["--set", "corpus"], "tokens of .*corpus.*the model reads bpe:512"),
    ],
)
def test_wrong_input_is_one_line(
    run: RunDirectory, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9. The end.")
    (tmp_path / "wikitext_103.npy").write_bytes(b"0" * 4096)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "v.bin").write_bytes(b"0" * 4096)
    make_corpus(tmp_path / "corpus")
    with pytest.raises(InputError, match=message):
        CliRunner().invoke(evaluate, [str(run.path), *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (diagnose, ["--tokens", "1,2"], "one number, at least 2"),
        (diagnose, ["--tokens", "1"], "one number, at least 2"),
        (generate, ["x", "--temperature", "nan"], "--temperature: nan"),
        (generate, ["x", "--top-p", "nan"], "--top-p: nan"),
    ],
)
def test_wrong_numbers_of_the_other_commands_are_one_line(
    run: RunDirectory, command: Any, arguments: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        CliRunner().invoke(command, [str(run.path), *arguments], catch_exceptions=False)


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_told(tokenizer: Any, tmp_path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(vocab_size=tokenizer.vocab_size - 1, n_positions=64, n_embd=8, n_layer=1, n_head=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(tokenizer.to_json_text())
    with pytest.raises(InputError, match="the tokenizer has 512 ids, the model 511"):
        evaluated.load_target(tmp_path / "model")


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    for command in (evaluate, diagnose, generate):
        with pytest.raises(InputError, match="neither a run nor a Hugging Face model"):
            CliRunner().invoke(command, [str(tmp_path)], input="x", catch_exceptions=False)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(InputError, match="transformers cannot load it"):
        CliRunner().invoke(evaluate, [str(tmp_path)], catch_exceptions=False)


def test_what_generate_refuses_comes_before_anything_is_printed(run: RunDirectory) -> None:
    result = CliRunner().invoke(generate, [str(run.path), "The 3th river", "--max-tokens", "100000"])
    assert isinstance(result.exception, InputError) and "and 100000 more" in str(result.exception)
    assert result.stdout == ""


def test_generate_prints_the_prompt_and_its_continuation(run: RunDirectory) -> None:
    first = call(generate, run.path, "The 3th river", "--max-tokens", 8)
    assert first == call(generate, run.path, "The 3th river", "--max-tokens", 8, "--no-cache")
    assert first.startswith("The 3th river") and first.endswith("\n")


def test_a_torn_line_does_not_lose_the_others(tmp_path: Path) -> None:
    result = Result(task="t", task_version="1", metric="acc", value=0.5, stderr=0.1, items=3, details={"truncated": 2})
    path = tmp_path / "evals" / "x.jsonl"
    write_results(path, [result.row(step=1, checkpoint_sha256="a")])
    with open(path, "a") as file:
        file.write('{"task": "to')
    write_results(path, [result.row(step=2, checkpoint_sha256="b")])
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    assert "2 truncated" in results_table([result])
