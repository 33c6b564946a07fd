//! The ledger's own journal: a ledger rebuilt from it, and what is refused.

use proptest::prelude::*;
use staleflow_core::error::{Document, LedgerError};
use staleflow_core::ids::{GroupId, Version};
use staleflow_core::ledger::journal::Replay;
use staleflow_core::ledger::{Ledger, LedgerConfig};

use crate::journal::{Journal, Step, configs, steps};

/// The ledger's snapshot at every mark of the journal, and at its end.
fn replayed(data: &[u8]) -> Result<Vec<(u64, Vec<u8>)>, LedgerError> {
    let (mut replay, mut ledger) = Replay::open(data.to_vec())?;
    let mut moments = Vec::new();
    while let Some(now_us) = replay.advance(&mut ledger)? {
        moments.push((now_us, ledger.snapshot()));
    }
    Ok(moments)
}

fn damaged(fault: &'static str) -> LedgerError {
    LedgerError::Damaged { document: Document::Journal, fault }
}

/// A batch of one group admitted at 1 s, complete at 2 s, trained at 3 s; its journal in four pieces.
fn pieces() -> Vec<Vec<u8>> {
    let mut ledger = Ledger::new(LedgerConfig::new(1, 1, 1).unwrap());
    ledger.start_journal();
    let mut pieces = vec![ledger.take_journal()];
    ledger.admit(Version(0)).unwrap();
    ledger.note_time(1_000_000);
    pieces.push(ledger.take_journal());
    ledger.complete(GroupId(1), None).unwrap();
    ledger.note_time(2_000_000);
    pieces.push(ledger.take_journal());
    ledger.consume().unwrap();
    ledger.publish(Version(1)).unwrap();
    ledger.note_time(3_000_000);
    pieces.push(ledger.take_journal());
    pieces
}

/// Takes the steps, and its journal every so many of them, with `between` after each piece; all pieces together must
/// give the ledger back as it was after every step.
fn journal_gives_the_ledger_back(
    config: LedgerConfig,
    steps: &[Step],
    every: usize,
    between: impl Fn(&mut Ledger, &[u8]),
) -> Result<(), TestCaseError> {
    let mut journal = Journal::new(config);
    journal.ledger.start_journal();
    let mut data = Vec::new();
    let mut expected = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let before = journal.ledger.snapshot();
        // A restored ledger keeps no journal.
        if !matches!(step, Step::Crash) {
            journal.take(step);
        }
        let now_us = index as u64 * 1000;
        journal.ledger.note_time(now_us);
        if journal.ledger.snapshot() != before {
            expected.push((now_us, journal.ledger.snapshot()));
        }
        if index % every == 0 {
            data.extend(journal.ledger.take_journal());
            between(&mut journal.ledger, &data);
        }
    }
    data.extend(journal.ledger.take_journal());
    prop_assert_eq!(replayed(&data), Ok(expected));
    Ok(())
}

/// Replaces the ledger by its snapshot, and lets that go on in the same journal.
fn restore_and_continue(ledger: &mut Ledger, data: &[u8]) {
    let marked_us = replayed(data).unwrap().last().map_or(0, |(now_us, _)| *now_us);
    *ledger = Ledger::restore(&ledger.snapshot()).unwrap();
    ledger.continue_journal(marked_us);
}

proptest! {
    /// After every step, the ledger rebuilt from the journal is the ledger.
    #[test]
    fn replay_equals_original(config in configs(), steps in steps(), every in 1_usize..20) {
        journal_gives_the_ledger_back(config, &steps, every, |_, _| ())?;
    }

    /// A ledger that is restored now and then continues its journal, and the whole of it is one journal.
    #[test]
    fn restored_ledgers_continue_their_journal(config in configs(), steps in steps(), every in 1_usize..20) {
        journal_gives_the_ledger_back(config, &steps, every, restore_and_continue)?;
    }

    /// A journal cut anywhere replays up to the last whole piece; one altered anywhere is refused or cut short.
    #[test]
    fn damaged_journals_are_refused(at in 0_usize..1000, flip in 1_u8..=255) {
        let data = pieces().concat();
        let whole = replayed(&data).unwrap();
        let at = at % data.len();
        if let Ok(moments) = replayed(&data[..at]) {
            prop_assert_eq!(&moments[..], &whole[..moments.len()]);
        }
        let mut altered = data.clone();
        altered[at] ^= flip;
        prop_assert!(replayed(&altered).is_err());
    }
}

#[test]
fn marks_tell_the_time_of_the_changes_before_them() {
    let times: Vec<_> = replayed(&pieces().concat()).unwrap().into_iter().map(|(now_us, _)| now_us).collect();
    assert_eq!(times, [1_000_000, 2_000_000, 3_000_000]);
}

#[test]
fn a_frame_cut_short_at_the_end_is_ignored() {
    let [start, admitted, completed, _] = &pieces()[..] else { panic!("there are four pieces") };
    let cut = [start.as_slice(), admitted, &completed[..completed.len() - 1]].concat();
    assert_eq!(replayed(&cut).unwrap().len(), 1);
    assert_eq!(replayed(&start[..start.len() - 1]), Err(damaged("it is cut short")));
}

#[test]
fn changes_that_do_not_follow_are_refused() {
    let [start, admitted, completed, _] = &pieces()[..] else { panic!("there are four pieces") };
    let fault = damaged("it holds a change that the ledger does not grant");
    assert_eq!(replayed(&[start.as_slice(), completed].concat()), Err(fault));
    assert_eq!(replayed(admitted), Err(LedgerError::Foreign(Document::Journal)));
}

#[test]
fn without_a_journal_nothing_is_kept() {
    let mut ledger = Ledger::new(LedgerConfig::new(1, 1, 1).unwrap());
    ledger.admit(Version(0)).unwrap();
    ledger.note_time(5);
    assert_eq!(ledger.take_journal(), []);
}
