//! The guarantees under random interleavings, failures and crashes.

use std::collections::BTreeSet;

use proptest::prelude::*;
use staleflow_core::ids::GroupId;
use staleflow_core::ledger::Ledger;

use crate::journal::{Journal, Place, Step, configs, steps};

proptest! {
    #[test]
    fn staleness_bound_holds(config in configs(), steps in steps()) {
        let mut journal = Journal::new(config);
        for step in &steps {
            journal.take(step);
        }
        for group in journal.groups.values() {
            if let Place::Trained(batch) = group.place {
                prop_assert!(batch <= group.oldest_token() + config.max_staleness());
            }
        }
    }

    #[test]
    fn versions_are_lower_bounds(config in configs(), steps in steps()) {
        let mut journal = Journal::new(config);
        for step in &steps {
            journal.take(step);
            for id in journal.in_place(Place::Complete) {
                let group = &journal.groups[&id];
                prop_assert_eq!(journal.ledger.group_version(id).unwrap().0, group.version);
                prop_assert!(group.version <= group.oldest_token());
            }
        }
    }

    #[test]
    fn no_finished_work_discarded(config in configs(), steps in steps()) {
        let mut journal = Journal::new(config);
        for step in &steps {
            if !matches!(step, Step::AbortComplete { .. } | Step::Filter { .. }) {
                journal.take(step);
            }
        }
        let finished: BTreeSet<GroupId> = [Place::Complete, Place::Leased]
            .into_iter()
            .flat_map(|place| journal.in_place(place))
            .collect();
        for _ in 0..=config.max_staleness() + 1 {
            journal.train_one_batch();
        }
        for id in finished {
            prop_assert!(matches!(journal.groups[&id].place, Place::Trained(_)));
        }
    }

    #[test]
    fn liveness(config in configs(), steps in steps()) {
        let mut journal = Journal::new(config);
        for step in &steps {
            journal.take(step);
        }
        let before = journal.ledger.published().0;
        for _ in 0..5 {
            journal.train_one_batch();
        }
        prop_assert!(journal.ledger.published().0 >= before + 5);
    }

    #[test]
    fn accounting_law(config in configs(), steps in steps()) {
        let mut journal = Journal::new(config);
        for step in &steps {
            journal.take(step);
            let statistics = journal.ledger.statistics();
            prop_assert!(statistics.accounting_holds());

            let noted = |place| journal.in_place(place).len() as u64;
            let trained = journal.groups.values().filter(|group| matches!(group.place, Place::Trained(_)));
            prop_assert_eq!(statistics.admitted, journal.groups.len() as u64);
            prop_assert_eq!(statistics.trained, trained.count() as u64);
            prop_assert_eq!(statistics.running, noted(Place::Running));
            prop_assert_eq!(statistics.complete, noted(Place::Complete));
            prop_assert_eq!(statistics.leased, noted(Place::Leased));
            prop_assert_eq!(statistics.aborted.values().sum::<u64>(), noted(Place::Aborted));
            prop_assert_eq!(statistics.filtered.values().sum::<u64>(), noted(Place::Filtered));
            prop_assert_eq!(statistics.expired, 0);
            prop_assert_eq!(statistics.late_completions, journal.late);
        }
    }

    /// The journal asserts on every publish that no group was trained before, and on every consume after a
    /// release that the same groups come in the same order. Here the ledger also crashes after every step.
    #[test]
    fn exactly_once(config in configs(), steps in steps()) {
        let mut journal = Journal::new(config);
        for step in &steps {
            journal.take(step);
            journal.take(&Step::Crash);
        }
        let batch_size = usize::try_from(config.batch_size()).unwrap();
        for batch in 0..journal.ledger.published().0 {
            prop_assert_eq!(journal.in_place(Place::Trained(batch)).len(), batch_size);
        }
    }

    #[test]
    fn released_groups_are_exempt(config in configs(), steps in steps()) {
        let mut journal = Journal::new(config);
        for step in &steps {
            journal.take(step);
            for id in journal.in_place(Place::Leased) {
                let mut ledger: Ledger = journal.ledger.clone();
                prop_assert!(ledger.abort(id, "engine lost").is_err());
                prop_assert!(ledger.filter(id, "all rewards equal").is_err());
            }
        }
    }
}
