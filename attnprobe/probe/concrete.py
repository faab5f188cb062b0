"""From a level on every axis to a case with numbers, and back to the axis that a number came from.

The numbers that stand for a level are drawn by a hash of the whole choice and the seed: the same levels
give the same case, other seeds visit other lengths of the same level.
"""

from __future__ import annotations

import hashlib
import random
from typing import Final

from msgspec import structs

from attnprobe.axes import WORK_CAP, At, head_dim_v
from attnprobe.config import Case
from attnprobe.lengths import length_level, lengths_on, order, representatives

SMALL_WORK: Final = 1 << 21
"""Multiply-adds that an ordinary case stays under where its levels allow it."""

_TRIES: Final = 16
DROPOUT: Final = 0.2
SOFTCAP: Final = 5.0
WINDOW: Final = 20


def concretise(at: At, seed: int = 0) -> Case:
    """Return the case that stands for a level on every axis.

    `at` must satisfy `axes.CONSTRAINTS`; the case falls on exactly these levels, and its work stays
    under `axes.WORK_CAP`.
    """
    draw = random.Random(_draw(at, seed))  # noqa: S311  # no secret
    dim = int(at["head_dim"])
    dim_v = head_dim_v(dim, at["head_dim_v"])
    heads, heads_kv = {"equal": (2, 2), "grouped": (4, 2), "one-kv": (3, 1)}[str(at["heads"])]
    batch = 2 if at["batch"] == "more" else 1
    if heads == heads_kv and at["seqlen_q"] == at["seqlen_kv"] == "long":
        heads = heads_kv = 1
    per_score = heads * batch * max(dim, dim_v)
    seqlen_q, seqlen_kv = _lengths(at, draw, per_score)
    if heads == heads_kv and seqlen_q * seqlen_kv * per_score > WORK_CAP:
        heads = heads_kv = 1
    return Case(
        pass_=at["pass"],  # type: ignore[arg-type]  # the levels of these axes are the literals
        dtype=at["dtype"],  # type: ignore[arg-type]
        head_dim=dim,
        head_dim_v=dim_v,
        heads=heads,
        heads_kv=heads_kv,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        mask=at["mask"],  # type: ignore[arg-type]
        window=WINDOW if at["mask"] == "window" else 0,
        masked_rows=at["masked_rows"],  # type: ignore[arg-type]
        dropout=DROPOUT if at["dropout"] == "on" else 0.0,
        scale=_custom_scale(dim) if at["scale"] == "custom" else None,
        softcap=SOFTCAP if at["softcap"] == "on" else 0.0,
        alibi=at["alibi"] == "on",
        layout=at["layout"],  # type: ignore[arg-type]
        needs_grad=at["needs_grad"],  # type: ignore[arg-type]
        deterministic=at["deterministic"] == "on",
        data=at["data"],  # type: ignore[arg-type]
        grad_out=at["grad_out"],  # type: ignore[arg-type]
        earlier=at["earlier"],  # type: ignore[arg-type]
        seed=seed,
    )


# The fields of a case that each axis decides, where the field does not bear the axis' own name.
_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "pass": ("pass_",),
    "head_dim": ("head_dim", "head_dim_v", "scale"),
    "heads": ("heads", "heads_kv"),
    "seqlen_order": (),
    "mask": ("mask", "window"),
}


def with_levels(case: Case, at: At, changed: frozenset[str]) -> Case:
    """Return `case` moved to the levels `at`, keeping every number that `changed` axes do not decide.

    A localiser changes one axis at a time; were the other numbers drawn anew, it would change more.
    """
    fresh = concretise(at, case.seed)
    names = {name for axis in changed for name in _FIELDS.get(axis, (axis,))}
    moved = structs.replace(case, **{name: getattr(fresh, name) for name in names})
    if "head_dim" in changed or "head_dim_v" in changed:
        moved = structs.replace(moved, head_dim_v=head_dim_v(moved.head_dim, at["head_dim_v"]))
    if {"seqlen_q", "seqlen_kv", "seqlen_order"} & changed:
        moved = _keep_lengths(case, moved, fresh, at)
    if moved.work > WORK_CAP and moved.heads == moved.heads_kv:
        moved = structs.replace(moved, heads=1, heads_kv=1)
    if moved.work > WORK_CAP:
        moved = structs.replace(moved, seqlen_q=fresh.seqlen_q, seqlen_kv=fresh.seqlen_kv)
    return moved


def _keep_lengths(case: Case, moved: Case, fresh: Case, at: At) -> Case:
    """Return `moved` with the old length on the side that may keep it, else both drawn anew."""
    wanted = at["seqlen_order"]
    for q, kv in (
        (case.seqlen_q, case.seqlen_kv),
        (case.seqlen_q, fresh.seqlen_kv),
        (fresh.seqlen_q, case.seqlen_kv),
        *((case.seqlen_q, kv) for kv in representatives(at["seqlen_kv"])),
        *((q, case.seqlen_kv) for q in representatives(at["seqlen_q"])),
    ):
        candidate = structs.replace(moved, seqlen_q=q, seqlen_kv=kv)
        if order(q, kv) == wanted and _on_levels(candidate, at):
            return candidate
    return structs.replace(moved, seqlen_q=fresh.seqlen_q, seqlen_kv=fresh.seqlen_kv)


def _on_levels(case: Case, at: At) -> bool:
    return length_level(case.seqlen_q) == at["seqlen_q"] and length_level(case.seqlen_kv) == at["seqlen_kv"]


def _custom_scale(head_dim: int) -> float:
    """Return a scale that no kernel confuses with the default: 0.6 of it, in exact binary."""
    return float(round(0.6 * float(head_dim) ** -0.5 * 4096) / 4096)


def _lengths(at: At, draw: random.Random, per_score: int) -> tuple[int, int]:
    """Return two lengths on their levels and in their order, small where possible.

    Any of a level, so that what fails for some residue or beyond some length is met; those that stand
    for the level where few of it are small enough.
    """
    for _ in range(_TRIES):
        q = draw.choice(lengths_on(at["seqlen_q"]))
        equal = at["seqlen_order"] == "equal"
        kv = q if equal else draw.choice(lengths_on(at["seqlen_kv"]))
        if order(q, kv) == at["seqlen_order"] and q * kv * per_score <= SMALL_WORK:
            return q, kv
    pairs = [
        (q, kv)
        for q in representatives(at["seqlen_q"])
        for kv in representatives(at["seqlen_kv"])
        if order(q, kv) == at["seqlen_order"]
    ]
    least = min(q * kv for q, kv in pairs)
    most = max(SMALL_WORK, min(2 * least * per_score, WORK_CAP))
    return draw.choice([(q, kv) for q, kv in pairs if q * kv == least or q * kv * per_score <= most])


def _draw(at: At, seed: int) -> int:
    said = ",".join(f"{name}={level}" for name, level in sorted(at.items()))
    digest = hashlib.blake2b(f"{seed}:{said}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
