"""`olmo-ext plan`: the plans of configs and sweeps as text or JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from olmo_ext.base.errors import InputError
from olmo_ext.base.nodes import load_hardware
from olmo_ext.base.quantities import format_bytes, format_count, parse_fraction
from olmo_ext.config.run_config import RunConfig, load_run_config
from olmo_ext.data.shared_orders import order_warnings
from olmo_ext.plan.run_plan import Machine, RunPlan, plan_run
from olmo_ext.shapes.kinds import changed_options, options_text
from olmo_ext.shapes.layers import AttentionSpec, ModelShape
from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES

BARS = "▁▂▃▄▅▆▇█"
NOT_RUNS = ("expected.yaml",)


def bars(values: Sequence[int]) -> str:
    """One small bar per value, the largest one full."""
    top = max(values)
    return "".join(BARS[max(0, -(-value * len(BARS) // top) - 1)] for value in values)


def find_configs(paths: Sequence[Path]) -> list[Path]:
    """The YAML files named, and those in the folders named.

    :raises InputError: for a path that is neither.
    """
    configs: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*.yaml") if file.name not in NOT_RUNS)
            if not inside:
                raise InputError("holds no .yaml file", where=str(path))
            configs += inside
        else:
            configs.append(path)
    return configs


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Paths and `key=value` overrides, told apart."""
    overrides = [text for text in arguments if "=" in text and not Path(text).exists()]
    paths = [Path(text) for text in arguments if text not in overrides]
    for path in paths:
        if str(path).startswith("--"):
            raise InputError(f"unknown option {path}", right="options stand in `olmo-ext plan --help`")
    return paths, overrides


def load_plans(
    paths: Sequence[Path], overrides: Sequence[str], machine_of: Callable[[RunConfig], Machine]
) -> tuple[list[RunPlan], list[str]]:
    """Plans of every run of every file, one per group of a sweep's seeds, and what concerns several of them.

    :param machine_of: config -> Machine.
    """
    from olmo_ext.config.sweep import is_sweep_file, load_sweep

    plans: list[RunPlan] = []
    remarks: list[str] = []
    for path in find_configs(paths):
        if is_sweep_file(path):
            sweep = load_sweep(path, overrides)
            by_group = {run.group: run for run in reversed(sweep.runs)}
            seeds = {group: sum(run.group == group for run in sweep.runs) for group in by_group}
            for group in sweep.groups:
                config = by_group[group].config
                name = group if seeds[group] == 1 else f"{group} ({seeds[group]} seeds)"
                plans.append(plan_run(name, config, machine_of(config)))
            remarks += order_warnings((run.config, None) for run in sweep.runs)
        else:
            config = load_run_config(path, overrides)
            plans.append(plan_run(str(config.run_name), config, machine_of(config)))
    return plans, remarks


def _ffn_text(shape: ModelShape) -> str:
    totals = [sum(layer.ffn.d_ff) for layer in shape.layers]
    kinds = "/".join(dict.fromkeys(layer.ffn.type for layer in shape.layers))
    per_layer = list(dict.fromkeys(layer.ffn.d_ff for layer in shape.layers))
    counts = {layer.ffn.num_sub_mlps for layer in shape.layers}

    def width(d_ff: tuple[int, ...]) -> str:
        if len(set(d_ff)) == 1:
            return f"{len(d_ff)} x {d_ff[0]}" if len(d_ff) > 1 else str(d_ff[0])
        return "+".join(map(str, d_ff))

    text = width(per_layer[0])
    if len(per_layer) > 1:
        text += f" to {width(shape.layers[-1].ffn.d_ff)}, mean {sum(totals) / len(totals) / min(counts):.6g}"
    specs = [layer.ffn for layer in shape.layers]
    options = dict.fromkeys(options_text(changed_options(FFN_TYPES, spec.type, spec.options)) for spec in specs)
    changed = "; ".join(filter(None, options))
    return f"{bars(totals)}  {kinds} {text}" + (f", {changed}" if changed else "")


def _attention_text(shape: ModelShape) -> str:
    layers = list(dict.fromkeys(map(_mixer_text, _attentions(shape))))
    texts = layers[:3]
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    shown = f"{bars([a.width for a in _attentions(shape)])}  " if len(layers) > 1 else ""
    return shown + "; ".join(texts) + more


def _mixer_text(mixer: AttentionSpec) -> str:
    shared = "" if mixer.n_heads == mixer.n_kv_heads else f", {mixer.n_kv_heads} KV"
    changed = options_text(changed_options(ATTENTION_TYPES, mixer.type, mixer.options))
    text = f"{mixer.type} {mixer.n_heads} x {mixer.head_dim} = {mixer.width}{shared}"
    return f"{text}, {changed}" if changed else text


def _attentions(shape: ModelShape) -> list[AttentionSpec]:
    return [layer.attention for layer in shape.layers]


def _mega(flops: float) -> str:
    return f"{flops / 1e6:,.0f}" if flops >= 1e8 else f"{flops / 1e6:.2f}"


def _hours(hours: float) -> str:
    if hours < 1:
        return f"{hours * 60:.1f} min"
    return f"{hours:.1f} h" if hours < 100 else f"{hours / 24:.1f} days"


def said_by_all(plans: Sequence[RunPlan]) -> list[str]:
    """Notes and warnings that every one of several runs would repeat."""
    if len(plans) < 2:
        return []
    first, *others = ([*plan.notes, *plan.warnings] for plan in plans)
    return [text for text in first if all(text in other for other in others)]


def render(plan: RunPlan, *, said: Sequence[str] = ()) -> list[str]:
    """One run as lines of text.

    :param said: notes and warnings that are shown elsewhere.
    """
    shape, counts, budget = plan.config.shape, plan.config.counts, plan.config.budget_report
    parameters = counts.parameters()
    groups = ", ".join(f"{name} {format_count(parameters[name])}" for name in ("attention", "ffn", "norm"))
    tables = f"embedding {format_count(counts.embedding)}, head {format_count(counts.head)}"
    lines = [
        plan.name,
        f"  shape       d_model {shape.d_model}, {shape.n_layers} layers, "
        f"d_model/layers {shape.d_model / shape.n_layers:.4g}",
        f"  FFN         {_ffn_text(shape)}",
        f"  attention   {_attention_text(shape)}",
        f"  parameters  non-embedding {format_count(counts.non_embedding)} ({groups}); "
        f"with embeddings {format_count(counts.total)} ({tables})",
    ]
    if budget is not None:
        lines.append(
            f"  budget      {budget.quantity} {format_count(budget.target)}: {budget.deviation:+.3%} "
            f"(tolerance {budget.tolerance:.2%})"
        )
    lines.append(
        f"  FLOPs       {_mega(counts.training_flops_per_token)}M a token in training "
        f"({_mega(counts.training_flops_per_token_causal)}M causal), {_mega(counts.forward_flops_per_token)}M "
        f"forward" + ("" if plan.total_training_flops is None else f"; {plan.total_training_flops:.3g} in all")
    )
    cache = 2 * counts.kv_cache_elements_per_token
    state = f", {format_bytes(4 * counts.state_elements)} of state a sequence (fp32)" if counts.state_elements else ""
    lines.append(f"  decoding    {cache:,} bytes of KV cache a token (2-byte type){state}")
    if plan.length is not None and plan.rates is not None:
        lines.append(
            f"  length      {plan.length.steps:,} steps x {format_count(plan.length.tokens_per_step)} = "
            f"{format_count(plan.length.tokens)} tokens, {plan.length.tokens / counts.non_embedding:.1f} a "
            f"non-embedding parameter, {plan.length.tokens / counts.total:.1f} a parameter"
        )
        lines.append(f"  rate        peak {plan.rates.peak:.4g}, last {plan.rates.last:.4g}")
    lines += _memory_lines(plan)
    if plan.hours is not None and plan.machine.node is not None and plan.machine.mfu is not None:
        lines.append(
            f"  time        {_hours(plan.hours)} on {plan.machine.num_gpus} x {plan.machine.node.gpu.name} at "
            f"{plan.machine.mfu:.1%} MFU ({plan.machine.mfu_source})"
        )
    lines += [f"  note        {note}" for note in plan.notes if note not in said]
    lines += [f"  warning     {warning}" for warning in plan.warnings if warning not in said]
    return lines


def _memory_lines(plan: RunPlan) -> list[str]:
    first = plan.memory[0].estimate
    where = f"{plan.machine.num_gpus} devices, {plan.strategy}" if plan.strategy else "one device"
    parts = ["weights", "gradients", "moments", *(["sums"] if first.sums else []), "copies"]
    fixed = ", ".join(f"{name} {format_bytes(getattr(first, name))}" for name in parts)
    precision = plan.config.precision or "fp32"
    lines = [f"  memory      {format_bytes(first.fixed)} fixed ({fixed}; {where}, {precision})"]
    for way in plan.memory:
        kept = "all activations" if way.checkpointing is None else way.checkpointing
        fits = ""
        if way.largest_micro_batch is not None and plan.machine.node is not None:
            memory = format_bytes(plan.machine.node.gpu.usable_memory)
            fits = f"; largest micro-batch in {memory}: {way.largest_micro_batch or 'not even 1'}"
        lines.append(
            f"              {kept}: micro-batch {way.estimate.micro_batch} adds activations "
            f"{format_bytes(way.estimate.activations)} and logits {format_bytes(way.estimate.logits)}, "
            f"{format_bytes(way.estimate.total)} in all{fits}"
        )
    return lines


def summary(plans: Sequence[RunPlan]) -> list[str]:
    """One line per run, to compare at a glance."""
    width = max(len(plan.name) for plan in plans)
    head = f"{'run':{width}} {'non-emb.':>9} {'budget':>8} {'total':>9} {'MFLOP/tok':>10} {'KV B/tok':>9} {'tokens':>8}"
    lines = [head]
    for plan in plans:
        counts, budget = plan.config.counts, plan.config.budget_report
        lines.append(
            f"{plan.name:{width}} {format_count(counts.non_embedding):>9} "
            f"{'-' if budget is None else f'{budget.deviation:+.3%}':>8} {format_count(counts.total):>9} "
            f"{_mega(counts.training_flops_per_token):>10} {2 * counts.kv_cache_elements_per_token:>9,} "
            f"{'-' if plan.length is None else format_count(plan.length.tokens):>8}"
        )
    costs = [plan.config.counts.training_flops_per_token for plan in plans]
    targets = {(b.quantity, b.target) if (b := plan.config.budget_report) else ("none", 0) for plan in plans}
    equal = len(targets) == 1 and next(iter(targets))[0] in ("non_embedding", "total")
    if equal and max(costs) > 1.02 * min(costs):
        lines.append(
            f"A token costs up to {max(costs) / min(costs):.2f} x as much in one run as in another: equal parameters "
            "are not equal FLOPs."
        )
    return lines


def measured_mfu(run: Path) -> tuple[float, str]:
    """The median MFU that a run logged.

    :raises InputError: if it logged none.
    """
    from olmo_ext.base.run_directory import RunDirectory

    rows = RunDirectory(run).read_metrics()
    measured = [row.values["throughput/mfu"] for row in rows if "throughput/mfu" in row.values]
    if not measured:
        raise InputError("holds no throughput/mfu", where=str(run), right="a run on a GPU whose peak is known")
    return statistics.median(measured), f"median of {len(measured)} logged steps of {run}"


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]})
@click.argument("arguments", nargs=-1, required=True, metavar="CONFIG|SWEEP|FOLDER... [key=value ...]")
@click.option("--node", "node_name", help="Node type, as rtx6000ada or b200 (default: the config's).")
@click.option("--gpus", type=click.IntRange(min=1), help="Number of GPUs (default: those of one node).")
@click.option("--mfu", "mfu_text", help="Reckon hours with this share of the peak, as 0.4 or 40%.")
@click.option(
    "--mfu-from",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Reckon hours with the MFU that this run directory logged.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    arguments: tuple[str, ...],
    node_name: str | None,
    gpus: int | None,
    mfu_text: str | None,
    mfu_from: Path | None,
    as_json: bool,
) -> None:
    """Show what runs will be before they cost anything: shape, counts, budget, FLOPs, memory, hours, warnings."""
    paths, overrides = split_arguments(arguments)
    if not paths:
        raise InputError("no config named", right="olmo-ext plan CONFIG|SWEEP|FOLDER... [key=value ...]")
    hardware = load_hardware()
    given: tuple[float, str] | None = None
    if mfu_text is not None and mfu_from is not None:
        raise InputError("both --mfu and --mfu-from", right="one of them")
    if mfu_text is not None:
        try:
            given = parse_fraction(mfu_text), "as given"
        except ValueError as error:
            raise InputError(str(error), where="--mfu", right="a share as 0.4 or 40%") from None
        if not 0 < given[0] <= 1:
            raise InputError(f"{mfu_text} is no share of the peak", where="--mfu", right="between 0 and 1")
    elif mfu_from is not None:
        given = measured_mfu(mfu_from)

    def machine_of(config: RunConfig) -> Machine:
        name = node_name or config.node
        node = None if name is None else hardware.node(name, where="--node" if node_name else "node")
        count = gpus or (node.gpus_per_node if node else 1)
        if given is not None and node is None:
            raise InputError(
                "a share of a peak that is not known",
                where="--mfu" if mfu_text else "--mfu-from",
                right="--node NAME",
            )
        mfu, source = given or ((node.mfu, node.mfu_source) if node else (None, ""))
        return Machine(node=node, num_gpus=count, mfu=mfu, mfu_source=source)

    plans, remarks = load_plans(paths, overrides, machine_of)
    if as_json:
        click.echo(json.dumps({"runs": [item.to_json() for item in plans], "warnings": remarks}, indent=1))
        return
    common = said_by_all(plans)
    for item in plans:
        click.echo("\n".join(render(item, said=common)) + "\n")
    if len(plans) > 1:
        click.echo("\n".join(summary(plans)))
    for text in common:
        click.echo(f"{'warning' if text in plans[0].warnings else 'note'}, all runs: {text}")
    for remark in remarks:
        click.echo(f"warning: {remark}")
