"""Find, read and write matrices. A file is read in one piece, checked, and only then believed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from attnprobe.errors import MatrixError, UsageError
from attnprobe.matrix.schema import SCHEMA, Matrix, compact, digest_of

_DECODER: Final = msgspec.json.Decoder(Matrix)


class _Head(msgspec.Struct):
    schema: str = ""


def data_directory() -> Path:
    """Return the user's directory of matrices (`ATTNPROBE_DATA_DIR`, else the platform's)."""
    named = os.environ.get("ATTNPROBE_DATA_DIR")
    if named:
        return Path(named)
    from platformdirs import user_data_path

    return user_data_path("attnprobe", appauthor=False)


def newest_matrix() -> Path:
    """Return the file that `ATTNPROBE_MATRIX` names, else the newest in the data directory.

    Raises:
        MatrixError: there is none.
    """
    named = os.environ.get("ATTNPROBE_MATRIX")
    if named:
        return Path(named)
    own = sorted(data_directory().glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not own:
        raise MatrixError("there is no matrix of your own yet", fix="attnprobe scan, or name a FILE")
    return own[-1]


def read_matrix(path: str | os.PathLike[str]) -> Matrix:
    """Return the matrix in a file.

    Raises:
        MatrixError: no such file, not readable, not a matrix of this schema, wrong types, or bytes that
            do not match the digest.
    """
    return parse_matrix(read_bytes(path), str(path))


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return a file's content, or raise MatrixError with the reason it cannot be had."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise MatrixError(
            f"{path} does not exist", fix="make one with `attnprobe scan -o json:FILE`"
        ) from None
    except OSError as error:
        raise MatrixError(f"{path} cannot be read", why=error.strerror or str(error)) from None


def parse_matrix(content: bytes, where: str) -> Matrix:
    """Return the matrix in `content`; `where` names it in errors. Raises MatrixError."""
    if not content.strip():
        raise MatrixError(f"{where} is empty", fix="scan again, or restore the file")
    head = None
    try:
        head = msgspec.json.decode(content, type=_Head)
        if head.schema != SCHEMA:
            raise MatrixError(
                f"{where} has schema {head.schema!r}",
                why=f"this attnprobe reads {SCHEMA!r}",
                fix="use the attnprobe that wrote it, or scan again" if head.schema else "",
            )
        matrix = compact(_DECODER.decode(content))
    except msgspec.ValidationError as error:
        raise MatrixError(
            f"{where} {'is no matrix' if head is None else f'breaks the schema {SCHEMA}'}",
            why=str(error),
            fix=f"`attnprobe validate {where}` lists every fault",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MatrixError(
            f"{where} is not JSON, or was cut off",
            why=str(error),
            fix="scan again, or restore the file",
        ) from None
    if digest_of(matrix) != matrix.digest:
        raise MatrixError(
            f"{where} was changed after it was written",
            why="its digest does not match its content",
            fix="restore the file, or scan again",
        )
    return matrix


def encode(matrix: Matrix) -> bytes:
    """Return the bytes of a matrix file: deterministic, one line a case, a rule and a result."""
    return _pretty(msgspec.to_builtins(matrix)).encode() + b"\n"


def _pretty(document: dict[str, object]) -> str:
    """Return JSON with one line an item of the long lists, so that files diff and read well."""

    def flat(value: object) -> str:
        return msgspec.json.encode(value, order="deterministic").decode()

    def lines(key: str, items: object, indent: str) -> str:
        if not isinstance(items, (list, tuple)) or not items:
            return f'{indent}"{key}": {flat(items)}'
        inner = f",\n{indent}  ".join(flat(item) for item in items)
        return f'{indent}"{key}": [\n{indent}  {inner}\n{indent}]'

    parts = []
    for key in sorted(document):
        value = document[key]
        if key == "backends":
            assert isinstance(value, (list, tuple))
            shown = []
            for backend in value:
                fields = ",\n".join(lines(name, backend[name], "      ") for name in sorted(backend))
                shown.append(f"    {{\n{fields}\n    }}")
            body = ",\n".join(shown)
            parts.append(f'  "backends": [\n{body}\n  ]' if shown else '  "backends": []')
        else:
            parts.append(lines(key, value, "  "))
    return "{\n" + ",\n".join(parts) + "\n}"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part of either.

    Raises:
        UsageError: the directory cannot be written.
    """
    import tempfile  # a reader does without

    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        mode = 0o666 & ~_umask()
        temporary.chmod(mode)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise UsageError(
            f"{path} cannot be written", why=error.strerror or str(error), fix="choose another -o"
        ) from None


def _umask() -> int:
    """Return the process' umask; reading it means setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def check_writable(path: Path) -> None:
    """Find out before a long scan that its result could not be written; creates parent directories.

    Raises:
        UsageError: `path` is a directory, or its directory does not take a new file.
    """
    import tempfile  # as above

    if path.is_dir():
        raise UsageError(f"{path} is a directory", fix="name a file: -o json:FILE")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written", why=error.strerror or str(error), fix="choose another -o"
        ) from None
