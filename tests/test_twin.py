"""The extension's ledger and its twin in Python get the same calls; they must give the same answers."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow._core import Lease, Refusal, StalenessLedger
from staleflow.bench.twin import TwinLease, TwinLedger, TwinRefusal
from staleflow.errors import LedgerError, StaleflowError, UnknownGroupError, WrongStateError

Ledger: TypeAlias = StalenessLedger | TwinLedger
Call: TypeAlias = Callable[[Ledger], Any]

GROUP = st.integers(0, 16)
"""How many groups before the next one to be admitted."""
AGO = st.integers(-1, 3)
"""How many versions before the newest published; -1 is from the future."""
MEMBER = st.integers(0, 3)
TERMS = ("admitted", "trained", "filtered", "aborted", "running", "complete", "leased", "next_batch", "published")


def version(ledger: Ledger, ago: int | None) -> int:
    return max(0, ledger.published - (ago or 0))


def group(ledger: Ledger, before: int) -> int:
    return max(0, ledger.statistics().admitted + 1 - before)


def version_of(before: int, ledger: Ledger) -> int:
    return ledger.group_version(group(ledger, before))


def minimum(ledger: Ledger, ago: int | None) -> int | None:
    return None if ago is None else version(ledger, ago)


def finish_blockers(ledger: Ledger, ago: int | None) -> None:
    for blocker in ledger.blockers():
        ledger.complete(blocker, min_version=minimum(ledger, ago))


def play(ledger: Ledger, of: int, ages: list[int | None]) -> None:
    """Start and finish the members of a group one by one, each with its own oldest token."""
    for member, ago in enumerate(ages):
        if member:
            ledger.start_member(group(ledger, of), member, ledger.published)
        ledger.finish_member(group(ledger, of), member, min_version=minimum(ledger, ago))


def complete_many(ledger: Ledger, befores: list[int]) -> Any:
    """If it is wrong in two ways, either may be named."""
    try:
        ledger.complete_many([group(ledger, before) for before in befores])
    except (UnknownGroupError, WrongStateError):
        return LedgerError
    return None


def step(ledger: Ledger, ago: int | None) -> Any:
    """What a run does all the time: without it, few random calls would get beyond the first batch."""
    ledger.admit_many(ledger.published, ledger.batch_size)
    finish_blockers(ledger, ago)
    lease = ledger.consume()
    ledger.publish(ledger.published + 1)
    return lease


CALLS: st.SearchStrategy[Call] = st.one_of(
    st.builds(lambda ago: lambda ledger: step(ledger, ago), st.none() | AGO),
    st.builds(lambda ago: lambda ledger: step(ledger, ago), st.none() | AGO),
    st.builds(lambda ago: lambda ledger: finish_blockers(ledger, ago), st.none() | AGO),
    st.builds(
        lambda of, ages: lambda ledger: play(ledger, of, ages),
        *(GROUP, st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=3)),
    ),
    st.builds(lambda ago: lambda ledger: ledger.admit(version(ledger, ago)), AGO),
    st.builds(lambda ago, n: lambda ledger: ledger.admit_many(version(ledger, ago), n), AGO, st.integers(0, 9)),
    st.builds(
        lambda of, member, ago: lambda ledger: ledger.start_member(group(ledger, of), member, version(ledger, ago)),
        *(GROUP, MEMBER, AGO),
    ),
    st.builds(
        lambda of, member, ago, attempt: (
            lambda ledger: ledger.finish_member(
                group(ledger, of), member, min_version=minimum(ledger, ago), attempt=attempt
            )
        ),
        *(GROUP, MEMBER, st.none() | AGO, st.integers(0, 2)),
    ),
    st.builds(
        lambda of, ago: lambda ledger: ledger.complete(group(ledger, of), min_version=minimum(ledger, ago)),
        *(GROUP, st.none() | AGO),
    ),
    st.builds(lambda many: lambda ledger: complete_many(ledger, many), st.lists(GROUP, max_size=4)),
    st.builds(
        lambda of, why: lambda ledger: ledger.abort(group(ledger, of), why), GROUP, st.sampled_from(["", "lost"])
    ),
    st.builds(
        lambda of, why: lambda ledger: ledger.filter(group(ledger, of), why), GROUP, st.sampled_from(["", "dull"])
    ),
    st.just(lambda ledger: ledger.consume()),
    st.builds(lambda ago: lambda ledger: ledger.publish(version(ledger, ago)), AGO),
    st.builds(lambda ago: lambda ledger: ledger.release(version(ledger, ago)), AGO),
)
ENDINGS: st.SearchStrategy[Call] = st.sampled_from(
    [lambda ledger: None, lambda ledger: ledger.drain(), lambda ledger: ledger.close()]
)


def answer(ledger: Ledger, call: Call) -> Any:
    try:
        result = call(ledger)
    except StaleflowError as error:
        return type(error)
    if isinstance(result, Refusal | TwinRefusal):
        return result.reason, result.detail
    if isinstance(result, Lease | TwinLease):
        return result.batch, result.groups
    return result


def state(ledger: Ledger) -> dict[str, Any]:
    """Everything the ledger can be asked."""
    statistics = ledger.statistics()
    return {term: getattr(statistics, term) for term in (*TERMS, "late_completions")} | {
        "ready": ledger.is_ready(),
        "blockers": ledger.blockers(),
        "capacity": [ledger.capacity(version(ledger, ago)) for ago in range(-1, 6)],
        "versions": [answer(ledger, partial(version_of, of)) for of in range(16)],
    }


@settings(deadline=None)
@given(
    sizes=st.fixed_dictionaries(
        {"batch_size": st.integers(1, 4), "max_staleness": st.integers(0, 4), "group_size": st.integers(1, 3)}
    ),
    calls=st.lists(CALLS, min_size=30, max_size=100),
    ending=ENDINGS,
    last_calls=st.lists(CALLS, max_size=10),
)
def test_the_twin_agrees_with_the_extension(
    sizes: dict[str, int],
    calls: list[Call],
    ending: Call,
    last_calls: list[Call],
) -> None:
    ledger, twin = StalenessLedger(**sizes), TwinLedger(**sizes)
    for call in [*calls, ending, *last_calls]:
        assert answer(ledger, call) == answer(twin, call)
        assert state(ledger) == state(twin)
