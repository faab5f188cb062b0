"""A loaded matrix that answers: one configuration in, one decision out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import structs

from attnprobe.config import AttentionConfig
from attnprobe.matrix.schema import DeviceRecord, Matrix, Result
from attnprobe.select.advisories import Advisory, applying
from attnprobe.select.asked import SIZES, Asked, asked, completions, numbers, said_equal
from attnprobe.select.compiled import Cases, Compiled, rule_table
from attnprobe.select.explain import Candidate, Decision, Mode, narrowing, only_where, rule_words, shortened
from attnprobe.select.match import Match, MaterialOf
from attnprobe.select.policy import check, choose
from attnprobe.verdict import Evidence, Verdict

REMEMBERED: Final = 65536
"""Most configurations to remember; a job has a few, a sweep over lengths must not fill memory."""
OPEN: Final = 64
"""Most completions of a configuration with open axes that are looked at one by one for proof."""


class Selector:
    """A matrix, compiled. Made by `attnprobe.load()`.

    `digest` names the document: ranks that loaded the same one have the same digest. `match` says how it
    compares with this machine, `source` where it came from.
    """

    def __init__(  # noqa: PLR0913  # what it was loaded from, one each
        self,
        matrix: Matrix,
        match: Match,
        *,
        devices: Sequence[DeviceRecord],
        installed: MaterialOf | None,
        advisories: Sequence[Advisory] = (),
        source: str = "",
        veto_expired: bool = True,
    ) -> None:
        """Compile a matrix. `installed` None: the builds of the matrix are assumed.

        `veto_expired` False: what was denied on another device or build is `unknown` here, with the reason.

        Raises:
            MatrixError: a case is not what its id says.
        """
        self.digest = matrix.digest
        self.matrix = matrix
        self.match = match
        self.source = source
        self._veto_expired = veto_expired
        self._cases = Cases(matrix)
        # A result may prove where it names a run that is there, on a device that is here.
        runs = frozenset(index for index, run in enumerate(matrix.runs) if run.device in match.devices)
        several = len(matrix.runs) > 1
        self._backends = {b.name: Compiled(b, self._cases, runs, several=several) for b in matrix.backends}
        rules = [(name, rule) for name, one in self._backends.items() for rule in one.rules]
        self._rules = [rule for _, rule in rules]
        self._rule_table = rule_table(self._rules)
        self._mine = {
            name: sum(1 << i for i, (owner, _) in enumerate(rules) if owner == name)
            for name in self._backends
        }
        self._advisories = {
            name: self._advisories_on(name, advisories, devices, installed) for name in self._backends
        }
        self._words: dict[int, str] = {}
        self._known: dict[AttentionConfig, tuple[Asked, dict[str, Candidate]]] = {}
        self._decided: dict[
            tuple[Mode, int | None, tuple[str, ...] | None], dict[AttentionConfig, Decision]
        ] = {}
        self._notes = self._compared()

    def select(
        self,
        config: AttentionConfig,
        mode: Mode = "gate",
        strength: int | None = None,
        backends: Sequence[str] | None = None,
    ) -> Decision:
        """Return the decision for a configuration.

        `mode`: "gate" chooses only what is proven, or with a `strength` also what is unrefuted at that
        strength; "veto" takes away what is denied; "observe" changes nothing and says what both would do.
        `backends`: those the caller can run, the preferred first; by default all of the matrix in its order.

        Raises:
            UsageError: no such mode or strength, a value out of range, sizes that contradict each other.
        """
        if backends is not None:
            backends = tuple(backends)
        try:
            return self._decided[mode, strength, backends][config]
        except KeyError:
            return self._decide(config, mode, strength, backends)

    def _decide(
        self, config: AttentionConfig, mode: Mode, strength: int | None, backends: tuple[str, ...] | None
    ) -> Decision:
        check(mode, strength)
        query, known = self._look(config)
        names = tuple(known) if backends is None else tuple(dict.fromkeys(backends))
        candidates = tuple(known.get(name) or _unheard_of(name) for name in names)
        backend, would = choose(candidates, mode, strength, named=backends is not None)
        decision = Decision(
            backend=backend,
            candidates=candidates,
            mode=mode,
            strength=strength,
            config=config,
            assumed=query.assumed,
            unsaid=query.unsaid,
            digest=self.digest,
            matches=not self.match.device and not any(self.match.expired(one.backend) for one in candidates),
            notes=self._notes,
            would=would,
        )
        memory = self._decided.setdefault((mode, strength, backends), {})
        if len(memory) >= REMEMBERED:
            memory.clear()
        memory[config] = decision
        return decision

    def _look(self, config: AttentionConfig) -> tuple[Asked, dict[str, Candidate]]:
        """Return what is known of every backend of the matrix; the same for all modes."""
        found = self._known.get(config)
        if found is None:
            query = asked(config)
            rules = self._rule_table.matching(query.levels)
            cases = self._cases.table.matching(query.levels)
            found = (
                query,
                {name: self._candidate(one, query, rules, cases) for name, one in self._backends.items()},
            )
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[config] = found
        return found

    def _candidate(self, one: Compiled, query: Asked, rules: int, cases: int) -> Candidate:
        found = self._found(one, query, rules, cases)
        if found.status == "denied" and found.expired and not self._veto_expired:
            return structs.replace(found, status="unknown", reason=f"was denied elsewhere: {found.reason}")
        return found

    def _found(self, one: Compiled, query: Asked, rules: int, cases: int) -> Candidate:
        """Return what is known of one backend: denied, proven, unrefuted or unknown, in this order."""
        denied = self._denied(one, query, rules & self._mine[one.name], cases)
        if denied is not None:
            return denied
        expired = self.match.expired(one.name)
        witnesses = () if expired else self._proof(one, query)
        for advisory in self._advisories[one.name]:
            if advisory.covers(query) and not (
                witnesses and all(advisory.shown_by(self._cases.cases[number]) for number in witnesses)
            ):
                return Candidate(
                    backend=one.name,
                    status="denied",
                    verdict=advisory.verdict,
                    evidence=Evidence.REPORTED,
                    reason=f"{advisory.title} ({advisory.id}: {advisory.link})",
                    rule=advisory.id,
                    expired=bool(expired),
                )
        if one.backend.status == "absent":
            return Candidate(
                backend=one.name,
                status="unknown",
                reason=f"absent: {shortened(one.backend.reason)}",
                absent=True,
            )
        if expired:
            return Candidate(backend=one.name, status="unknown", reason=f"expired: {expired}", expired=True)
        if witnesses:
            return Candidate(
                backend=one.name,
                status="proven",
                verdict=Verdict.OK,
                evidence=Evidence.MEASURED,
                reason="ran right with these axis values, at this size or larger",
                witness=self._cases.ids[witnesses[0]],
            )
        return self._uncertain(one, query)

    def _denied(self, one: Compiled, query: Asked, rules: int, cases: int) -> Candidate | None:
        """Return the denial by a rule, by a case, or by a case that a rule names for its numbers alone."""
        expired = self.match.expired(one.name)
        stale = f"; {expired}" if expired else ""
        if rules:
            # What holds for all that is asked says more than what an unsaid field lets in, and a defect
            # says more than a refusal.
            number = min(
                numbers(rules),
                key=lambda i: (bool(narrowing(self._rules[i], query)), not self._rules[i].verdict.fails),
            )
            rule = self._rules[number]
            words = self._words.get(number)
            if words is None:
                words = self._words[number] = rule_words(rule, *self._witness(one, rule.witness))
            return Candidate(
                backend=one.name,
                status="denied",
                verdict=rule.verdict,
                evidence=rule.evidence,
                reason=words + only_where(rule, query) + one.rule_dispute(rule, cases) + stale,
                rule=rule.id,
                witness=rule.witness or None,
                expired=bool(expired),
            )
        for number in numbers(cases & one.exact):
            if said_equal(query.config, self._cases.cases[number]):
                rule = one.named[number]
                return Candidate(
                    backend=one.name,
                    status="denied",
                    verdict=rule.verdict,
                    evidence=rule.evidence,
                    reason=f"exactly this case {_verb(rule.verdict)}{one.case_dispute(number)}{stale}",
                    rule=rule.id,
                    witness=self._cases.ids[number],
                    expired=bool(expired),
                )
        for number in numbers(cases & one.failing):
            result = one.results[number]
            said = f"a case with these axis values {_verb(result.verdict)}"
            return Candidate(
                backend=one.name,
                status="denied",
                verdict=result.verdict,
                evidence=result.evidence,
                reason=said + one.case_dispute(number) + stale,
                witness=result.id,
                expired=bool(expired),
            )
        return None

    def _proof(self, one: Compiled, query: Asked) -> tuple[int, ...]:
        """Return a passed case, at least as large, for every completion of the query; none if one lacks."""
        extent = query.extent
        if extent is None or not one.passed:
            return ()
        every = completions(query.levels, OPEN)
        found = []
        for at in every or ():
            levels = {axis: (level,) for axis, level in at.items()}
            passed = self._cases.table.matching(levels) & one.passed
            passed &= self._cases.with_dim_v(levels, query.dim_v)
            witness = next((n for n in numbers(passed) if extent.within(self._cases.extent(n))), None)
            if witness is None:
                return ()
            found.append(witness)
        return tuple(found)

    def _uncertain(self, one: Compiled, query: Asked) -> Candidate:
        """Return `unrefuted` with its strength, or `unknown` with what keeps it from that."""

        def unknown(reason: str) -> Candidate:
            return Candidate(backend=one.name, status="unknown", reason=reason)

        if one.incomplete:
            return unknown("the matrix has failing cases under no rule: what they deny is not known")
        if not one.passed:
            return unknown("nothing was measured to be right here")
        if query.extent is None:
            sizes = ", ".join(name for name in query.unsaid if name in SIZES)
            return unknown(f"{sizes} unsaid: any size is more than what was measured")
        if not query.extent.within(one.envelope):
            return unknown(f"not proven, and {query.extent.exceeding(one.envelope)}")
        right = self._cases.with_dim_v(query.levels, query.dim_v)
        strength, missing = one.strength(query.levels, right)
        if not strength:
            return unknown(f"no passed case has {missing}")
        reason = f"not known to be bad: every {strength} of its axis values passed together"
        if missing:
            reason += f"; no passed case has {missing}"
        return Candidate(
            backend=one.name,
            status="unrefuted",
            verdict=None,
            evidence=Evidence.MEASURED,
            reason=reason,
            strength=strength,
        )

    def _witness(self, one: Compiled, case_id: str) -> tuple[Result | None, int]:
        """Return what became of a case, and its key length; None and 0 where it is not there."""
        number = self._cases.number.get(case_id)
        if number is None:
            return None, 0
        return one.results.get(number), self._cases.cases[number].seqlen_kv

    def _advisories_on(
        self,
        name: str,
        every: Sequence[Advisory],
        devices: Sequence[DeviceRecord],
        installed: MaterialOf | None,
    ) -> tuple[Advisory, ...]:
        recorded = {material.name: material.version for material in self._backends[name].backend.materials}
        found: list[Advisory] = []
        for one in every:
            if name not in one.backends:
                continue
            version = recorded.get(one.library)
            if installed is not None:
                live = installed(one.library)
                version = live.version if live is not None else version
            found += applying((one,), devices, version, name)
        return tuple(found)

    def _compared(self) -> tuple[str, ...]:
        """Return how the matrix compares with this machine, in lines."""
        source = (f"from {self.source}",) if self.source else ()
        if self.match.assumed:
            names = " or ".join(record.name for record in self.matrix.devices)
            return (*source, f"assumed: {names} and the builds of the matrix")
        if self.match.device:
            return (*source, f"does not match: {self.match.device}")
        beside = (f"of the CPU alone: nothing in it is of {self.match.beside}",) if self.match.beside else ()
        return (*source, *beside, *(f"{name}: {said}" for name, said in self.match.materials.items()))


def _verb(verdict: Verdict) -> str:
    return "was refused" if verdict is Verdict.REFUSED else f"was {verdict.value}"


def _unheard_of(name: str) -> Candidate:
    return Candidate(backend=name, status="unknown", reason="not in this matrix")
