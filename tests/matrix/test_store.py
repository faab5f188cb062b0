from __future__ import annotations

import json
import os
import random
import resource
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attnprobe
from attnprobe.errors import MatrixError, UsageError
from attnprobe.matrix.schema import Matrix, expanded
from attnprobe.matrix.store import (
    check_writable,
    encode,
    newest_matrix,
    parse_matrix,
    read_matrix,
    write_atomically,
)
from attnprobe.report.json import format_ as json_format

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def shapes(matrix: Matrix) -> dict[str, bytes]:
    return {
        "compact": encode(matrix),
        "expanded": json_format.text(matrix, width=100, color=False).encode(),
    }


@few
@given(data=st.data())
def test_what_is_written_is_read(data: st.DataObject, documents: st.SearchStrategy[Matrix]) -> None:
    matrix = data.draw(documents)
    content = encode(matrix)
    assert parse_matrix(content, "it") == matrix
    assert encode(parse_matrix(content, "it")) == content


@few
@given(data=st.data())
def test_bytes_follow_from_the_document_alone(
    data: st.DataObject, documents: st.SearchStrategy[Matrix]
) -> None:
    matrix = data.draw(documents)
    # Rebuilt with every mapping in the opposite order.
    turned = msgspec.convert(_turned(msgspec.to_builtins(matrix)), Matrix)
    assert encode(turned) == encode(matrix)


def _turned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _turned(inner) for key, inner in reversed(value.items())}
    if isinstance(value, (list, tuple)):
        return [_turned(inner) for inner in value]
    return value


def test_both_shapes_are_read_as_one_document(handmade: Matrix) -> None:
    found = [parse_matrix(content, "it") for content in shapes(handmade).values()]
    assert found == [handmade, handmade]


def test_a_scans_file_is_read_by_the_public_name(small_matrix: Path) -> None:
    matrix = attnprobe.read_matrix(small_matrix)
    assert matrix.runs[0].complete
    assert encode(matrix) == small_matrix.read_bytes()
    assert parse_matrix(shapes(matrix)["expanded"], "it") == matrix


@pytest.mark.parametrize("shape", ["compact", "expanded"])
def test_a_file_cut_off_anywhere_is_refused(handmade: Matrix, shape: str) -> None:
    content = shapes(handmade)[shape].rstrip()
    for offset in sorted({*range(0, len(content), len(content) // 50), len(content) - 1}):
        with pytest.raises(MatrixError, match=r"cut off|is empty"):
            parse_matrix(content[:offset], "it")


@pytest.mark.parametrize("shape", ["compact", "expanded"])
def test_a_flipped_bit_is_never_believed(handmade: Matrix, shape: str) -> None:
    content = shapes(handmade)[shape]
    draw = random.Random(shape)  # noqa: S311  # no secret
    refused = 0
    for _ in range(400):
        position, bit = draw.randrange(len(content)), draw.randrange(8)
        flipped = bytearray(content)
        flipped[position] ^= 1 << bit
        try:
            found = parse_matrix(bytes(flipped), "it")
        except MatrixError:
            refused += 1
        else:
            assert found == handmade, (position, bit, content[position - 30 : position + 30])
    assert refused > (380 if shape == "compact" else 200)


def test_a_flipped_bit_in_a_scans_file_is_never_believed(small_matrix: Path) -> None:
    content = small_matrix.read_bytes()
    matrix = read_matrix(small_matrix)
    draw = random.Random(3)  # noqa: S311  # no secret
    for _ in range(200):
        position = draw.randrange(len(content))
        flipped = bytearray(content)
        flipped[position] ^= 1 << draw.randrange(8)
        try:
            found = parse_matrix(bytes(flipped), "it")
        except MatrixError:
            continue
        assert found == matrix, content[position - 30 : position + 30]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"hello", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b'{"schema": "\xff"}', "not JSON"),
        (b"\x00" * 4096, "not JSON"),
        (b"[" * 100_000, "is no matrix"),
        (b'{"a": ' * 100_000, "not JSON"),
        (b"[1, 2]", "is no matrix"),
        (b"null", "is no matrix"),
        (b'"attnprobe.matrix/1"', "is no matrix"),
        (b'{"schema": 1}', "is no matrix"),
        (b"{}", "has schema ''"),
        (b'{"schema": "attnprobe.matrix/2"}', "has schema 'attnprobe.matrix/2'"),
        (b'{"schema": "attnprobe.matrix/1"}', "breaks the schema"),
        (b'{"schema": "attnprobe.matrix/1"} {}', "not JSON"),
    ],
)
def test_what_is_no_matrix_is_refused_in_words(content: bytes, what: str) -> None:
    with pytest.raises(MatrixError, match=what):
        parse_matrix(content, "it")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("devices",), None),
        (("backends", 0, "status"), "maybe"),
        (("backends", 0, "cases", 0, "verdict"), "fine"),
        (("backends", 0, "cases", 0, "id"), 7),
        (("cases", 0, "case", "head_dim"), -8),
        (("cases", 0, "case", "dtype"), "float8"),
        (("runs", 0, "complete"), "yes"),
        (("runs", 0, "seed"), 0.5),
    ],
)
def test_a_wrong_type_is_refused_with_its_path(
    handmade: Matrix, path: tuple[str | int, ...], value: object
) -> None:
    document = json.loads(encode(handmade))
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(MatrixError, match="breaks the schema") as caught:
        parse_matrix(json.dumps(document).encode(), "it")
    assert str(path[-1]) in caught.value.why
    assert "validate" in caught.value.fix


def test_a_changed_value_is_refused_by_the_digest(handmade: Matrix) -> None:
    content = encode(handmade)
    changed = content.replace(b'"wrong"', b'"hung"', 1)
    assert changed != content
    with pytest.raises(MatrixError, match="was changed"):
        parse_matrix(changed, "it")


def test_another_layout_of_the_same_document_is_no_change(handmade: Matrix) -> None:
    assert parse_matrix(json.dumps(json.loads(encode(handmade))).encode(), "it") == handmade
    assert parse_matrix(json.dumps(expanded(handmade), indent=8).encode(), "it") == handmade


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match="does not exist"):
        read_matrix(tmp_path / "none.json")
    with pytest.raises(MatrixError, match="cannot be read"):
        read_matrix(tmp_path)


def test_writing_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "m.json"
    write_atomically(path, b"a long first content")
    write_atomically(path, b"short")
    assert path.read_bytes() == b"short"
    assert [one.name for one in path.parent.iterdir()] == ["m.json"]


def test_a_written_file_has_the_usual_mode(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "m.json", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "m.json").stat().st_mode & 0o777 == 0o640


def test_a_disk_that_ends_midway_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ, so that a write beyond the limit fails like one on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UsageError, match="cannot be written"):
            write_atomically(path, b"new" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["m.json"]


def test_a_target_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "m.json").mkdir()
    (tmp_path / "m.json" / "inner").write_text("kept")
    with pytest.raises(UsageError, match="cannot be written"):
        write_atomically(tmp_path / "m.json", b"new")
    assert (tmp_path / "m.json" / "inner").read_text() == "kept"
    assert [one.name for one in tmp_path.iterdir()] == ["m.json"]


@pytest.mark.parametrize("write", [check_writable, lambda path: write_atomically(path, b"x")])
def test_a_parent_that_is_a_file(tmp_path: Path, write: Any) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UsageError, match="cannot be written"):
        write(tmp_path / "file" / "m.json")
    assert (tmp_path / "file").read_text() == "kept"


def test_checking_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text("old")
    check_writable(tmp_path / "m.json")
    check_writable(tmp_path / "n.json")
    assert [one.name for one in tmp_path.iterdir()] == ["m.json"]
    assert (tmp_path / "m.json").read_text() == "old"
    with pytest.raises(UsageError, match="is a directory"):
        check_writable(tmp_path)


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    contents = {b"a" * 200_000, b"b" * 300_000}
    write_atomically(path, b"a" * 200_000)
    done = threading.Event()

    def write() -> None:
        for _ in range(10):
            for content in contents:
                write_atomically(path, content)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(path.read_bytes())
    writer.join()
    assert seen <= contents


def test_the_newest_matrix_is_the_last_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPROBE_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("ATTNPROBE_MATRIX", raising=False)
    with pytest.raises(MatrixError, match="no matrix"):
        newest_matrix()
    for age, name in enumerate(["b.json", "a.json", "c.json"]):
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    assert newest_matrix() == tmp_path / "b.json"
    monkeypatch.setenv("ATTNPROBE_MATRIX", str(tmp_path / "c.json"))
    assert newest_matrix() == tmp_path / "c.json"
