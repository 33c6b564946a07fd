//! Worlds too large to visit every state of: random histories, shrunk to a short one if a guarantee is broken.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use staleflow_core::ids::{GroupId, Version};
use staleflow_core::ledger::{Ledger, LedgerConfig};

use crate::journal::{Journal, Place, Step, large_configs, many_steps};
use crate::oracle;

/// Large histories take long, so there are fewer of them than of small ones.
const SHARE: u32 = 8;

#[test]
fn guarantees_hold_in_large_worlds() {
    let cases = (Config::default().cases / SHARE).max(1);
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let check = |(config, steps): (LedgerConfig, Vec<Step>)| check_history(config, &steps);
    runner.run(&(large_configs(), many_steps()), check).unwrap();
    println!("{cases} histories of large worlds");
}

fn check_history(config: LedgerConfig, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut journal = Journal::new(config);
    for (index, step) in steps.iter().enumerate() {
        journal.take(step);
        prop_assert!(journal.ledger.statistics().accounting_holds());
        if index % 100 == 0 {
            check_state(&journal)?;
        }
    }
    check_state(&journal)?;
    check_future(journal)
}

/// Compares the answers of this state with a search.
fn check_state(journal: &Journal) -> Result<(), TestCaseError> {
    let ledger = &journal.ledger;
    let places = usize::try_from(ledger.config().batch_size()).unwrap();
    let staleness = ledger.config().max_staleness();
    let leased = !journal.in_place(Place::Leased).is_empty();
    let first = ledger.published().0 + u64::from(leased);
    let due = |place| journal.in_place(place).into_iter().map(|id| journal.groups[&id].version + staleness);
    let live: Vec<u64> = due(Place::Running).chain(due(Place::Complete)).collect();
    prop_assert!(oracle::placeable(&live, first, places));

    for version in ledger.published().0.saturating_sub(staleness)..=ledger.published().0 {
        let room = usize::try_from(ledger.capacity(Version(version))).unwrap();
        let with = |joining| [live.clone(), vec![version + staleness; joining]].concat();
        prop_assert!(room == 0 || oracle::placeable(&with(room), first, places));
        prop_assert!(!oracle::placeable(&with(room + 1), first, places));
    }
    if !leased {
        // Whatever choice works, the one of those due first works as well.
        let mut complete: Vec<u64> = due(Place::Complete).collect();
        complete.sort_unstable();
        let feasible = complete.len() >= places && {
            let rest = due(Place::Running).chain(complete[places..].iter().copied()).collect::<Vec<_>>();
            oracle::placeable(&rest, first + 1, places)
        };
        prop_assert_eq!(ledger.is_ready(), feasible);
    }
    let restored = Ledger::restore(&ledger.snapshot()).unwrap();
    prop_assert_eq!(restored.blockers(), ledger.blockers());
    prop_assert_eq!(restored.snapshot(), ledger.snapshot());
    Ok(())
}

/// From here on everything goes well: every batch becomes ready, and all finished work is trained inside the bound.
fn check_future(mut journal: Journal) -> Result<(), TestCaseError> {
    let finished: BTreeSet<GroupId> =
        [Place::Complete, Place::Leased].into_iter().flat_map(|place| journal.in_place(place)).collect();
    let (published, bound) = (journal.ledger.published().0, journal.ledger.config().max_staleness());
    for _ in 0..bound + 2 {
        journal.train_one_batch();
    }
    prop_assert!(journal.ledger.published().0 >= published + bound + 2);
    for (id, group) in &journal.groups {
        match group.place {
            Place::Trained(batch) => prop_assert!(batch <= group.oldest_token() + bound),
            _ => prop_assert!(!finished.contains(id), "finished group {} is not trained", id),
        }
    }
    Ok(())
}
