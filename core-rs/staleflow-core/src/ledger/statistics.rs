//! The accounting law: every admitted group is in exactly one place.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

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
    /// Ended by missing their deadline. Without extra groups the capacity law leaves no way to miss one.
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
    /// Groups that were made complete with fewer members than the group size. Each is also counted where it is.
    pub closed_short: u64,
}

/// What is left of the groups that have ended untrained, and of calls that changed no group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ended {
    pub(super) filtered: BTreeMap<String, u64>,
    pub(super) aborted: BTreeMap<String, u64>,
    pub(super) expired: u64,
    pub(super) closed_short: u64,
    pub(super) late_completions: u64,
}

/// One more of this reason. Allocates only for a reason that is new.
pub(super) fn count(counts: &mut BTreeMap<String, u64>, reason: &str) {
    if let Some(found) = counts.get_mut(reason) {
        *found += 1;
    } else {
        counts.insert(reason.to_owned(), 1);
    }
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
            admitted: self.next_id.0.saturating_sub(1),
            trained: self.published.0.saturating_mul(self.config.batch_size()),
            filtered: self.ended.filtered.clone(),
            aborted: self.ended.aborted.clone(),
            expired: self.ended.expired,
            running,
            complete,
            leased: self.training.groups().len() as u64,
            next_batch: self.next_batch(),
            published: self.published,
            late_completions: self.ended.late_completions,
            closed_short: self.ended.closed_short,
        }
    }
}
