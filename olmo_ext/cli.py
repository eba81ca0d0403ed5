"""The command line. Only click is imported here; a command's module is imported when the command is called."""

from __future__ import annotations

import importlib
import os
import sys

import click

from olmo_ext.base.errors import EXIT_BAD_INPUT, EXIT_FAILED, OlmoExtError, unexpected

COMMANDS: dict[str, tuple[str, str]] = {
    "plan": (
        "olmo_ext.plan.plan_command:plan",
        "Counts, memory and cost of a config or sweep, before a GPU hour.",
    ),
    "solve": ("olmo_ext.solve.solve_command:solve", "Search shapes of equal budget."),
    "data": ("olmo_ext.data.data_command:data", "Corpus, official order, subsets."),
    "train": ("olmo_ext.training.train_command:train", "Train one run on this machine."),
    "launch": ("olmo_ext.launch.launch_command:launch", "Run a sweep, locally or on Slurm."),
    "status": ("olmo_ext.launch.launch_command:status", "What each run of a sweep is doing."),
    "slurm": ("olmo_ext.launch.slurm_init:slurm", "Write the Slurm scripts into your folder."),
    "cancel": ("olmo_ext.launch.launch_command:cancel", "Stop the runs of a sweep."),
    "compare": (
        "olmo_ext.compare.compare_command:compare",
        "What is better, by how much, how surely; writes the report.",
    ),
    "dashboard": ("olmo_ext.compare.dashboard_command:dashboard", "Build the sweep's W&B workspace and report."),
    "sync": ("olmo_ext.weights_and_biases.sync_command:sync", "Upload offline W&B segments, in order and once."),
    "eval": ("olmo_ext.evals.eval_command:evaluate", "Perplexity, downstream tasks, long context."),
    "diagnose": ("olmo_ext.evals.eval_command:diagnose", "Per-layer geometry of a run or a Hugging Face model."),
    "generate": ("olmo_ext.evals.eval_command:generate", "Continue a prompt with a trained run."),
    "export": ("olmo_ext.export.export_command:export", "Write a verified Hugging Face model folder."),
    "import": (
        "olmo_ext.export.export_command:import_",
        "Read a Hugging Face folder or an OLMo checkpoint as a run.",
    ),
    "demo": ("olmo_ext.demo:demo", "Train and compare three small shapes on this machine."),
}
"""Command name -> (module:attribute, one line of help). The help line stands here so that --help imports nothing."""


class LazyGroup(click.Group):
    """A click group whose commands are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="olmo-ext")
def cli(debug: bool) -> None:
    """Give a language model a new shape, train it at equal budget, see what is better and how surely."""
    if debug:
        os.environ["OLMO_EXT_DEBUG"] = "1"


def usage_line(error: click.ClickException) -> str:
    """What click says of a wrong call, in one line with the help that would be right."""
    text = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    return text if context is None else f"{text}; `{context.command_path} --help` shows what is right"


def main(arguments: list[str] | None = None) -> None:
    """Entry point: one line and an exit code for every error, a traceback only with --debug."""
    try:
        result = cli.main(args=arguments, prog_name="olmo-ext", standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except click.ClickException as error:
        print(f"olmo-ext: {usage_line(error)}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except OlmoExtError as error:
        if os.environ.get("OLMO_EXT_DEBUG"):
            raise
        print(f"olmo-ext: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    except Exception as error:  # noqa: BLE001
        if os.environ.get("OLMO_EXT_DEBUG"):
            raise
        code, text = unexpected(error)
        print(f"olmo-ext: {text}", file=sys.stderr)
        sys.exit(code)
