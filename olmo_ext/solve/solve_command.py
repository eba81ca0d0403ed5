"""`olmo-ext solve`: shapes of equal budget as a table, JSON, a config or a sweep."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from olmo_ext.base.errors import InputError
from olmo_ext.base.files import write_atomically
from olmo_ext.base.quantities import format_count, parse_fraction
from olmo_ext.base.yaml_tree import dump_yaml
from olmo_ext.config.run_config import import_plugins, plugins_of
from olmo_ext.shapes.counts import count
from olmo_ext.solve.options import make_problem, taper_section
from olmo_ext.solve.problem import Problem, Solution, shape_of
from olmo_ext.solve.refusals import refusal_of_all
from olmo_ext.solve.search import Obstacle, Outcome, obstacles, search

DEFAULT_BASE = Path("configs/base/olmo2.yaml")
FLAGS = {"num_sub_mlps": "--sub-mlps"}
"""Options whose name is not the quantity's."""


def model_section(problem: Problem, solution: Solution) -> dict[str, Any]:
    """The `model` keys that make this shape."""
    ffn: dict[str, Any] = {"type": problem.ffn_type, "d_ff": solution.d_ff}
    if solution.num_sub_mlps > 1 or problem.ffn_type != "conventional":
        ffn["num_sub_mlps"] = solution.num_sub_mlps
    if problem.taper is not None:
        ffn["taper"] = taper_section(problem.taper)
    ffn.update(problem.ffn_options)
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
        "ffn": ffn,
        "attention": attention,
    }


def run_section(problem: Problem, solution: Solution) -> dict[str, Any]:
    """The keys of a run's config: the model's and the budget, which every command then checks."""
    budget = {problem.quantity: problem.target, "tolerance": f"{100 * problem.tolerance:g}%"}
    return {"model": model_section(problem, solution), "budget": budget}


def name_of(solution: Solution) -> str:
    """A run's name that says its shape."""
    heads = f"h{solution.heads}x{solution.head_dim}"
    return f"l{solution.layers}-d{solution.d_model}-{heads}-k{solution.num_sub_mlps}-ff{solution.d_ff}"


def to_json(problem: Problem, solution: Solution) -> dict[str, Any]:
    """One solution with every count of its shape, as `count` has them."""
    counts = count(shape_of(problem, solution))
    return {
        "name": name_of(solution),
        "layers": solution.layers,
        "d_model": solution.d_model,
        "num_sub_mlps": solution.num_sub_mlps,
        "d_ff": solution.d_ff,
        "ratio": solution.d_ff / solution.d_model,
        "heads": solution.heads,
        "head_dim": solution.head_dim,
        "deviation": solution.deviation,
        "alignment": solution.alignment,
        **counts.to_json(),
        "config": run_section(problem, solution),
    }


def table(problem: Problem, outcome: Outcome) -> list[str]:
    """The solutions for people."""
    lines = [
        f"{'#':>3} {'layers':>6} {'d_model':>7} {'K':>3} {'d_ff':>6} {'d_ff/d':>7} {'heads':>9} {'d/layers':>8} "
        f"{'attention':>9} {'FFN':>9} {'non-emb.':>9} {'deviation':>9} {'aligned':>7} {'MFLOP/tok':>9}"
    ]
    for number, found in enumerate(outcome.solutions, start=1):
        flops = count(shape_of(problem, found)).training_flops_per_token
        lines.append(
            f"{number:>3} {found.layers:>6} {found.d_model:>7} {found.num_sub_mlps:>3} {found.d_ff:>6} "
            f"{found.d_ff / found.d_model:>7.3f} {f'{found.heads}x{found.head_dim}':>9} "
            f"{found.d_model / found.layers:>8.1f} {format_count(found.attention):>9} {format_count(found.ffn):>9} "
            f"{format_count(found.attention + found.ffn):>9} {found.deviation:>+9.4%} {found.alignment:>7} "
            f"{mega(flops):>9}"
        )
    return lines


def mega(flops: float) -> str:
    """Millions, in three significant digits at least: `4.05`, `40.5`, `4,051`."""
    millions = flops / 1e6
    return f"{millions:,.{max(0, 2 - math.floor(math.log10(millions)))}f}" if millions > 0 else "0"


def infeasible(found: Sequence[Obstacle], refusal: str | None = None) -> InputError:
    """One line: the constraints in the way, each with the nearest feasible value.

    :param refusal: what the attention type has against all candidates.
    """
    if not found:
        said = "" if refusal is None else f" (attention: {refusal})"
        return InputError(
            f"no shape meets these constraints, and giving up any single one does not help{said}",
            right="relax two, or raise --tolerance",
        )

    def words(item: Obstacle) -> str:
        flag = FLAGS.get(item.name, "--" + item.name.replace("_", "-"))
        value = f"{item.nearest:.4%}" if item.name == "tolerance" else f"{item.nearest:,.6g}"
        if item.name in ("attention", "ffn"):
            value = f"{item.nearest / 1e6:.6g}M"
        shape = item.solution
        return f"{flag} {value} (L={shape.layers} d={shape.d_model} K={shape.num_sub_mlps} d_ff={shape.d_ff})"

    nearest = "; ".join(words(item) for item in found)
    names = " or ".join(FLAGS.get(item.name, "--" + item.name.replace("_", "-")) for item in found)
    return InputError(
        f"no shape meets these constraints: {names} alone is in the way", right=f"nearest feasible: {nearest}"
    )


def _header() -> str:
    return f"# Shape from: {shlex.join(['olmo-ext', *sys.argv[1:]])}\n"


def _relative(base: Path, folder: Path) -> str:
    return os.path.relpath(base.resolve(), folder.resolve())


def _dump(tree: dict[str, Any]) -> str:
    return dump_yaml(tree, default_flow_style=None, width=110)


def _plugins_section(plugins: Sequence[str]) -> dict[str, list[str]]:
    return {"plugins": list(plugins)} if plugins else {}


def _plugins_to_write(options: dict[str, Any]) -> list[str]:
    """Those named here and by `--like`. They would take the place of the base's own, so these come along."""
    like = options["like"]
    named = [*options["plugins"], *(plugins_of(Path(like)) if like else [])]
    return list(dict.fromkeys([*plugins_of(options["base"]), *named])) if named else []


def config_text(problem: Problem, solution: Solution, *, base: Path, folder: Path, plugins: Sequence[str] = ()) -> str:
    """One run's config, ready to train.

    :param plugins: modules that register its types.
    """
    tree = {"extends": _relative(base, folder), "run_name": name_of(solution), **_plugins_section(plugins)}
    return _dump({**tree, **run_section(problem, solution)})


def sweep_text(
    problem: Problem, solutions: Sequence[Solution], *, base: Path, folder: Path, plugins: Sequence[str] = ()
) -> str:
    """A sweep over the solutions, the first its baseline; `plugins` as in `config_text`."""
    runs = {name_of(found): {"model": model_section(problem, found)} for found in solutions}
    budget = {problem.quantity: problem.target, "tolerance": f"{100 * problem.tolerance:g}%"}
    tree = {
        "base": _relative(base, folder),
        **_plugins_section(plugins),
        "budget": budget,
        "runs": runs,
        "seeds": [1, 2, 3],
        "baseline": next(iter(runs)),
    }
    return _dump(tree)


def _fraction(context: click.Context, parameter: click.Parameter, value: str) -> float:
    try:
        share = parse_fraction(value)
    except ValueError as error:
        raise InputError(str(error), where="--tolerance", right="as 0.5% or 0.005") from None
    if share < 0:
        raise InputError(f"{value} is negative", where="--tolerance")
    return share


POSITIVE = click.IntRange(min=1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--non-embedding", "non_embedding", metavar="COUNT", help="Budget: attention and FFN weights.")
@click.option("--total", metavar="COUNT", help="Budget: all parameters.")
@click.option("--training-flops", "training_flops_per_token", metavar="COUNT", help="Budget: training FLOPs per token.")
@click.option(
    "--like",
    type=click.Path(exists=True, dir_okay=False),
    help="Budget: that of this config. Types, their options, activation and K that all its layers share are taken too, "
    "where they are not named here.",
)
@click.option("--tolerance", default="0.5%", callback=_fraction, show_default=True, help="Deviation allowed.")
@click.option("--layers", metavar="RANGE", help="As 6, 4,6,8, 4..24 or 4..24:2 (default 2..48).")
@click.option("--d-model", metavar="RANGE", help="As 1376 or 1024..2048:16 (default: multiples up to 8192).")
@click.option("--d-model-multiple-of", type=POSITIVE, default=64, show_default=True)
@click.option("--sub-mlps", metavar="RANGE", help="K, sub-MLPs a layer (default: 1, or --like).")
@click.option("--d-ff", metavar="RANGE", help="Inner width of one branch of one sub-MLP.")
@click.option("--multiple-of", type=POSITIVE, default=16, show_default=True, help="What d_ff is a multiple of.")
@click.option("--ratio", metavar="RANGE", help="d_ff / d_model, as 0.5 or 0.4..0.8.")
@click.option("--total-ratio", metavar="RANGE", help="K d_ff / d_model.")
@click.option("--attention", metavar="COUNT", help="Attention weights: 45M is all that rounds to it, 40M..50M a range.")
@click.option("--ffn", metavar="COUNT", help="FFN weights, likewise.")
@click.option("--attention-share", metavar="RANGE", help="Attention / (attention + FFN), as 40% or 0.2..0.4.")
@click.option("--aspect", metavar="RANGE", help="d_model / layers.")
@click.option("--heads", metavar="RANGE")
@click.option("--head-dim", metavar="RANGE", help="With --heads: attention of its own width.")
@click.option("--kv-heads", type=POSITIVE)
@click.option("--taper", metavar="RULE", help="cosine:1.5:0.5, linear:..., sigmoid:...[:steepness], groups:1.5,1,0.5.")
@click.option("--taper-multiple-of", type=POSITIVE, default=16, show_default=True)
@click.option("--activation", type=click.Choice(["swiglu", "gelu", "relu"]), help="Default: swiglu, or that of --like.")
@click.option("--ffn-type", help="conventional, hourglass (the default for K > 1) or a registered type.")
@click.option("--ffn-option", multiple=True, metavar="KEY=VALUE", help="As update_periods=[1,4], once per option.")
@click.option("--attention-type", help="Default: softmax, or that of --like.")
@click.option("--attention-option", multiple=True, metavar="KEY=VALUE", help="As gate=headwise, once per option.")
@click.option("--embedding-size", type=POSITIVE, help="Default: OLMo-2's 100352, or that of --like.")
@click.option("--sequence-length", type=POSITIVE, help="Default: 4096, or that of --like.")
@click.option("--tied/--untied", default=None, help="Whether the output head is the embedding.")
@click.option("--qk-norm/--no-qk-norm", default=None, help="Counts in --total (default: as OLMo-2, or --like).")
@click.option("--plugin", "plugins", multiple=True, metavar="MODULE", help="Import a module that registers types.")
@click.option("--sort", type=click.Choice(["deviation", "alignment"]), default="deviation", show_default=True)
@click.option("--top", type=POSITIVE, default=20, show_default=True, help="How many to show.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--pick", type=POSITIVE, default=1, show_default=True, help="Which of them --yaml writes.")
@click.option("--yaml", "yaml_file", type=click.Path(path_type=Path), help="Write one as a config; - prints it.")
@click.option("--sweep", "sweep_file", type=click.Path(path_type=Path), help="Write all shown as a sweep; - prints it.")
@click.option(
    "--base", type=click.Path(path_type=Path), default=DEFAULT_BASE, show_default=True, help="What they extend."
)
def solve(as_json: bool, sort: str, top: int, **options: Any) -> None:
    """Search shapes of equal budget: fix what you know, give ranges for the rest."""
    import_plugins(list(options["plugins"]))
    problem = make_problem(options)
    outcome = search(problem, limit=top, by=sort)
    if not outcome.solutions:
        raise infeasible(obstacles(problem), refusal_of_all(problem))
    yaml_file, sweep_file, base = options["yaml_file"], options["sweep_file"], options["base"]
    if (yaml_file or sweep_file) and not base.is_file():
        raise InputError("no such file", where=f"--base {base}", right="the config that what is written extends")
    plugins = _plugins_to_write(options) if yaml_file or sweep_file else []
    if yaml_file is not None:
        if options["pick"] > len(outcome.solutions):
            raise InputError(f"--pick {options['pick']} of {len(outcome.solutions)} shapes")
        found = outcome.solutions[options["pick"] - 1]
        _write(yaml_file, config_text(problem, found, base=base, folder=_folder(yaml_file), plugins=plugins))
    if sweep_file is not None:
        text = sweep_text(problem, outcome.solutions, base=base, folder=_folder(sweep_file), plugins=plugins)
        _write(sweep_file, text)
    if as_json:
        rows = [to_json(problem, found) for found in outcome.solutions]
        summary = {"candidates": outcome.num_candidates, "feasible": outcome.num_feasible, "solutions": rows}
        click.echo(json.dumps(summary, indent=1))
    elif "-" not in (str(yaml_file), str(sweep_file)):
        click.echo("\n".join(table(problem, outcome)))
        click.echo(
            f"{outcome.num_feasible:,} of {outcome.num_candidates:,} candidates are feasible, "
            f"{len(outcome.solutions)} shown, by {sort}"
        )


def _folder(path: Path) -> Path:
    return Path.cwd() if str(path) == "-" else path.parent


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        click.echo(text, nl=False)
        return
    if path.exists():
        raise InputError("exists", where=str(path), right="another name: nothing is overwritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _header() + text)
    click.echo(f"wrote {path}", err=True)
