"""The selector on merged documents: what one run denies is denied, and nothing taken away allows more."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from msgspec import structs

from attnprobe.axes import levels_of
from attnprobe.config import Case, config_of
from attnprobe.errors import AttnprobeError, MatrixError
from attnprobe.matrix.lint import faults
from attnprobe.matrix.merge import merged
from attnprobe.matrix.schema import Backend, CaseRecord, Matrix, Result, Rule, sealed
from attnprobe.matrix.store import encode, parse_matrix
from attnprobe.select.match import Live, assume, compare
from attnprobe.select.selector import Selector
from attnprobe.verdict import Evidence, Verdict
from tests.select.test_selector_oracle import (
    HERE,
    LIVE,
    SHORT_FORM,
    TORCH,
    assert_only_less,
    clean_matrix,
    fields_of,
    leaves_a_trace,
    random_query,
    selector_of,
    with_backend,
    without,
)

PLAIN = Case()
PACKED = Case(layout="packed")


def shard(draw: random.Random, number: int) -> Matrix:
    """Return a valid document of one device and build; its run is another than that of the next."""
    matrix = clean_matrix(draw)
    runs = tuple(structs.replace(run, device=0, started=str(number)) for run in matrix.runs)
    return sealed(
        structs.replace(
            matrix,
            devices=(HERE,),
            runs=runs,
            backends=tuple(structs.replace(backend, materials=(TORCH,)) for backend in matrix.backends),
        )
    )


def shards(draw: random.Random) -> tuple[list[Matrix], Matrix]:
    """Return documents, some of whose cases are the same, and their union."""
    first = shard(draw, 0)
    found = [first]
    for number in range(1, draw.choice([2, 2, 3])):
        other = shard(draw, number)
        if draw.random() < 0.6:
            other = seen_otherwise(draw, first, number)
        found.append(other)
    whole = merged((str(number), matrix) for number, matrix in enumerate(found))
    assert [f for f in faults(encode(whole)) if not f.path.endswith("witness")] == []
    return found, whole


def seen_otherwise(draw: random.Random, matrix: Matrix, number: int) -> Matrix:
    """Return another run of the same plan on which some of what failed passed, its rules gone with it."""
    backends = []
    for backend in matrix.backends:
        gone = {rule.id for rule in backend.rules if draw.random() < 0.5}
        at = {record.id: record.case for record in matrix.cases}
        rules = tuple(rule for rule in backend.rules if rule.id not in gone)
        kept = structs.replace(backend, rules=rules)
        cases = tuple(
            result
            if any(rule.covers(result.id, levels_of(at[result.id])) for rule in rules)
            else Result(id=result.id, run=result.run)
            for result in kept.cases
        )
        backends.append(structs.replace(kept, cases=cases))
    runs = tuple(structs.replace(run, started=str(number)) for run in matrix.runs)
    return sealed(structs.replace(matrix, backends=tuple(backends), runs=runs))


def test_the_union_denies_what_one_document_denies_and_nothing_else() -> None:
    counts: Counter[str] = Counter()
    for number in range(25):
        draw = random.Random(f"union/{number}")  # noqa: S311  # no secret
        found, whole = shards(draw)
        alone = [selector_of(matrix) for matrix in found]
        together = selector_of(whole)
        for _ in range(60):
            config = random_query(draw, draw.choice(found))
            for one in together.select(config).candidates:
                before = [s.select(config).candidate(one.backend) for s in alone]
                statuses = {each.status for each in before if each is not None}
                counts[one.status] += 1
                counts["disputed"] += "disputed: " in one.reason
                assert (one.status == "denied") == ("denied" in statuses), (number, config, one)
                counts["passed elsewhere"] += {"denied", "proven"} <= statuses
    assert counts["passed elsewhere"] > 20
    assert counts["disputed"] > 50
    assert min(counts["proven"], counts["denied"], counts["unrefuted"]) > 100


def test_what_every_run_proves_alone_the_union_proves() -> None:
    proven = 0
    for number in range(10):
        draw = random.Random(f"proof/{number}")  # noqa: S311  # no secret
        found, whole = shards(draw)
        alone, together = [selector_of(matrix) for matrix in found], selector_of(whole)
        for _ in range(60):
            config = random_query(draw, draw.choice(found))
            for one in together.select(config).candidates:
                before = {c.status for s in alone if (c := s.select(config).candidate(one.backend))}
                if before == {"proven"}:
                    assert one.status == "proven", (number, config, one)
                    proven += 1
    assert proven > 50


def test_removing_a_case_a_result_or_a_rule_of_a_union_never_allows_more() -> None:
    tried: Counter[str] = Counter()
    for number in range(12):
        draw = random.Random(f"less/{number}")  # noqa: S311  # no secret
        _, matrix = shards(draw)
        before = selector_of(matrix)
        configs = [random_query(draw, matrix) for _ in range(30)]
        for _ in range(6):
            index = draw.randrange(len(matrix.cases))
            fewer = structs.replace(matrix, cases=matrix.cases[:index] + matrix.cases[index + 1 :])
            assert_only_less(before, selector_of(sealed(fewer)), configs, matrix.cases[index])
            place = draw.randrange(len(matrix.backends))
            backend = matrix.backends[place]
            if backend.cases:
                index = draw.randrange(len(backend.cases))
                less = structs.replace(backend, cases=backend.cases[:index] + backend.cases[index + 1 :])
                after = selector_of(with_backend(matrix, place, less))
                assert_only_less(before, after, configs, backend.cases[index])
                tried["results"] += 1
        for place, backend in enumerate(matrix.backends):
            for index, rule in enumerate(backend.rules):
                if leaves_a_trace(matrix, backend, index):
                    less = structs.replace(backend, rules=backend.rules[:index] + backend.rules[index + 1 :])
                    assert_only_less(before, selector_of(with_backend(matrix, place, less)), configs, rule)
                    tried["rules"] += 1
    assert min(tried.values()) > 30, tried


def test_removing_any_field_of_a_union_is_refused_and_even_resealed_never_allows_more() -> None:
    tried: Counter[str] = Counter()
    for number in range(10):
        draw = random.Random(f"fields of a union/{number}")  # noqa: S311  # no secret
        _, matrix = shards(draw)
        before = selector_of(matrix)
        configs = [random_query(draw, matrix) for _ in range(25)]
        document = msgspec.json.decode(encode(matrix))
        paths = fields_of(document)
        always = [path for path in paths if path[0] == "backends" and path[-1] in {"rules", "cases"}]
        for path in [*always, *draw.sample(paths, min(len(paths), 40))]:
            content = msgspec.json.encode(without(document, path))
            try:
                same = parse_matrix(content, "changed")
            except MatrixError:
                tried["refused"] += 1
            else:
                assert same == matrix, path
            if (path[0], path[-1]) in SHORT_FORM:
                continue
            try:
                after = selector_of(sealed(msgspec.json.decode(content, type=Matrix)))
            except (msgspec.ValidationError, AttnprobeError):
                tried["not a matrix"] += 1
                continue
            tried["resealed"] += 1
            assert_only_less(before, after, configs, path)
    assert min(tried.values()) > 60, tried


# One example each, and what is said.


@pytest.fixture
def union_of(handmade: Matrix) -> Callable[..., Selector]:
    """Return the selector of one run per argument: what became of each case, and the rules."""

    def make(*runs: tuple[dict[Case, Verdict], tuple[Rule, ...]]) -> Selector:
        found = []
        for number, (results, rules) in enumerate(runs):
            backend = Backend(
                name="kernel",
                status="probed",
                materials=(TORCH,),
                rules=rules,
                cases=tuple(Result(id=case.id, verdict=verdict) for case, verdict in results.items()),
            )
            matrix = structs.replace(
                handmade,
                backends=(backend,),
                cases=tuple(CaseRecord(id=case.id, case=case) for case in results),
                runs=(structs.replace(handmade.runs[0], started=f"{number:04}"),),
            )
            found.append((str(number), sealed(matrix)))
        whole = merged(found)
        return Selector(whole, assume(whole), devices=whole.devices, installed=None)

    return make


def rule_on(case: Case, verdict: Verdict, **when: tuple[str, ...]) -> Rule:
    return Rule(id="r", when=dict(when), verdict=verdict, witness=case.id)


def test_a_case_that_fails_in_one_run_is_denied_with_the_runs(union_of: Callable[..., Selector]) -> None:
    bad = ({PLAIN: Verdict.WRONG}, (rule_on(PLAIN, Verdict.WRONG, layout=("contiguous",)),))
    good = ({PLAIN: Verdict.OK}, ())
    (one,) = union_of(bad, good, good).select(config_of(PLAIN)).candidates
    assert (one.status, one.verdict, one.rule, one.witness) == ("denied", Verdict.WRONG, "r", PLAIN.id)
    assert one.reason.endswith("disputed: ok in runs 1, 2, wrong in run 0")
    (one,) = union_of(good, bad).select(config_of(PLAIN)).candidates
    assert one.reason.endswith("disputed: ok in run 0, wrong in run 1")


def test_a_failing_case_without_its_rule_denies_with_the_runs(union_of: Callable[..., Selector]) -> None:
    for verdict in (Verdict.CRASHED, Verdict.REFUSED):
        (one,) = (
            union_of(({PLAIN: Verdict.OK}, ()), ({PLAIN: verdict}, ())).select(config_of(PLAIN)).candidates
        )
        assert one.status == "denied"
        assert one.verdict is verdict
        assert f"disputed: ok in run 0, {verdict.value} in run 1" in one.reason


def test_two_ways_to_fail_are_a_dispute_and_the_defect_is_named(union_of: Callable[..., Selector]) -> None:
    for order in ((Verdict.REFUSED, Verdict.WRONG), (Verdict.WRONG, Verdict.REFUSED)):
        (one,) = union_of(*(({PLAIN: verdict}, ()) for verdict in order)).select(config_of(PLAIN)).candidates
        assert (one.status, one.verdict) == ("denied", Verdict.WRONG)
        assert "disputed: " in one.reason


def test_runs_that_agree_are_no_dispute(union_of: Callable[..., Selector]) -> None:
    good = ({PLAIN: Verdict.OK, PACKED: Verdict.WRONG}, (rule_on(PACKED, Verdict.WRONG, layout=("packed",)),))
    selector = union_of(good, good)
    (one,) = selector.select(config_of(PLAIN)).candidates
    assert (one.status, one.witness) == ("proven", PLAIN.id)
    (one,) = selector.select(config_of(PACKED)).candidates
    assert one.status == "denied"
    assert "disputed" not in one.reason


@pytest.mark.parametrize("verdict", [v for v in Verdict if v.neutral])
def test_a_neutral_result_neither_disputes_nor_denies(
    union_of: Callable[..., Selector], verdict: Verdict
) -> None:
    (one,) = union_of(({PLAIN: Verdict.OK}, ()), ({PLAIN: verdict}, ())).select(config_of(PLAIN)).candidates
    assert one.status == "proven"


def test_a_rule_denies_what_another_run_saw_pass_beside_its_witness(
    union_of: Callable[..., Selector],
) -> None:
    rule = rule_on(PLAIN, Verdict.WRONG, dtype=("float32",))
    selector = union_of(({PLAIN: Verdict.WRONG}, (rule,)), ({PACKED: Verdict.OK}, ()))
    (one,) = selector.select(config_of(PACKED)).candidates
    assert one.status == "denied"
    assert one.reason.endswith("disputed: ok in run 1, wrong in run 0")
    # Where the rule is gone, its witness shows it, and nothing is proven in its place.
    matrix = selector.matrix
    lost = sealed(structs.replace(matrix, backends=(structs.replace(matrix.backends[0], rules=()),)))
    (one,) = Selector(lost, assume(lost), devices=(), installed=None).select(config_of(PACKED)).candidates
    assert one.status == "unknown"
    assert "under no rule" in one.reason


def test_a_disputed_case_does_not_widen_what_is_unrefuted(union_of: Callable[..., Selector]) -> None:
    large = Case(seqlen_q=512, seqlen_kv=512, layout="packed")
    rule = rule_on(large, Verdict.WRONG, layout=("packed",))
    good = {PLAIN: Verdict.OK, large: Verdict.OK}
    wide = Case(seqlen_q=512, seqlen_kv=512)
    (one,) = union_of((good, ())).select(config_of(wide)).candidates
    assert one.status == "unrefuted"
    (one,) = union_of((good, ()), ({large: Verdict.WRONG}, (rule,))).select(config_of(wide)).candidates
    assert one.status == "unknown"


def test_only_runs_on_a_device_that_is_here_prove(handmade: Matrix) -> None:
    backend = Backend(name="kernel", status="probed", materials=(TORCH,), cases=(Result(id=PLAIN.id),))
    matrix = structs.replace(
        handmade, devices=(HERE,), backends=(backend,), cases=(CaseRecord(id=PLAIN.id, case=PLAIN),)
    )
    cores = structs.replace(matrix, devices=(structs.replace(HERE, cores=3),))
    whole = merged([("a", sealed(matrix)), ("b", sealed(cores))])
    assert len(whole.devices) == 2
    (one,) = selector_of(whole).select(config_of(PLAIN)).candidates
    assert (one.status, one.evidence) == ("proven", Evidence.MEASURED)
    elsewhere = Live((structs.replace(HERE, sm="9.0"),), LIVE.material)
    away = Selector(whole, compare(whole, elsewhere), devices=elsewhere.devices, installed=elsewhere.material)
    assert away.select(config_of(PLAIN)).candidates[0].status == "unknown"


def test_a_long_list_of_runs_is_cut_short(union_of: Callable[..., Selector]) -> None:
    bad = ({PLAIN: Verdict.WRONG}, (rule_on(PLAIN, Verdict.WRONG, layout=("contiguous",)),))
    selector = union_of(bad, *([({PLAIN: Verdict.OK}, ())] * 20))
    assert len(selector.matrix.runs) == 21
    (one,) = selector.select(config_of(PLAIN)).candidates
    assert "wrong in run" in one.reason
    assert "and 12 more" in one.reason
