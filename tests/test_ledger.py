"""The Python face of the ledger. The law itself is tested by brute force in core-rs/staleflow-core/tests."""

import enum
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow._core import Lease, LedgerStatistics, Refusal, RefusalReason, StalenessLedger
from staleflow.errors import (
    ConfigError,
    NotReadyError,
    SnapshotError,
    StaleflowError,
    UnknownGroupError,
    VersionOrderError,
    WrongStateError,
)

HUGE = [2**63, 2**64, 10**30]
"""Integers around and beyond the machine's widest."""


def ledger_at(version: int, *, batch_size: int = 1, max_staleness: int = 2) -> StalenessLedger:
    """An empty ledger that has published this version."""
    ledger = StalenessLedger(batch_size=batch_size, max_staleness=max_staleness)
    for batch in range(version):
        ledger.complete_many(ledger.admit_many(batch, batch_size))
        ledger.consume()
        ledger.publish(batch + 1)
    return ledger


def admitted(answer: int | Refusal) -> int:
    assert isinstance(answer, int)
    return answer


def reason_of(answer: object) -> RefusalReason:
    assert isinstance(answer, Refusal)
    return answer.reason


@pytest.fixture
def ledger() -> StalenessLedger:
    """Group 1 is leased, 2 complete, 3 running with its member 1 not started, 4 aborted."""
    ledger = StalenessLedger(batch_size=1, max_staleness=3, group_size=2)
    assert ledger.admit_many(0, 99) == [1, 2, 3, 4]
    ledger.complete_many([1, 2])
    ledger.abort(4, "engine lost")
    assert ledger.consume().groups == (1,)
    return ledger


def granted(admission: int | Refusal) -> int:
    assert isinstance(admission, int)
    return admission


class TestConstruction:
    def test_defaults_and_properties(self) -> None:
        ledger = StalenessLedger(batch_size=8, max_staleness=0)
        assert (ledger.batch_size, ledger.max_staleness, ledger.group_size) == (8, 0, 1)
        assert (ledger.next_batch, ledger.published) == (0, 0)

    @pytest.mark.parametrize(
        ("name", "lowest", "highest"),
        [
            ("batch_size", 1, 2**24),
            ("max_staleness", 0, 1_000_000),
            ("group_size", 1, 65_536),
            ("extra_groups", 0, 2**24),
            ("extra_members", 0, 65_536),
        ],
    )
    def test_limits(self, name: str, lowest: int, highest: int) -> None:
        sizes = {"batch_size": 1, "max_staleness": 1}
        for value in (lowest, highest):
            StalenessLedger(**(sizes | {name: value}))
        for value in (lowest - 1, highest + 1, -(10**30), *HUGE):
            with pytest.raises(ConfigError, match=rf"^{name} = .* is not allowed: ") as caught:
                StalenessLedger(**(sizes | {name: value}))
            assert f" {value} " in str(caught.value)

    @pytest.mark.parametrize(
        ("sizes", "most"),
        [
            ({"batch_size": 2**24, "max_staleness": 10**6}, 15),
            ({"batch_size": 4096, "max_staleness": 10**6, "group_size": 16}, 4095),
            ({"batch_size": 1, "max_staleness": 0, "group_size": 65_536, "extra_groups": 2**24}, 0),
            ({"batch_size": 2**20, "max_staleness": 10, "extra_members": 65_536}, 0),
        ],
    )
    def test_sizes_that_together_ask_for_too_much_memory(self, sizes: dict[str, int], most: int) -> None:
        with pytest.raises(ConfigError, match=f"max_staleness = .* trajectories could be live .* at most {most} vers"):
            StalenessLedger(**sizes)
        if "extra_groups" not in sizes and "extra_members" not in sizes:
            StalenessLedger(**(sizes | {"max_staleness": most}))

    def test_properties_are_read_only(self, ledger: StalenessLedger) -> None:
        sizes = ("batch_size", "max_staleness", "group_size", "extra_groups", "extra_members")
        for name in (*sizes, "next_batch", "published"):
            with pytest.raises(AttributeError):
                setattr(ledger, name, 5)


class TestAdmission:
    def test_oldest_admissible_version(self) -> None:
        ledger = ledger_at(5, max_staleness=2)
        assert reason_of(ledger.admit(2)) is RefusalReason.TOO_OLD
        assert admitted(ledger.admit(3)) == 6
        assert admitted(ledger.admit(4)) == 7

    def test_newest_admissible_version(self) -> None:
        ledger = ledger_at(5)
        assert reason_of(ledger.admit(6)) is RefusalReason.FROM_FUTURE
        assert admitted(ledger.admit(5)) == 6

    @pytest.mark.parametrize(("batch_size", "max_staleness"), [(1, 0), (3, 0), (2, 3), (4, 1)])
    def test_window_holds_exactly_its_places(self, batch_size: int, max_staleness: int) -> None:
        ledger = ledger_at(0, batch_size=batch_size, max_staleness=max_staleness)
        places = batch_size * (max_staleness + 1)
        assert ledger.capacity(0) == places
        assert ledger.admit_many(0, places - 1) == list(range(1, places))
        assert admitted(ledger.admit(0)) == places
        refusal = ledger.admit(0)
        assert reason_of(refusal) is RefusalReason.WINDOW_FULL
        assert ledger.capacity(0) == 0
        assert ledger.admit_many(0, 1) == []

    def test_full_window_names_the_first_full_batch(self) -> None:
        ledger = ledger_at(2, max_staleness=2)
        ledger.admit(0)
        refusal = ledger.admit(0)
        assert isinstance(refusal, Refusal)
        assert "up to batch 2 " in refusal.detail
        assert admitted(ledger.admit(1))

    def test_admit_many_grants_no_more_than_asked(self) -> None:
        ledger = ledger_at(0, batch_size=5)
        assert ledger.admit_many(0, 0) == []
        assert ledger.admit_many(0, 2) == [1, 2]
        assert len(ledger.admit_many(0, 10**30)) == 13

    def test_admit_many_rejects_a_negative_number(self, ledger: StalenessLedger) -> None:
        for n in (-1, -(10**30)):
            with pytest.raises(ConfigError, match=r"^n = -1"):
                ledger.admit_many(0, n)

    def test_synchronous_training_admits_nothing_during_a_step(self) -> None:
        ledger = ledger_at(0, batch_size=2, max_staleness=0)
        ledger.complete_many(ledger.admit_many(0, 2))
        ledger.consume()
        assert reason_of(ledger.admit(0)) is RefusalReason.TOO_OLD
        ledger.publish(1)
        assert ledger.capacity(1) == 2

    def test_an_ended_group_frees_its_place(self) -> None:
        ledger = ledger_at(0, max_staleness=1)
        first, second = ledger.admit_many(0, 9)
        ledger.abort(first, "engine lost")
        ledger.complete(second)
        ledger.filter(second, "all rewards equal")
        assert ledger.capacity(0) == 2

    def test_drain_then_close(self) -> None:
        ledger = ledger_at(0)
        group = admitted(ledger.admit(0))
        ledger.drain()
        assert reason_of(ledger.admit(0)) is RefusalReason.DRAINING
        assert ledger.capacity(0) == 0
        assert ledger.admit_many(0, 1) == []
        ledger.complete(group)
        assert ledger.consume().groups == (group,)
        ledger.close()
        ledger.drain()
        assert reason_of(ledger.admit(0)) is RefusalReason.CLOSED


class TestRefusal:
    def test_is_a_falsy_frozen_value(self) -> None:
        ledger = ledger_at(0)
        refusal = ledger.admit(1)
        assert isinstance(refusal, Refusal)
        assert not refusal
        assert refusal == ledger.admit(1)
        assert len({refusal, ledger.admit(1), ledger.admit(2)}) == 2
        assert repr(refusal).startswith("Refusal(reason=RefusalReason.FROM_FUTURE, detail=")
        with pytest.raises(AttributeError):
            refusal.detail = "other"  # type: ignore[misc]

    def test_group_ids_are_truthy(self) -> None:
        assert ledger_at(0).admit(0) == 1

    def test_reasons_are_an_enum(self) -> None:
        assert issubclass(RefusalReason, enum.Enum)
        names = [reason.name for reason in RefusalReason]
        assert names == ["TOO_OLD", "FROM_FUTURE", "WINDOW_FULL", "DRAINING", "CLOSED"]


class TestMembers:
    def test_last_member_completes_the_group(self) -> None:
        ledger = StalenessLedger(batch_size=1, max_staleness=1, group_size=3)
        group = admitted(ledger.admit(0))
        assert ledger.start_member(group, 1, 0) is None
        assert ledger.start_member(group, 2, 0) is None
        assert [ledger.finish_member(group, member) for member in (1, 0, 2)] == [False, False, True]
        assert ledger.is_ready()

    def test_members_start_no_older_than_their_group(self) -> None:
        ledger = StalenessLedger(batch_size=1, max_staleness=5, group_size=2)
        for batch in (0, 1):
            ledger.complete(admitted(ledger.admit(batch)))
            ledger.consume()
            ledger.publish(batch + 1)
        group = admitted(ledger.admit(1))
        assert reason_of(ledger.start_member(group, 1, 0)) is RefusalReason.TOO_OLD
        assert reason_of(ledger.start_member(group, 1, 3)) is RefusalReason.FROM_FUTURE
        assert ledger.start_member(group, 1, 1) is None
        assert ledger.start_member(group, 1, 2) is None

    def test_late_attempts_are_ignored_and_counted(self) -> None:
        ledger = StalenessLedger(batch_size=1, max_staleness=1, group_size=1)
        group = admitted(ledger.admit(0))
        ledger.start_member(group, 0, 0)
        assert ledger.finish_member(group, 0, attempt=0) is False
        assert ledger.finish_member(group, 0, attempt=1) is True
        assert ledger.finish_member(group, 0, attempt=0) is False
        ledger.abort(group, "engine lost")
        assert ledger.finish_member(group, 0, attempt=1) is False
        assert ledger.statistics().late_completions == 3

    def test_version_rises_once_all_members_reported(self) -> None:
        ledger = StalenessLedger(batch_size=1, max_staleness=3, group_size=2)
        groups = ledger.admit_many(0, 3)
        trained, raised, kept = groups
        for group in groups:
            assert ledger.start_member(group, 1, 0) is None
        ledger.complete(trained)
        ledger.consume()
        ledger.publish(1)
        ledger.finish_member(raised, 0, min_version=1)
        assert ledger.group_version(raised) == 0
        ledger.finish_member(raised, 1, min_version=1)
        assert ledger.group_version(raised) == 1
        ledger.finish_member(kept, 0, min_version=1)
        ledger.finish_member(kept, 1)
        assert ledger.group_version(kept) == 0

    def test_whole_group_reports_a_version(self) -> None:
        ledger = ledger_at(3, max_staleness=2)
        group = admitted(ledger.admit(1))
        assert ledger.capacity(1) == 0
        for version in (0, 4):
            with pytest.raises(VersionOrderError, match="between 1 and 3"):
                ledger.complete(group, min_version=version)
        ledger.complete(group, min_version=3)
        assert ledger.group_version(group) == 3
        assert ledger.capacity(1) == 1


class TestBatches:
    def test_earliest_deadline_first_then_admission(self) -> None:
        ledger = ledger_at(2, batch_size=3, max_staleness=3)
        newer, older = admitted(ledger.admit(2)), ledger.admit_many(1, 2)
        ledger.complete_many([newer, older[1], older[0]])
        assert ledger.consume().groups == (*older, newer)

    def test_a_finished_batch_waits_for_a_group_due_now(self) -> None:
        ledger = ledger_at(1, max_staleness=1)
        due, fresh = admitted(ledger.admit(0)), admitted(ledger.admit(1))
        ledger.complete(fresh)
        assert not ledger.is_ready()
        assert ledger.blockers() == [due]
        with pytest.raises(NotReadyError, match=rf"batch 1 is not ready; waiting for groups {due}$"):
            ledger.consume()
        ledger.complete(due)
        assert ledger.consume().groups == (due,)

    def test_lease_is_a_frozen_value(self, ledger: StalenessLedger) -> None:
        ledger.release(0)
        lease = ledger.consume()
        assert (lease.batch, lease.groups, repr(lease)) == (0, (1,), "Lease(batch=0, groups=(1,), expired=())")
        assert isinstance(lease, Lease)
        with pytest.raises(AttributeError):
            lease.batch = 1  # type: ignore[misc]

    def test_release_hands_out_the_same_lease(self) -> None:
        ledger = ledger_at(0, batch_size=2, max_staleness=1)
        groups = ledger.admit_many(0, 4)
        ledger.complete_many(groups)
        lease = ledger.consume()
        ledger.release(0)
        assert (ledger.next_batch, ledger.is_ready(), ledger.blockers()) == (0, True, [])
        assert ledger.statistics().leased == 2
        assert reason_of(ledger.admit(0)) is RefusalReason.WINDOW_FULL
        again = ledger.consume()
        assert again == lease
        assert hash(again) == hash(lease)
        ledger.publish(1)
        assert ledger.statistics().trained == 2

    def test_one_lease_at_a_time(self, ledger: StalenessLedger) -> None:
        assert (ledger.next_batch, ledger.published) == (1, 0)
        assert not ledger.is_ready()
        with pytest.raises(NotReadyError, match="batch 0 is out for training"):
            ledger.consume()
        ledger.publish(1)
        assert ledger.consume().groups == (2,)


ILLEGAL: list[tuple[str, type[StaleflowError], Callable[[StalenessLedger], object]]] = [
    ("unknown version", UnknownGroupError, lambda ledger: ledger.group_version(4)),
    ("unknown start", UnknownGroupError, lambda ledger: ledger.start_member(4, 0, 0)),
    ("unknown finish", UnknownGroupError, lambda ledger: ledger.finish_member(5, 0)),
    ("unknown complete", UnknownGroupError, lambda ledger: ledger.complete(0)),
    ("unknown complete_many", UnknownGroupError, lambda ledger: ledger.complete_many([3, 9])),
    ("unknown abort", UnknownGroupError, lambda ledger: ledger.abort(-1, "lost")),
    ("unknown filter", UnknownGroupError, lambda ledger: ledger.filter(10**30, "equal")),
    ("complete twice", WrongStateError, lambda ledger: ledger.complete(2)),
    ("complete leased", WrongStateError, lambda ledger: ledger.complete(1)),
    ("complete_many twice", WrongStateError, lambda ledger: ledger.complete_many([3, 3])),
    ("abort leased", WrongStateError, lambda ledger: ledger.abort(1, "lost")),
    ("filter leased", WrongStateError, lambda ledger: ledger.filter(1, "equal")),
    ("filter running", WrongStateError, lambda ledger: ledger.filter(3, "equal")),
    ("start in complete", WrongStateError, lambda ledger: ledger.start_member(2, 0, 0)),
    ("start absent", WrongStateError, lambda ledger: ledger.start_member(3, 2, 0)),
    ("start negative", WrongStateError, lambda ledger: ledger.start_member(3, -1, 0)),
    ("finish waiting", WrongStateError, lambda ledger: ledger.finish_member(3, 1)),
    ("finish twice", WrongStateError, lambda ledger: ledger.finish_member(2, 0)),
    ("finish negative attempt", WrongStateError, lambda ledger: ledger.finish_member(3, 0, attempt=-1)),
    ("finish future", VersionOrderError, lambda ledger: ledger.finish_member(3, 0, min_version=1)),
    ("complete future", VersionOrderError, lambda ledger: ledger.complete(3, min_version=1)),
    ("complete negative", VersionOrderError, lambda ledger: ledger.complete(3, min_version=-1)),
    ("admit negative", VersionOrderError, lambda ledger: ledger.admit(-1)),
    ("capacity negative", VersionOrderError, lambda ledger: ledger.capacity(-1)),
    ("consume leased", NotReadyError, lambda ledger: ledger.consume()),
    ("publish same", VersionOrderError, lambda ledger: ledger.publish(0)),
    ("publish skipping", VersionOrderError, lambda ledger: ledger.publish(2)),
    ("publish negative", VersionOrderError, lambda ledger: ledger.publish(-1)),
    ("release other", WrongStateError, lambda ledger: ledger.release(1)),
    ("release negative", WrongStateError, lambda ledger: ledger.release(-1)),
    ("abort without reason", ConfigError, lambda ledger: ledger.abort(2, "")),
    ("filter without reason", ConfigError, lambda ledger: ledger.filter(2, "")),
]


@pytest.mark.parametrize(("error", "call"), [entry[1:] for entry in ILLEGAL], ids=[entry[0] for entry in ILLEGAL])
def test_illegal_calls_change_nothing(
    ledger: StalenessLedger, error: type[StaleflowError], call: Callable[[StalenessLedger], object]
) -> None:
    before = ledger.snapshot()
    with pytest.raises(error) as caught:
        call(ledger)
    assert caught.type is error
    assert ledger.snapshot() == before


def test_publish_and_release_need_a_held_lease(ledger: StalenessLedger) -> None:
    ledger.release(0)
    with pytest.raises(WrongStateError, match="publish: no batch is out for training"):
        ledger.publish(1)
    with pytest.raises(WrongStateError, match="release: no batch is out for training"):
        ledger.release(0)


@pytest.mark.parametrize("number", HUGE)
def test_huge_integers_raise_typed_errors(ledger: StalenessLedger, number: int) -> None:
    before = ledger.snapshot()
    with pytest.raises(UnknownGroupError):
        ledger.complete(number)
    with pytest.raises(WrongStateError):
        ledger.start_member(3, number, 0)
    with pytest.raises(VersionOrderError):
        ledger.complete(3, min_version=number)
    with pytest.raises(VersionOrderError):
        ledger.publish(number)
    with pytest.raises(WrongStateError):
        ledger.release(number)
    assert ledger.snapshot() == before


def test_an_integer_too_long_to_print_raises_typed_errors(ledger: StalenessLedger) -> None:
    with pytest.raises(UnknownGroupError, match="a huge integer"):
        ledger.complete(10**5000)
    with pytest.raises(ConfigError, match="batch_size = a huge integer"):
        StalenessLedger(batch_size=10**5000, max_staleness=1)


class TestStatistics:
    def test_every_term(self, ledger: StalenessLedger) -> None:
        ledger.publish(1)
        ledger.filter(2, "all rewards equal")
        groups = ledger.admit_many(1, 2)
        ledger.complete_many([3, *groups])
        ledger.consume()
        ledger.abort(groups[0], "a reason")
        admitted(ledger.admit(1))
        statistics = ledger.statistics()
        assert isinstance(statistics, LedgerStatistics)
        assert statistics.accounting_holds is True
        assert (statistics.admitted, statistics.trained, statistics.expired) == (7, 1, 0)
        assert (statistics.running, statistics.complete, statistics.leased) == (1, 1, 1)
        assert statistics.filtered == {"all rewards equal": 1}
        assert list(statistics.aborted.items()) == [("a reason", 1), ("engine lost", 1)]
        assert (statistics.next_batch, statistics.published, statistics.late_completions) == (2, 1, 0)

    def test_is_a_frozen_value(self, ledger: StalenessLedger) -> None:
        statistics = ledger.statistics()
        assert statistics == ledger.statistics()
        ledger.complete(3)
        assert statistics != ledger.statistics()
        statistics.aborted.clear()
        assert statistics.aborted == {"engine lost": 1}
        with pytest.raises(AttributeError):
            statistics.running = 0  # type: ignore[misc]


class TestSnapshot:
    def test_round_trip(self, ledger: StalenessLedger) -> None:
        ledger.start_member(3, 0, 0)
        restored = StalenessLedger.restore(ledger.snapshot())
        for twin in (ledger, restored):
            twin.publish(1)
            assert twin.finish_member(3, 0, attempt=1) is False
            assert twin.capacity(1) == 2
            assert twin.consume().groups == (2,)
        assert restored.statistics() == ledger.statistics()
        assert restored.snapshot() == ledger.snapshot()

    def test_damage_is_an_error(self, ledger: StalenessLedger) -> None:
        data = ledger.snapshot()
        for length in range(len(data)):
            with pytest.raises(SnapshotError):
                StalenessLedger.restore(data[:length])
        for position in range(len(data)):
            altered = bytearray(data)
            altered[position] ^= 0xFF
            with pytest.raises(SnapshotError):
                StalenessLedger.restore(bytes(altered))

    @given(st.binary(max_size=200))
    def test_foreign_bytes_are_an_error(self, data: bytes) -> None:
        with pytest.raises(SnapshotError):
            StalenessLedger.restore(data)


Call = tuple[str, tuple[object, ...], dict[str, object]]

INTEGERS = st.integers(-2, 12) | st.integers() | st.sampled_from([*HUGE, *(-number for number in HUGE)])


def calls_of(
    name: str, *arguments: st.SearchStrategy[object], **keywords: st.SearchStrategy[object]
) -> st.SearchStrategy[Call]:
    optional: st.SearchStrategy[dict[str, object]] = st.fixed_dictionaries({}, optional=keywords)
    return st.tuples(st.just(name), st.tuples(*arguments), optional)


CALLS = st.one_of(
    calls_of("admit", INTEGERS),
    calls_of("admit_many", INTEGERS, INTEGERS),
    calls_of("capacity", INTEGERS),
    calls_of("group_version", INTEGERS),
    calls_of("start_member", INTEGERS, INTEGERS, INTEGERS),
    calls_of("finish_member", INTEGERS, INTEGERS, min_version=INTEGERS, attempt=INTEGERS),
    calls_of("complete", INTEGERS, min_version=INTEGERS),
    calls_of("complete_many", st.lists(INTEGERS, max_size=4)),
    calls_of("abort", INTEGERS, st.text(max_size=3)),
    calls_of("filter", INTEGERS, st.text(max_size=3)),
    calls_of("consume"),
    calls_of("publish", INTEGERS),
    calls_of("release", INTEGERS),
)


@given(st.integers(1, 3), st.integers(0, 3), st.integers(1, 3), st.lists(st.just(None) | CALLS, max_size=60))
def test_any_calls_keep_the_accounting_law(
    batch_size: int,
    max_staleness: int,
    group_size: int,
    calls: list[Call | None],
) -> None:
    """Whatever is called: only typed errors, state unchanged by them, and the books add up.

    None stands for a lawful round that moves the ledger on, which random numbers alone would rarely do.
    """
    ledger = StalenessLedger(batch_size=batch_size, max_staleness=max_staleness, group_size=group_size)
    for call in calls:
        before = ledger.snapshot()
        if call is None:
            ledger.admit_many(ledger.published, batch_size)
            ledger.complete_many(ledger.blockers())
            if ledger.is_ready():
                ledger.publish(ledger.consume().batch + 1)
        else:
            name, arguments, keywords = call
            try:
                getattr(ledger, name)(*arguments, **keywords)
            except StaleflowError:
                assert ledger.snapshot() == before
        assert ledger.statistics().accounting_holds
        assert StalenessLedger.restore(ledger.snapshot()).statistics() == ledger.statistics()


def test_wrong_types_are_type_errors(ledger: StalenessLedger) -> None:
    before = ledger.snapshot()
    calls: list[Callable[[], object]] = [
        lambda: ledger.admit(1.5),  # type: ignore[arg-type]
        lambda: ledger.complete("1"),  # type: ignore[arg-type]
        lambda: ledger.abort(2, 7),  # type: ignore[arg-type]
        lambda: StalenessLedger.restore("text"),  # type: ignore[arg-type]
        lambda: StalenessLedger(batch_size="2", max_staleness=1),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(TypeError):
            call()
    assert ledger.snapshot() == before


class TestOverProvisioning:
    def test_first_finishers_complete_a_group(self) -> None:
        ledger = StalenessLedger(batch_size=1, max_staleness=0, group_size=2, extra_members=1)
        assert (ledger.group_size, ledger.extra_members) == (2, 1)
        group = granted(ledger.admit(0))
        for member in (1, 2):
            assert ledger.start_member(group, member, 0) is None
        assert [ledger.finish_member(group, member) for member in (2, 0, 1)] == [False, True, False]
        assert ledger.statistics().late_completions == 1

    def test_groups_left_behind_expire(self) -> None:
        ledger = StalenessLedger(batch_size=1, max_staleness=0, extra_groups=2)
        assert ledger.extra_groups == 2
        first, second, third = ledger.admit_many(0, 10)
        ledger.complete_many([second, third])
        lease = ledger.consume()
        assert (lease.groups, lease.expired) == ((second,), (first, third))
        assert ledger.statistics().expired == 2
        assert ledger.statistics().accounting_holds

    def test_close_short(self) -> None:
        ledger = StalenessLedger(batch_size=1, max_staleness=0, group_size=3)
        group = granted(ledger.admit(0))
        with pytest.raises(WrongStateError, match="no member of group 1 has finished; abort it instead"):
            ledger.close_short(group)
        ledger.finish_member(group, 0)
        ledger.close_short(group)
        assert ledger.statistics().closed_short == 1
        assert ledger.consume().groups == (group,)


class TestJournal:
    def journalled(self) -> tuple[StalenessLedger, bytes, list[tuple[float, bytes]]]:
        """A ledger, its journal, and its snapshot at each noted time."""
        ledger = StalenessLedger(batch_size=1, max_staleness=1, group_size=2, extra_members=1)
        ledger.start_journal()
        moments = []

        def note(now_s: float) -> None:
            ledger.note_time(now_s)
            moments.append((now_s, ledger.snapshot()))

        first, second = ledger.admit_many(0, 2)
        note(0.25)
        ledger.start_member(first, 1, 0)
        ledger.finish_member(first, 1, min_version=0)
        ledger.finish_member(first, 1, attempt=1)
        ledger.close_short(first)
        ledger.complete(second, min_version=0)
        note(1.5)
        ledger.filter(second, "uniform_rewards")
        ledger.consume()
        ledger.release(0)
        ledger.consume()
        ledger.publish(1)
        note(2.000001)
        ledger.abort(granted(ledger.admit(1)), "failed")
        ledger.complete_many(ledger.admit_many(1, 1))
        ledger.drain()
        ledger.close()
        note(3.0)
        return ledger, ledger.take_journal(), moments

    def test_every_moment_can_be_seen_again(self) -> None:
        ledger, journal, moments = self.journalled()
        replay = StalenessLedger.replay(journal)
        assert replay.ledger.statistics().admitted == 0
        assert [(now_s, then.snapshot()) for now_s, then in replay] == moments
        assert replay.ledger.snapshot() == ledger.snapshot()

    def test_is_taken_in_pieces(self) -> None:
        ledger, journal, moments = self.journalled()
        assert ledger.take_journal() == b""
        ledger.note_time(4.0)
        assert ledger.take_journal() == b""
        cut_short = list(StalenessLedger.replay(journal[:-1]))
        assert len(cut_short) < len(moments)

    def test_a_change_costs_a_few_bytes(self) -> None:
        ledger = StalenessLedger(batch_size=100, max_staleness=1)
        ledger.start_journal()
        start = len(ledger.take_journal())
        for _ in range(100):
            ledger.complete(granted(ledger.admit(0)))
        assert len(ledger.take_journal()) < 100 * 2 * 4 + start

    def test_refused_calls_leave_no_trace(self) -> None:
        ledger = StalenessLedger(batch_size=1, max_staleness=0)
        ledger.admit(0)
        ledger.start_journal()
        ledger.take_journal()
        assert isinstance(ledger.admit(0), Refusal)
        with pytest.raises(NotReadyError):
            ledger.consume()
        assert ledger.take_journal() == b""

    def test_is_continued_by_a_restored_ledger(self) -> None:
        ledger = StalenessLedger(batch_size=1, max_staleness=1)
        assert ledger.noted_s == 0.0
        ledger.start_journal()
        group = granted(ledger.admit(0))
        ledger.note_time(1.25)
        ledger.note_time(1.75)
        assert ledger.noted_s == 1.25, "nothing had changed since"
        restored = StalenessLedger.restore(ledger.snapshot())
        restored.continue_journal(ledger.noted_s)
        restored.complete(group)
        restored.note_time(2.5)
        replay = StalenessLedger.replay(ledger.take_journal() + restored.take_journal())
        assert [now_s for now_s, _ in replay] == [1.25, 2.5]
        assert replay.ledger.snapshot() == restored.snapshot()

    @pytest.mark.parametrize("now_s", [-1.0, float("nan"), float("inf")])
    def test_impossible_times_do_no_harm(self, now_s: float) -> None:
        ledger = StalenessLedger(batch_size=1, max_staleness=0)
        ledger.start_journal()
        ledger.admit(0)
        ledger.note_time(now_s)
        assert len(list(StalenessLedger.replay(ledger.take_journal()))) == 1

    def test_damage_is_refused(self) -> None:
        _, journal, _ = self.journalled()
        with pytest.raises(SnapshotError, match="these bytes are not a ledger journal"):
            StalenessLedger.replay(b"no journal")
        with pytest.raises(SnapshotError, match="the journal is damaged"):
            list(StalenessLedger.replay(journal[:-1] + b"x"))
