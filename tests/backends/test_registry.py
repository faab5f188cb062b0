from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from attnprobe.backends.registry import choose, known
from attnprobe.device.cpu import cpu_device
from attnprobe.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

KERNEL = "import torch\nattention = torch.nn.functional.scaled_dot_product_attention\nnumber = 3\n"


def test_every_module_that_holds_a_backend_is_found_under_its_own_name() -> None:
    found, absent = known()
    assert {"aten-flash", "flex-attention", "torch-default", "torch-flash", "torch-math"} <= found.keys()
    assert all(backend.name == name for name, backend in found.items())
    assert absent == []


def test_nothing_asked_means_all_and_a_name_means_that_one() -> None:
    everything, _ = choose((), cpu_device())
    one, _ = choose(("torch-math",), cpu_device())
    assert list(one) == ["torch-math"]
    assert one.keys() < everything.keys()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nonsense", "not known"),
        ("missing.py:attention", "does not exist"),
        ("{file}:nothing", "has no nothing"),
        ("{file}:number", "not callable"),
        ("no_such_package_here:attention", "ModuleNotFoundError"),
        ("{file}:", "no known backend"),
    ],
)
def test_a_name_that_cannot_be_used_says_why(spec: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(KERNEL, encoding="utf-8")
    with pytest.raises(UsageError, match=said):
        choose((spec.format(file=file),), cpu_device())


def test_a_module_that_raises_anything_is_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("raise AttributeError('no symbol')\n", encoding="utf-8")
    with pytest.raises(UsageError, match="AttributeError: no symbol"):
        choose((f"{file}:attention",), cpu_device())


def test_a_callable_is_named_by_file_and_name_and_digests_its_file(tmp_path: Path) -> None:
    file = tmp_path / "my_kernel.py"
    file.write_text(KERNEL, encoding="utf-8")
    found, _ = choose((f"{file}:attention",), cpu_device())
    (backend,) = found.values()
    assert backend.name == "my_kernel:attention"
    before = backend.materials()[-1].digest
    file.write_text(KERNEL + "# changed\n", encoding="utf-8")
    ((again, *_), _) = (list(choose((f"{file}:attention",), cpu_device())[0].values()), None)
    assert again.materials()[-1].digest != before


def test_an_entry_point_is_a_backend_and_a_broken_one_is_absent(tmp_path: Path) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n", encoding="utf-8")
    points = "[attnprobe.backends]\nmine = other_backends:backend\nbad = other_broken:backend\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    code = "from attnprobe.backends._sdpa import Sdpa\nbackend = Sdpa('mine', 'MATH')\n"
    (tmp_path / "other_backends.py").write_text(code, encoding="utf-8")
    (tmp_path / "other_broken.py").write_text("raise OSError('undefined symbol')\n", encoding="utf-8")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from attnprobe.backends.registry import known\n"
        "found, absent = known()\n"
        "print('mine' in found, [(one.name, one.reason) for one in absent])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True [('bad', 'OSError: undefined symbol')]"
