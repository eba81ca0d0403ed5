"""What torchrun starts, one process per device:

    torchrun --nproc-per-node 8 scripts/train.py CONFIG [key=value ...] [--run-directory DIR] [--extend]

DDP or FSDP by `distributed_strategy`, nccl where there are GPUs, gloo elsewhere. Exit codes: 0 done, 1 failed, 2 bad
input, 75 stopped by a signal after a complete checkpoint. torchrun turns every code but 0 into 1: what happened stands
in the run's state.json.
"""

from __future__ import annotations

import os
import sys
import traceback


def main() -> int:
    """Like `olmo-ext train`, with an exit that waits for nobody: other ranks may hang in a collective."""
    import click

    from olmo_ext.base.errors import EXIT_BAD_INPUT, EXIT_FAILED, OlmoExtError
    from olmo_ext.cli import usage_line
    from olmo_ext.training.signals import EXIT_INTERRUPTED
    from olmo_ext.training.train_command import train

    try:
        return train.main(prog_name="scripts/train.py", standalone_mode=False) or 0
    except click.ClickException as error:
        print(f"olmo-ext: {usage_line(error)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except OlmoExtError as error:
        who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        print(f"olmo-ext: {who}{' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):  # click makes the first of the second
        return EXIT_INTERRUPTED
    except BaseException:
        traceback.print_exc()
        return EXIT_FAILED


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreter shutdown would join the communication threads of ranks that are gone.
    os._exit(code)
