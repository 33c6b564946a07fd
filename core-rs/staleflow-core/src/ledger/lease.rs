//! How a batch passes to the trainer, and comes back if the trainer dies.

use serde::{Deserialize, Serialize};

use super::Ledger;
use crate::error::{Call, LedgerError};
use crate::ids::{Batch, GroupId, Version};

/// A batch handed to the trainer: its groups in the order they are to be trained.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Lease {
    /// The batch's index.
    pub batch: Batch,
    /// The groups, earliest deadline first, then in admission order.
    pub groups: Vec<GroupId>,
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
        match self.books.training {
            Training::Idle => self.window.shortfall() == 0,
            Training::Held(_) => false,
            Training::Released(_) => true,
        }
    }

    /// The fewest running groups whose completion makes the next batch ready, those due first. If not even all
    /// running groups are enough, all of them. Empty when the next batch waits for no group.
    #[must_use]
    pub fn blockers(&self) -> Vec<GroupId> {
        match self.books.training {
            Training::Idle | Training::Held(_) => self.window.blockers(),
            Training::Released(_) => Vec::new(),
        }
    }

    /// Hands out the next batch. A released one is handed out again, unchanged.
    ///
    /// # Errors
    /// [`LedgerError::LeaseHeld`] while the batch before is in training, or [`LedgerError::NotReady`].
    pub fn consume(&mut self) -> Result<Lease, LedgerError> {
        let batch = self.next_batch();
        let groups = match &self.books.training {
            Training::Held(_) => {
                let published = self.published();
                return Err(LedgerError::LeaseHeld { held: Batch(published.0), awaited: published.next() });
            }
            Training::Released(groups) => groups.clone(),
            Training::Idle if self.window.shortfall() == 0 => self.window.take_batch(),
            Training::Idle => return Err(LedgerError::NotReady { batch, blockers: self.blockers() }),
        };
        for id in &groups {
            if let Some(group) = self.books.groups.get_mut(id) {
                group.lease();
            }
        }
        self.books.training = Training::Held(groups.clone());
        Ok(Lease { batch, groups })
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
        let Training::Held(groups) = &self.books.training else {
            return Err(self.no_lease(Call::Publish));
        };
        for group in groups {
            self.books.groups.remove(group);
        }
        self.books.training = Training::Idle;
        self.books.published = version;
        Ok(())
    }

    /// Takes a batch back from a trainer that will not publish it.
    ///
    /// # Errors
    /// [`LedgerError::NoLease`] if none is held, [`LedgerError::OtherLease`] if it is for another batch.
    pub fn release(&mut self, batch: Batch) -> Result<(), LedgerError> {
        let Training::Held(groups) = &self.books.training else {
            return Err(self.no_lease(Call::Release));
        };
        let held = Batch(self.published().0);
        if batch != held {
            return Err(LedgerError::OtherLease { asked: batch, held });
        }
        self.books.training = Training::Released(groups.clone());
        Ok(())
    }

    fn no_lease(&self, call: Call) -> LedgerError {
        LedgerError::NoLease { next_batch: self.next_batch(), published: self.published(), call }
    }
}
