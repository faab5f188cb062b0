"""`json`: the matrix for programs. A file is compact, standard output expanded; both can be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from attnprobe.matrix.schema import expanded
from attnprobe.matrix.store import encode

if TYPE_CHECKING:
    from attnprobe.matrix.schema import Matrix


class Json:
    """The document itself."""

    name = "json"

    def file(self, matrix: Matrix) -> bytes:
        """Return the bytes of a matrix file."""
        return encode(matrix)

    def text(self, matrix: Matrix, *, width: int, color: bool) -> str:  # noqa: ARG002  # JSON has neither
        """Return the document with every case whole."""
        content = msgspec.json.encode(expanded(matrix), order="deterministic")
        return msgspec.json.format(content, indent=2).decode() + "\n"


format_ = Json()
