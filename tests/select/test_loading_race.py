"""Many processes load one file while it is replaced: each load sees one whole document, and answers by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from msgspec import structs

from attnprobe.config import Case, config_of
from attnprobe.matrix.schema import Matrix, sealed
from attnprobe.matrix.store import encode, write_atomically

# One process imports what selecting needs and forks the rest: 256 interpreters would take minutes to start.
# Each loads until the writer is done, and ends with a word for what it saw.
READERS = """
    import json, os, sys, time
    import attnprobe.select.loading as loading
    from attnprobe.config import AttentionConfig
    assert "torch" not in sys.modules
    path, done, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    right = {digest: backend for digest, backend in json.loads(sys.argv[4])}
    config = AttentionConfig(**json.loads(sys.argv[5]))

    def read():
        seen, loads, last = set(), 0, False
        while not last:
            last = os.path.exists(done)
            selector = loading.load(path, assume_device=True, known=())
            answer = selector.select(config, backends=["torch-math"]).backend
            assert selector.digest in right, "torn"
            assert answer == right[selector.digest], "wrong"
            seen.add(selector.digest)
            loads += 1
            time.sleep(0.01)
            time.sleep(0.5 * (os.getpid() % 7) / 7)  # so that the writer gets its turn among 256
        return loads, len(seen)

    os.nice(19)  # the writer comes first, and so does all else on the machine
    pipes = []
    for _ in range(count):
        ours, theirs = os.pipe()
        if os.fork() == 0:
            code = 1
            os.nice(19)  # so that the writer gets its turn
            try:
                os.write(theirs, json.dumps(read()).encode())
                code = 0
            except BaseException as error:
                os.write(theirs, json.dumps(repr(error)[:500]).encode())
            finally:
                os._exit(code)
        os.close(theirs)
        pipes.append(ours)
    print("reading", flush=True)
    found = [json.loads(os.read(one, 1000) or '"died"') for one in pipes]
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    print(json.dumps(found))
"""


def race(place: Path, matrix: Matrix, readers: int, replacements: int) -> list[tuple[int, int]]:
    """Return how often each reader loaded the file, and how many documents it saw."""
    math = next(backend for backend in matrix.backends if backend.name == "torch-math")
    absent = structs.replace(math, status="absent", cases=(), rules=(), reason="not here")
    without = sealed(
        structs.replace(matrix, backends=tuple(absent if b is math else b for b in matrix.backends))
    )
    contents = [encode(matrix), encode(without)]
    config = config_of(Case(seed=7))
    fields = {name: getattr(config, name) for name in config.__struct_fields__ if name != "window"}
    write_atomically(place / "m.json", contents[0])
    arguments = [
        str(place / "m.json"),
        str(place / "done"),
        str(readers),
        json.dumps([(matrix.digest, "torch-math"), (without.digest, None)]),
        json.dumps(fields),
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(READERS), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    for number in range(replacements):
        write_atomically(place / "m.json", contents[(number + 1) % 2])
    (place / "done").touch()
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    found = json.loads(stdout)
    assert [one for one in found if not isinstance(one, list)] == []
    return [(loads, seen) for loads, seen in found]


@pytest.fixture
def large(handmade: Matrix) -> Matrix:
    """Return a document that takes the system several writes and reads."""
    run = structs.replace(handmade.runs[0], notes=("x" * 300_000,))
    return sealed(structs.replace(handmade, runs=(run,)))


def test_a_few_readers_see_whole_documents(large: Matrix, tmp_path: Path) -> None:
    found = race(tmp_path, large, readers=4, replacements=60)
    assert len(found) == 4
    assert max(seen for _, seen in found) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_256_processes_while_the_file_is_replaced_1000_times(large: Matrix, tmp_path: Path) -> None:
    found = race(tmp_path, large, readers=256, replacements=1000)
    assert len(found) == 256
    assert sum(loads for loads, _ in found) > 1000
    assert sum(seen == 2 for _, seen in found) > 64
