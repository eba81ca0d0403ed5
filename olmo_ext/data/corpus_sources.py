"""Where the text of a corpus comes from: the packages that every machine has, or a user's own files. No torch."""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import sysconfig
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError

TEXT_SUFFIXES = (".txt", ".md")
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
DATASET_SUFFIXES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "csv", ".json": "json"}
"""Suffix -> the builder of `datasets` that reads such a file."""

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
"""What `datasets` decompresses by itself."""

PACKAGE_SUFFIXES = frozenset(
    (".py", ".pyi", ".pyx", ".h", ".hpp", ".cuh", ".cu", ".c", ".cpp", ".cmake", ".md", ".rst", ".txt", ".html")
)
NOT_SOURCES = ("site-packages", "dist-packages", "__pycache__")
MACHINE_SPECIFIC = ("_sysconfigdata", "config-")
"""Starts of names in the standard library that hold paths of the machine Python was built on."""

NEAR_DUPLICATE_SHARE = 0.5
SHORTEST_COMPARED_LINE = 10


class TextSource(ABC):
    """Documents that can be read as often as needed, in the same order."""

    name: str
    whole_files: bool = True
    """Whether each document is one file."""

    @abstractmethod
    def documents(self) -> Iterator[tuple[str, str]]:
        """Name and text of every document; neither empty nor only white space."""

    @abstractmethod
    def describe(self) -> list[dict[str, Any]]:
        """What the manifest says about the origin, after `documents` has been read once."""

    @property
    @abstractmethod
    def left_out(self) -> dict[str, int]:
        """Reason -> number of documents that were not taken."""


def package_folders() -> dict[str, tuple[str, Path]]:
    """Name -> (version, folder) of the packages of the embedded corpus, found without importing them."""
    folders = {"python": (platform.python_version(), Path(sysconfig.get_paths()["stdlib"]))}
    for name in ("torch", "transformers"):
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise InputError(f"package {name} is not installed", where="data corpus", right=f"pip install {name}")
        # A local part (+cpu) names a build, not other sources.
        version = importlib.metadata.version(name).split("+")[0]
        folders[name] = (version, Path(next(iter(spec.submodule_search_locations))))
    return folders


def _package_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [n for n in subfolders if n not in NOT_SOURCES and not n.startswith(MACHINE_SPECIFIC)]
        for name in files:
            path = Path(folder, name)
            if path.suffix in PACKAGE_SUFFIXES and not name.startswith(MACHINE_SPECIFIC) and not path.is_symlink():
                yield path


class EmbeddedSource(TextSource):
    """Sources and docs of the standard library, torch and transformers.

    The order is that of the sha256 of `package/path`: fixed, and a mixture from the first megabyte on. A file is left
    out if it is not UTF-8, empty, or if at least half of its text stands in lines that files before it hold already
    (copies, generated variants): otherwise validation files would be known from training.

    :param max_bytes: stop before the file that would exceed it; None for everything.
    """

    name = "embedded"

    def __init__(self, *, max_bytes: int | None = None, folders: dict[str, tuple[str, Path]] | None = None) -> None:
        self.max_bytes = max_bytes
        self._folders = package_folders() if folders is None else folders
        self._left_out: Counter[str] = Counter()
        self._selected: list[tuple[str, Path]] = []
        self._taken: dict[str, Counter[str]] = {}

    def _select(self) -> Iterator[tuple[str, str]]:
        files = []
        for package, (_, root) in self._folders.items():
            files += [(f"{package}/{path.relative_to(root).as_posix()}", path) for path in _package_files(root)]
        files.sort(key=lambda item: hashlib.sha256(item[0].encode()).digest())
        seen: set[int] = set()
        total = 0
        left_out: Counter[str] = Counter()
        selected: list[tuple[str, Path]] = []
        taken = {package: Counter[str]() for package in self._folders}
        for name, path in files:
            content = path.read_bytes()
            if self.max_bytes is not None and total + len(content) > self.max_bytes:
                left_out["beyond max_bytes"] = len(files) - len(selected) - sum(left_out.values())
                break
            try:
                text = content.decode()
            except UnicodeDecodeError:
                left_out["not UTF-8"] += 1
                continue
            if not text.strip():
                left_out["empty"] += 1
                continue
            lines = [line for raw in text.splitlines() if len(line := raw.strip()) >= SHORTEST_COMPARED_LINE]
            hashes = [hash(line) for line in lines]
            known = sum(len(line) for line, value in zip(lines, hashes, strict=True) if value in seen)
            if lines and known >= NEAR_DUPLICATE_SHARE * sum(map(len, lines)):
                left_out["duplicate"] += 1
                continue
            seen.update(hashes)
            total += len(content)
            selected.append((name, path))
            taken[name.partition("/")[0]].update(files=1, bytes=len(content))
            yield name, text
        self._selected, self._taken, self._left_out = selected, taken, left_out

    def documents(self) -> Iterator[tuple[str, str]]:
        if self._selected:
            yield from ((name, path.read_bytes().decode()) for name, path in self._selected)
        else:
            yield from self._select()

    def describe(self) -> list[dict[str, Any]]:
        return [
            {"package": name, "version": version, **{key: self._taken[name][key] for key in ("files", "bytes")}}
            for name, (version, _) in self._folders.items()
        ]

    @property
    def left_out(self) -> dict[str, int]:
        return dict(self._left_out)


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    if name.endswith(TEXT_SUFFIXES):
        return "text"
    if name.endswith(JSONL_SUFFIXES):
        return "jsonl"
    return DATASET_SUFFIXES.get(_bare_suffix(path))


def _bare_suffix(path: Path) -> str:
    """The suffix before a compression's."""
    last = path.suffix.lower()
    return Path(path.stem).suffix.lower() if last in COMPRESSED else last


def _files_of(paths: Sequence[Path]) -> tuple[list[tuple[Path, str]], int]:
    """The files behind the given paths with their kind, folders expanded in sorted order; how many are no text."""
    documents: list[tuple[Path, str]] = []
    others = 0
    for path in paths:
        if path.is_dir():
            if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
                documents.append((path, "saved"))
                continue
            # A link to a folder is not followed, which might go round; it is counted with what is no text.
            entries = sorted(p for p in path.rglob("*") if p.is_file() or p.is_symlink())
            inside = [(p, kind) for p in entries if p.is_file() and (kind := _kind(p))]
            if not inside:
                raise InputError("no text in this folder", where=str(path), right=_readable())
            others += len(entries) - len(inside)
            documents += inside
        elif path.is_file():
            kind = _kind(path)
            if kind is None:
                raise InputError(f"unknown kind of file {path.name!r}", where=str(path), right=_readable())
            documents.append((path, kind))
        else:
            raise InputError("no such file or folder", where=str(path))
    return documents, others


def _readable() -> str:
    return f"readable are {', '.join((*TEXT_SUFFIXES, *JSONL_SUFFIXES, *DATASET_SUFFIXES))} and save_to_disk folders"


def open_lines(path: Path) -> Any:
    """A file for reading, decompressed by its suffix; reading raises EOFError where a compressed file was cut."""
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rb")
    if path.name.lower().endswith(".zst"):
        return io.BufferedReader(_ZstdFile(path))
    return open(path, "rb")


class _ZstdFile(io.RawIOBase):
    """The content of a .zst file, all its frames; `zstandard`'s own reader takes a cut frame for the end."""

    def __init__(self, path: Path) -> None:
        import zstandard

        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._file = open(path, "rb")
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._file.read(1 << 17)
            if not block:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return 0
            pieces = []
            while block:
                self._frame = self._frame or self._new_frame()
                pieces.append(self._frame.decompress(block))
                block = self._frame.unused_data
                if self._frame.eof:
                    self._frame = None
            self._ready = memoryview(b"".join(pieces))
        taken, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def close(self) -> None:
        self._file.close()
        super().close()


def _read_text(path: Path) -> str:
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError("not UTF-8", where=f"{path}, offset {error.start}", right="convert the file") from None


def _text_field(record: Any, field: str, where: str) -> str:
    """The text of a record; null, which is what an empty cell of a table is, is an empty text."""
    value = record.get(field, False) if isinstance(record, dict) else False
    if value is None:
        return ""
    if not isinstance(value, str):
        have = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise InputError(f"no text in field {field!r} (there is: {have})", where=where, right="name it: --text-field")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"half a surrogate pair at character {error.start}", where=where, right="repair it") from None
    return value


def read_jsonl(path: Path, field: str) -> Iterator[tuple[str, str]]:
    """(place, text) of every line of a JSON-lines file.

    :raises InputError: naming the line.
    """
    import zlib

    line_number = 0
    try:
        with open_lines(path) as file:
            for line_number, line in enumerate(file, start=1):
                where = f"{path}, line {line_number}"
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise InputError(f"not JSON ({error})", where=where) from None
                yield where, _text_field(record, field, where)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot be read ({error})", where=f"{path}, after line {line_number}") from None
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise InputError(f"cannot be read ({error})", where=f"{path}, after line {line_number}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _read_dataset(path: Path, kind: str, field: str) -> Iterator[tuple[str, str]]:
    import datasets

    try:
        if kind == "saved":
            loaded = datasets.load_from_disk(str(path))
            parts = loaded.values() if isinstance(loaded, dict) else [loaded]
        else:
            options = {"sep": "\t"} if _bare_suffix(path) == ".tsv" else {}
            # Unescaped, a[1].csv would be a pattern, and a1.csv would be read in its place.
            files = glob.escape(str(path))
            parts = [datasets.load_dataset(kind, data_files=files, split="train", streaming=True, **options)]
    except Exception as error:
        raise InputError(f"`datasets` cannot read it ({_first_line(error)})", where=str(path)) from None
    row = 0
    for part in parts:
        try:
            for record in part:
                yield f"{path}, row {row}", _text_field(record, field, f"{path}, row {row}")
                row += 1
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"`datasets` cannot read it ({_first_line(error)})", where=f"{path}, row {row}") from None


class FileSource(TextSource):
    """A user's own files: a .txt or .md file is one document, a JSON line or a data set's row is one.

    :param paths: files and folders; folders are searched.
    :param text_field: the field of a record that holds the text.
    """

    name = "files"

    def __init__(self, paths: Sequence[Path], *, text_field: str = "text") -> None:
        self._files, self._others = _files_of(paths)
        self._text_field = text_field
        self.whole_files = all(kind == "text" for _, kind in self._files)
        self._left_out: Counter[str] = Counter()
        self._described: list[dict[str, Any]] = []

    def documents(self) -> Iterator[tuple[str, str]]:
        left_out = Counter({"no text, or a link that leads to no file": self._others} if self._others else {})
        described = []
        for path, kind in self._files:
            entry: dict[str, Any] = {"file": path.name, "documents": 0, "bytes": 0}
            if kind == "text":
                rows: Iterator[tuple[str, str]] = iter([(str(path), _read_text(path))])
            elif kind == "jsonl":
                rows = read_jsonl(path, self._text_field)
            else:
                rows = _read_dataset(path, kind, self._text_field)
            for name, text in rows:
                if not text.strip():
                    left_out["empty"] += 1
                    continue
                entry["documents"] += 1
                entry["bytes"] += len(text.encode())
                yield name, text
            described.append(entry)
        self._left_out, self._described = left_out, described

    def describe(self) -> list[dict[str, Any]]:
        return self._described

    @property
    def left_out(self) -> dict[str, int]:
        return dict(self._left_out)
