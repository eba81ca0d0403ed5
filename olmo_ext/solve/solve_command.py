"""`olmo-ext solve`: shapes of equal budget as a table, JSON, a config or a sweep."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from olmo_ext.base.errors import InputError
from olmo_ext.base.files import write_atomically
from olmo_ext.base.quantities import EQUAL_WITHIN, format_count
from olmo_ext.base.yaml_tree import dump_yaml, parse_yaml
from olmo_ext.config.run_config import differing_keys, import_plugins, load_run_config, merged_tree
from olmo_ext.shapes.counts import count
from olmo_ext.solve.infeasible import Obstacle, obstacles
from olmo_ext.solve.options import (
    AROUND,
    BUDGET,
    HEAD_DIMS,
    INTERVAL,
    NUMBERS,
    SHARE,
    TOLERANCE,
    WEIGHTS,
    flag_of,
    make_problem,
    taper_section,
)
from olmo_ext.solve.problem import Problem, Solution, shape_of
from olmo_ext.solve.refusals import refusal_of_all
from olmo_ext.solve.search import search

DEFAULT_BASE = Path("configs/base/olmo2.yaml")
COLUMNS = {"#": 3, "layers": 6, "d_model": 7, "K": 3, "d_ff": 6, "d_ff/d": 7, "heads": 9, "d/layers": 8}
COLUMNS |= {"attention": 9, "FFN": 9, "non-emb.": 9, "deviation": 9, "aligned": 7, "MFLOP/tok": 9}
"""Headers of the table, and how wide their columns are."""


def model_section(problem: Problem, solution: Solution) -> dict[str, Any]:
    """The `model` keys that make this shape."""
    ffn: dict[str, Any] = {"type": problem.ffn_type, "d_ff": solution.d_ff}
    if solution.num_sub_mlps > 1 or problem.ffn_type != "conventional":
        ffn["num_sub_mlps"] = solution.num_sub_mlps
    if problem.taper is not None:
        ffn["taper"] = taper_section(problem.taper)
    attention: dict[str, Any] = {"type": problem.attention_type, **problem.attention_options}
    if solution.heads * solution.head_dim != solution.d_model:
        attention["head_dim"] = solution.head_dim
    if problem.kv_heads is not None:
        attention["n_kv_heads"] = problem.kv_heads
    return {
        "d_model": solution.d_model,
        "n_layers": solution.layers,
        "n_heads": solution.heads,
        "activation_type": problem.activation,
        "ffn": {**ffn, **problem.ffn_options},
        "attention": attention,
    }


def budget_section(problem: Problem) -> dict[str, Any]:
    """The budget, which every command then checks."""
    return {problem.quantity: problem.target, "tolerance": f"{100 * problem.tolerance:g}%"}


def name_of(solution: Solution) -> str:
    """A run's name that says its shape."""
    heads = f"h{solution.heads}x{solution.head_dim}"
    return f"l{solution.layers}-d{solution.d_model}-{heads}-k{solution.num_sub_mlps}-ff{solution.d_ff}"


def to_json(problem: Problem, solution: Solution) -> dict[str, Any]:
    """One solution with every count of its shape, as `count` has them, and the keys of its config."""
    named = ("layers", "d_model", "num_sub_mlps", "d_ff", "ratio", "heads", "head_dim", "deviation")
    values = {name: getattr(solution, name) for name in named} | {"alignment": int(solution.alignment)}
    config = {"model": model_section(problem, solution), "budget": budget_section(problem)}
    return {"name": name_of(solution), **values, **count(shape_of(problem, solution)).to_json(), "config": config}


def table(problem: Problem, solutions: Sequence[Solution]) -> str:
    """The solutions for people."""
    rows: list[Sequence[Any]] = [tuple(COLUMNS)]
    for number, solution in enumerate(solutions, start=1):
        rows.append(
            (
                *(number, solution.layers, solution.d_model, solution.num_sub_mlps, solution.d_ff),
                *(f"{solution.ratio:.3f}", f"{solution.heads}x{solution.head_dim}"),
                f"{solution.aspect:.1f}",
                *map(format_count, (solution.attention, solution.ffn, solution.attention + solution.ffn)),
                *(f"{solution.deviation:+.4%}", solution.alignment),
                mega(count(shape_of(problem, solution)).training_flops_per_token),
            )
        )
    return "\n".join(
        " ".join(f"{cell:>{width}}" for cell, width in zip(row, COLUMNS.values(), strict=True)) for row in rows
    )


def mega(flops: float) -> str:
    """Millions, in three significant digits at least: `4.05`, `40.5`, `4,051`."""
    millions = flops / 1e6
    return f"{millions:,.{max(0, 2 - math.floor(math.log10(millions)))}f}" if millions > 0 else "0"


def infeasible(problem: Problem) -> InputError:
    """One line: the constraints in the way, each with the nearest feasible value."""
    nearest = obstacles(problem)
    if not nearest:
        refusal = refusal_of_all(problem)
        said = "" if refusal is None else f" (attention: {refusal})"
        return InputError(
            f"no shape meets these constraints, and giving up any single one does not help{said}",
            right="relax two, or raise --tolerance",
        )
    names = " or ".join(flag_of(item.name) for item in nearest)
    return InputError(
        f"no shape meets these constraints: {names} alone is in the way",
        right=f"nearest feasible: {'; '.join(map(_nearest, nearest))}",
    )


def _nearest(item: Obstacle) -> str:
    value = f"{item.nearest:.4%}" if item.name == "tolerance" else f"{item.nearest:,.6g}"
    if item.name in ("attention", "ffn"):
        value = f"{item.nearest / 1e6:.6g}M"
    of = item.solution
    return f"{flag_of(item.name)} {value} (L={of.layers} d={of.d_model} K={of.num_sub_mlps} d_ff={of.d_ff})"


@dataclass(frozen=True, kw_only=True)
class Written:
    """What the files that `--yaml` and `--sweep` write have in common.

    :param base: the config that they extend.
    :param around: keys of `model` around the shape that the command line named.
    :param plugins: modules that register their types.
    """

    base: Path
    around: Mapping[str, Any] = field(default_factory=dict)
    plugins: Sequence[str] = ()

    def shape(self, problem: Problem, solution: Solution) -> dict[str, Any]:
        """The `model` keys of a solution; what else the base says of a layer's shape is unset."""
        model = {**model_section(problem, solution), **self.around}
        # A number of sub-MLPs cannot be unset.
        model["ffn"].setdefault("num_sub_mlps", 1)
        inherited = self._inherited("model")
        rivals = ("ffn", "attention", "mlp_hidden_size", "n_kv_heads", "multi_query_attention")
        return _in_place_of({key: inherited[key] for key in rivals if key in inherited}, model)

    def budget(self, problem: Problem) -> dict[str, Any]:
        """The budget, in place of the base's own."""
        return _in_place_of(self._inherited("budget"), budget_section(problem))

    def run(self, problem: Problem, solution: Solution, *, folder: Path) -> str:
        """One run's config, ready to train, to be written into `folder`."""
        shape = {"model": self.shape(problem, solution), "budget": self.budget(problem)}
        return self._dump({"extends": _relative(self.base, folder), "run_name": name_of(solution)}, shape)

    def sweep(self, problem: Problem, solutions: Sequence[Solution], *, folder: Path) -> str:
        """A sweep over the solutions, the first its baseline, to be written into `folder`."""
        runs = {name_of(solution): {"model": self.shape(problem, solution)} for solution in solutions}
        baseline = next(iter(runs))
        shapes = {"budget": self.budget(problem), "runs": runs, "seeds": [1, 2, 3], "baseline": baseline}
        return self._dump({"base": _relative(self.base, folder)}, shapes)

    def _inherited(self, section: str) -> dict[str, Any]:
        stated = merged_tree(self.base).get(section) if self.base.is_file() else None
        return stated if isinstance(stated, dict) else {}

    def _dump(self, first: dict[str, Any], last: dict[str, Any]) -> str:
        plugins = {"plugins": list(self.plugins)} if self.plugins else {}
        return dump_yaml({**first, **plugins, **last}, default_flow_style=None, width=110)


def _in_place_of(inherited: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """A section that unsets, by null, every inherited key that it does not state."""
    result = dict.fromkeys(inherited) | dict(section)
    for key, own in section.items():
        if isinstance(own, dict) and isinstance(inherited.get(key), dict):
            result[key] = _in_place_of(inherited[key], own)
    return result


def _relative(base: Path, folder: Path) -> str:
    return os.path.relpath(base.resolve(), folder.resolve())


POSITIVE = click.IntRange(min=1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--non-embedding", type=BUDGET, help="Budget: attention and FFN weights.")
@click.option("--total", type=BUDGET, help="Budget: all parameters.")
@click.option("--training-flops", "training_flops_per_token", type=BUDGET, help="Budget: training FLOPs per token.")
@click.option(
    "--like",
    type=click.Path(exists=True, dir_okay=False),
    help="Budget: that of this config. Types, their options, activation and K that all its layers share are taken too, "
    "where they are not named here.",
)
@click.option("--tolerance", type=TOLERANCE, default=f"{EQUAL_WITHIN:.1%}", show_default=True, help="Deviation.")
@click.option("--layers", type=NUMBERS, help="As 6, 4,6,8, 4..24 or 4..24:2 (default 2..48).")
@click.option("--d-model", metavar="RANGE", help="As 1376 or 1024..2048:16 (default: multiples up to 8192).")
@click.option("--d-model-multiple-of", type=POSITIVE, default=64, show_default=True)
@click.option("--sub-mlps", "num_sub_mlps", type=NUMBERS, help="K, sub-MLPs a layer (default: 1, or --like).")
@click.option("--d-ff", type=INTERVAL, help="Inner width of one branch of one sub-MLP.")
@click.option("--multiple-of", type=POSITIVE, default=16, show_default=True, help="What d_ff is a multiple of.")
@click.option("--ratio", type=INTERVAL, help="d_ff / d_model, as 0.5 or 0.4..0.8.")
@click.option("--total-ratio", type=INTERVAL, help="K d_ff / d_model.")
@click.option("--attention", type=WEIGHTS, help="Attention weights: 45M is all that rounds to it, 40M..50M a range.")
@click.option("--ffn", type=WEIGHTS, help="FFN weights, likewise.")
@click.option("--attention-share", type=SHARE, help="Attention / (attention + FFN), as 40% or 0.2..0.4.")
@click.option("--aspect", type=INTERVAL, help="d_model / layers.")
@click.option("--heads", type=NUMBERS)
@click.option("--head-dim", type=HEAD_DIMS, help="With --heads: attention of its own width.")
@click.option("--kv-heads", type=POSITIVE)
@click.option("--taper", metavar="RULE", help="cosine:1.5:0.5, linear:..., sigmoid:...[:steepness], groups:1.5,1,0.5.")
@click.option("--taper-multiple-of", type=POSITIVE, default=16, show_default=True)
@click.option("--activation", type=click.Choice(["swiglu", "gelu", "relu"]), help="Default: swiglu, or that of --like.")
@click.option("--ffn-type", help="conventional, hourglass (the default for K > 1) or a registered type.")
@click.option("--ffn-option", multiple=True, metavar="KEY=VALUE", help="As update_periods=[1,4], once per option.")
@click.option("--attention-type", help="Default: softmax, or that of --like.")
@click.option("--attention-option", multiple=True, metavar="KEY=VALUE", help="As gate=headwise, once per option.")
@click.option("--embedding-size", type=POSITIVE, help="Default: OLMo-2's 100352, or that of --like.")
@click.option("--sequence-length", "max_sequence_length", type=POSITIVE, help="Default: 4096, or that of --like.")
@click.option("--tied/--untied", "weight_tying", default=None, help="Whether the output head is the embedding.")
@click.option("--qk-norm/--no-qk-norm", default=None, help="Counts in --total (default: as OLMo-2, or --like).")
@click.option("--plugin", "plugins", multiple=True, metavar="MODULE", help="Import a module that registers types.")
@click.option("--sort", type=click.Choice(["deviation", "alignment"]), default="deviation", show_default=True)
@click.option("--top", type=POSITIVE, default=20, show_default=True, help="How many to show.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--pick", type=POSITIVE, default=1, show_default=True, help="Which of them --yaml writes.")
@click.option("--yaml", "yaml_file", type=click.Path(path_type=Path), help="Write one as a config; - prints it.")
@click.option("--sweep", "sweep_file", type=click.Path(path_type=Path), help="Write all shown as a sweep; - prints it.")
@click.option(
    "--base", type=click.Path(path_type=Path), help=f"What they extend (default: --like, else {DEFAULT_BASE})."
)
def solve(as_json: bool, sort: str, top: int, **options: Any) -> None:
    """Search shapes of equal budget: fix what you know, give ranges for the rest."""
    import_plugins(list(options["plugins"]))
    problem = make_problem(options)
    outcome = search(problem, limit=top, by=sort)
    if not outcome.solutions:
        raise infeasible(problem)
    _write_files(problem, outcome.solutions, options)
    if as_json:
        rows = [to_json(problem, solution) for solution in outcome.solutions]
        summary = {"candidates": outcome.num_candidates, "feasible": outcome.num_feasible, "solutions": rows}
        click.echo(json.dumps(summary, indent=1))
    elif Path("-") not in (options["yaml_file"], options["sweep_file"]):
        click.echo(table(problem, outcome.solutions))
        click.echo(
            f"{outcome.num_feasible:,} of {outcome.num_candidates:,} candidates are feasible, "
            f"{len(outcome.solutions)} shown, by {sort}"
        )


def _write_files(problem: Problem, solutions: Sequence[Solution], options: dict[str, Any]) -> None:
    """What `--yaml` and `--sweep` ask for."""
    run, sweep, like, pick = (options[name] for name in ("yaml_file", "sweep_file", "like", "pick"))
    if run is None and sweep is None:
        return
    base = options["base"] or (Path(like) if like else DEFAULT_BASE)
    if not base.is_file():
        raise InputError("no such file", where=f"--base {base}", right="the config that what is written extends")
    plugins = [*options["plugins"], *(_plugins_of(Path(like)) if like else [])]
    if plugins:
        # They would take the place of the base's own, so these come along.
        plugins = list(dict.fromkeys([*_plugins_of(base), *plugins]))
    around = {key: getattr(problem, name) for name, key in AROUND.items() if options[name] is not None}
    written = Written(base=base, around=around, plugins=plugins)
    if run is not None:
        if pick > len(solutions):
            raise InputError(f"--pick {pick} of {len(solutions)} shapes")
        text = written.run(problem, solutions[pick - 1], folder=_folder(run))
        _write(run, _changes(text, base=base, folder=_folder(run)) + text if like else text)
    if sweep is not None:
        _write(sweep, written.sweep(problem, solutions, folder=_folder(sweep)))


def _plugins_of(path: Path) -> list[str]:
    names = merged_tree(path).get("plugins")
    return [str(name) for name in names] if isinstance(names, list) else []


def _changes(text: str, *, base: Path, folder: Path) -> str:
    """Comment lines that name every key in which a config differs from the one that it extends."""
    ours = load_run_config(parse_yaml(text, name="the solution's config"), relative_to=folder).plain()
    theirs = load_run_config(base, check_budget_too=False).plain()
    differing = [change for change in differing_keys(ours, theirs) if not change.startswith("run_name:")]
    return "".join(f"# Changes {change}\n" for change in differing)


def _folder(path: Path) -> Path:
    return Path.cwd() if path == Path("-") else path.parent


def _write(path: Path, text: str) -> None:
    if path == Path("-"):
        click.echo(text, nl=False)
        return
    if path.exists():
        raise InputError("exists", where=str(path), right="another name: nothing is overwritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f"# Shape from: {shlex.join(['olmo-ext', *sys.argv[1:]])}\n{text}")
    click.echo(f"wrote {path}", err=True)
