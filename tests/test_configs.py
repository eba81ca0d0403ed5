"""Every checked-in config: loads, plans, keeps its paper's counts, and builds what it counts."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from olmo_ext.config.run_config import RunConfig, load_run_config
from olmo_ext.config.sweep import is_sweep_file, load_sweep
from olmo_ext.plan.run_plan import Machine, plan_run
from olmo_ext.solve.solve_command import solve

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
PAPERS = ("hourglass", "tapered")
RUNS = sorted(path for folder in (*PAPERS, "smoke") for path in (CONFIGS / folder).glob("*.yaml"))
RUNS = [path for path in RUNS if path.name not in ("expected.yaml", "small.yaml")]
RUNS.append(CONFIGS / "base" / "olmo2-1b.yaml")
SWEEPS = sorted((CONFIGS / "sweeps").glob("*.yaml"))
NO_CORPUS = ("data.corpus=null", "model.vocab_size=4096", "model.embedding_size=4096")
"""The smoke configs get their vocabulary from a corpus that tests do not make."""

MACHINE = Machine(node=None, num_gpus=1, mfu=None, mfu_source="")


def overrides_of(path: Path) -> tuple[str, ...]:
    small = path.parent.name == "smoke" or "smoke/" in path.read_text()
    return NO_CORPUS if small else ()


@cache
def loaded(path: Path) -> RunConfig:
    return load_run_config(path, overrides_of(path))


def names(paths: list[Path]) -> list[str]:
    return [f"{path.parent.name}/{path.stem}" for path in paths]


@pytest.mark.parametrize("path", RUNS, ids=names(RUNS))
def test_every_run_loads_and_plans_within_its_budget(path):
    config = loaded(path)
    plan = plan_run(path.stem, config, MACHINE)
    assert config.budget_report is not None and config.budget_report.within
    assert abs(config.budget_report.deviation) <= 0.0065
    assert plan.rates is not None and plan.length is not None
    assert plan.rates.peak == pytest.approx(config.optimizer.learning_rate, rel=0.02)
    json.dumps(plan.to_json())


def test_every_run_builds_on_the_meta_device_with_exactly_the_counts_planned():
    from olmo_ext.upstream import build_model

    seen = []
    for path in RUNS:
        config = loaded(path)
        if config.shape in seen:
            continue
        seen.append(config.shape)
        found = dict.fromkeys(("embedding", "attention", "ffn", "norm", "head"), 0)
        matrices = 0
        for name, parameter in build_model(config, device="meta").named_parameters():
            found[group_of(name)] += parameter.numel()
            if group_of(name) in ("attention", "ffn") and parameter.dim() == 2:
                matrices += parameter.numel()
        counted = config.counts.parameters()
        assert {group: counted[group] for group in found} == found, path
        assert counted["non_embedding"] == matrices, path
    assert len(seen) > 50


def group_of(name: str) -> str:
    if ".wte." in name or ".wpe." in name:
        return "embedding"
    if "norm" in name or ".ln_f." in name:
        return "norm"
    if name.startswith("transformer.ff_out."):
        return "head"
    return "attention" if any(word in name for word in (".attention.", "att_proj", "attn_out")) else "ffn"


@pytest.mark.parametrize("path", SWEEPS, ids=names(SWEEPS))
def test_every_sweep_expands_and_its_runs_have_the_shapes_of_their_files(path):
    assert is_sweep_file(path)
    sweep = load_sweep(path, overrides_of(path))
    assert len(sweep.runs) >= 2
    files = {file.stem: file for file in RUNS}
    for run in sweep.runs:
        if run.group in files:
            ours, theirs = run.config, loaded(files[run.group])
            assert ours.shape == theirs.shape, run.name
            if files[run.group].parent.name == "smoke":
                continue
            for key in ("optimizer", "scheduler", "max_duration", "global_train_batch_size", "data", "evaluators"):
                assert getattr(ours, key) == getattr(theirs, key), (run.name, key)


def test_the_papers_sweeps_hold_every_row_of_their_tables():
    groups = {group for path in SWEEPS for group in load_sweep(path, overrides_of(path)).groups}
    for folder in PAPERS:
        rows = {row["run"] for row in yaml.safe_load((CONFIGS / folder / "expected.yaml").read_text())["rows"]}
        files = {path.stem for path in (CONFIGS / folder).glob("*.yaml")} - {"expected"}
        assert rows == files
        alone = {row for row in rows if row.startswith("1.3b-18x2048")}
        assert rows - groups == alone
    assert len(load_sweep(CONFIGS / "sweeps/tapered-440m.yaml").runs) == 16


def test_equal_seeds_mean_equal_data_in_the_papers_sweeps():
    runs = load_sweep(CONFIGS / "sweeps/hourglass-113m.yaml").runs
    assert {run.seed for run in runs} == {6198, 6199, 6200}
    assert {run.config.data.seed for run in runs} == {6198}


@pytest.mark.parametrize(
    ("run", "attention", "ffn"),
    [
        ("113m-conventional", 28.31, 84.93),
        ("113m-same-shape-k8", 28.31, 84.93),
        ("113m-45m-68m", 45, 68),
        ("113m-66m-47m-l6", 66, 47),
        ("113m-66m-47m-l10", 66, 47),
        ("403m-conventional", 100.66, 301.99),
        ("906m-conventional", 226.49, 679.48),
        ("1074m-conventional", 268.44, 805.31),
        ("v2-906m-hourglass", 184.0, 724.6),
        ("v2-3b-conventional", 1057, 2114),
        ("v2-3b-hourglass", 817.5, 2350.3),
        ("v2-8b-conventional", 2147, 5637),
        ("v2-8b-hourglass", 1799.4, 5988.5),
    ],
)
def test_counts_of_the_paper_to_the_digit_it_gives_and_asserted_in_the_config(run, attention, ffn):
    config = loaded(CONFIGS / "hourglass" / f"{run}.yaml")
    for figure, count in ((attention, config.counts.attention), (ffn, config.counts.ffn)):
        digits = len(str(figure).partition(".")[2]) if isinstance(figure, float) else 0
        assert round(count / 1e6, digits) == figure
    budget = config.budget
    assert float(budget.attention.rstrip("M")) == attention and float(budget.ffn.rstrip("M")) == ffn


def test_u_shape_sweep_has_eight_points_between_30_and_400():
    aspects = [
        config.shape.d_model / config.shape.n_layers
        for path in (CONFIGS / "hourglass").glob("113m-layers-*.yaml")
        for config in [loaded(path)]
    ]
    assert sum(30 <= aspect <= 400 for aspect in aspects) >= 8


def test_the_440m_sweep_keeps_the_mean_width_exactly():
    for path in (CONFIGS / "tapered").glob("440m-*.yaml"):
        widths = [layer.ffn.d_ff[0] for layer in loaded(path).shape.layers]
        assert sum(widths) == 32 * 4096, path.name


def test_taper_pairs_of_all_architectures_have_equal_counts():
    for size in ("760m", "1.3b"):
        for kind in ("transformer", "gated", "hope", "titans"):
            uniform, tapered = (
                loaded(CONFIGS / f"tapered/{size}-{kind}-{form}.yaml").counts for form in ("uniform", "tapered")
            )
            assert uniform == tapered


def header_command(path: Path) -> list[str] | None:
    """Arguments of the `olmo-ext solve` command in a config's header."""
    header = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
    text = " ".join(line.rstrip("\\") for line in header)
    if (match := re.search(r"olmo-ext solve (.*)$", text)) is None:
        return None
    return shlex.split(match[1])


SOLVED = [path for path in RUNS if header_command(path) is not None]


@pytest.mark.parametrize("path", SOLVED, ids=names(SOLVED))
def test_the_command_in_a_header_gives_the_configs_shape(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = header_command(path)
    assert arguments is not None
    result = CliRunner().invoke(solve, [*arguments, "--json", "--top", "400"], catch_exceptions=False)
    shape = loaded(path).shape
    layer = shape.layers[0]
    ours = (shape.n_layers, shape.d_model, layer.ffn.num_sub_mlps, layer.ffn.d_ff[0])
    ours += (layer.attention.n_heads, layer.attention.head_dim)
    found = [
        (row["layers"], row["d_model"], row["num_sub_mlps"], row["d_ff"], row["heads"], row["head_dim"])
        for row in json.loads(result.output)["solutions"]
    ]
    assert ours in found


def test_a_shape_that_the_paper_does_not_give_names_the_command_that_made_it():
    for folder in PAPERS:
        for row in yaml.safe_load((CONFIGS / folder / "expected.yaml").read_text())["rows"]:
            path = CONFIGS / folder / f"{row['run']}.yaml"
            header = path.read_text().partition("extends")[0]
            if "solved" in row["mark"]:
                assert header_command(path), path
            if "I" in row["mark"].replace("F", ""):
                assert re.search(r"\bI\b", header), path
            if row["mark"].startswith("N"):
                assert "(N)" in header, path


OLMO2_1B = {
    "model.d_model": 2048,
    "model.n_heads": 16,
    "model.n_layers": 16,
    "model.mlp_ratio": 8,
    "model.block_type": "sequential",
    "model.activation_type": "swiglu",
    "model.rope": True,
    "model.rope_theta": 500000,
    "model.alibi": False,
    "model.layer_norm_type": "rms",
    "model.layer_norm_eps": 1e-6,
    "model.layer_norm_with_affine": True,
    "model.bias_for_layer_norm": False,
    "model.attention_layer_norm": True,
    "model.attention_layer_norm_with_affine": True,
    "model.norm_after": True,
    "model.include_bias": False,
    "model.attention_dropout": 0.0,
    "model.residual_dropout": 0.0,
    "model.embedding_dropout": 0.0,
    "model.weight_tying": False,
    "model.max_sequence_length": 4096,
    "model.vocab_size": 100278,
    "model.embedding_size": 100352,
    "model.eos_token_id": 100257,
    "model.pad_token_id": 100277,
    "model.init_fn": "normal",
    "model.init_std": 0.02,
    "model.init_cutoff_factor": 3.0,
    "softmax_auxiliary_loss": True,
    "auxiliary_loss_multiplier": 1e-5,
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 4e-4,
    "optimizer.betas": [0.9, 0.95],
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "optimizer.decay_norm_and_bias": True,
    "optimizer.decay_embeddings": False,
    "scheduler.name": "cosine_with_warmup",
    "scheduler.units": "tokens",
    "scheduler.t_warmup": 8388608000,
    "scheduler.t_max": 5 * 10**12,
    "scheduler.alpha_f": 0.1,
    "scheduler.warmup_min_lr": 0.0,
    "tokenizer.identifier": "tokenizers/allenai_dolma2.json",
    "max_duration": "4000000000000T",
    "global_train_batch_size": 512,
    "device_train_microbatch_size": 4,
    "max_grad_norm": 1.0,
    "precision": "amp_bf16",
    "data.memmap_dtype": "uint32",
    "data.seed": 6198,
    "data.instance_filter.repetition_min_period": 1,
    "data.instance_filter.repetition_max_period": 13,
    "data.instance_filter.repetition_max_count": 32,
    "seed": 6198,
    "fsdp.sharding_strategy": "SHARD_GRAD_OP",
    "fsdp.precision": "mixed",
}
"""OLMo-2 1B stage 1, value by value."""


@pytest.mark.parametrize("key", OLMO2_1B)
def test_our_olmo2_1b_has_the_official_value(key):
    value = loaded(CONFIGS / "base" / "olmo2-1b.yaml").plain()
    for part in key.split("."):
        value = value[part]
    assert value == OLMO2_1B[key]


def test_our_olmo2_1b_has_its_published_number_of_parameters():
    assert loaded(CONFIGS / "base" / "olmo2-1b.yaml").counts.total == 1_484_916_736


def test_paper_a_is_pre_norm_and_olmo2_is_not():
    assert not loaded(CONFIGS / "hourglass/1074m-conventional.yaml").shape.norm_after
    assert loaded(CONFIGS / "base/olmo2-1b.yaml").shape.norm_after


def test_runs_stay_within_the_tokens_that_their_subset_is_named_after():
    for path in RUNS:
        config = loaded(path)
        subset = config.data.subset
        if subset is None:
            continue
        match = re.search(r"-([\d.]+)([bt])$", subset)
        assert match, path
        tokens = float(match[1]) * {"b": 1e9, "t": 1e12}[match[2]]
        length = plan_run(path.stem, config, MACHINE).length
        assert length is not None
        assert tokens - 2 * length.tokens_per_step < length.tokens <= tokens + length.excess_tokens, path


def test_validation_files_are_those_that_eval_prepare_fetches():
    from olmo_ext.evals.built_in import Lambada, Perplexity

    prepared = {f"data/eval/{file.name}" for file in (*Perplexity.files, *Lambada.files)}
    for path in (CONFIGS / "hourglass/113m-conventional.yaml", CONFIGS / "tapered/440m-uniform.yaml"):
        evaluators = loaded(path).evaluators
        sets = next(item for item in evaluators if item.type == "lm").data.datasets
        assert len(sets) == 4
        assert {file for files in sets.values() for file in files} <= prepared


def test_downstream_tasks_are_in_olmos_wheel():
    from olmo.eval.downstream import label_to_task_map

    labels = [item.label for item in loaded(CONFIGS / "base/olmo2-1b.yaml").evaluators]
    tasks = [label for label in labels if label != "v3-small"]
    assert len(tasks) == 9 and not set(tasks) - set(label_to_task_map)


def test_smoke_shapes_have_equal_non_embedding_parameters_within_half_a_percent():
    for size in ("", "-1m"):
        counts = [
            loaded(CONFIGS / f"smoke/{kind}{size}.yaml").counts.non_embedding
            for kind in ("conventional", "hourglass", "tapered")
        ]
        assert max(counts) / min(counts) - 1 <= 0.005


@pytest.mark.parametrize("folder", PAPERS)
def test_expected_figures_belong_to_runs_and_name_their_source(folder):
    content = yaml.safe_load((CONFIGS / folder / "expected.yaml").read_text())
    runs = {row["run"] for row in content["rows"]}
    for figure in content["figures"]:
        assert figure["run"] in runs
        assert figure["source"] and figure["mark"] and math.isfinite(figure["value"])


def test_the_papers_figures_are_read_by_compare():
    from olmo_ext.compare.paper import read_expected

    hourglass = {(f.run, f.metric): f for f in read_expected(CONFIGS / "hourglass/expected.yaml")}
    assert hourglass["113m-45m-68m", "ppl"].value == 35.101
    assert hourglass["113m-45m-68m", "ppl"].tokens == 2_500_000_000
    tapered = {(f.run, f.metric): f for f in read_expected(CONFIGS / "tapered/expected.yaml")}
    assert tapered["440m-cosine-1.5-0.5", "ppl"].value == 14.44
    doubtful = tapered["440m-sigmoid-1.25-0.75", "ppl"]
    assert doubtful.value == 16.16 and "16.44" in doubtful.note


def test_config_readme_is_what_its_script_writes():
    command = [sys.executable, "scripts/generate_config_table.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_links_of_the_config_readme_lead_to_files():
    links = re.findall(r"\]\(([^)]+)\)", (CONFIGS / "README.md").read_text())
    assert len(links) > 60
    assert all((CONFIGS / link).is_file() for link in links)
