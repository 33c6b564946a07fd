//! The accounting law: every admitted group is in exactly one place.

use std::collections::BTreeMap;

use super::Ledger;
use crate::ids::{Batch, Version};

/// Where all admitted groups are. Counts are groups, except where said otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statistics {
    /// Ever admitted.
    pub admitted: u64,
    /// In a batch whose step is published.
    pub trained: u64,
    /// Ended for want of a learning signal, by reason.
    pub filtered: BTreeMap<String, u64>,
    /// Ended by failure or cancellation, by reason.
    pub aborted: BTreeMap<String, u64>,
    /// Ended by missing their deadline. The capacity law leaves no way to miss one, so always 0.
    pub expired: u64,
    /// Live, with an unfinished member.
    pub running: u64,
    /// Live and finished, waiting to be consumed.
    pub complete: u64,
    /// In a batch that is held by the trainer or was released.
    pub leased: u64,
    /// The next batch to be consumed.
    pub next_batch: Batch,
    /// The newest published version.
    pub published: Version,
    /// Member completions, not groups, that were ignored because their attempt or group was over.
    pub late_completions: u64,
}

impl Statistics {
    /// Whether the terms add up to the admitted groups.
    #[must_use]
    pub fn accounting_holds(&self) -> bool {
        let ended = self.filtered.values().chain(self.aborted.values());
        let others = [self.trained, self.expired, self.running, self.complete, self.leased];
        let total = ended.chain(&others).try_fold(0_u64, |sum, term| sum.checked_add(*term));
        total == Some(self.admitted)
    }
}

impl Ledger {
    /// All terms of the accounting law.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let (running, complete) = self.window.counts();
        Statistics {
            admitted: self.books.next_id.0.saturating_sub(1),
            trained: self.published().0.saturating_mul(self.config().batch_size()),
            filtered: self.books.filtered.clone(),
            aborted: self.books.aborted.clone(),
            expired: 0,
            running,
            complete,
            leased: self.books.training.groups().len() as u64,
            next_batch: self.next_batch(),
            published: self.published(),
            late_completions: self.books.late_completions,
        }
    }
}
