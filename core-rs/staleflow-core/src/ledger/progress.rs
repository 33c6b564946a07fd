//! What happens to a group between admission and consumption: its members run and finish, or it ends early.

use std::collections::BTreeSet;

use super::Ledger;
use super::admission::Refusal;
use super::group::{Group, Report};
use crate::error::{Call, GroupState, LedgerError, MemberState};
use crate::ids::{GroupId, Version};

/// What finishing a member led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// Other members of the group are unfinished.
    Member,
    /// It was the last one: the group is complete.
    Group,
    /// The attempt or the group was over already. Ignored, and counted.
    Late,
}

impl Ledger {
    /// The version of a live group: none of its tokens may be older.
    ///
    /// # Errors
    /// [`LedgerError::UnknownGroup`].
    pub fn group_version(&self, group: GroupId) -> Result<Version, LedgerError> {
        self.live(group, Call::GroupVersion).map(|found| found.version)
    }

    /// Begins a member's first attempt on an engine of this version, or, if it is running, its next attempt. The
    /// outer result says whether the call was legal, the inner one whether the start was granted.
    ///
    /// # Errors
    /// [`LedgerError::UnknownGroup`], [`LedgerError::GroupState`] unless the group is running, or
    /// [`LedgerError::MemberState`] if the member has finished or does not exist.
    pub fn start_member(
        &mut self,
        group: GroupId,
        member: usize,
        engine_version: Version,
    ) -> Result<Result<(), Refusal>, LedgerError> {
        let call = Call::StartMember;
        let found = self.live_in(group, &[GroupState::Running], call)?;
        if let Some(state) = found.start_obstacle(member) {
            return Err(LedgerError::MemberState { group, member, state, call });
        }
        if let Err(refusal) = self.check_engine(engine_version, found.version) {
            return Ok(Err(refusal));
        }
        self.change(group, |found| found.start(member));
        Ok(Ok(()))
    }

    /// Finishes a member's current attempt. `min_version` is the oldest version among its sampled tokens.
    ///
    /// # Errors
    /// [`LedgerError::UnknownGroup`] for an id never handed out, [`LedgerError::MemberState`] if the member
    /// does not exist, was never started or finished this attempt before, and [`LedgerError::TokenVersion`].
    pub fn finish_member(
        &mut self,
        group: GroupId,
        member: usize,
        min_version: Option<Version>,
        attempt: u64,
    ) -> Result<Finish, LedgerError> {
        let call = Call::FinishMember;
        if !self.was_admitted(group) {
            return Err(LedgerError::UnknownGroup { group, call });
        }
        if member >= self.config().group_size() as usize {
            return Err(LedgerError::MemberState { group, member, state: MemberState::Absent, call });
        }
        let report = self.books.groups.get(&group).map_or(Report::Late, |found| found.judge(member, attempt));
        match report {
            Report::Illegal(state) => Err(LedgerError::MemberState { group, member, state, call }),
            Report::Late => {
                self.books.late_completions = self.books.late_completions.saturating_add(1);
                Ok(Finish::Late)
            }
            Report::Current => {
                self.check_tokens(group, min_version, call)?;
                Ok(match self.change(group, |found| found.finish(member, min_version)) {
                    Some(GroupState::Complete) => Finish::Group,
                    _ => Finish::Member,
                })
            }
        }
    }

    /// Completes a running group: every unfinished member finishes, with `min_version` as its oldest version.
    ///
    /// # Errors
    /// [`LedgerError::UnknownGroup`], [`LedgerError::GroupState`] unless it is running, or
    /// [`LedgerError::TokenVersion`].
    pub fn complete(&mut self, group: GroupId, min_version: Option<Version>) -> Result<(), LedgerError> {
        self.live_in(group, &[GroupState::Running], Call::Complete)?;
        self.check_tokens(group, min_version, Call::Complete)?;
        self.change(group, |found| found.finish_all(min_version));
        Ok(())
    }

    /// Completes all of these running groups, or none if one of them cannot be.
    ///
    /// # Errors
    /// As [`Ledger::complete`], and [`LedgerError::RepeatedGroup`].
    pub fn complete_many(&mut self, groups: &[GroupId]) -> Result<(), LedgerError> {
        let call = Call::CompleteMany;
        let mut seen = BTreeSet::new();
        for &group in groups {
            self.live_in(group, &[GroupState::Running], call)?;
            if !seen.insert(group) {
                return Err(LedgerError::RepeatedGroup { group, call });
            }
        }
        for &group in groups {
            self.change(group, |found| found.finish_all(None));
        }
        Ok(())
    }

    /// Ends a running or complete group that failed or was cancelled. Its place is free at once.
    ///
    /// # Errors
    /// [`LedgerError::Argument`] for an empty reason, [`LedgerError::UnknownGroup`], or
    /// [`LedgerError::GroupState`] if it is leased.
    pub fn abort(&mut self, group: GroupId, reason: &str) -> Result<(), LedgerError> {
        check_reason(reason)?;
        self.live_in(group, &[GroupState::Running, GroupState::Complete], Call::Abort)?;
        self.end(group);
        *self.books.aborted.entry(reason.to_owned()).or_default() += 1;
        Ok(())
    }

    /// Ends a complete group that has nothing to teach. Its place is free at once.
    ///
    /// # Errors
    /// [`LedgerError::Argument`] for an empty reason, [`LedgerError::UnknownGroup`], or
    /// [`LedgerError::GroupState`] unless it is complete.
    pub fn filter(&mut self, group: GroupId, reason: &str) -> Result<(), LedgerError> {
        check_reason(reason)?;
        self.live_in(group, &[GroupState::Complete], Call::Filter)?;
        self.end(group);
        *self.books.filtered.entry(reason.to_owned()).or_default() += 1;
        Ok(())
    }

    fn was_admitted(&self, group: GroupId) -> bool {
        GroupId(0) < group && group < self.books.next_id
    }

    fn live(&self, group: GroupId, call: Call) -> Result<&Group, LedgerError> {
        self.books.groups.get(&group).ok_or(LedgerError::UnknownGroup { group, call })
    }

    fn live_in(&self, group: GroupId, states: &[GroupState], call: Call) -> Result<&Group, LedgerError> {
        let found = self.live(group, call)?;
        let state = found.state();
        if states.contains(&state) { Ok(found) } else { Err(LedgerError::GroupState { group, state, call }) }
    }

    fn check_tokens(
        &self,
        group: GroupId,
        min_version: Option<Version>,
        call: Call,
    ) -> Result<(), LedgerError> {
        let oldest = self.live(group, call)?.version;
        let published = self.published();
        match min_version {
            Some(version) if version < oldest || version > published => {
                Err(LedgerError::TokenVersion { group, version, oldest, published, call })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Changes a running group and gives it its new place in the window.
    fn change(&mut self, group: GroupId, change: impl FnOnce(&mut Group)) -> Option<GroupState> {
        let max_staleness = self.books.config.max_staleness();
        let found = self.books.groups.get_mut(&group)?;
        let before = found.version.deadline(max_staleness);
        change(found);
        if found.state() == GroupState::Complete {
            self.window.remove(group, before);
            self.window.insert_complete(group, found.version.deadline(max_staleness));
        }
        Some(found.state())
    }

    fn end(&mut self, group: GroupId) {
        if let Some(ended) = self.books.groups.remove(&group) {
            self.window.remove(group, self.deadline(ended.version));
        }
    }
}

fn check_reason(reason: &str) -> Result<(), LedgerError> {
    if reason.is_empty() {
        let allowed = "a text that is not empty".to_owned();
        return Err(LedgerError::Argument { name: "reason", value: "''".to_owned(), allowed });
    }
    Ok(())
}
