//! Calls that are illegal or refused: a typed answer, and a ledger that did not change.

use proptest::prelude::*;
use staleflow_core::error::{Call, GroupState, LedgerError, MemberState};
use staleflow_core::ids::{Batch, GroupId, Version};
use staleflow_core::ledger::{Finish, Ledger, LedgerConfig, Refusal};

use crate::journal::{Journal, configs, steps};

/// One ledger holding a group in each state: 1 leased, 2 complete, 3 running with member 1 never started, 4 ended.
fn ledger() -> Ledger {
    let mut ledger = Ledger::new(LedgerConfig::new(1, 3, 2).unwrap());
    ledger.admit_many(Version(0), 4);
    ledger.complete_many(&[GroupId(1), GroupId(2)]).unwrap();
    ledger.abort(GroupId(4), "engine lost").unwrap();
    ledger.consume().unwrap();
    ledger
}

/// Asserts that the call fails like this and leaves no trace.
#[track_caller]
fn fails<T: std::fmt::Debug>(
    call: impl FnOnce(&mut Ledger) -> Result<T, LedgerError>,
    expected: &LedgerError,
) {
    let mut ledger = ledger();
    let before = ledger.snapshot();
    assert_eq!(&call(&mut ledger).unwrap_err(), expected);
    assert_eq!(ledger.snapshot(), before);
}

#[test]
fn unknown_groups() {
    for id in [0, 4, 5, u64::MAX] {
        let group = GroupId(id);
        let unknown = |call| LedgerError::UnknownGroup { group, call };
        fails(|ledger| ledger.group_version(group), &unknown(Call::GroupVersion));
        fails(|ledger| ledger.start_member(group, 0, Version(0)), &unknown(Call::StartMember));
        fails(|ledger| ledger.complete(group, None), &unknown(Call::Complete));
        fails(|ledger| ledger.complete_many(&[GroupId(3), group]), &unknown(Call::CompleteMany));
        fails(|ledger| ledger.abort(group, "engine lost"), &unknown(Call::Abort));
        fails(|ledger| ledger.filter(group, "all rewards equal"), &unknown(Call::Filter));
        if id != 4 {
            fails(|ledger| ledger.finish_member(group, 0, None, 0), &unknown(Call::FinishMember));
        }
    }
}

#[test]
fn groups_in_another_state() {
    let wrong = |id, state, call| LedgerError::GroupState { group: GroupId(id), state, call };
    for (id, state) in [(1, GroupState::Leased), (2, GroupState::Complete)] {
        let group = GroupId(id);
        fails(|ledger| ledger.complete(group, None), &wrong(id, state, Call::Complete));
        fails(|ledger| ledger.complete_many(&[GroupId(3), group]), &wrong(id, state, Call::CompleteMany));
        fails(|ledger| ledger.start_member(group, 0, Version(0)), &wrong(id, state, Call::StartMember));
    }
    fails(|ledger| ledger.abort(GroupId(1), "lost"), &wrong(1, GroupState::Leased, Call::Abort));
    fails(|ledger| ledger.filter(GroupId(1), "equal"), &wrong(1, GroupState::Leased, Call::Filter));
    fails(|ledger| ledger.filter(GroupId(3), "equal"), &wrong(3, GroupState::Running, Call::Filter));
    let repeated = LedgerError::RepeatedGroup { group: GroupId(3), call: Call::CompleteMany };
    fails(|ledger| ledger.complete_many(&[GroupId(3), GroupId(3)]), &repeated);
}

#[test]
fn members_in_another_state() {
    let finish = |id, member, state| {
        let expected =
            LedgerError::MemberState { group: GroupId(id), member, state, call: Call::FinishMember };
        fails(|ledger| ledger.finish_member(GroupId(id), member, None, 0), &expected);
    };
    finish(3, 1, MemberState::Waiting);
    finish(3, 2, MemberState::Absent);
    finish(4, usize::MAX, MemberState::Absent);
    finish(2, 0, MemberState::Finished);
    finish(1, 1, MemberState::Finished);

    let mut ledger = ledger();
    ledger.finish_member(GroupId(3), 0, None, 0).unwrap();
    for (member, state) in [(0, MemberState::Finished), (2, MemberState::Absent)] {
        let expected = LedgerError::MemberState { group: GroupId(3), member, state, call: Call::StartMember };
        assert_eq!(ledger.start_member(GroupId(3), member, Version(0)), Err(expected));
    }
}

#[test]
fn late_completions_are_counted_and_ignored() {
    let mut ledger = ledger();
    ledger.start_member(GroupId(3), 0, Version(0)).unwrap().unwrap();
    for (group, attempt) in [(3, 0), (3, 2), (4, 0), (4, 9), (2, 1), (1, 7)] {
        assert_eq!(ledger.finish_member(GroupId(group), 0, None, attempt), Ok(Finish::Late));
    }
    assert_eq!(ledger.statistics().late_completions, 6);
    assert_eq!(ledger.finish_member(GroupId(3), 0, None, 1), Ok(Finish::Member));
}

#[test]
fn leases_out_of_order() {
    let held = LedgerError::LeaseHeld { held: Batch(0), awaited: Version(1) };
    fails(Ledger::consume, &held);
    for version in [0, 2, u64::MAX] {
        let expected = LedgerError::PublishOrder { version: Version(version), published: Version(0) };
        fails(|ledger| ledger.publish(Version(version)), &expected);
    }
    fails(|ledger| ledger.release(Batch(1)), &LedgerError::OtherLease { asked: Batch(1), held: Batch(0) });

    let mut ledger = ledger();
    ledger.release(Batch(0)).unwrap();
    let no_lease = |call| LedgerError::NoLease { next_batch: Batch(0), published: Version(0), call };
    assert_eq!(ledger.release(Batch(0)), Err(no_lease(Call::Release)));
    assert_eq!(ledger.publish(Version(1)), Err(no_lease(Call::Publish)));
}

#[test]
fn consume_when_not_ready() {
    let mut ledger = Ledger::new(LedgerConfig::new(2, 1, 1).unwrap());
    let not_ready = |blockers| LedgerError::NotReady { batch: Batch(0), blockers };
    assert_eq!(ledger.consume(), Err(not_ready(vec![])));
    let groups = ledger.admit_many(Version(0), 3);
    ledger.complete(groups[1], None).unwrap();
    assert_eq!(ledger.consume(), Err(not_ready(vec![groups[0]])));
}

#[test]
fn token_versions_outside_the_group() {
    let mut ledger = ledger();
    ledger.publish(Version(1)).unwrap();
    let group = ledger.admit(Version(1)).unwrap();
    for version in [0, 2] {
        let before = ledger.snapshot();
        let expected = |call| LedgerError::TokenVersion {
            group,
            version: Version(version),
            oldest: Version(1),
            published: Version(1),
            call,
        };
        let reported = Some(Version(version));
        assert_eq!(ledger.complete(group, reported), Err(expected(Call::Complete)));
        assert_eq!(ledger.finish_member(group, 0, reported, 0), Err(expected(Call::FinishMember)));
        assert_eq!(ledger.snapshot(), before);
    }
}

#[test]
fn refused_starts_change_nothing() {
    let mut ledger = ledger();
    ledger.publish(Version(1)).unwrap();
    let group = ledger.admit(Version(1)).unwrap();
    let before = ledger.snapshot();
    let too_old = Refusal::TooOld { engine_version: Version(0), oldest: Version(1) };
    let from_future = Refusal::FromFuture { engine_version: Version(2), published: Version(1) };
    assert_eq!(ledger.start_member(group, 1, Version(0)), Ok(Err(too_old)));
    assert_eq!(ledger.start_member(group, 1, Version(2)), Ok(Err(from_future)));
    assert_eq!(ledger.snapshot(), before);
}

#[test]
fn empty_reasons() {
    let allowed = "a text that is not empty".to_owned();
    let expected = LedgerError::Argument { name: "reason", value: "''".to_owned(), allowed };
    fails(|ledger| ledger.abort(GroupId(2), ""), &expected);
    fails(|ledger| ledger.filter(GroupId(2), ""), &expected);
}

#[test]
fn settings_out_of_range() {
    let rejected = |batch, staleness, group| match LedgerConfig::new(batch, staleness, group) {
        Err(LedgerError::Argument { name, .. }) => name,
        other => panic!("{other:?}"),
    };
    for value in [i64::MIN, -1, i64::MAX] {
        assert_eq!(rejected(value, 0, 1), "batch_size");
        assert_eq!(rejected(1, value, 1), "max_staleness");
        assert_eq!(rejected(1, 0, value), "group_size");
    }
    assert_eq!(rejected(0, 0, 1), "batch_size");
    assert_eq!(rejected(1, 0, 0), "group_size");
}

#[test]
fn a_closed_ledger_does_not_reopen() {
    let mut ledger = ledger();
    ledger.drain();
    assert_eq!(ledger.admit(Version(0)), Err(Refusal::Draining));
    ledger.close();
    ledger.drain();
    assert_eq!(ledger.admit(Version(0)), Err(Refusal::Closed));
    ledger.complete(GroupId(3), None).unwrap();
}

proptest! {
    /// Any call with any numbers, in any state: if it is not granted, nothing has changed.
    #[test]
    fn illegal_calls_change_nothing(
        config in configs(),
        steps in steps(),
        call in 0_u8..9,
        number in prop_oneof![0_u64..20, any::<u64>()],
        member in prop_oneof![0_usize..4, any::<usize>()],
        version in prop_oneof![0_u64..8, any::<u64>()],
    ) {
        let mut journal = Journal::new(config);
        for step in &steps {
            journal.take(step);
        }
        let ledger = &mut journal.ledger;
        let before = ledger.snapshot();
        let (group, version) = (GroupId(number), Version(version));
        let granted = match call {
            0 => ledger.admit(version).is_ok(),
            1 => matches!(ledger.start_member(group, member, version), Ok(Ok(()))),
            2 => ledger.finish_member(group, member, Some(version), 0).is_ok(),
            3 => ledger.complete(group, Some(version)).is_ok(),
            4 => ledger.complete_many(&[GroupId(1), group]).is_ok(),
            5 => ledger.abort(group, "engine lost").is_ok(),
            6 => ledger.filter(group, "all rewards equal").is_ok(),
            7 => ledger.publish(version).is_ok(),
            _ => ledger.release(Batch(number)).is_ok(),
        };
        prop_assert!(granted || ledger.snapshot() == before);
        prop_assert!(ledger.statistics().accounting_holds());
    }
}
