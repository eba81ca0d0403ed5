"""A W&B server on the loopback interface: as much of the GraphQL and file-stream protocol as wandb 0.31 and
wandb-workspaces 0.4 use for runs, `sync`, workspaces and reports. It keeps what it receives for comparison.

    with WandbServer() as server:
        environment = {**os.environ, **server.environment()}
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

API_KEY = "0123456789" * 4
ENTITY = "loopback"


def graphql_id(kind: str, *parts: str) -> str:
    return base64.b64encode(":".join((kind, *parts)).encode()).decode()


class ServerRun:
    """What the server knows of one run."""

    def __init__(self, name: str, project: str) -> None:
        self.name, self.project = name, project
        self.fields: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.lines: list[dict[str, Any]] = []
        """History rows in the order received, duplicates included: a row sent twice stands here twice."""
        self.events: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.preempting = False

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) of every received row that carries `metric`."""
        return [(row["_step"], row[metric]) for row in self.lines if metric in row]


class WandbServer:
    """Start with `with`. `hang` makes it accept connections and never answer; `fail` answers 500 to everything."""

    def __init__(self, port: int = 0) -> None:
        self.runs: dict[str, ServerRun] = {}
        self.views: dict[str, dict[str, Any]] = {}
        self.projects: set[str] = set()
        self.operations: list[str] = []
        self.unanswered: list[str] = []
        self.errors: list[str] = []
        self.hang = threading.Event()
        self.fail = False
        self.lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _body(self) -> bytes:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

            def _answer(self, content: Any, status: int = 200) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _handle(self) -> None:
                body = self._body()
                while server.hang.is_set():
                    time.sleep(0.05)
                if server.fail:
                    self._answer({"error": "broken on purpose"}, 500)
                elif self.path.endswith("/graphql"):
                    request = json.loads(body)
                    with server.lock:
                        self._answer({"data": server.graphql(request["query"], request.get("variables") or {})})
                elif match := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
                    with server.lock:
                        server.file_stream(match[1], json.loads(body))
                    self._answer({"exitcode": None, "limits": {}})
                else:
                    self._answer({})

            do_GET = do_POST = do_PUT = _handle

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                # Clients hang up when they end; anything else is a fault of ours and fails the test.
                if not isinstance(sys.exc_info()[1], ConnectionError):
                    server.errors.append(traceback.format_exc())

        self._server = Server(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> WandbServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Refuse connections from now on."""
        self.hang.clear()
        self._server.shutdown()
        self._server.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """Variables that lead wandb to this server and keep it away from the user's own files."""
        return {
            "WANDB_BASE_URL": self.url,
            "WANDB_API_KEY": API_KEY,
            "WANDB_ERROR_REPORTING": "false",
            "HOME": str(home),
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    # -- GraphQL ------------------------------------------------------------------------------------------------

    def graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        match = re.search(r"\b(?:query|mutation)\s+(\w+)", query)
        operation = match[1] if match else ("__introspection" if "__schema" in query or "__type" in query else query)
        self.operations.append(operation)
        answer = getattr(self, f"on_{operation}", None)
        if answer is None:
            self.unanswered.append(query)
            return {}
        return answer(variables)

    def _run_node(self, run: ServerRun) -> dict[str, Any]:
        return {
            "id": graphql_id("Run", "v1", run.name, run.project, ENTITY),
            "name": run.name,
            "displayName": run.fields.get("displayName") or run.name,
            "tags": run.fields.get("tags") or [],
            "config": json.dumps(run.config),
            "summaryMetrics": json.dumps(run.summary),
            "state": "finished" if run.exit_code == 0 else "running",
            "historyLineCount": len(run.lines),
            "eventsLineCount": len(run.events),
            "logLineCount": 0,
            "historyTail": json.dumps([json.dumps(row) for row in run.lines[-1:]]),
            "eventsTail": json.dumps([json.dumps(row) for row in run.events[-1:]]),
            "historyKeys": {"lastStep": run.lines[-1]["_step"] if run.lines else -1, "keys": {}, "sets": []},
            "wandbConfig": json.dumps({"t": 1}),
            "sweepName": None,
            "group": run.fields.get("groupName"),
            "jobType": run.fields.get("jobType"),
            "commit": None,
            "readOnly": False,
            "createdAt": "2026-01-01T00:00:00",
            "heartbeatAt": "2026-01-01T00:00:00",
            "description": "",
            "notes": "",
            "systemMetrics": "{}",
            "user": {"name": ENTITY, "username": ENTITY},
            "projectId": "1",
            "project": self._project_node(run.project),
            "files": {"edges": []},
        }

    def _project_node(self, name: str) -> dict[str, Any]:
        return {
            "id": graphql_id("Project", name),
            "internalId": "1",
            "name": name,
            "entityName": ENTITY,
            "entity": {"id": graphql_id("Entity", ENTITY), "name": ENTITY},
            "createdAt": "2026-01-01T00:00:00",
            "isBenchmark": False,
            "user": self._user(),
        }

    @staticmethod
    def _user() -> dict[str, Any]:
        return {
            "id": "VXNlcjox",
            "name": ENTITY,
            "entity": ENTITY,
            "username": ENTITY,
            "email": "nobody@localhost",
            "admin": False,
            "flags": "{}",
            "deletedAt": None,
            "teams": {"edges": [{"node": {"name": ENTITY}}]},
            "apiKeys": {"edges": []},
        }

    def on_Viewer(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"viewer": self._user()}

    on_GetDefaultEntity = on_Viewer

    def on_UpsertBucket(self, variables: dict[str, Any]) -> dict[str, Any]:
        name, project = variables.get("name") or "", variables.get("project") or "uncategorized"
        if not name:
            name = next(run.name for run in self.runs.values() if self._run_node(run)["id"] == variables["id"])
        inserted = name not in self.runs
        run = self.runs.setdefault(name, ServerRun(name, project))
        self.projects.add(run.project)
        run.fields.update({key: value for key, value in variables.items() if value is not None})
        if variables.get("config"):
            run.config = json.loads(variables["config"])
        if variables.get("summaryMetrics"):
            run.summary = json.loads(variables["summaryMetrics"])
        return {"upsertBucket": {"bucket": self._run_node(run), "inserted": inserted}}

    def on_RunResumeStatus(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.get(variables.get("name", ""))
        node = self._run_node(run) if run else None
        project = self._project_node(variables.get("project") or "uncategorized")
        return {"model": {**project, "bucket": node}}

    def on_Run(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.get(variables.get("name", ""))
        project = self._project_node(variables.get("project") or "uncategorized")
        return {"project": {**project, "internalId": "1", "run": self._run_node(run) if run else None}}

    def on_OrganizationCoreWeaveOrganizationID(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}

    on_RunHistoryKeys = on_Run

    def on_ServerFeaturesQuery(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"serverInfo": {"features": []}}

    def on_CreateRunFiles(self, variables: dict[str, Any]) -> dict[str, Any]:
        files = [
            {"name": name, "uploadUrl": f"{self.url}/upload/{name}", "id": str(index)}
            for index, name in enumerate(variables.get("files") or [])
        ]
        return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}

    def on_GetProjects(self, variables: dict[str, Any]) -> dict[str, Any]:
        edges = [{"node": self._project_node(name), "cursor": name} for name in sorted(self.projects)]
        return {"models": {"edges": edges, "pageInfo": {"endCursor": None, "hasNextPage": False}}}

    def on_CreateProject(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables.get("name") or variables.get("project") or ""
        self.projects.add(name)
        return {"upsertModel": {"project": self._project_node(name), "model": self._project_node(name)}}

    def on_upsertView(self, variables: dict[str, Any]) -> dict[str, Any]:
        known = [key for key, view in self.views.items() if view["name"] == variables.get("name")]
        key = variables.get("id") or (known[0] if known else graphql_id("View", str(len(self.views) + 1)))
        inserted = key not in self.views
        self.views[key] = {**variables, "id": key}
        view = {
            "id": key,
            "type": variables["type"],
            "name": variables.get("name"),
            "displayName": variables.get("displayName"),
            "description": variables.get("description") or "",
            "project": self._project_node(variables["projectName"]),
            "spec": variables["spec"],
            "updatedAt": "2026-01-01T00:00:00",
        }
        return {"upsertView": {"view": view, "inserted": inserted}}

    on_UpsertView2 = on_upsertView

    def _views(self, type_: str, name: str | None = None) -> list[dict[str, Any]]:
        return [
            view for view in self.views.values() if view["type"] == type_ and (name is None or view["name"] == name)
        ]

    def on_View(self, variables: dict[str, Any]) -> dict[str, Any]:
        views = self._views(variables.get("viewType") or "runs", variables.get("viewName"))
        if variables["name"] not in self.projects:
            return {"project": None}
        edges = [{"node": {k: v[k] for k in ("id", "displayName", "spec", "name")}} for v in views]
        return {"project": {**self._project_node(variables["name"]), "allViews": {"edges": edges}}}

    def on_ProjectViews(self, variables: dict[str, Any]) -> dict[str, Any]:
        nodes = [
            {
                **{key: view[key] for key in ("id", "name", "displayName", "description", "spec")},
                "user": {"username": ENTITY, "photoUrl": None, "email": None},
                "createdAt": "2026-01-01T00:00:00",
                "updatedAt": "2026-01-01T00:00:00",
            }
            for view in self._views(variables.get("viewType") or "runs", variables.get("viewName"))
        ]
        page = {"endCursor": None, "hasNextPage": False}
        edges = [{"node": node, "cursor": node["id"]} for node in nodes]
        return {"project": {"allViews": {"edges": edges, "pageInfo": page}}}

    # -- file stream --------------------------------------------------------------------------------------------

    def file_stream(self, name: str, content: dict[str, Any]) -> None:
        run = self.runs[name]
        for file_name, part in (content.get("files") or {}).items():
            rows = [json.loads(line) for line in part["content"]] if ".json" in file_name else []
            if file_name == "wandb-history.jsonl":
                run.lines += rows
            elif file_name == "wandb-events.jsonl":
                run.events += rows
            elif file_name == "wandb-summary.json" and rows:
                run.summary.update(rows[-1])
        run.preempting |= bool(content.get("preempting"))
        if content.get("complete"):
            run.exit_code = content.get("exitcode")
