//! The ledger as bytes, and back.
//!
//! ```text
//! magic, 8 bytes | format version, u16 little-endian | books, postcard | CRC-32 of all before, u32 little-endian
//! ```
//!
//! The window is not written. It is rebuilt from the books, so it cannot disagree with them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::admission::Gate;
use super::group::GroupRecord;
use super::lease::Training;
use super::live::LiveGroups;
use super::statistics::Ended;
use super::window::Window;
use super::{Ledger, LedgerConfig};
use crate::error::{Document, GroupState, LedgerError};
use crate::ids::{Batch, GroupId, Version};

const MAGIC: &[u8; 8] = b"SFLEDGER";
const FORMAT_VERSION: u16 = 2;
const CHECKSUM_BYTES: usize = 4;

/// No run comes near this many versions or groups; below it, no sum of two counters overflows.
const COUNTER_LIMIT: u64 = 1 << 62;

/// Everything a snapshot has to keep.
#[derive(Debug, Serialize, Deserialize)]
struct Books {
    config: LedgerConfig,
    gate: Gate,
    published: Version,
    training: Training,
    next_id: GroupId,
    /// Oldest first.
    groups: Vec<GroupRecord>,
    ended: Ended,
}

impl Ledger {
    /// All state, such that [`Ledger::restore`] gives a ledger that decides the same for ever after.
    #[must_use]
    pub fn snapshot(&self) -> Vec<u8> {
        self.books().write()
    }

    /// The ledger that [`Ledger::snapshot`] was called on. It keeps no journal.
    ///
    /// # Errors
    /// [`LedgerError::Foreign`], [`LedgerError::Format`] or [`LedgerError::Damaged`].
    pub fn restore(data: &[u8]) -> Result<Self, LedgerError> {
        let books: Books = match postcard::take_from_bytes(body(data)?) {
            Ok((books, [])) => books,
            Ok(_) => return Err(damaged("bytes follow the last field")),
            Err(_) => return Err(damaged("the fields cannot be read")),
        };
        books.check_fields()?;
        let ledger = Self::from_books(books);
        if !ledger.window.law_holds(ledger.config.max_staleness()) {
            return Err(damaged("the groups break the capacity law"));
        }
        if !ledger.statistics().accounting_holds() {
            return Err(damaged("the groups do not add up"));
        }
        Ok(ledger)
    }

    fn books(&self) -> Books {
        Books {
            config: self.config,
            gate: self.gate,
            published: self.published,
            training: self.training.clone(),
            next_id: self.next_id,
            groups: self.live.records(),
            ended: self.ended.clone(),
        }
    }

    fn from_books(books: Books) -> Self {
        let window = books.window();
        let mut live = LiveGroups::new(books.config.members());
        for record in &books.groups {
            live.insert_record(record);
        }
        let Books { config, gate, published, training, next_id, groups: _, ended } = books;
        Self { config, gate, published, training, next_id, live, ended, window, journal: None }
    }
}

/// The serialized books between a good header and a good checksum.
fn body(data: &[u8]) -> Result<&[u8], LedgerError> {
    let rest = data.strip_prefix(MAGIC).ok_or(LedgerError::Foreign(Document::Snapshot))?;
    let cut_short = damaged("it is cut short");
    let (version, rest) = rest.split_first_chunk().ok_or(cut_short.clone())?;
    let found = u16::from_le_bytes(*version);
    if found != FORMAT_VERSION {
        return Err(LedgerError::Format { document: Document::Snapshot, found, supported: FORMAT_VERSION });
    }
    let (body, checksum) = rest.split_last_chunk::<CHECKSUM_BYTES>().ok_or(cut_short)?;
    let covered = &data[..data.len() - CHECKSUM_BYTES];
    if crc32fast::hash(covered) != u32::from_le_bytes(*checksum) {
        return Err(damaged("the checksum does not match"));
    }
    Ok(body)
}

fn damaged(fault: &'static str) -> LedgerError {
    LedgerError::Damaged { document: Document::Snapshot, fault }
}

impl Books {
    fn write(&self) -> Vec<u8> {
        let mut data = MAGIC.to_vec();
        data.extend(FORMAT_VERSION.to_le_bytes());
        let mut data = postcard::to_extend(self, data).expect("the books can be serialized");
        data.extend(crc32fast::hash(&data).to_le_bytes());
        data
    }

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
        Err(damaged(fault))
    }

    fn counters_fit(&self) -> bool {
        (1..COUNTER_LIMIT).contains(&self.next_id.0) && self.published.0 < COUNTER_LIMIT
    }

    fn groups_fit(&self) -> bool {
        let (size, extra) = (self.config.group_size(), self.config.extra_members());
        self.groups.is_sorted_by(|earlier, later| earlier.group.id < later.group.id)
            && self.groups.iter().all(|record| {
                (1..self.next_id.0).contains(&record.group.id.0)
                    && record.is_consistent(size, extra, self.published)
            })
    }

    /// A lease is a full batch of groups, none too old for it, in the order they are handed out.
    fn lease_fits(&self) -> bool {
        let leased: BTreeMap<GroupId, Version> = self
            .groups
            .iter()
            .filter(|record| record.group.state() == GroupState::Leased)
            .map(|record| (record.group.id, record.group.version))
            .collect();
        let listed = self.training.groups();
        let full = match self.training {
            Training::Idle => listed.is_empty(),
            Training::Held(_) | Training::Released(_) => listed.len() as u64 == self.config.batch_size(),
        };
        let order = |id: &GroupId| leased.get(id).map(|version| (*version, *id));
        let in_time =
            |version: &Version| version.deadline(self.config.max_staleness()) >= Batch(self.published.0);
        full && listed.len() == leased.len()
            && listed.iter().all(|id| leased.contains_key(id))
            && listed.is_sorted_by(|left, right| order(left) < order(right))
            && leased.values().all(in_time)
    }

    /// The window over these groups. Its first batch lies behind a lease even if that was released: the batch is
    /// full, so no other group may count on a place in it.
    fn window(&self) -> Window {
        let published = Batch(self.published.0);
        let first_batch = match self.training {
            Training::Idle => published,
            Training::Held(_) | Training::Released(_) => published.next(),
        };
        let mut window = Window::new(self.config.batch_size(), self.config.extra_groups(), first_batch);
        for GroupRecord { group, .. } in &self.groups {
            let deadline = group.version.deadline(self.config.max_staleness());
            match group.state() {
                GroupState::Running => window.insert_running(deadline, 1),
                GroupState::Complete => window.insert_complete(group.id, deadline),
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
    use crate::ledger::group::Group;

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
        let mut books = ledger().books();
        assert!(Ledger::restore(&books.write()).is_ok());
        edit(&mut books);
        assert_eq!(Ledger::restore(&books.write()).unwrap_err(), damaged(fault));
    }

    fn group(books: &mut Books, id: u64) -> &mut Group {
        &mut books.groups.iter_mut().find(|record| record.group.id == GroupId(id)).unwrap().group
    }

    /// Another running group, like number 6.
    fn add(books: &mut Books, id: u64) {
        let mut record = books.groups.iter().find(|record| record.group.id == GroupId(6)).unwrap().clone();
        record.group.id = GroupId(id);
        books.groups.push(record);
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
        rejected(fault, |books| group(books, 6).version = Version(2));
        rejected(fault, |books| books.next_id = GroupId(7));
        rejected(fault, |books| group(books, 3).id = GroupId(0));
        rejected(fault, |books| add(books, 7));
        rejected(fault, |books| books.groups.swap(0, 1));
        rejected(fault, |books| {
            let members = books.groups[0].members.clone();
            books.groups[0].members.extend(members);
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
                add(books, id);
            }
            books.next_id = GroupId(12);
        });
        rejected("the groups do not add up", |books| {
            books.groups.remove(3);
        });
        rejected("the groups do not add up", |books| {
            books.ended.aborted.insert("overflow".to_owned(), u64::MAX);
        });
    }

    #[test]
    fn more_groups_than_extra_groups_allow() {
        let ledger = |live| {
            let config = LedgerConfig::new(1, 1, 1).unwrap().with_extra_groups(1).unwrap();
            let mut books = Ledger::new(config).books();
            for id in 1..=live {
                let mut members = LiveGroups::new(1);
                members.insert(Group::admitted(GroupId(id), Version(0), 1));
                books.groups.extend(members.records());
                books.next_id = GroupId(id + 1);
            }
            Ledger::restore(&books.write())
        };
        assert!(ledger(4).is_ok());
        assert_eq!(ledger(5).unwrap_err(), damaged("the groups break the capacity law"));
    }
}
