"""Any call with any arguments, through the extension: an exception of ours or a TypeError, and an unchanged ledger."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from staleflow import StalenessLedger
from staleflow.errors import SnapshotError, StaleflowError

EDGES = [2**31 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30]
NUMBERS = st.integers(-2, 12) | st.integers() | st.sampled_from([*EDGES, *(-number for number in EDGES)])
OTHER_TYPES = st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
ANYTHING = NUMBERS | OTHER_TYPES | st.lists(NUMBERS | OTHER_TYPES, max_size=3) | st.just(object())

Call = tuple[str, tuple[object, ...], dict[str, object]]


def calls_of(name: str, *arguments: st.SearchStrategy[object], **keywords: st.SearchStrategy[object]) -> Any:
    """Calls with arguments that fit, or with anything in their place."""
    fitting = st.tuples(st.just(name), st.tuples(*arguments), st.fixed_dictionaries({}, optional=keywords))
    places = st.tuples(*[ANYTHING] * len(arguments))
    careless = st.tuples(st.just(name), places, st.dictionaries(st.sampled_from([*keywords, "other"]), ANYTHING))
    too_many: Any = st.tuples(st.just(name), st.lists(ANYTHING, max_size=5).map(tuple), st.just({}))
    return st.one_of(fitting, fitting, fitting, careless, too_many)


REASONS = st.text(max_size=3) | st.just("\x00\U0001f41f")
# What is granted is also allocated, so more than a few are never asked for.
CALLS: st.SearchStrategy[Call] = st.one_of(
    calls_of("admit", NUMBERS),
    calls_of("admit_many", NUMBERS, NUMBERS),
    calls_of("capacity", NUMBERS),
    calls_of("group_version", NUMBERS),
    calls_of("start_member", NUMBERS, NUMBERS, NUMBERS),
    calls_of("finish_member", NUMBERS, NUMBERS, min_version=NUMBERS | st.none(), attempt=NUMBERS),
    calls_of("complete", NUMBERS, min_version=NUMBERS | st.none()),
    calls_of("complete_many", st.lists(NUMBERS, max_size=4)),
    calls_of("close_short", NUMBERS),
    calls_of("abort", NUMBERS, REASONS),
    calls_of("filter", NUMBERS, REASONS),
    calls_of("is_ready"),
    calls_of("blockers"),
    calls_of("consume"),
    calls_of("publish", NUMBERS),
    calls_of("release", NUMBERS),
    calls_of("statistics"),
    calls_of("snapshot"),
)


def ledger_that_moved_on(rounds: int, **sizes: int) -> StalenessLedger:
    ledger = StalenessLedger(**sizes)
    for _ in range(rounds):
        ledger.admit_many(ledger.published, 2)
        ledger.complete_many(ledger.blockers())
        if ledger.is_ready():
            ledger.publish(ledger.consume().batch + 1)
    ledger.admit_many(ledger.published, 3)
    return ledger


@given(
    rounds=st.integers(0, 4),
    sizes=st.fixed_dictionaries(
        {"batch_size": st.integers(1, 3), "max_staleness": st.integers(0, 3), "group_size": st.integers(1, 3)},
        optional={"extra_groups": st.integers(0, 1), "extra_members": st.integers(0, 1)},
    ),
    calls=st.lists(CALLS, max_size=40),
)
def test_no_panic_crosses_and_a_call_that_raises_changes_nothing(
    rounds: int, sizes: dict[str, int], calls: list[Call]
) -> None:
    """A panic would arrive as a PanicException, which is none of the exceptions that are let through here."""
    ledger = ledger_that_moved_on(rounds, **sizes)
    for name, arguments, keywords in calls:
        before = ledger.snapshot()
        try:
            getattr(ledger, name)(*arguments, **keywords)
        except (StaleflowError, TypeError):
            assert ledger.snapshot() == before
        assert ledger.statistics().accounting_holds
    assert StalenessLedger.restore(ledger.snapshot()).snapshot() == ledger.snapshot()


@given(
    st.dictionaries(st.sampled_from(["batch_size", "max_staleness", "group_size", "extra_groups", "other"]), ANYTHING)
)
def test_constructor_takes_what_is_right_and_refuses_the_rest(sizes: dict[str, Any]) -> None:
    try:
        ledger = StalenessLedger(**sizes)
    except (StaleflowError, TypeError):
        return
    assert ledger.batch_size >= 1
    assert ledger.max_staleness >= 0
    assert ledger.group_size >= 1
    assert ledger.statistics().accounting_holds


@given(st.integers(0, 4), st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=4), st.integers(0))
def test_tampered_snapshots_are_refused(rounds: int, edits: list[tuple[int, int]], cut: int) -> None:
    data = ledger_that_moved_on(rounds, batch_size=2, max_staleness=2).snapshot()
    tampered = bytearray(data)
    for at, byte in edits:
        tampered[at % len(tampered)] = byte
    del tampered[len(tampered) - cut % 3 :]
    try:
        restored = StalenessLedger.restore(bytes(tampered))
    except SnapshotError:
        assert tampered != data
    else:
        assert restored.snapshot() == data


@given(ANYTHING)
def test_anything_else_is_no_snapshot(data: Any) -> None:
    try:
        StalenessLedger.restore(data)
    except (SnapshotError, TypeError):
        return
    raise AssertionError(f"{data!r} was taken for a snapshot")
