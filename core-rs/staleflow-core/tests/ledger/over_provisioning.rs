//! More groups and members than are needed, and groups closed short.

use staleflow_core::error::{Call, GroupState, LedgerError};
use staleflow_core::ids::{Batch, GroupId, Version};
use staleflow_core::ledger::{Finish, Ledger, LedgerConfig, Refusal};

fn ledger(config: Result<LedgerConfig, LedgerError>) -> Ledger {
    Ledger::new(config.unwrap())
}

/// Two groups to a batch and one more admitted; bound 1.
fn with_extra_group() -> Ledger {
    ledger(LedgerConfig::new(2, 1, 1).and_then(|config| config.with_extra_groups(1)))
}

/// Two members to a group and one more played.
fn with_extra_member() -> Ledger {
    let mut ledger = ledger(LedgerConfig::new(1, 2, 2).and_then(|config| config.with_extra_members(1)));
    ledger.admit(Version(0)).unwrap();
    for member in 1..3 {
        ledger.start_member(GroupId(1), member, Version(0)).unwrap().unwrap();
    }
    ledger
}

#[test]
fn extra_groups_widen_the_law() {
    let mut ledger = with_extra_group();
    assert_eq!(ledger.admit_many(Version(0), 10).len(), 6);
    assert_eq!(ledger.admit(Version(0)), Err(Refusal::WindowFull { batch: Batch(1) }));
}

#[test]
fn running_groups_stand_in_nobodys_way() {
    let mut ledger = with_extra_group();
    let groups = ledger.admit_many(Version(0), 6);
    ledger.complete(groups[4], None).unwrap();
    assert_eq!(ledger.blockers(), groups[..1]);
    ledger.complete(groups[5], None).unwrap();
    assert!(ledger.is_ready());
    assert_eq!(ledger.consume().unwrap().groups, groups[4..]);
}

#[test]
fn groups_left_behind_at_their_deadline_expire() {
    let mut ledger = with_extra_group();
    let first = ledger.admit_many(Version(0), 6);
    ledger.complete_many(&first[..2]).unwrap();
    assert_eq!(ledger.consume().unwrap().expired, []);
    ledger.publish(Version(1)).unwrap();

    ledger.complete_many(&first[2..5]).unwrap();
    let lease = ledger.consume().unwrap();
    assert_eq!((lease.groups, lease.expired), (first[2..4].to_vec(), first[4..].to_vec()));
    let second = ledger.admit_many(Version(1), 2);
    let statistics = ledger.statistics();
    assert_eq!((statistics.expired, statistics.running, statistics.complete), (2, 2, 0));
    assert!(statistics.accounting_holds());

    assert_eq!(ledger.finish_member(first[5], 0, None, 0), Ok(Finish::Late));
    let unknown = LedgerError::UnknownGroup { group: first[4], call: Call::Abort };
    assert_eq!(ledger.abort(first[4], "too late"), Err(unknown));

    ledger.release(Batch(1)).unwrap();
    let again = ledger.consume().unwrap();
    assert_eq!((again.groups, again.expired), (first[2..4].to_vec(), vec![]));
    assert_eq!(ledger.blockers(), second);
}

#[test]
fn no_group_is_admitted_for_a_batch_whose_places_are_gone() {
    let mut ledger = with_extra_group();
    let groups = ledger.admit_many(Version(0), 6);
    ledger.complete_many(&groups[..2]).unwrap();
    ledger.consume().unwrap();
    // Four groups are due in batch 1, which has three places; the law is false, and admission waits for it.
    assert_eq!(ledger.admit(Version(0)), Err(Refusal::WindowFull { batch: Batch(1) }));
    ledger.publish(Version(1)).unwrap();
    assert_eq!(ledger.admit(Version(1)), Err(Refusal::WindowFull { batch: Batch(1) }));
    assert_eq!(Ledger::restore(&ledger.snapshot()).unwrap().snapshot(), ledger.snapshot());
}

#[test]
fn first_finishers_complete_a_group() {
    let mut ledger = with_extra_member();
    let group = GroupId(1);
    assert_eq!(ledger.finish_member(group, 2, Some(Version(0)), 0), Ok(Finish::Member));
    assert_eq!(ledger.finish_member(group, 0, Some(Version(0)), 0), Ok(Finish::Group));
    assert_eq!(ledger.finish_member(group, 1, Some(Version(0)), 0), Ok(Finish::Late));
    assert_eq!(ledger.statistics().late_completions, 1);
    let complete = LedgerError::GroupState { group, state: GroupState::Complete, call: Call::StartMember };
    assert_eq!(ledger.start_member(group, 1, Version(0)), Err(complete));
    assert_eq!(Ledger::restore(&ledger.snapshot()).unwrap().consume().unwrap().groups, [group]);
}

#[test]
fn dismissed_members_do_not_hold_the_version_down() {
    let mut ledger = with_extra_member();
    ledger.admit(Version(0)).unwrap();
    ledger.complete(GroupId(2), None).unwrap();
    ledger.finish_member(GroupId(1), 0, None, 0).unwrap();
    ledger.close_short(GroupId(1)).unwrap();
    ledger.consume().unwrap();
    ledger.publish(Version(1)).unwrap();

    let group = ledger.admit(Version(0)).unwrap();
    for member in 1..3 {
        ledger.start_member(group, member, Version(1)).unwrap().unwrap();
        ledger.finish_member(group, member, Some(Version(1)), 0).unwrap();
    }
    assert_eq!(ledger.group_version(group), Ok(Version(1)));
}

#[test]
fn completing_at_once_takes_no_more_members_than_needed() {
    let mut ledger = with_extra_member();
    ledger.finish_member(GroupId(1), 1, None, 0).unwrap();
    ledger.complete(GroupId(1), None).unwrap();
    let finished = LedgerError::MemberState {
        group: GroupId(1),
        member: 0,
        state: staleflow_core::error::MemberState::Finished,
        call: Call::FinishMember,
    };
    assert_eq!(ledger.finish_member(GroupId(1), 0, None, 0), Err(finished));
    assert_eq!(ledger.finish_member(GroupId(1), 2, None, 0), Ok(Finish::Late));
}

#[test]
fn a_group_is_closed_short_with_those_that_finished() {
    let mut ledger = with_extra_member();
    let group = GroupId(1);
    let before = ledger.snapshot();
    assert_eq!(ledger.close_short(group), Err(LedgerError::NoMemberFinished { group }));
    assert_eq!(ledger.snapshot(), before);

    ledger.finish_member(group, 1, None, 0).unwrap();
    ledger.close_short(group).unwrap();
    assert_eq!(ledger.finish_member(group, 0, None, 0), Ok(Finish::Late));
    let complete = LedgerError::GroupState { group, state: GroupState::Complete, call: Call::CloseShort };
    assert_eq!(ledger.close_short(group), Err(complete));
    let statistics = ledger.statistics();
    assert_eq!((statistics.complete, statistics.closed_short), (1, 1));
    assert_eq!(Ledger::restore(&ledger.snapshot()).unwrap().statistics(), statistics);
    assert_eq!(ledger.consume().unwrap().groups, [group]);
}

#[test]
fn ended_groups_do_not_pile_up_in_the_window() {
    let mut ledger = ledger(LedgerConfig::new(100, 0, 1));
    for _ in 0..100 {
        let groups = ledger.admit_many(Version(0), 100);
        ledger.complete_many(&groups).unwrap();
        for group in &groups[1..] {
            ledger.filter(*group, "all rewards equal").unwrap();
        }
        ledger.abort(groups[0], "engine lost").unwrap();
        assert_eq!(ledger.statistics().complete, 0);
    }
    let groups = ledger.admit_many(Version(0), 100);
    ledger.complete_many(&groups).unwrap();
    for group in &groups[..50] {
        ledger.filter(*group, "all rewards equal").unwrap();
    }
    let others = ledger.admit_many(Version(0), 50);
    ledger.complete_many(&others).unwrap();
    assert_eq!(ledger.consume().unwrap().groups, [&groups[50..], &others].concat());
}
