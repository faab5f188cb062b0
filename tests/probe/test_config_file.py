"""Configurations from files: three syntaxes that say the same, and errors that name the entry."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from attnprobe.config import AttentionConfig
from attnprobe.errors import UsageError
from attnprobe.probe.config_file import read_configs

EXPECTED: Final = [
    AttentionConfig(pass_="backward", dtype="bfloat16", head_dim=128, dropout=0.1, alibi=True),
    AttentionConfig(pass_="forward", scale=1.0, seqlen_q=0),
]

YAML: Final = """\
# what our jobs call
- pass: backward
  dtype: bfloat16
  head_dim: 128
  dropout: 0.1
  alibi: true
- {pass: forward, scale: 1, seqlen_q: 0}
"""
JSON: Final = (
    '[{"pass": "backward", "dtype": "bfloat16", "head_dim": 128, "dropout": 0.1, "alibi": true},'
    ' {"pass": "forward", "scale": 1, "seqlen_q": 0}]'
)
TOML: Final = """\
[[configs]]
pass = "backward"
dtype = "bfloat16"
head_dim = 128
dropout = 0.1
alibi = true

[[configs]]
pass = "forward"
scale = 1
seqlen_q = 0
"""


def indented(text: str) -> str:
    return "".join(f"  {line}" for line in text.splitlines(keepends=True))


GOOD: Final = {
    "list.yaml": YAML,
    "list.yml": YAML,
    "UPPER.YAML": YAML,
    "mapping.yaml": f"configs:\n{indented(YAML)}",
    "list.json": JSON,
    "mapping.json": f'{{"configs": {JSON}}}',
    "mapping.toml": TOML,
}


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("name", GOOD)
def test_all_syntaxes_say_the_same(tmp_path: Path, name: str) -> None:
    assert read_configs(written(tmp_path, name, GOOD[name])) == EXPECTED


def test_an_empty_mapping_leaves_everything_unsaid(tmp_path: Path) -> None:
    assert read_configs(written(tmp_path, "c.json", "[{}]")) == [AttentionConfig()]


@pytest.mark.parametrize("name", ["absent.yaml", "absent.json", "absent.toml"])
def test_an_absent_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} cannot be read") as caught:
        read_configs(tmp_path / name)
    assert caught.value.exit_code == 2
    assert "No such file" in caught.value.why


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        read_configs(tmp_path / "d.yaml")


@pytest.mark.parametrize("name", ["c.txt", "c", "c.ini", "yaml"])
def test_an_unknown_suffix_is_refused_with_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_configs(written(tmp_path, name, YAML))
    assert name in caught.value.what
    assert all(suffix in caught.value.why for suffix in (".yaml", ".json", ".toml"))


BROKEN: Final[dict[str, str | bytes]] = {
    "c.yaml": "- {pass: backward",
    "tab.yaml": "-\tpass: backward\n\t- x",
    "tag.yaml": "!!python/object/apply:os.system ['true']",
    "c.json": '[{"pass": "backward"',
    "trailing.json": "[{}] {}",
    "empty.json": "",
    "c.toml": "[[configs]\n",
    "twice.toml": "[[configs]]\npass = 'forward'\npass = 'backward'\n",
    "latin.json": b'[{"dtype": "\xff"}]',
    "latin.toml": b"[[configs]]\ndtype = '\xff'\n",
    "latin.yaml": b"- dtype: \xff\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_syntax_is_an_error_that_names_the_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_configs(written(tmp_path, name, BROKEN[name]))
    assert name in caught.value.what
    assert "cannot be parsed" in caught.value.what
    assert caught.value.why
    assert "\n" not in caught.value.why


HOLDS_NONE: Final = {
    "empty.yaml": "",
    "comment.yaml": "# nothing yet\n",
    "text.yaml": "hello",
    "empty-list.yaml": "[]",
    "number.json": "3",
    "null.json": "null",
    "empty-list.json": "[]",
    "other-key.json": '{"configurations": [{}]}',
    "mapping.json": '{"configs": {"pass": "forward"}}',
    "empty.toml": "",
    "table.toml": "[configs]\npass = 'forward'\n",
}


@pytest.mark.parametrize("name", HOLDS_NONE)
def test_a_file_without_configurations_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="holds no configurations") as caught:
        read_configs(written(tmp_path, name, HOLDS_NONE[name]))
    assert name in caught.value.what


@pytest.mark.parametrize(
    ("name", "content", "entry"),
    [
        ("c.yaml", "- pass: forward\n- forward\n", "entry 2"),
        ("c.json", "[[]]", "entry 1"),
        ("c.json", "[{}, {}, null]", "entry 3"),
        ("c.toml", "configs = [1]\n", "entry 1"),
    ],
)
def test_an_entry_that_is_no_mapping_is_named(tmp_path: Path, name: str, content: str, entry: str) -> None:
    with pytest.raises(UsageError, match=entry):
        read_configs(written(tmp_path, name, content))


@pytest.mark.parametrize(
    ("name", "content", "entry", "field"),
    [
        ("c.yaml", "- pass: forward\n- {pass: forward, head_dim: 0}\n", "entry 2", "head_dim"),
        ("c.yaml", "- dropout: yes\n", "entry 1", "dropout"),
        ("c.yaml", "- mask: off\n", "entry 1", "mask"),
        ("c.yaml", "- scale: .nan\n", "entry 1", "scale"),
        ("c.yaml", "- scale: .inf\n", "entry 1", "scale"),
        ("c.yaml", "- head_dim: 64\n  colour: red\n", "entry 1", "colour"),
        ("c.yaml", "- 64: head_dim\n", "entry 1", "key"),
        ("c.json", '[{"dtype": "float8"}]', "entry 1", "dtype"),
        ("c.toml", "[[configs]]\nseqlen_q = -1\n", "entry 1", "seqlen_q"),
        ("c.toml", "[[configs]]\nhead_dim = 1979-05-27\n", "entry 1", "head_dim"),
    ],
)
def test_a_bad_field_is_named_with_its_entry(
    tmp_path: Path, name: str, content: str, entry: str, field: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read_configs(written(tmp_path, name, content))
    assert entry in caught.value.what
    assert name in caught.value.what
    assert field in caught.value.why
