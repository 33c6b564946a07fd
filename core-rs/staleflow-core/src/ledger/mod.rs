//! The staleness ledger: which group may begin, which batch may be trained, and no finished group ever wasted.
//!
//! ```text
//!             admit               finish              consume              publish
//! (refused) <------- running ---------------> complete -------> leased ---------------> trained
//!                       |                      |    |            |  ^
//!                       +--------> aborted <---+    +-> filtered +--+ release, consume again
//! ```
//!
//! It knows versions, deadlines and counts. It refuses to know what a group contains, which engine runs it, what
//! time it is and what the trainer computes.

mod admission;
pub mod config;
mod group;
pub mod journal;
mod lease;
mod live;
mod progress;
mod snapshot;
mod statistics;
mod window;

pub use self::admission::Refusal;
pub use self::config::LedgerConfig;
pub use self::lease::Lease;
pub use self::progress::Finish;
pub use self::statistics::Statistics;

use self::admission::Gate;
use self::journal::Journal;
use self::lease::Training;
use self::live::LiveGroups;
use self::statistics::Ended;
use self::window::Window;
use crate::ids::{Batch, GroupId, Version};

/// Keeps every consumed token within `max_staleness` published versions of the batch that trains on it.
///
/// **Invariant.** Every live group has a version `V` that none of its tokens is older than, and a place in some
/// batch up to its deadline `V + max_staleness`:
///
/// - running and complete groups satisfy the capacity law of `Window`, counted from the first batch that no
///   lease fills;
/// - leased groups fill batch `published`, and none of them was due before it.
///
/// Admission keeps it by refusing; consumption keeps it by waiting until the batch can be filled with complete
/// groups that leave the law true for the rest; nothing else adds a group or brings a deadline forward. A place is
/// therefore never taken away again, and finished work is never discarded for age. With extra groups the second half
/// of this is given up: there may be more groups than places, and those that a batch leaves behind at their deadline
/// expire.
///
/// **Accounting law.** The admitted groups are exactly the trained, filtered, aborted, expired, running, complete
/// and leased ones. See [`Statistics`].
#[derive(Debug, Clone)]
pub struct Ledger {
    config: LedgerConfig,
    gate: Gate,
    published: Version,
    training: Training,
    next_id: GroupId,
    live: LiveGroups,
    ended: Ended,
    /// Derived from the rest: how many groups are neither leased nor ended, by deadline.
    window: Window,
    /// Written only if asked for.
    journal: Option<Journal>,
}

impl Ledger {
    /// An empty ledger at version 0.
    #[must_use]
    pub fn new(config: LedgerConfig) -> Self {
        Self {
            config,
            gate: Gate::Open,
            published: Version(0),
            training: Training::Idle,
            next_id: GroupId(1),
            live: LiveGroups::new(config.members()),
            ended: Ended::default(),
            window: Window::new(config.batch_size(), config.extra_groups(), Batch(0)),
            journal: None,
        }
    }

    /// The sizes and the bound.
    #[must_use]
    pub fn config(&self) -> &LedgerConfig {
        &self.config
    }

    /// The newest version that engines can pull.
    #[must_use]
    pub fn published(&self) -> Version {
        self.published
    }

    /// The batch that the next [`Ledger::consume`] hands out. One ahead of the published version while a batch is
    /// being trained, equal to it otherwise.
    #[must_use]
    pub fn next_batch(&self) -> Batch {
        let published = Batch(self.published.0);
        match self.training {
            Training::Idle | Training::Released(_) => published,
            Training::Held(_) => published.next(),
        }
    }

    fn deadline(&self, version: Version) -> Batch {
        version.deadline(self.config.max_staleness())
    }
}
