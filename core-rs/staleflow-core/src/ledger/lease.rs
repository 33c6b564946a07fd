//! How a batch passes to the trainer, and comes back if the trainer dies.

use serde::{Deserialize, Serialize};

use super::Ledger;
use super::journal::Change;
use crate::error::{Call, GroupState, LedgerError};
use crate::ids::{Batch, GroupId, Version};

/// A batch handed to the trainer: its groups in the order they are to be trained.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Lease {
    /// The batch's index.
    pub batch: Batch,
    /// The groups, earliest deadline first, then in admission order.
    pub groups: Vec<GroupId>,
    /// The groups that had to be in this batch and were not needed for it, in admission order: they have ended.
    /// Empty without extra groups, and for a batch that was released before.
    pub expired: Vec<GroupId>,
}

/// Where the batch numbered like the newest published version is. There is at most one lease, and it ends only by
/// publishing the next version: that is what makes every group train in one published step at most.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Training {
    /// Not consumed yet.
    Idle,
    /// With the trainer.
    Held(Vec<GroupId>),
    /// Given back untrained; these groups, and no others, are its content.
    Released(Vec<GroupId>),
}

impl Training {
    pub(super) fn groups(&self) -> &[GroupId] {
        match self {
            Self::Idle => &[],
            Self::Held(groups) | Self::Released(groups) => groups,
        }
    }
}

impl Ledger {
    /// Whether [`Ledger::consume`] would succeed.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        match self.training {
            Training::Idle => self.window.shortfall() == 0,
            Training::Held(_) => false,
            Training::Released(_) => true,
        }
    }

    /// The fewest running groups whose completion makes the next batch ready, those due first. If not even all
    /// running groups are enough, all of them. Empty when the next batch waits for no group.
    #[must_use]
    pub fn blockers(&self) -> Vec<GroupId> {
        match self.training {
            Training::Idle | Training::Held(_) => self.first_running(self.window.shortfall()),
            Training::Released(_) => Vec::new(),
        }
    }

    fn first_running(&self, wanted: u64) -> Vec<GroupId> {
        if wanted == 0 {
            return Vec::new();
        }
        let running = self.live.iter().filter(|group| group.state() == GroupState::Running);
        let mut due: Vec<_> = running.map(|group| (self.deadline(group.version), group.id)).collect();
        due.sort_unstable();
        due.truncate(usize::try_from(wanted).unwrap_or(usize::MAX));
        due.into_iter().map(|(_, group)| group).collect()
    }

    /// Hands out the next batch. A released one is handed out again, unchanged.
    ///
    /// # Errors
    /// [`LedgerError::LeaseHeld`] while the batch before is in training, or [`LedgerError::NotReady`].
    pub fn consume(&mut self) -> Result<Lease, LedgerError> {
        let batch = self.next_batch();
        let (groups, expired) = match &self.training {
            Training::Held(_) => {
                let published = self.published();
                return Err(LedgerError::LeaseHeld { held: Batch(published.0), awaited: published.next() });
            }
            Training::Released(groups) => (groups.clone(), Vec::new()),
            Training::Idle if self.window.shortfall() == 0 => self.take_batch(),
            Training::Idle => return Err(LedgerError::NotReady { batch, blockers: self.blockers() }),
        };
        self.training = Training::Held(groups.clone());
        self.note(&Change::Consume);
        Ok(Lease { batch, groups, expired })
    }

    fn take_batch(&mut self) -> (Vec<GroupId>, Vec<GroupId>) {
        let live = &self.live;
        let groups = self.window.take_batch(|id| live.is_complete(id));
        for id in &groups {
            if let Some((group, _)) = self.live.get_mut(*id) {
                group.lease();
            }
        }
        let expired = if self.window.drop_late() { self.expire() } else { Vec::new() };
        (groups, expired)
    }

    /// Ends the groups that no batch can hold any more.
    fn expire(&mut self) -> Vec<GroupId> {
        let first_batch = self.window.first_batch();
        let late = self.live.iter().filter(|group| {
            group.state() != GroupState::Leased && self.deadline(group.version) < first_batch
        });
        let mut expired: Vec<GroupId> = late.map(|group| group.id).collect();
        expired.sort_unstable();
        for id in &expired {
            self.live.remove(*id);
        }
        self.ended.expired += expired.len() as u64;
        expired
    }

    /// Makes the lease final: its groups count as trained, and engines may now serve `version`.
    ///
    /// # Errors
    /// [`LedgerError::PublishOrder`] unless `version` follows the published one, or [`LedgerError::NoLease`].
    pub fn publish(&mut self, version: Version) -> Result<(), LedgerError> {
        let published = self.published();
        if version != published.next() {
            return Err(LedgerError::PublishOrder { version, published });
        }
        let Training::Held(groups) = &self.training else {
            return Err(self.no_lease(Call::Publish));
        };
        for group in groups {
            self.live.remove(*group);
        }
        self.training = Training::Idle;
        self.published = version;
        self.note(&Change::Publish);
        Ok(())
    }

    /// Takes a batch back from a trainer that will not publish it.
    ///
    /// # Errors
    /// [`LedgerError::NoLease`] if none is held, [`LedgerError::OtherLease`] if it is for another batch.
    pub fn release(&mut self, batch: Batch) -> Result<(), LedgerError> {
        let Training::Held(groups) = &self.training else {
            return Err(self.no_lease(Call::Release));
        };
        let held = Batch(self.published().0);
        if batch != held {
            return Err(LedgerError::OtherLease { asked: batch, held });
        }
        self.training = Training::Released(groups.clone());
        self.note(&Change::Release);
        Ok(())
    }

    fn no_lease(&self, call: Call) -> LedgerError {
        LedgerError::NoLease { next_batch: self.next_batch(), published: self.published(), call }
    }
}
