//! The ledger as bytes, and back.
//!
//! ```text
//! magic, 8 bytes | format version, u16 little-endian | books, postcard | CRC-32 of all before, u32 little-endian
//! ```
//!
//! Only the books are written. The window is rebuilt from them, so it cannot disagree with them.

use std::collections::BTreeSet;

use super::group::Group;
use super::lease::Training;
use super::window::Window;
use super::{Books, Ledger};
use crate::error::{GroupState, LedgerError};
use crate::ids::{Batch, GroupId};

const MAGIC: &[u8; 8] = b"SFLEDGER";
const FORMAT_VERSION: u16 = 1;
const CHECKSUM_BYTES: usize = 4;

/// No run comes near this many versions or groups; below it, no sum of two counters overflows.
const COUNTER_LIMIT: u64 = 1 << 62;

impl Ledger {
    /// All state, such that [`Ledger::restore`] gives a ledger that decides the same for ever after.
    #[must_use]
    #[expect(
        clippy::missing_panics_doc,
        reason = "a vector takes any bytes and every field can be serialized"
    )]
    pub fn snapshot(&self) -> Vec<u8> {
        let mut data = MAGIC.to_vec();
        data.extend(FORMAT_VERSION.to_le_bytes());
        let mut data = postcard::to_extend(&self.books, data).expect("the books can be serialized");
        data.extend(crc32fast::hash(&data).to_le_bytes());
        data
    }

    /// The ledger that [`Ledger::snapshot`] was called on.
    ///
    /// # Errors
    /// [`LedgerError::SnapshotForeign`], [`LedgerError::SnapshotFormat`] or [`LedgerError::SnapshotDamaged`].
    pub fn restore(data: &[u8]) -> Result<Self, LedgerError> {
        let books: Books = match postcard::take_from_bytes(body(data)?) {
            Ok((books, [])) => books,
            Ok(_) => return Err(LedgerError::SnapshotDamaged("bytes follow the last field")),
            Err(_) => return Err(LedgerError::SnapshotDamaged("the fields cannot be read")),
        };
        books.check_fields()?;
        let window = books.window();
        if !window.law_holds() {
            return Err(LedgerError::SnapshotDamaged("the groups break the capacity law"));
        }
        let ledger = Self { books, window };
        if !ledger.statistics().accounting_holds() {
            return Err(LedgerError::SnapshotDamaged("the groups do not add up"));
        }
        Ok(ledger)
    }
}

/// The serialized books between a good header and a good checksum.
fn body(data: &[u8]) -> Result<&[u8], LedgerError> {
    let rest = data.strip_prefix(MAGIC).ok_or(LedgerError::SnapshotForeign)?;
    let cut_short = LedgerError::SnapshotDamaged("it is cut short");
    let (version, rest) = rest.split_first_chunk().ok_or(cut_short.clone())?;
    let found = u16::from_le_bytes(*version);
    if found != FORMAT_VERSION {
        return Err(LedgerError::SnapshotFormat { found, supported: FORMAT_VERSION });
    }
    let (body, checksum) = rest.split_last_chunk::<CHECKSUM_BYTES>().ok_or(cut_short)?;
    let covered = &data[..data.len() - CHECKSUM_BYTES];
    if crc32fast::hash(covered) != u32::from_le_bytes(*checksum) {
        return Err(LedgerError::SnapshotDamaged("the checksum does not match"));
    }
    Ok(body)
}

impl Books {
    fn check_fields(&self) -> Result<(), LedgerError> {
        let fault = if !self.config.is_valid() {
            "a setting is out of range"
        } else if !self.counters_fit() {
            "a counter is out of range"
        } else if !self.groups_fit() {
            "a group contradicts itself"
        } else if !self.lease_fits() {
            "the lease does not match the groups"
        } else {
            return Ok(());
        };
        Err(LedgerError::SnapshotDamaged(fault))
    }

    fn counters_fit(&self) -> bool {
        (1..COUNTER_LIMIT).contains(&self.next_id.0) && self.published.0 < COUNTER_LIMIT
    }

    fn groups_fit(&self) -> bool {
        self.groups.iter().all(|(id, group)| {
            (1..self.next_id.0).contains(&id.0)
                && group.is_consistent(self.config.group_size(), self.published)
        })
    }

    /// A lease is a full batch of groups, none too old for it, in the order they are handed out.
    fn lease_fits(&self) -> bool {
        let leased: BTreeSet<GroupId> = self.in_state(GroupState::Leased).map(|(id, _)| id).collect();
        let listed = self.training.groups();
        let full = match self.training {
            Training::Idle => listed.is_empty(),
            Training::Held(_) | Training::Released(_) => listed.len() as u64 == self.config.batch_size(),
        };
        let order = |id: &GroupId| self.groups.get(id).map(|group| (group.version, *id));
        let in_time = self
            .in_state(GroupState::Leased)
            .all(|(_, group)| group.version.deadline(self.config.max_staleness()) >= Batch(self.published.0));
        full && listed.len() == leased.len()
            && listed.iter().all(|id| leased.contains(id))
            && listed.is_sorted_by(|left, right| order(left) < order(right))
            && in_time
    }

    fn in_state(&self, state: GroupState) -> impl Iterator<Item = (GroupId, &Group)> {
        self.groups.iter().filter(move |(_, group)| group.state() == state).map(|(id, group)| (*id, group))
    }

    /// The window over these groups. Its first batch lies behind a lease even if that was released: the batch is
    /// full, so no other group may count on a place in it.
    fn window(&self) -> Window {
        let published = Batch(self.published.0);
        let first_batch = match self.training {
            Training::Idle => published,
            Training::Held(_) | Training::Released(_) => published.next(),
        };
        let mut window = Window::new(self.config.batch_size(), first_batch);
        for (id, group) in &self.groups {
            let deadline = group.version.deadline(self.config.max_staleness());
            match group.state() {
                GroupState::Running => window.insert_running(*id, deadline),
                GroupState::Complete => window.insert_complete(*id, deadline),
                GroupState::Leased => {}
            }
        }
        window
    }
}

/// Books that contradict themselves, under a good checksum.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Version;
    use crate::ledger::LedgerConfig;

    /// Groups 1 and 2 trained, 3 and 4 leased for batch 1, 5 complete, 6 and 7 running.
    fn ledger() -> Ledger {
        let mut ledger = Ledger::new(LedgerConfig::new(2, 2, 1).unwrap());
        let first = ledger.admit_many(Version(0), 2);
        ledger.complete_many(&first).unwrap();
        ledger.consume().unwrap();
        ledger.publish(Version(1)).unwrap();
        let groups = ledger.admit_many(Version(1), 5);
        ledger.complete_many(&groups[..3]).unwrap();
        ledger.consume().unwrap();
        ledger
    }

    #[track_caller]
    fn rejected(fault: &'static str, edit: impl FnOnce(&mut Books)) {
        let mut ledger = ledger();
        assert!(Ledger::restore(&ledger.snapshot()).is_ok());
        edit(&mut ledger.books);
        assert_eq!(Ledger::restore(&ledger.snapshot()).unwrap_err(), LedgerError::SnapshotDamaged(fault));
    }

    fn set_version(books: &mut Books, id: u64, version: u64) {
        books.groups.get_mut(&GroupId(id)).unwrap().version = Version(version);
    }

    #[test]
    fn counters_out_of_range() {
        let fault = "a counter is out of range";
        rejected(fault, |books| books.next_id = GroupId(0));
        rejected(fault, |books| books.next_id = GroupId(u64::MAX));
        rejected(fault, |books| books.published = Version(COUNTER_LIMIT));
    }

    #[test]
    fn impossible_groups() {
        let fault = "a group contradicts itself";
        rejected(fault, |books| set_version(books, 6, 2));
        rejected(fault, |books| books.next_id = GroupId(7));
        rejected(fault, |books| {
            let group = books.groups[&GroupId(6)].clone();
            books.groups.insert(GroupId(0), group);
        });
        rejected(fault, |books| {
            books.groups.insert(GroupId(6), Group::admitted(Version(1), 2));
        });
    }

    #[test]
    fn impossible_leases() {
        let fault = "the lease does not match the groups";
        let held = |ids: &[u64]| Training::Held(ids.iter().copied().map(GroupId).collect());
        for ids in [&[3][..], &[3, 3], &[4, 3], &[3, 5], &[3, 4, 5], &[3, 99]] {
            rejected(fault, |books| books.training = held(ids));
        }
        rejected(fault, |books| books.training = Training::Idle);
        rejected(fault, |books| books.published = Version(4));
    }

    #[test]
    fn broken_laws() {
        rejected("the groups break the capacity law", |books| {
            for id in 8..12 {
                books.groups.insert(GroupId(id), Group::admitted(Version(1), 1));
            }
            books.next_id = GroupId(12);
        });
        rejected("the groups do not add up", |books| {
            books.groups.remove(&GroupId(6));
        });
        rejected("the groups do not add up", |books| {
            books.aborted.insert("overflow".to_owned(), u64::MAX);
        });
    }
}
