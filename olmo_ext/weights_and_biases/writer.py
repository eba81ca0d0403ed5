"""The process in which the W&B SDK runs: JSON lines come in on stdin, events go out on stdout.

In:  {"settings": {...}} once, then {"row": {...}, "step": n} ..., {"stats": "<base64 record>"} ...,
     {"expect_step": n} (ask the server at the end whether it has that step), {"finish": exit code, "seconds": limit}
Out: {"event": "ready", "mode", "url", "step"}, {"event": "warning", "text"}, {"event": "cancel", "reason"},
     {"event": "finished", "ok", "sent", "dropped"}

The end of stdin without "finish" means that the training process died: the run is closed as failed.
Started by `live_run.Writer`. What wandb prints goes to stderr: wandb/writer.log of the run, or sync.log for `sync`.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import signal
import sys
import threading
import time
from typing import IO, Any, Literal

from olmo_ext.base.errors import EXIT_REQUEUE
from olmo_ext.base.locks import wait_for_lock

ORPHAN_SECONDS = 30.0
"""Seconds that an orphaned writer may take to finish."""

CANCEL_POLL_SECONDS = 60.0
CONFIRM_SECONDS = 20.0
"""Seconds to wait for the server to show rows, which it stores in the background."""

EXIT_TIMED_OUT = 3


class Events:
    """Write each event as one JSON line, from any thread."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, event: str, **content: Any) -> None:
        try:
            with self._lock:
                self._stream.write(json.dumps({"event": event, **content}, default=str) + "\n")
                self._stream.flush()
        except (OSError, ValueError):
            pass  # The training process is gone.


def _init(settings: dict[str, Any], mode: Literal["online", "offline"]) -> Any:
    import wandb

    wanted = {
        "init_timeout": settings["start_seconds"],
        "console": "off",
        "silent": True,
        "disable_git": True,
        "save_code": False,
        "x_save_requirements": False,
        "x_disable_stats": settings.get("stats_pid") is None,
        "x_disable_meta": settings.get("stats_pid") is None,
        "x_stats_pid": settings.get("stats_pid") or os.getpid(),
    }
    known = getattr(wandb.Settings, "model_fields", {})
    return wandb.init(
        project=settings["project"],
        entity=settings["entity"],
        id=settings["id"],
        name=settings["name"],
        group=settings["group"],
        tags=settings["tags"] or None,
        job_type=settings["job_type"],
        dir=settings["directory"],
        config=settings["config"],
        resume="allow",
        mode=mode,
        settings=wandb.Settings(**{key: value for key, value in wanted.items() if key in known}),
    )


def _define_axes(run: Any) -> None:
    """tokens and flops as x axes: tokens for every metric by default, flops for the panels that ask for it."""
    run.define_metric("tokens")
    run.define_metric("flops")
    run.define_metric("*", step_metric="tokens")


def _start(settings: dict[str, Any], events: Events) -> tuple[Any, str]:
    mode = settings["mode"]
    if mode == "online":
        try:
            # Kept until this process ends.
            settings["held"] = _take_lock(settings["lock"], 0.0 if settings.get("online_only") else 10.0)
            return _init(settings, "online"), "online"
        except Exception as error:  # noqa: BLE001  (any failure of the server or the SDK: go on without it)
            if settings.get("online_only"):
                raise
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            events.send("warning", text=f"going on offline ({reason}); `olmo-ext sync` uploads the run")
    return _init(settings, "offline"), "offline"


def _watch_for_cancel(run: Any, events: Events) -> None:
    """Ask the server for the tags `cancel` or `canceled`, as upstream does, but where nobody waits for the answer."""
    import wandb

    path = f"{run.entity}/{run.project}/{run.id}"
    pause = float(os.environ.get("OLMO_EXT_WANDB_CANCEL_SECONDS") or CANCEL_POLL_SECONDS)
    while True:
        time.sleep(pause)
        try:
            tags = wandb.Api(timeout=10).run(path).tags
        except Exception:  # noqa: BLE001  (an unreachable server is no reason to stop)
            continue
        if cancel_tags := {"cancel", "canceled", "cancelled"} & {str(tag).lower() for tag in tags or []}:
            events.send("cancel", reason=f"tagged {sorted(cancel_tags)[0]!r} on W&B")
            return


def _publish_stats(run: Any, encoded: str) -> bool:
    """Send a system-metrics record of an offline segment as it stands, with its own time; False where the installed
    wandb has no such (private) way."""
    from wandb.proto import wandb_internal_pb2

    record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
    try:
        record.stats.ParseFromString(base64.b64decode(encoded))
        run._interface._publish(record)
        return True
    except Exception:  # noqa: BLE001  (counted: what was not sent is said at the end)
        return False


def _take_lock(path: str, seconds: float) -> IO[str]:
    """Hold the run's lock, so that training online and `sync` never send the same run at the same time.

    :raises TimeoutError: when another process keeps it.
    """
    file = open(path, "a")
    if not wait_for_lock(file, seconds=seconds):
        raise TimeoutError("another process is sending this run to W&B")
    return file


def _confirm(run_path: str, step: int, seconds: float) -> str:
    """Ask the server for its last step until it is `step`; what is wrong, or an empty text."""
    import wandb

    deadline = time.monotonic() + seconds
    last: Any = None
    while True:
        try:
            last = wandb.Api(timeout=10).run(run_path).lastHistoryStep
            if last is not None and last >= step:
                return ""
        except Exception as error:  # noqa: BLE001
            last = " ".join(str(error).split())[:200]
        if time.monotonic() > deadline:
            return f"the server does not confirm step {step} (it says {last})"
        time.sleep(0.5)


def _arm(seconds: float) -> None:
    """End this process after `seconds`, whatever the SDK is doing."""
    timer = threading.Timer(seconds, os._exit, (EXIT_TIMED_OUT,))
    timer.daemon = True
    timer.start()


def main() -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        # Slurm signals every process of a step; the training process decides when this one ends.
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    events = Events(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)

    inbox: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin.buffer:
            try:
                inbox.put(json.loads(line))
            except ValueError:
                continue
        # After a proper finish nobody reads this any more.
        inbox.put({"finish": 1, "seconds": ORPHAN_SECONDS})

    threading.Thread(target=read, daemon=True).start()
    settings = inbox.get().get("settings")
    if not settings:
        return
    try:
        run, mode = _start(settings, events)
        _define_axes(run)
    except Exception as error:  # noqa: BLE001
        events.send("warning", text=f"off: {' '.join(str(error).split())[:300]}")
        events.send("finished", ok=False, sent=0, reason=str(error)[:500], busy=isinstance(error, TimeoutError))
        os._exit(1)
    # One beyond the last step that the server has; 0 for a new run and offline.
    floor = int(run.starting_step or 0)
    path = f"{run.entity}/{run.project}/{run.id}"
    events.send("ready", mode=mode, url=run.url, step=floor, entity=run.entity, project=run.project)
    if settings.get("cancel_check") and mode == "online":
        threading.Thread(target=_watch_for_cancel, args=(run, events), daemon=True).start()

    sent = dropped = stats = 0
    expected: int | None = None
    reason = ""
    while True:
        message = inbox.get()
        if "finish" in message:
            break
        try:
            if "expect_step" in message:
                expected = message["expect_step"]
            elif "stats" in message:
                stats += _publish_stats(run, message["stats"])
            elif "row" in message:
                # An earlier attempt has sent this step: W&B would ignore the row with a warning for each.
                if message["step"] < floor:
                    dropped += 1
                    continue
                run.log(message["row"], step=message["step"])
                floor, sent = message["step"], sent + 1
        except Exception as error:  # noqa: BLE001
            reason = " ".join(str(error).split())[:300]
    if dropped:
        events.send(
            "warning",
            text=f"{dropped} rows of steps below {floor} stay as an earlier attempt has sent them; `olmo-ext sync` says"
            " whether they differ",
        )
    _arm(message["seconds"])
    try:
        if message["finish"] == EXIT_REQUEUE:
            run.mark_preempting()  # Stopped to be continued: W&B shows it as preempted and not as failed.
        run.finish(exit_code=message["finish"])
    except Exception as error:  # noqa: BLE001
        reason = " ".join(str(error).split())[:300]
    if expected is not None and not reason:
        reason = _confirm(path, expected, CONFIRM_SECONDS)
    events.send("finished", ok=not reason, sent=sent, dropped=dropped, stats=stats, reason=reason)
    os._exit(0 if not reason else 1)


if __name__ == "__main__":
    main()
