"""Write configs/README.md: from a paper's table to the file, with the counts that each file's shape has.

python scripts/generate_config_table.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from olmo_ext.config.run_config import RunConfig, load_run_config
from olmo_ext.config.run_length import run_length

ROOT = Path(__file__).resolve().parents[1] / "configs"
TARGET = ROOT / "README.md"
PAPERS = (
    ("hourglass", "Paper A: Revisiting the Shape Convention of Transformer Language Models (arXiv 2602.06471)"),
    ("tapered", "Paper B: Tapered Language Models (arXiv 2606.23670)"),
)
HEAD = """# Configs

Written by `python scripts/generate_config_table.py`; a test holds it equal to the files.

What is where: `base/` recipes and one base per size; `hourglass/` and `tapered/` one file per row of a paper's table,
with `expected.yaml`, the paper's figures; `sweeps/` the experiments as sweeps; `smoke/` small shapes for a CPU;
`data/` where data and validation files come from and where a local copy is looked for first.

    olmo-ext plan configs/hourglass/113m-45m-68m.yaml --node b200
    olmo-ext plan configs/sweeps/tapered-440m.yaml
    olmo-ext launch configs/sweeps/hourglass-113m.yaml --on b200 --dry-run

Marks: **F** found in the paper or its released code; **I** inferred, the file's header says how; **N** not known, the
shape comes from `olmo-ext solve` with the command in the header. Counts are weights of attention (gates included) and
FFN, in millions; cost is training FLOPs per token at the config's sequence length, without causal discount. Every file
declares its budget and, where the paper prints them, the attention and FFN counts: a config that misses them is
refused by every command.
"""


def ffn_text(config: RunConfig) -> str:
    """d_ff, as one sub-MLP's width or the ends of a taper, with K where it is not 1."""
    first, last = config.shape.layers[0].ffn.d_ff, config.shape.layers[-1].ffn.d_ff
    text = str(first[0]) if first == last else f"{first[0]} to {last[0]}"
    periods = config.shape.layers[0].ffn.options.get("update_periods")
    every = f", every {', '.join(map(str, periods))} steps" if periods else ""
    return text if len(first) == 1 else f"{len(first)} x {text}{every}"


def attention_text(config: RunConfig) -> str:
    """Heads and their size; the type where it is not softmax."""
    spec = config.shape.layers[0].attention
    options = spec.options
    form = (
        f" {options['form']}, memory {options['memory_heads'] or spec.n_heads} heads" if spec.type == "titans" else ""
    )
    return f"{spec.n_heads}x{spec.head_dim}" + ("" if spec.type == "softmax" else f" {spec.type}") + form


def figures_by_run(expected: dict[str, Any]) -> dict[str, str]:
    """The paper's perplexity of each run, with the doubt about it."""
    result: dict[str, str] = {}
    for figure in expected["figures"]:
        if figure["metric"] == "ppl":
            doubt = " (?)" if "doubtful" in figure["mark"] else ""
            result.setdefault(figure["run"], f"{figure['value']:g}{doubt}")
    return result


def row(folder: str, entry: dict[str, str], figures: dict[str, str]) -> str:
    """One line of the table."""
    config = load_run_config(ROOT / folder / f"{entry['run']}.yaml")
    counts, shape = config.counts, config.shape
    tokens = run_length(config).tokens
    cells = [
        entry["row"],
        f"[{entry['run']}]({folder}/{entry['run']}.yaml)",
        entry["mark"],
        str(shape.n_layers),
        str(shape.d_model),
        attention_text(config),
        ffn_text(config),
        f"{counts.attention_matrices / 1e6:.2f} + {counts.ffn_matrices / 1e6:.2f} = {counts.non_embedding / 1e6:.2f}",
        f"{counts.training_flops_per_token / 1e6:,.0f}M",
        f"{tokens / 1e9:.2f}B",
        figures.get(entry["run"], ""),
    ]
    return "| " + " | ".join(cells) + " |"


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    columns = [
        "row",
        "file",
        "mark",
        "L",
        "d_model",
        "heads",
        "d_ff",
        "attention + FFN (M)",
        "cost",
        "tokens",
        "paper's PPL",
    ]
    for folder, title in PAPERS:
        expected = yaml.safe_load((ROOT / folder / "expected.yaml").read_text())
        figures = figures_by_run(expected)
        parts.append(f"\n## {title}\n")
        table = None
        for entry in expected["rows"]:
            if entry["table"] != table:
                table = entry["table"]
                parts.append(f"\n### {table}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n")
            parts.append(row(folder, entry, figures) + "\n")
    return "".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    arguments = parser.parse_args()
    text = render()
    if arguments.check:
        if TARGET.read_text() != text:
            print(f"{TARGET} is out of date: python scripts/generate_config_table.py", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
