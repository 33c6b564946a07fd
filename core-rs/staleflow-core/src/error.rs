//! Every way a call to the core can be illegal. State is unchanged whenever one of these is returned.

use std::fmt;

use thiserror::Error;

use crate::ids::{Batch, GroupId, Version};

/// An illegal call: which one, on what, and why.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LedgerError {
    /// An argument has a value that no state could make right.
    #[error("{name} = {value} is not allowed: {allowed}")]
    Argument {
        /// The argument's name.
        name: &'static str,
        /// What was passed, as text: it may not fit any integer type.
        value: String,
        /// What would have been right.
        allowed: String,
    },
    /// The id was never handed out, or its group has ended.
    #[error("{call}: no live group has id {group}")]
    UnknownGroup {
        /// The id that was passed.
        group: GroupId,
        /// The call that failed.
        call: Call,
    },
    /// One bulk call names the same group more than once.
    #[error("{call}: group {group} is named more than once")]
    RepeatedGroup {
        /// The id that was repeated.
        group: GroupId,
        /// The call that failed.
        call: Call,
    },
    /// The group is live, but not in a state for this call.
    #[error("{call}: group {group} is {state}")]
    GroupState {
        /// The group.
        group: GroupId,
        /// The state it is in.
        state: GroupState,
        /// The call that failed.
        call: Call,
    },
    /// The member is not in a state for this call.
    #[error("{call}: member {member} of group {group} {state}")]
    MemberState {
        /// The group.
        group: GroupId,
        /// The member's index in the group.
        member: usize,
        /// The state it is in.
        state: MemberState,
        /// The call that failed.
        call: Call,
    },
    /// A group cannot be closed short with no member at all.
    #[error("close_short: no member of group {group} has finished; abort it instead")]
    NoMemberFinished {
        /// The group.
        group: GroupId,
    },
    /// No lease is in the state that publish or release needs.
    #[error("{call}: no batch is out for training (next batch {next_batch}, published {published})")]
    NoLease {
        /// The next batch to be consumed.
        next_batch: Batch,
        /// The newest published version.
        published: Version,
        /// The call that failed.
        call: Call,
    },
    /// Release names another batch than the one out for training.
    #[error("release: batch {asked} is not out for training, batch {held} is")]
    OtherLease {
        /// The batch that was passed.
        asked: Batch,
        /// The batch whose lease is held.
        held: Batch,
    },
    /// Consume was called while the batch before is still being trained.
    #[error("consume: batch {held} is out for training; publish version {awaited} or release it first")]
    LeaseHeld {
        /// The batch whose lease is held.
        held: Batch,
        /// The version that ends it.
        awaited: Version,
    },
    /// Too few groups are complete, or running ones stand in the way.
    #[error("consume: batch {batch} is not ready; {}", waiting(blockers))]
    NotReady {
        /// The batch that was asked for.
        batch: Batch,
        /// The running groups that must finish first.
        blockers: Vec<GroupId>,
    },
    /// Publish skips a version or goes back.
    #[error("publish: version {version} does not follow the published version {published}")]
    PublishOrder {
        /// The version that was passed.
        version: Version,
        /// The newest published version.
        published: Version,
    },
    /// A reported token version is older than the group may hold, or not published yet.
    #[error(
        "{call}: group {group} cannot hold a token of version {version}; \
         its versions lie between {oldest} and {published}"
    )]
    TokenVersion {
        /// The group.
        group: GroupId,
        /// The version that was reported.
        version: Version,
        /// The group's own version: no token may be older.
        oldest: Version,
        /// The newest published version.
        published: Version,
        /// The call that failed.
        call: Call,
    },
    /// The bytes do not begin like what they should be.
    #[error("these bytes are not a ledger {0}")]
    Foreign(Document),
    /// The document is of a format that this release does not read.
    #[error("the {document} has format version {found}; this release reads version {supported}")]
    Format {
        /// What was read.
        document: Document,
        /// The format version in the header.
        found: u16,
        /// The one this release reads and writes.
        supported: u16,
    },
    /// The document is cut short, altered, or contradicts itself.
    #[error("the {document} is damaged: {fault}")]
    Damaged {
        /// What was read.
        document: Document,
        /// What is wrong with it.
        fault: &'static str,
    },
}

/// What a ledger can be restored from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Document {
    /// All state at one moment.
    Snapshot,
    /// Every change of state since one moment.
    Journal,
}

/// The calls that can be illegal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant is the ledger method of that name")]
pub enum Call {
    GroupVersion,
    StartMember,
    FinishMember,
    Complete,
    CompleteMany,
    CloseShort,
    Abort,
    Filter,
    Publish,
    Release,
}

/// The state of a live group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupState {
    /// Some member is unfinished.
    Running,
    /// All members are finished; the group waits to be consumed.
    Complete,
    /// The group was handed to the trainer and its batch is not published.
    Leased,
}

/// The state of a member that made a call illegal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberState {
    /// The group has fewer members.
    Absent,
    /// The member was never started.
    Waiting,
    /// The member has finished.
    Finished,
}

impl fmt::Display for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Snapshot => "snapshot",
            Self::Journal => "journal",
        })
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::GroupVersion => "group_version",
            Self::StartMember => "start_member",
            Self::FinishMember => "finish_member",
            Self::Complete => "complete",
            Self::CompleteMany => "complete_many",
            Self::CloseShort => "close_short",
            Self::Abort => "abort",
            Self::Filter => "filter",
            Self::Publish => "publish",
            Self::Release => "release",
        })
    }
}

impl fmt::Display for GroupState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "still running",
            Self::Complete => "already complete",
            Self::Leased => "leased to the trainer",
        })
    }
}

impl fmt::Display for MemberState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Absent => "does not exist",
            Self::Waiting => "was never started",
            Self::Finished => "has already finished",
        })
    }
}

/// How many ids a message spells out; a large batch would bury the reader.
const LISTED: usize = 8;

fn waiting(blockers: &[GroupId]) -> String {
    if blockers.is_empty() {
        return "too few groups are admitted".to_owned();
    }
    let ids: Vec<String> = blockers.iter().take(LISTED).map(GroupId::to_string).collect();
    let more = match blockers.len().saturating_sub(LISTED) {
        0 => String::new(),
        hidden => format!(" and {hidden} more"),
    };
    format!("waiting for groups {}{more}", ids.join(", "))
}
