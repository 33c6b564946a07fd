//! Snapshots: what is restored, and what is rejected.

use proptest::prelude::*;
use staleflow_core::error::{Document, LedgerError};
use staleflow_core::ids::Version;
use staleflow_core::ledger::{Ledger, LedgerConfig};

use crate::journal::{Journal, configs, steps};

const HEADER_BYTES: usize = 10;
const CHECKSUM_BYTES: usize = 4;

proptest! {
    #[test]
    fn restore_equals_original(config in configs(), before in steps(), after in steps()) {
        let mut original = Journal::new(config);
        for step in &before {
            original.take(step);
        }
        let mut restored = original.clone();
        restored.ledger = Ledger::restore(&original.ledger.snapshot()).unwrap();
        for step in &after {
            for version in 0..=original.ledger.published().0 + 1 {
                let version = Version(version);
                prop_assert_eq!(restored.ledger.capacity(version), original.ledger.capacity(version));
            }
            prop_assert_eq!(restored.ledger.blockers(), original.ledger.blockers());
            prop_assert_eq!(restored.take(step), original.take(step));
            prop_assert_eq!(restored.ledger.snapshot(), original.ledger.snapshot());
            prop_assert_eq!(restored.ledger.statistics(), original.ledger.statistics());
        }
    }

    #[test]
    fn damaged_snapshots_are_rejected(config in configs(), steps in steps(), bit in any::<prop::sample::Index>()) {
        let data = snapshot_after(config, &steps);
        let mut flipped = data.clone();
        let bit = bit.index(8 * data.len());
        flipped[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(Ledger::restore(&flipped).is_err());
        for length in 0..data.len() {
            prop_assert!(Ledger::restore(&data[..length]).is_err());
        }
        prop_assert!(Ledger::restore(&[data, vec![0]].concat()).is_err());
    }

    /// A checksum is no proof of sense. What is accepted has to be a ledger that keeps its laws.
    #[test]
    fn forged_snapshots_are_rejected_or_lawful(
        config in configs(),
        steps in steps(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut data = snapshot_after(config, &steps);
        data.truncate(data.len() - CHECKSUM_BYTES);
        for (at, byte) in edits {
            let at = HEADER_BYTES + at.index(data.len() - HEADER_BYTES);
            data[at] = byte;
        }
        if let Ok(mut ledger) = Ledger::restore(&sealed(data)) {
            prop_assert!(ledger.statistics().accounting_holds());
            ledger.admit_many(ledger.published(), 10);
            ledger.complete_many(&ledger.blockers()).unwrap();
            if let Ok(lease) = ledger.consume() {
                ledger.publish(Version(lease.batch.0 + 1)).unwrap();
            }
            prop_assert!(ledger.statistics().accounting_holds());
            prop_assert!(Ledger::restore(&ledger.snapshot()).is_ok());
        }
    }

    #[test]
    fn foreign_bytes_are_rejected(data in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Ledger::restore(&data).is_err());
    }
}

#[test]
fn another_format_version_is_named() {
    let mut data = Ledger::new(LedgerConfig::new(1, 1, 1).unwrap()).snapshot();
    data.truncate(data.len() - CHECKSUM_BYTES);
    data[HEADER_BYTES - 2] = 1;
    let error = Ledger::restore(&sealed(data)).unwrap_err();
    assert_eq!(error, LedgerError::Format { document: Document::Snapshot, found: 1, supported: 2 });
}

#[test]
fn a_setting_out_of_range_is_rejected() {
    let mut data = Ledger::new(LedgerConfig::new(1, 1, 1).unwrap()).snapshot();
    data.truncate(data.len() - CHECKSUM_BYTES);
    data[HEADER_BYTES] = 0;
    let error = Ledger::restore(&sealed(data)).unwrap_err();
    let fault = "a setting is out of range";
    assert_eq!(error, LedgerError::Damaged { document: Document::Snapshot, fault });
}

#[test]
fn a_drained_ledger_stays_drained() {
    let mut ledger = Ledger::new(LedgerConfig::new(1, 1, 1).unwrap());
    ledger.drain();
    assert_eq!(Ledger::restore(&ledger.snapshot()).unwrap().capacity(Version(0)), 0);
}

fn snapshot_after(config: LedgerConfig, steps: &[crate::journal::Step]) -> Vec<u8> {
    let mut journal = Journal::new(config);
    for step in steps {
        journal.take(step);
    }
    journal.ledger.snapshot()
}

/// These bytes with a good checksum.
fn sealed(mut data: Vec<u8>) -> Vec<u8> {
    data.extend(crc32fast::hash(&data).to_le_bytes());
    data
}
