//! Every change of a ledger's state, in order, as bytes from which the ledger can be rebuilt at any moment.
//!
//! ```text
//! header: magic, 8 bytes | format version, u16 little-endian
//! frame:  length, u64 | CRC-32 of the length, u32 | content | CRC-32 of the content, u32; little-endian all
//! ```
//!
//! The first frame holds a snapshot, every other one a series of changes that follow it (postcard). A frame cut short
//! at the very end is what a process leaves that was killed while it wrote: it is ignored. Any other damage is refused.
//!
//! The ledger is a function of its calls, so a journal is the list of those that changed something. It takes the time
//! from whoever keeps it: a mark says when the changes since the mark before it happened.

use std::borrow::Cow;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::Ledger;
use crate::error::{Document, LedgerError};
use crate::ids::{Batch, GroupId, Version};

const MAGIC: &[u8; 8] = b"SFJOURNL";
const FORMAT_VERSION: u16 = 1;

/// A call that changed the ledger's state.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Change<'a> {
    Admit {
        version: Version,
    },
    AdmitMany {
        version: Version,
        groups: u64,
    },
    StartMember {
        group: GroupId,
        member: usize,
        version: Version,
    },
    FinishMember {
        group: GroupId,
        member: usize,
        min_version: Option<Version>,
        attempt: u64,
    },
    Complete {
        group: GroupId,
        min_version: Option<Version>,
    },
    CompleteMany {
        groups: Cow<'a, [GroupId]>,
    },
    CloseShort {
        group: GroupId,
    },
    Abort {
        group: GroupId,
        reason: &'a str,
    },
    Filter {
        group: GroupId,
        reason: &'a str,
    },
    Consume,
    Publish,
    Release,
    Drain,
    Close,
    /// All changes since the mark before happened by then, so many microseconds after that mark.
    Mark {
        elapsed_us: u64,
    },
}

/// What is to be written next.
#[derive(Debug, Clone)]
pub(super) struct Journal {
    frames: Vec<u8>,
    changes: Vec<u8>,
    marked_us: u64,
    unmarked: bool,
}

impl Ledger {
    /// Keeps a journal from here on, starting from the present state. Whoever asks for it takes it now and then.
    pub fn start_journal(&mut self) {
        let mut frames = MAGIC.to_vec();
        frames.extend(FORMAT_VERSION.to_le_bytes());
        push_frame(&mut frames, &self.snapshot());
        self.journal = Some(Journal { frames, changes: Vec::new(), marked_us: 0, unmarked: false });
    }

    /// Keeps a journal from here on that is the end of another one: of one that has come to the present state, its last
    /// change noted at this time, in microseconds. What is taken from it is to be appended to that journal.
    pub fn continue_journal(&mut self, marked_us: u64) {
        self.journal = Some(Journal { frames: Vec::new(), changes: Vec::new(), marked_us, unmarked: false });
    }

    /// Notes that the changes since the last call happened by this time, in microseconds since a moment of the
    /// caller's choice. Does nothing if there were none, or without a journal.
    pub fn note_time(&mut self, now_us: u64) {
        if let Some(journal) = self.journal.as_mut().filter(|journal| journal.unmarked) {
            journal.push(&Change::Mark { elapsed_us: now_us.saturating_sub(journal.marked_us) });
            journal.marked_us = journal.marked_us.max(now_us);
            journal.unmarked = false;
        }
    }

    /// When the newest changes happened, as it was noted; what [`Ledger::continue_journal`] wants to know. 0 before the
    /// first, or without a journal.
    #[must_use]
    pub fn noted_us(&self) -> u64 {
        self.journal.as_ref().map_or(0, |journal| journal.marked_us)
    }

    /// What the journal holds since this was called last, to be appended to what was taken before. Empty if nothing
    /// changed, or without a journal.
    pub fn take_journal(&mut self) -> Vec<u8> {
        self.journal.as_mut().map(Journal::take).unwrap_or_default()
    }

    pub(super) fn note(&mut self, change: &Change<'_>) {
        if let Some(journal) = &mut self.journal {
            journal.push(change);
            journal.unmarked = true;
        }
    }
}

impl Journal {
    fn push(&mut self, change: &Change<'_>) {
        let changes = std::mem::take(&mut self.changes);
        self.changes = postcard::to_extend(change, changes).expect("a vector takes any bytes");
    }

    fn take(&mut self) -> Vec<u8> {
        let mut taken = std::mem::take(&mut self.frames);
        if !self.changes.is_empty() {
            push_frame(&mut taken, &self.changes);
            self.changes.clear();
        }
        taken
    }
}

fn push_frame(data: &mut Vec<u8>, content: &[u8]) {
    let length = content.len() as u64;
    for part in [&length.to_le_bytes(), content] {
        data.extend(part);
        data.extend(crc32fast::hash(part).to_le_bytes());
    }
}

/// A part without its checksum, and what follows it.
type Split<'a> = (&'a [u8], &'a [u8]);

/// Splits off a part of so many bytes and its checksum; `None` if the data ends before.
fn split_part(data: &[u8], length: usize) -> Result<Option<Split<'_>>, LedgerError> {
    let Some((part, rest)) = data.split_at_checked(length) else { return Ok(None) };
    let Some((checksum, rest)) = rest.split_first_chunk() else { return Ok(None) };
    if crc32fast::hash(part) != u32::from_le_bytes(*checksum) {
        return Err(damaged("a checksum does not match"));
    }
    Ok(Some((part, rest)))
}

/// Splits off a whole frame; `None` if there is none left.
fn split_frame(data: &[u8]) -> Result<Option<Split<'_>>, LedgerError> {
    let Some((length, rest)) = split_part(data, size_of::<u64>())? else { return Ok(None) };
    let length = length.try_into().map_or(0, u64::from_le_bytes);
    split_part(rest, usize::try_from(length).unwrap_or(usize::MAX))
}

/// Reads a journal and carries out its changes.
#[derive(Debug, Clone)]
pub struct Replay {
    data: Vec<u8>,
    /// Where the next frame begins.
    frame: usize,
    /// Where the unread changes of the present frame are.
    changes: Range<usize>,
    now_us: u64,
}

impl Replay {
    /// Opens a journal; the ledger is in the state in which the journal was started.
    ///
    /// # Errors
    /// [`LedgerError::Foreign`], [`LedgerError::Format`] or [`LedgerError::Damaged`].
    pub fn open(data: Vec<u8>) -> Result<(Self, Ledger), LedgerError> {
        let rest = data.strip_prefix(MAGIC).ok_or(LedgerError::Foreign(Document::Journal))?;
        let (version, rest) = rest.split_first_chunk().ok_or(damaged("it is cut short"))?;
        let found = u16::from_le_bytes(*version);
        if found != FORMAT_VERSION {
            return Err(LedgerError::Format {
                document: Document::Journal,
                found,
                supported: FORMAT_VERSION,
            });
        }
        let (snapshot, rest) = split_frame(rest)?.ok_or(damaged("it is cut short"))?;
        let ledger = Ledger::restore(snapshot)?;
        let frame = data.len() - rest.len();
        Ok((Self { data, frame, changes: 0..0, now_us: 0 }, ledger))
    }

    /// Carries out the changes up to the next mark and returns its time, in microseconds; `None` at the end. Changes
    /// after the last mark count as of its time.
    ///
    /// # Errors
    /// [`LedgerError::Damaged`].
    pub fn advance(&mut self, ledger: &mut Ledger) -> Result<Option<u64>, LedgerError> {
        let mut changed = false;
        loop {
            if self.changes.is_empty() && !self.next_frame()? {
                return Ok(changed.then_some(self.now_us));
            }
            let unread = &self.data[self.changes.clone()];
            let (change, rest) =
                postcard::take_from_bytes(unread).map_err(|_| damaged("a change cannot be read"))?;
            self.changes.start = self.changes.end - rest.len();
            if let Change::Mark { elapsed_us } = change {
                self.now_us = self.now_us.saturating_add(elapsed_us);
                return Ok(Some(self.now_us));
            }
            if !ledger.repeat(&change) {
                return Err(damaged("it holds a change that the ledger does not grant"));
            }
            changed = true;
        }
    }

    fn next_frame(&mut self) -> Result<bool, LedgerError> {
        let Some((content, rest)) = split_frame(&self.data[self.frame..])? else { return Ok(false) };
        self.frame = self.data.len() - rest.len();
        let end = self.frame - size_of::<u32>();
        self.changes = end - content.len()..end;
        Ok(true)
    }
}

impl Ledger {
    /// Makes a call again; returns whether it changed the ledger, as it did the first time.
    fn repeat(&mut self, change: &Change<'_>) -> bool {
        match *change {
            Change::Admit { version } => self.admit(version).is_ok(),
            Change::AdmitMany { version, groups } => self.admit_many(version, groups).len() as u64 == groups,
            Change::StartMember { group, member, version } => {
                matches!(self.start_member(group, member, version), Ok(Ok(())))
            }
            Change::FinishMember { group, member, min_version, attempt } => {
                self.finish_member(group, member, min_version, attempt).is_ok()
            }
            Change::Complete { group, min_version } => self.complete(group, min_version).is_ok(),
            Change::CompleteMany { ref groups } => self.complete_many(groups).is_ok(),
            Change::CloseShort { group } => self.close_short(group).is_ok(),
            Change::Abort { group, reason } => self.abort(group, reason).is_ok(),
            Change::Filter { group, reason } => self.filter(group, reason).is_ok(),
            Change::Consume => self.consume().is_ok(),
            Change::Publish => self.publish(self.published().next()).is_ok(),
            Change::Release => self.release(Batch(self.published().0)).is_ok(),
            Change::Drain => {
                self.drain();
                true
            }
            Change::Close => {
                self.close();
                true
            }
            Change::Mark { .. } => true,
        }
    }
}

fn damaged(fault: &'static str) -> LedgerError {
    LedgerError::Damaged { document: Document::Journal, fault }
}
