"""`plan`: without torch, in the words a reader needs, with every warning it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from olmo_ext.base.errors import InputError
from olmo_ext.plan.plan_command import bars, plan

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
model: {d_model: 128, n_layers: 4, n_heads: 4, rope: true, include_bias: false, weight_tying: false,
        attention_layer_norm: true, vocab_size: 512, embedding_size: 512, max_sequence_length: 64, ffn: {d_ff: 512}}
optimizer: {name: adamw, learning_rate: 1e-3}
scheduler: {t_warmup: 5}
max_duration: 100
global_train_batch_size: 8
budget: {non_embedding: 1048576}
"""


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "one.yaml"
    path.write_text(CONFIG)
    return path


def invoke(*arguments: object):
    return CliRunner().invoke(plan, [str(argument) for argument in arguments])


def planned(*arguments: object) -> dict:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.output)["runs"][0]


def warnings_of(config: Path, *overrides: str) -> str:
    return " | ".join(planned(config, *overrides)["warnings"])


def test_planning_imports_no_torch_and_nothing_else_that_is_slow():
    code = (
        "import sys; from olmo_ext.cli import main\n"
        "try: main(['plan', 'configs/sweeps/tapered-440m.yaml', '--node', 'b200'])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "slow = {'torch', 'olmo', 'pandas', 'transformers', 'datasets', 'wandb', 'scipy', 'omegaconf', 'rich'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("440m-cosine") == 10  # a block and a line of the summary for each of five


def test_plan_says_what_the_config_comes_to(config):
    run = planned(config, "--node", "b200", "--gpus", "4")
    assert run["parameters"]["non_embedding"] == 1_048_576
    assert run["budget"]["deviation"] == 0
    assert run["steps"] == 100 and run["tokens"] == 100 * 8 * 64
    assert run["learning_rate"]["peak"] == pytest.approx(1e-3, rel=1e-2)
    flops = run["flops_per_token"]["training"]
    assert flops == 6 * (1_048_576 + 128 * 512) + 12 * 4 * 128 * 64
    assert run["total_training_flops"] == flops * run["tokens"]
    assert run["hours"] == pytest.approx(run["total_training_flops"] / (4 * 2.25e15 * 0.35) / 3600)
    assert run["strategy"] == "ddp" and "assumed" in run["mfu_source"]
    assert run["kv_cache_bytes_per_token"] == 2 * 2 * 4 * 128


def test_options_that_are_not_the_types_own_defaults_are_shown(config):
    hope = ("model.ffn.type=hope", "model.ffn.num_sub_mlps=2", "model.ffn.d_ff=256")
    shown = []
    for periods in ("[1,4]", "[4,1]", "[]"):
        output = invoke(config, *hope, f"model.ffn.update_periods={periods}").output
        shown.append(next(line for line in output.splitlines() if line.startswith("  FFN ")).partition("hope ")[2])
    assert shown == ["2 x 256, update_periods [1, 4]", "2 x 256, update_periods [4, 1]", "2 x 256"]
    titans = ("model.attention.form=mag", "model.attention.window=16", "model.attention.momentum=false")
    mixed = (*titans, "model.attention.type=[softmax,titans,titans,titans]", "budget=null")
    output = invoke(config, *mixed).output
    assert "softmax 4 x 32 = 128; titans 4 x 32 = 128, form mag, window 16, momentum false\n" in output
    options = planned(config, *mixed)["shape"]["attention_options"]
    assert options[0] == {} and options[1]["window"] == 16 and options[1]["memory_depth"] == 2


def test_overrides_are_written_with_or_without_dashes(config):
    assert planned(config, "max_duration=10")["steps"] == 10
    assert planned(config, "--max_duration=10")["steps"] == 10
    assert isinstance(invoke(config, "--max-duration").exception, InputError)


def test_mfu_can_be_given_or_taken_from_a_run(config, tmp_path):
    assert planned(config, "--node", "b200", "--mfu", "50%")["mfu"] == 0.5
    rows = [{"kind": "attempt", "attempt": 1, "step": 0, "tokens": 0, "time": 0.0}]
    for step, mfu in ((1, 0.1), (2, 0.4), (3, 0.42)):
        rows.append({"kind": "train", "attempt": 1, "step": step, "tokens": step, "flops": 1.0, "seconds": 1.0,
                     "time": 1.0, "values": {"throughput/mfu": mfu}})  # fmt: skip
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured = planned(config, "--node", "b200", "--mfu-from", run)
    assert measured["mfu"] == 0.4 and "median of 3 logged steps" in measured["mfu_source"]
    assert "between 0 and 1" in str(invoke(config, "--mfu", "140%").exception)
    assert "--mfu: a share of a peak that is not known; --node" in str(invoke(config, "--mfu", "40%").exception)
    assert "--mfu-from: a share of a peak" in str(invoke(config, "--mfu-from", run).exception)
    both = invoke(config, "--node", "b200", "--mfu", "40%", "--mfu-from", run)
    assert "both --mfu and --mfu-from" in str(both.exception)


def test_unequal_costs_are_a_remark_on_equal_parameters_only(config, tmp_path):
    other = tmp_path / "two.yaml"
    remark = "equal parameters are not equal FLOPs"
    # Twice the sequence: the same parameters, and attention costs more.
    other.write_text(CONFIG.replace("max_sequence_length: 64", "max_sequence_length: 512"))
    assert remark in invoke(config, other).output
    config.write_text(CONFIG.replace("budget: {non_embedding: 1048576}", ""))
    other.write_text(CONFIG.replace("budget: {non_embedding: 1048576}", "").replace("d_ff: 512", "d_ff: 768"))
    assert invoke(config, other).exit_code == 0 and remark not in invoke(config, other).output


def test_copies_of_hybrid_sharding_have_to_divide_the_devices(config):
    hybrid = ("distributed_strategy=fsdp", "fsdp.sharding_strategy=HYBRID_SHARD")
    found = invoke(config, *hybrid, "fsdp.hybrid_sharding_num_model_replicas=8", "--gpus", "4", "--node", "b200")
    assert "8 copies of the model do not divide 4 ranks; a divisor" in str(found.exception)
    assert planned(config, *hybrid, "fsdp.hybrid_sharding_num_model_replicas=2", "--gpus", "4")["memory"]


def test_micro_batch_that_fits_falls_with_memory_and_rises_with_checkpointing():
    path = ROOT / "configs/hourglass/906m-conventional.yaml"
    fits = {}
    for node in ("rtx6000ada", "b200"):
        run = planned(path, "--node", node, "--gpus", "8")
        fits[node] = {way["checkpointing"]: way["largest_micro_batch"] for way in run["memory"]}
        for way in run["memory"]:
            assert way["total"] > way["weights"] + way["gradients"] + way["moments"]
    assert fits["rtx6000ada"][None] < fits["b200"][None] <= fits["b200"]["whole_layer"]
    assert all(64 % size == 0 for size in fits["b200"].values())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.ffn.d_ff=500", "budget=null"], "d_ff 500 is no multiple of 8"),
        (["model.ffn.d_ff=520", "budget=null"], "d_ff 520 is no multiple of 64"),
        (["model.attention.head_dim=36", "budget=null"], "head_dim 36 is no multiple of 8"),
        (["scheduler.t_warmup=500"], "peak learning rate is never reached"),
        (["stop_at=50"], "the last learning rate is not the schedule's end"),
        (
            ["model.norm_after=true", "model.ffn={type: hourglass, d_ff: 64, num_sub_mlps: 3}", "budget=null"],
            "the residual's variance grows as L (1 + K)",
        ),
        (
            ["model.attention={type: titans, chunk_size: 100000}", "budget=null"],
            "chunk_size 100000 is longer than max_sequence_length",
        ),
        (
            ["model.attention={type: titans, chunk_size: 100000}", "budget=null", "max_duration=2ep"],
            "chunk_size 100000 is longer than max_sequence_length",
        ),
        (
            ["model.vocab_size=8000", "model.embedding_size=8064"],
            "embedding and head hold more parameters than the body",
        ),
    ],
)
def test_warnings(config, overrides, words):
    assert words in warnings_of(config, *overrides)
    assert words not in warnings_of(config)


def test_peak_rate_of_a_warm_up_that_never_ends_is_what_the_run_reaches(config):
    rates = planned(config, "scheduler.t_warmup=500", "scheduler.warmup_min_lr=0.0")["learning_rate"]
    assert rates["peak"] == rates["last"] == pytest.approx(1e-3 * 100 / 500)


def test_seeds_that_share_an_order_are_named(tmp_path):
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(CONFIG + "axes: {model.rope_theta: [10000, 500000]}\nseeds: [1, 2]\nseeds_change_data: true\n")
    output = invoke(sweep).output
    same = "data.seed 1 epoch 1 and data.seed 2 epoch 0 are the same order of the data"
    assert f"{same}, if a run is longer than an epoch" in output
    sweep.write_text(CONFIG + "axes: {model.rope_theta: [10000, 500000]}\nseeds: [1, 2]\n")
    assert "same order" not in invoke(sweep).output


def test_what_every_run_of_a_sweep_would_say_is_said_once(tmp_path):
    """Seen in smoke sweeps: the same sentence beneath every shape."""
    sweep = tmp_path / "sweep.yaml"
    text = CONFIG.replace("vocab_size: 512, embedding_size: 512", "vocab_size: 8000, embedding_size: 8064")
    shapes = "axes: {shape: {a: {model.ffn.d_ff: 512}, b: {model.ffn.d_ff: 520, model.n_layers: 3}}}"
    sweep.write_text(text.replace("budget: {non_embedding: 1048576}", "unequal_budgets: true") + shapes)
    output = invoke(sweep, "scheduler.t_warmup=500").output.splitlines()
    for words in ("more parameters than the body", "peak learning rate is never reached"):
        said = [line for line in output if words in line]
        assert len(said) == 1 and said[0].startswith("warning, all runs: ")
    own = [line for line in output if "d_ff 520 is no multiple" in line]
    assert len(own) == 1 and own[0].startswith("  warning")
    for run in json.loads(invoke(sweep, "--json").output)["runs"]:
        assert "more parameters than the body" in " ".join(run["warnings"])


def test_epochs_have_no_steps_until_there_is_data_and_the_plan_says_so(config):
    run = planned(config, "max_duration=2ep")
    assert run["steps"] is None and run["hours"] is None
    assert "in epochs" in " ".join(run["warnings"])


def test_what_is_wrong_is_one_line(config, tmp_path):
    assert "--node" in str(invoke(config, "--node", "b20").exception)
    assert "did you mean 'b200'" in str(invoke(config, "--node", "b20").exception)
    assert "does not divide over 3 ranks" in str(invoke(config, "--gpus", "3").exception)
    assert "no such file" in str(invoke(tmp_path / "none.yaml").exception)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no .yaml file" in str(invoke(empty).exception)


def test_bars_are_one_per_layer_and_the_widest_is_full():
    assert bars([4, 2, 1]) == "█▄▂"
    assert len(bars(list(range(1, 33)))) == 32
