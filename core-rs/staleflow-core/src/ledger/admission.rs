//! Whether new work may begin, and the reason when it may not.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Ledger;
use super::group::Group;
use super::journal::Change;
use crate::ids::{Batch, GroupId, Version};

/// Whether the ledger takes new groups at all. It only ever moves towards `Closed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Gate {
    Open,
    Draining,
    Closed,
}

/// A legal request that cannot be granted now. Nothing was reserved and nothing changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The engine's weights are older than the work may be started with.
    TooOld {
        /// The engine's version.
        engine_version: Version,
        /// The oldest version that would do.
        oldest: Version,
    },
    /// The engine claims weights that are not published.
    FromFuture {
        /// The engine's version.
        engine_version: Version,
        /// The newest published version.
        published: Version,
    },
    /// One more group would leave some live group without a place.
    WindowFull {
        /// The first batch up to which every place is spoken for.
        batch: Batch,
    },
    /// The ledger is draining.
    Draining,
    /// The ledger is closed.
    Closed,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooOld { engine_version, oldest } => {
                write!(f, "engine version {engine_version} is older than {oldest}, the oldest usable here")
            }
            Self::FromFuture { engine_version, published } => {
                write!(f, "engine version {engine_version} is newer than {published}, the newest published")
            }
            Self::WindowFull { batch } => {
                write!(f, "every place up to batch {batch} is taken by a live group due by then")
            }
            Self::Draining => f.write_str("the ledger is draining and admits no new group"),
            Self::Closed => f.write_str("the ledger is closed and admits no new group"),
        }
    }
}

impl Ledger {
    /// Admits a group whose first member is dispatched to an engine of this version.
    ///
    /// # Errors
    /// The [`Refusal`] that applies now.
    pub fn admit(&mut self, engine_version: Version) -> Result<GroupId, Refusal> {
        self.check_admission(engine_version)?;
        self.note(&Change::Admit { version: engine_version });
        Ok(self.insert_group(engine_version))
    }

    /// Admits up to `wanted` groups, as many as the law allows.
    pub fn admit_many(&mut self, engine_version: Version, wanted: u64) -> Vec<GroupId> {
        let granted = wanted.min(self.capacity(engine_version));
        if granted > 0 {
            self.note(&Change::AdmitMany { version: engine_version, groups: granted });
        }
        (0..granted).map(|_| self.insert_group(engine_version)).collect()
    }

    /// How many more groups could be admitted now on an engine of this version.
    #[must_use]
    pub fn capacity(&self, engine_version: Version) -> u64 {
        match self.check_admission(engine_version) {
            Ok(()) => self.window.vacancies(self.deadline(engine_version)),
            Err(_) => 0,
        }
    }

    /// Refuses every admission from now on; live groups go on.
    pub fn drain(&mut self) {
        if self.gate < Gate::Draining {
            self.gate = Gate::Draining;
            self.note(&Change::Drain);
        }
    }

    /// Refuses every admission from now on, as a ledger that is done.
    pub fn close(&mut self) {
        if self.gate < Gate::Closed {
            self.gate = Gate::Closed;
            self.note(&Change::Close);
        }
    }

    fn check_admission(&self, engine_version: Version) -> Result<(), Refusal> {
        match self.gate {
            Gate::Open => {}
            Gate::Draining => return Err(Refusal::Draining),
            Gate::Closed => return Err(Refusal::Closed),
        }
        let oldest = Version(self.next_batch().0.saturating_sub(self.config().max_staleness()));
        check_engine(engine_version, oldest, self.published())?;
        match self.window.first_full(self.deadline(engine_version)) {
            Some(batch) => Err(Refusal::WindowFull { batch }),
            None => Ok(()),
        }
    }

    fn insert_group(&mut self, version: Version) -> GroupId {
        let id = self.next_id;
        self.next_id = GroupId(id.0.saturating_add(1));
        self.live.insert(Group::admitted(id, version, self.config.group_size()));
        self.window.insert_running(self.deadline(version), 1);
        id
    }
}

/// Refuses engines whose weights are outside `oldest..=published`.
pub(super) fn check_engine(
    engine_version: Version,
    oldest: Version,
    published: Version,
) -> Result<(), Refusal> {
    if engine_version > published {
        Err(Refusal::FromFuture { engine_version, published })
    } else if engine_version < oldest {
        Err(Refusal::TooOld { engine_version, oldest })
    } else {
        Ok(())
    }
}
