"""Preparing files beforehand: complete or absent, not fetched twice, and what is missing is named at once."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.data.validation_sets import PERPLEXITY_SETS
from olmo_ext.evals import built_in
from olmo_ext.evals import prepare as module
from olmo_ext.evals.prepare import prepare, prepared_file
from olmo_ext.evals.tasks import EvaluationOptions, prepared_files, require_files

FILES = [*built_in.Perplexity.files, *built_in.Lambada.files]


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; `short.*` promises more bytes than it sends."""

    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = Path(self.directory) / self.path.strip("/")
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        promised = len(content) + (5 if content.startswith(b"cut") else 0)
        self.send_response(200)
        self.send_header("Content-Length", str(promised))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    folder = tmp_path / "mirror"
    folder.mkdir()
    for file in FILES:
        (folder / file.name).write_text(f"content of {file.name}")
    Handler.asked = []
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *arguments: Handler(*arguments, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", folder
    server.shutdown()
    server.server_close()


def test_a_second_call_fetches_nothing_and_a_damaged_file_is_fetched_again(
    mirror: tuple[str, Path], tmp_path: Path
) -> None:
    url, _ = mirror
    target = tmp_path / "prepared"
    assert prepare(target, FILES, mirror=url) == []
    assert len(Handler.asked) == len(FILES)
    assert prepare(target, FILES, mirror=url) == [] and len(Handler.asked) == len(FILES)
    (target / FILES[0].name).write_text("torn")
    with pytest.raises(InputError, match="4 bytes of"):
        prepared_file(target, FILES[0].name)
    assert prepare(target, FILES, mirror=url) == [] and len(Handler.asked) == len(FILES) + 1
    assert prepared_file(target, FILES[0].name).read_text() == f"content of {FILES[0].name}"


@pytest.mark.parametrize("torn", ["[1, 2]", '{"wikitext_103.npy": 7}', '{"wikitext_103.npy": {"url": "x"}}', "{"])
def test_a_manifest_that_is_none_is_made_again(torn: str, mirror: tuple[str, Path], tmp_path: Path) -> None:
    url, _ = mirror
    target = tmp_path / "prepared"
    target.mkdir()
    (target / "wikitext_103.npy").write_text("of nobody knows where")
    (target / "manifest.json").write_text(torn)
    assert prepared_file(target, "wikitext_103.npy").is_file()
    assert prepare(target, FILES, mirror=url) == [] and len(Handler.asked) == len(FILES)


def test_a_file_of_the_right_size_and_other_content_is_fetched_again(mirror: tuple[str, Path], tmp_path: Path) -> None:
    url, _ = mirror
    target = tmp_path / "prepared"
    prepare(target, FILES, mirror=url)
    whole = (target / "wikitext_103.npy").read_bytes()
    (target / "wikitext_103.npy").write_bytes(whole[::-1])
    prepare(target, FILES, mirror=url)
    assert (target / "wikitext_103.npy").read_bytes() == whole


def test_a_file_that_ends_early_is_never_there(mirror: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = mirror
    (folder / "wikitext_103.npy").write_text("cut")
    missing = prepare(tmp_path / "prepared", FILES, mirror=url)
    assert len(missing) == 1 and "wikitext_103.npy" in missing[0]
    assert sorted(path.name for path in (tmp_path / "prepared").iterdir()) == sorted(
        ["manifest.json", *(file.name for file in FILES if file.name != "wikitext_103.npy")]
    )


def test_a_folder_is_a_mirror_and_a_local_lambada_is_taken(mirror: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = mirror
    (tmp_path / "own.jsonl").write_text('{"text": "my own"}')
    assert prepare(tmp_path / "prepared", FILES, mirror=str(folder), lambada=tmp_path / "own.jsonl") == []
    assert "my own" in (tmp_path / "prepared" / "lambada_test.jsonl").read_text()
    assert Handler.asked == []


def test_without_network_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    for tasks, named in (("lambada", "lambada_test.jsonl"), ("m2d2_s2orc", "m2d2_s2orc.npy")):
        with pytest.raises(InputError, match=named):
            require_files(EvaluationOptions(tasks=tasks))
        with pytest.raises(InputError, match=f"{named} is missing"):
            require_files(EvaluationOptions(tasks=tasks, prepared=tmp_path))
    with pytest.raises(InputError, match="nowhere.txt"):
        require_files(EvaluationOptions(text=tmp_path / "nowhere.txt"))
    with pytest.raises(InputError, match="mine=.*nowhere.bin"):
        require_files(EvaluationOptions(sets=(f"mine={tmp_path / 'nowhere.bin'}",)))


def test_a_missing_file_is_told_within_seconds_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from olmo_ext.evals.eval_command import evaluate\n"
        f"try: evaluate.main(['run', '--tasks', 'lambada', '--prepared', {str(tmp_path)!r}], standalone_mode=False)\n"
        "except Exception as error: print(type(error).__name__, error, 'torch' in sys.modules)"
    )
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "InputError" in result.stdout and "lambada_test.jsonl is missing" in result.stdout
    assert result.stdout.strip().endswith("False")
    assert time.monotonic() - start < 30


def test_a_server_that_is_not_there_is_one_line_per_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_SECONDS", 2)
    missing = prepare(tmp_path / "prepared", FILES, mirror="http://")
    assert len(missing) == len(FILES)
    missing = prepare(tmp_path / "prepared", FILES, mirror="http://127.0.0.1:9")
    assert len(missing) == len(FILES) and all("refused" in line for line in missing)


def test_the_sets_are_paper_as() -> None:
    assert set(FILES) <= set(prepared_files())
    assert PERPLEXITY_SETS == ("dolma_common-crawl", "dolma_stack", "m2d2_s2orc", "wikitext_103")
