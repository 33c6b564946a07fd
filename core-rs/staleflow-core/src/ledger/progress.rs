//! What happens to a group between admission and consumption: its members run and finish, or it ends early.

use std::borrow::Cow;

use super::Ledger;
use super::admission::{Refusal, check_engine};
use super::group::{Group, Member, Report};
use super::journal::Change;
use super::statistics::count;
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
        let call = Call::GroupVersion;
        self.live.get(group).map(|found| found.version).ok_or(LedgerError::UnknownGroup { group, call })
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
        let published = self.published;
        let (found, members) = self.live_in(group, &[GroupState::Running], call)?;
        let obstacle = members.get(member).map_or(Some(MemberState::Absent), |found| found.start_obstacle());
        if let Some(state) = obstacle {
            return Err(LedgerError::MemberState { group, member, state, call });
        }
        if let Err(refusal) = check_engine(engine_version, found.version, published) {
            return Ok(Err(refusal));
        }
        members[member].start();
        self.note(&Change::StartMember { group, member, version: engine_version });
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
        if member >= self.config().members() {
            return Err(LedgerError::MemberState { group, member, state: MemberState::Absent, call });
        }
        let finish = self.finish_admitted(group, member, min_version, attempt)?;
        self.note(&Change::FinishMember { group, member, min_version, attempt });
        Ok(finish)
    }

    fn finish_admitted(
        &mut self,
        group: GroupId,
        member: usize,
        min_version: Option<Version>,
        attempt: u64,
    ) -> Result<Finish, LedgerError> {
        let (call, published) = (Call::FinishMember, self.published);
        if let Some((found, members)) = self.live.get_mut(group) {
            match found.judge(members[member], attempt) {
                Report::Illegal(state) => {
                    return Err(LedgerError::MemberState { group, member, state, call });
                }
                Report::Current => {
                    check_tokens(found, min_version, published, call)?;
                    let admitted = found.version;
                    found.finish(members, member, min_version);
                    let (state, version) = (found.state(), found.version);
                    return Ok(if state == GroupState::Complete {
                        self.completed(group, admitted, version);
                        Finish::Group
                    } else {
                        Finish::Member
                    });
                }
                Report::Late => {}
            }
        }
        self.ended.late_completions = self.ended.late_completions.saturating_add(1);
        Ok(Finish::Late)
    }

    /// Completes a running group: as many unfinished members as it needs finish, the first ones, with `min_version`
    /// as their oldest version.
    ///
    /// # Errors
    /// [`LedgerError::UnknownGroup`], [`LedgerError::GroupState`] unless it is running, or
    /// [`LedgerError::TokenVersion`].
    pub fn complete(&mut self, group: GroupId, min_version: Option<Version>) -> Result<(), LedgerError> {
        let published = self.published;
        let (found, members) = self.live_in(group, &[GroupState::Running], Call::Complete)?;
        check_tokens(found, min_version, published, Call::Complete)?;
        let admitted = found.version;
        found.finish_all(members, min_version);
        let version = found.version;
        self.completed(group, admitted, version);
        self.note(&Change::Complete { group, min_version });
        Ok(())
    }

    /// Completes all of these running groups, or none if one of them cannot be.
    ///
    /// # Errors
    /// As [`Ledger::complete`], and [`LedgerError::RepeatedGroup`].
    pub fn complete_many(&mut self, groups: &[GroupId]) -> Result<(), LedgerError> {
        let call = Call::CompleteMany;
        for &group in groups {
            self.live_in(group, &[GroupState::Running], call)?;
        }
        if let Some(group) = repeated(groups) {
            return Err(LedgerError::RepeatedGroup { group, call });
        }
        for &group in groups {
            let (found, members) = self.live_in(group, &[GroupState::Running], call)?;
            found.finish_all(members, None);
            let version = found.version;
            self.completed(group, version, version);
        }
        if !groups.is_empty() {
            self.note(&Change::CompleteMany { groups: Cow::Borrowed(groups) });
        }
        Ok(())
    }

    /// Completes a running group with the members that have finished, fewer than the group size. The others are not
    /// needed any more.
    ///
    /// # Errors
    /// [`LedgerError::UnknownGroup`], [`LedgerError::GroupState`] unless it is running, or
    /// [`LedgerError::NoMemberFinished`].
    pub fn close_short(&mut self, group: GroupId) -> Result<(), LedgerError> {
        let (found, members) = self.live_in(group, &[GroupState::Running], Call::CloseShort)?;
        if !Group::has_finished_member(members) {
            return Err(LedgerError::NoMemberFinished { group });
        }
        let admitted = found.version;
        found.complete(members);
        let version = found.version;
        self.completed(group, admitted, version);
        self.ended.closed_short += 1;
        self.note(&Change::CloseShort { group });
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
        count(&mut self.ended.aborted, reason);
        self.note(&Change::Abort { group, reason });
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
        count(&mut self.ended.filtered, reason);
        self.note(&Change::Filter { group, reason });
        Ok(())
    }

    fn was_admitted(&self, group: GroupId) -> bool {
        GroupId(0) < group && group < self.next_id
    }

    fn live_in(
        &mut self,
        group: GroupId,
        states: &[GroupState],
        call: Call,
    ) -> Result<(&mut Group, &mut [Member]), LedgerError> {
        let found = self.live.get_mut(group).ok_or(LedgerError::UnknownGroup { group, call })?;
        let state = found.0.state();
        if states.contains(&state) { Ok(found) } else { Err(LedgerError::GroupState { group, state, call }) }
    }

    /// Gives a group that was admitted at one version and has become complete at another its place in the window.
    fn completed(&mut self, group: GroupId, admitted: Version, version: Version) {
        self.window.remove_running(self.deadline(admitted));
        self.window.insert_complete(group, self.deadline(version));
    }

    fn end(&mut self, id: GroupId) {
        let Some(group) = self.live.remove(id) else { return };
        let deadline = self.deadline(group.version);
        match group.state() {
            GroupState::Running => self.window.remove_running(deadline),
            GroupState::Complete => self.window.remove_complete(deadline, |id| self.live.is_complete(id)),
            GroupState::Leased => {}
        }
    }
}

/// A group that is named more than once.
fn repeated(groups: &[GroupId]) -> Option<GroupId> {
    if groups.is_sorted_by(|earlier, later| earlier < later) {
        return None;
    }
    let mut sorted = groups.to_vec();
    sorted.sort_unstable();
    sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}

/// Refuses a report of a token that the group cannot hold.
fn check_tokens(
    group: &Group,
    min_version: Option<Version>,
    published: Version,
    call: Call,
) -> Result<(), LedgerError> {
    match min_version {
        Some(version) if version < group.version || version > published => Err(LedgerError::TokenVersion {
            group: group.id,
            version,
            oldest: group.version,
            published,
            call,
        }),
        Some(_) | None => Ok(()),
    }
}

fn check_reason(reason: &str) -> Result<(), LedgerError> {
    if reason.is_empty() {
        let allowed = "a text that is not empty".to_owned();
        return Err(LedgerError::Argument { name: "reason", value: "''".to_owned(), allowed });
    }
    Ok(())
}
