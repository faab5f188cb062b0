"""`AttentionConfig`, the question a job asks, and `Case`, one answerable instance of it.

A config may leave fields unsaid; a case has every field, a hazard for each thing nobody can promise
(what the data looks like, how grad_out is laid out), and a seed, so that it can be run again.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from attnprobe.errors import UsageError

Pass = Literal["forward", "backward"]
Dtype = Literal["float32", "bfloat16", "float16"]
Mask = Literal[
    "none",
    "causal-top-left",
    "causal-bottom-right",
    "bool",
    "float",
    "bool-broadcast",
    "float-broadcast",
    "window",
]
MaskedRows = Literal["none", "false", "-inf", "finfo-min"]
Layout = Literal["contiguous", "transposed", "packed", "expanded", "inner-stride", "varlen"]
NeedsGrad = Literal["none", "all", "q", "kv", "mask"]
Data = Literal["gaussian", "far-below", "large-logits", "outliers", "batch-differs"]
GradOut = Literal["contiguous", "transposed", "expanded", "scalar"]
Earlier = Literal["nothing", "other-data", "other-strides", "other-dtype"]

Size = Annotated[int, Meta(ge=1, le=1 << 31)]
Length = Annotated[int, Meta(ge=0, le=1 << 31)]
Probability = Annotated[float, Meta(ge=0, lt=1)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]


class AttentionConfig(
    Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    rename={"pass_": "pass"},
):
    """What a job would call. A field left `UNSET` means any of its values.

    Lengths are in tokens, `scale` multiplies the scores (None: 1/sqrt(head_dim)), `softcap` 0 is off,
    `window` is how many earlier keys a query sees where `mask` is "window".
    """

    pass_: Pass | UnsetType = UNSET
    dtype: Dtype | UnsetType = UNSET
    head_dim: Size | UnsetType = UNSET
    head_dim_v: Size | UnsetType = UNSET
    heads: Size | UnsetType = UNSET
    heads_kv: Size | UnsetType = UNSET
    batch: Size | UnsetType = UNSET
    seqlen_q: Length | UnsetType = UNSET
    seqlen_kv: Length | UnsetType = UNSET
    mask: Mask | UnsetType = UNSET
    window: Size | UnsetType = UNSET
    masked_rows: MaskedRows | UnsetType = UNSET
    dropout: Probability | UnsetType = UNSET
    scale: Positive | UnsetType | None = UNSET
    softcap: NotNegative | UnsetType = UNSET
    alibi: bool | UnsetType = UNSET
    layout: Layout | UnsetType = UNSET
    needs_grad: NeedsGrad | UnsetType = UNSET
    deterministic: bool | UnsetType = UNSET


class Case(
    Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"pass_": "pass"},
):
    """One config with concrete values, its hazards and its seed.

    The defaults are the plain case: what is not said in a file is this. They are part of the format
    `attnprobe.matrix/1` and never change within it.
    """

    pass_: Pass = "backward"
    dtype: Dtype = "float32"
    head_dim: Size = 64
    head_dim_v: Size = 64
    heads: Size = 2
    heads_kv: Size = 2
    batch: Size = 1
    seqlen_q: Length = 128
    seqlen_kv: Length = 128
    mask: Mask = "none"
    window: Length = 0
    masked_rows: MaskedRows = "none"
    dropout: Probability = 0.0
    scale: Positive | None = None
    softcap: NotNegative = 0.0
    alibi: bool = False
    layout: Layout = "contiguous"
    needs_grad: NeedsGrad = "all"
    deterministic: bool = False
    data: Data = "gaussian"
    grad_out: GradOut = "contiguous"
    earlier: Earlier = "nothing"
    seed: Length = 0

    def __post_init__(self) -> None:
        """Let what equals a default be that default.

        msgspec leaves a field out where it *is* its default; a 0.0 that was computed is another object,
        and would give the same case another id.
        """
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value is not default and value == default:
                msgspec.structs.force_setattr(self, name, default)

    @property
    def id(self) -> str:
        """Twelve hex digits that name this case wherever it is run: a hash of its canonical form."""
        return hashlib.blake2b(canonical(self), digest_size=6).hexdigest()

    @property
    def work(self) -> int:
        """B x H x S_q x S_kv x D, the multiply-adds of one score matrix."""
        head_dim = max(self.head_dim, self.head_dim_v)
        return self.batch * self.heads * self.seqlen_q * self.seqlen_kv * head_dim

    @property
    def softmax_scale(self) -> float:
        """Return the factor on the scores."""
        return self.scale if self.scale is not None else float(self.head_dim) ** -0.5


_DEFAULTS: Final[dict[str, Any]] = {field.name: field.default for field in msgspec.structs.fields(Case)}
_ENCODER: Final = msgspec.json.Encoder(order="deterministic")


def canonical(value: Any) -> bytes:
    """Return deterministic JSON bytes: fields as declared, other mappings by key, no spaces."""
    return _ENCODER.encode(value)


def config_of(case: Case) -> AttentionConfig:
    """Return the question that a case answers: the case without hazards and seed, every field said."""
    fields = {name: getattr(case, name) for name in AttentionConfig.__struct_fields__}
    if case.mask != "window":
        fields["window"] = UNSET
    return AttentionConfig(**fields)


def case_from(config: AttentionConfig, *, seed: int = 0) -> Case:
    """Return the case that runs exactly this config; an unsaid field takes the plain value.

    Dependent fields follow what is said: `head_dim_v` follows `head_dim`, `heads_kv` follows `heads`,
    `seqlen_kv` follows `seqlen_q`, and a forward-only config needs no gradients.

    Raises:
        UsageError: the config contradicts itself.
    """
    said = {
        name: value
        for name in AttentionConfig.__struct_fields__
        if (value := getattr(config, name)) is not UNSET
    }
    for follower, leader in (
        ("head_dim_v", "head_dim"),
        ("heads_kv", "heads"),
        ("seqlen_kv", "seqlen_q"),
    ):
        if follower not in said and leader in said:
            said[follower] = said[leader]
        elif leader not in said and follower in said:
            said[leader] = said[follower]
    if said.get("pass_") == "forward":
        said.setdefault("needs_grad", "none")
    if said.get("masked_rows", "none") != "none" and "mask" not in said:
        said["mask"] = "bool" if said["masked_rows"] == "false" else "float"
    if said.get("mask") == "window":
        said.setdefault("window", 64)
    case = Case(**said, seed=seed)
    contradiction = _contradiction(case)
    if contradiction:
        shown = ", ".join(f"{name.rstrip('_')}={value}" for name, value in said.items())
        raise UsageError(f"the configuration {shown} contradicts itself", why=contradiction)
    return case


def _contradiction(case: Case) -> str:
    """Return why a case cannot be, or "" where it can."""
    from attnprobe.axes import PLANNING_ONLY, first_violated, levels_of

    if case.heads % case.heads_kv:
        return f"heads={case.heads} is no multiple of heads_kv={case.heads_kv}"
    if case.window and case.mask != "window":
        return "a window goes with mask=window"
    broken = first_violated(levels_of(case), leaving_out=PLANNING_ONLY)
    return "" if broken is None else broken.reason


def parse_config(fields: dict[str, object], where: str) -> AttentionConfig:
    """Return the config that a mapping of names to values spells.

    Raises:
        UsageError: an unknown name or a value out of range; the message names `where` and the field.
    """
    try:
        return msgspec.convert(fields, AttentionConfig)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{where} is no attention configuration",
            why=str(error),
            fix="names and spellings: docs/axes.md, or `attnprobe scan --help`",
        ) from None
