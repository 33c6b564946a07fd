//! One group: its version, its members, and how they finish.

use serde::{Deserialize, Serialize};

use crate::error::{GroupState, MemberState};
use crate::ids::Version;

/// A live group.
///
/// No token of any member is older than `version`. It is fixed at admission and rises at most once, when the last
/// member finishes and every member reported the oldest version it really sampled with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Group {
    pub(super) version: Version,
    phase: Phase,
    members: Vec<Member>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Phase {
    Running { unfinished: u32 },
    Complete,
    Leased,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Member {
    Waiting,
    Running { attempt: u64 },
    Finished { attempt: u64, min_version: Option<Version> },
}

impl Member {
    fn attempt(self) -> Option<u64> {
        match self {
            Self::Waiting => None,
            Self::Running { attempt } | Self::Finished { attempt, .. } => Some(attempt),
        }
    }

    fn reported(self) -> Option<Version> {
        match self {
            Self::Waiting | Self::Running { .. } => None,
            Self::Finished { min_version, .. } => min_version,
        }
    }

    fn is_finished(self) -> bool {
        matches!(self, Self::Finished { .. })
    }
}

/// What a member's report that it finished means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Report {
    /// The member runs this attempt.
    Current,
    /// The member is on another attempt.
    Late,
    /// The report cannot be true.
    Illegal(MemberState),
}

impl Group {
    /// A new group whose first member is dispatched at once.
    pub(super) fn admitted(version: Version, size: u32) -> Self {
        let mut members = vec![Member::Waiting; size as usize];
        members[0] = Member::Running { attempt: 0 };
        Self { version, phase: Phase::Running { unfinished: size }, members }
    }

    pub(super) fn state(&self) -> GroupState {
        match self.phase {
            Phase::Running { .. } => GroupState::Running,
            Phase::Complete => GroupState::Complete,
            Phase::Leased => GroupState::Leased,
        }
    }

    /// Why the member cannot begin an attempt, if it cannot.
    pub(super) fn start_obstacle(&self, member: usize) -> Option<MemberState> {
        match self.members.get(member) {
            None => Some(MemberState::Absent),
            Some(Member::Finished { .. }) => Some(MemberState::Finished),
            Some(Member::Waiting | Member::Running { .. }) => None,
        }
    }

    /// Begins the member's first attempt, or its next one.
    pub(super) fn start(&mut self, member: usize) {
        let attempt = self.members[member].attempt().map_or(0, |last| last.saturating_add(1));
        self.members[member] = Member::Running { attempt };
    }

    pub(super) fn judge(&self, member: usize, attempt: u64) -> Report {
        match self.members.get(member) {
            None => Report::Illegal(MemberState::Absent),
            Some(Member::Waiting) => Report::Illegal(MemberState::Waiting),
            Some(found) if found.attempt() != Some(attempt) => Report::Late,
            Some(Member::Finished { .. }) => Report::Illegal(MemberState::Finished),
            Some(Member::Running { .. }) => Report::Current,
        }
    }

    /// Finishes a member that is running. The group may become complete, and its version may rise.
    pub(super) fn finish(&mut self, member: usize, min_version: Option<Version>) {
        let attempt = self.members[member].attempt().unwrap_or(0);
        self.members[member] = Member::Finished { attempt, min_version };
        if let Phase::Running { unfinished } = &mut self.phase {
            *unfinished = unfinished.saturating_sub(1);
            if *unfinished == 0 {
                self.complete();
            }
        }
    }

    /// Finishes every member that has not finished, each with this oldest version.
    pub(super) fn finish_all(&mut self, min_version: Option<Version>) {
        for member in &mut self.members {
            if !member.is_finished() {
                *member = Member::Finished { attempt: member.attempt().unwrap_or(0), min_version };
            }
        }
        self.complete();
    }

    /// Raises the version only if every member reported one: a silent member may hold the oldest token.
    fn complete(&mut self) {
        self.phase = Phase::Complete;
        let reported: Option<Vec<Version>> = self.members.iter().map(|member| member.reported()).collect();
        if let Some(oldest) = reported.and_then(|versions| versions.into_iter().min()) {
            self.version = oldest;
        }
    }

    pub(super) fn lease(&mut self) {
        self.phase = Phase::Leased;
    }

    /// Whether a deserialized group is one that legal calls could have made.
    pub(super) fn is_consistent(&self, size: u32, published: Version) -> bool {
        let finished = self.members.iter().filter(|member| member.is_finished()).count();
        let versions_fit = self
            .members
            .iter()
            .filter_map(|member| member.reported())
            .all(|version| self.version <= version && version <= published);
        let phase_fits = match self.phase {
            Phase::Running { unfinished } => {
                unfinished > 0 && finished + unfinished as usize == size as usize
            }
            Phase::Complete | Phase::Leased => finished == size as usize,
        };
        self.members.len() == size as usize
            && self.members.first() != Some(&Member::Waiting)
            && self.version <= published
            && versions_fit
            && phase_fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PUBLISHED: Version = Version(3);

    /// A group of two at version 1: its first member runs, its second is done with tokens from version 2 on.
    fn group() -> Group {
        let mut group = Group::admitted(Version(1), 2);
        group.start(1);
        group.finish(1, Some(Version(2)));
        group
    }

    #[track_caller]
    fn inconsistent(edit: impl FnOnce(&mut Group)) {
        let mut group = group();
        assert!(group.is_consistent(2, PUBLISHED));
        edit(&mut group);
        assert!(!group.is_consistent(2, PUBLISHED));
    }

    #[test]
    fn inconsistent_groups() {
        inconsistent(|group| group.version = Version(4));
        inconsistent(|group| group.version = Version(3));
        inconsistent(|group| group.members.clear());
        inconsistent(|group| group.members[0] = Member::Waiting);
        inconsistent(|group| {
            group.members[1] = Member::Finished { attempt: 0, min_version: Some(Version(4)) }
        });
        inconsistent(|group| group.phase = Phase::Complete);
        inconsistent(|group| group.phase = Phase::Leased);
        inconsistent(|group| group.phase = Phase::Running { unfinished: 0 });
        inconsistent(|group| group.phase = Phase::Running { unfinished: 2 });
    }

    #[test]
    fn version_rises_only_if_all_members_reported() {
        let mut reported = group();
        reported.finish(0, Some(Version(3)));
        assert_eq!(reported.version, Version(2));

        let mut silent = group();
        silent.finish(0, None);
        assert_eq!(silent.version, Version(1));
    }
}
