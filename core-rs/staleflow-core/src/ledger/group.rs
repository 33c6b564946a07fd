//! One group: its version, its members, and how they finish.

use serde::{Deserialize, Serialize};

use crate::error::{GroupState, MemberState};
use crate::ids::{GroupId, Version};

/// A live group, without its members.
///
/// No token of any member is older than `version`. It is fixed at admission and rises at most once, when the group
/// becomes complete and every member that counts reported the oldest version it really sampled with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Group {
    pub(super) id: GroupId,
    pub(super) version: Version,
    phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Phase {
    /// So many members must still finish.
    Running {
        needed: u32,
    },
    Complete,
    Leased,
}

/// One member of a group, in eight bytes: a ledger has many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Member {
    attempt: u32,
    progress: PackedProgress,
}

/// A [`Progress`] as one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
struct PackedProgress(u32);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Waiting,
    Running,
    /// Finished without saying how old its tokens are.
    Silent,
    /// Finished; its oldest token is so many versions newer than the group.
    Reported(u32),
}

/// What a member's report that it finished means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Report {
    /// The member runs this attempt.
    Current,
    /// The member is on another attempt, or its group does not need it any more.
    Late,
    /// The report cannot be true.
    Illegal(MemberState),
}

impl PackedProgress {
    const WAITING: Self = Self(0);
    const RUNNING: Self = Self(1);
    const SILENT: Self = Self(2);
    const REPORTED: u32 = 3;

    fn unpack(self) -> Progress {
        match self {
            Self::WAITING => Progress::Waiting,
            Self::RUNNING => Progress::Running,
            Self::SILENT => Progress::Silent,
            Self(reported) => Progress::Reported(reported - Self::REPORTED),
        }
    }
}

impl From<Progress> for PackedProgress {
    fn from(progress: Progress) -> Self {
        match progress {
            Progress::Waiting => Self::WAITING,
            Progress::Running => Self::RUNNING,
            Progress::Silent => Self::SILENT,
            Progress::Reported(rise) => Self(rise.saturating_add(Self::REPORTED)),
        }
    }
}

impl Member {
    pub(super) const WAITING: Self = Self { attempt: 0, progress: PackedProgress::WAITING };

    fn progress(self) -> Progress {
        self.progress.unpack()
    }

    fn set(&mut self, progress: Progress) {
        self.progress = progress.into();
    }

    /// Begins the first attempt, or the next one.
    pub(super) fn start(&mut self) {
        match self.progress() {
            Progress::Waiting => {}
            Progress::Running | Progress::Silent | Progress::Reported(_) => {
                self.attempt = self.attempt.saturating_add(1);
            }
        }
        self.set(Progress::Running);
    }

    /// Why the member cannot begin an attempt, if it cannot.
    pub(super) fn start_obstacle(self) -> Option<MemberState> {
        self.is_finished().then_some(MemberState::Finished)
    }

    fn is_finished(self) -> bool {
        match self.progress() {
            Progress::Waiting | Progress::Running => false,
            Progress::Silent | Progress::Reported(_) => true,
        }
    }
}

impl Group {
    /// A new group that needs so many members.
    pub(super) fn admitted(id: GroupId, version: Version, needed: u32) -> Self {
        Self { id, version, phase: Phase::Running { needed } }
    }

    pub(super) fn state(&self) -> GroupState {
        match self.phase {
            Phase::Running { .. } => GroupState::Running,
            Phase::Complete => GroupState::Complete,
            Phase::Leased => GroupState::Leased,
        }
    }

    pub(super) fn judge(&self, member: Member, attempt: u64) -> Report {
        match (self.phase, member.progress()) {
            (_, Progress::Waiting) => Report::Illegal(MemberState::Waiting),
            _ if u64::from(member.attempt) != attempt => Report::Late,
            (_, Progress::Silent | Progress::Reported(_)) => Report::Illegal(MemberState::Finished),
            (Phase::Running { .. }, Progress::Running) => Report::Current,
            (Phase::Complete | Phase::Leased, Progress::Running) => Report::Late,
        }
    }

    /// Finishes one unfinished member. The group may become complete, and its version may rise.
    pub(super) fn finish(&mut self, members: &mut [Member], member: usize, min_version: Option<Version>) {
        members[member].set(self.finished(min_version));
        if let Phase::Running { needed } = &mut self.phase {
            *needed = needed.saturating_sub(1);
            if *needed == 0 {
                self.complete(members);
            }
        }
    }

    /// Finishes as many unfinished members as are needed, the first ones, each with this oldest version.
    pub(super) fn finish_all(&mut self, members: &mut [Member], min_version: Option<Version>) {
        if let Phase::Running { needed } = self.phase {
            let unfinished = members.iter_mut().filter(|member| !member.is_finished());
            for member in unfinished.take(needed as usize) {
                member.set(self.finished(min_version));
            }
        }
        self.complete(members);
    }

    fn finished(&self, min_version: Option<Version>) -> Progress {
        match min_version {
            None => Progress::Silent,
            // A live group is far fewer than 2^32 versions old; a report cut short would only be too cautious.
            Some(version) => Progress::Reported(
                u32::try_from(version.0.saturating_sub(self.version.0)).unwrap_or(u32::MAX),
            ),
        }
    }

    /// Makes the group complete with the members that have finished. Its version rises only if all of them reported
    /// one: a silent member may hold the oldest token.
    pub(super) fn complete(&mut self, members: &[Member]) {
        self.phase = Phase::Complete;
        let rise = members.iter().filter_map(|member| match member.progress() {
            Progress::Waiting | Progress::Running => None,
            Progress::Silent => Some(0),
            Progress::Reported(rise) => Some(rise),
        });
        self.version = Version(self.version.0.saturating_add(rise.min().unwrap_or(0).into()));
    }

    pub(super) fn has_finished_member(members: &[Member]) -> bool {
        members.iter().any(|member| member.is_finished())
    }

    pub(super) fn lease(&mut self) {
        self.phase = Phase::Leased;
    }
}

/// A group with its members, as a snapshot keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GroupRecord {
    pub(super) group: Group,
    pub(super) members: Vec<Member>,
}

impl GroupRecord {
    /// Whether a deserialized group is one that legal calls could have made.
    pub(super) fn is_consistent(&self, size: u32, extra: u32, published: Version) -> bool {
        let Self { group, members } = self;
        let finished = members.iter().filter(|member| member.is_finished()).count();
        let phase_fits = match group.phase {
            Phase::Running { needed } => {
                let newest_rise = published.0.saturating_sub(group.version.0);
                let rises_fit = members.iter().all(|member| match member.progress() {
                    Progress::Waiting | Progress::Running | Progress::Silent => true,
                    Progress::Reported(rise) => u64::from(rise) <= newest_rise,
                });
                needed > 0 && finished + needed as usize == size as usize && rises_fit
            }
            Phase::Complete | Phase::Leased => (1..=size as usize).contains(&finished),
        };
        members.len() == size as usize + extra as usize
            && members.first() != Some(&Member::WAITING)
            && group.version <= published
            && phase_fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PUBLISHED: Version = Version(3);

    /// A group of two at version 1: its first member runs, its second is done with tokens from version 2 on.
    fn record() -> GroupRecord {
        let mut group = Group::admitted(GroupId(1), Version(1), 2);
        let mut members = vec![Member::WAITING; 2];
        members[0].start();
        members[1].start();
        group.finish(&mut members, 1, Some(Version(2)));
        GroupRecord { group, members }
    }

    #[track_caller]
    fn inconsistent(edit: impl FnOnce(&mut GroupRecord)) {
        let mut record = record();
        assert!(record.is_consistent(2, 0, PUBLISHED));
        edit(&mut record);
        assert!(!record.is_consistent(2, 0, PUBLISHED));
    }

    #[test]
    fn inconsistent_groups() {
        inconsistent(|record| record.group.version = Version(4));
        inconsistent(|record| record.group.version = Version(3));
        inconsistent(|record| record.members.clear());
        inconsistent(|record| record.members.push(Member::WAITING));
        inconsistent(|record| record.members[0] = Member::WAITING);
        inconsistent(|record| record.members[1].set(Progress::Reported(3)));
        inconsistent(|record| record.group.phase = Phase::Running { needed: 0 });
        inconsistent(|record| record.group.phase = Phase::Running { needed: 2 });
        for phase in [Phase::Complete, Phase::Leased] {
            inconsistent(|record| {
                record.group.phase = phase;
                record.members[1].set(Progress::Running);
            });
        }
    }

    #[test]
    fn version_rises_only_if_all_members_reported() {
        let mut reported = record();
        reported.group.finish(&mut reported.members, 0, Some(Version(3)));
        assert_eq!(reported.group.version, Version(2));

        let mut silent = record();
        silent.group.finish(&mut silent.members, 0, None);
        assert_eq!(silent.group.version, Version(1));
    }
}
