//! A small ledger, every move the system around it can make, and a bystander who keeps an own account of both.

use std::rc::Rc;

use staleflow_core::error::LedgerError;
use staleflow_core::ids::{Batch, GroupId, Version};
use staleflow_core::ledger::{Finish, Lease, Ledger, LedgerConfig, Refusal};

use crate::oracle::Live;

/// What makes one world different from another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    pub(crate) batch: usize,
    pub(crate) staleness: u64,
    pub(crate) members: usize,
    pub(crate) extra_groups: usize,
    pub(crate) extra_members: usize,
    /// Attempts of a member after its first; one more than enough differs by nothing but its number.
    pub(crate) restarts: u64,
    /// How many groups are running or complete at a time, if fewer than the ledger admits.
    pub(crate) live_limit: Option<usize>,
    /// Whether states that differ by the order of admission are told apart.
    pub(crate) ordered: bool,
    /// Whether the ledger may be drained, in any state.
    pub(crate) drains: bool,
}

impl Size {
    /// Places to a batch that admission counts with.
    pub(crate) fn places(&self) -> usize {
        self.batch + self.extra_groups
    }

    /// Members that are played; the first ones to finish make a group complete.
    pub(crate) fn played(&self) -> usize {
        self.members + self.extra_members
    }

    fn config(&self) -> LedgerConfig {
        let signed = |count| i64::try_from(count).unwrap();
        LedgerConfig::new(signed(self.batch), i64::try_from(self.staleness).unwrap(), signed(self.members))
            .and_then(|config| config.with_extra_groups(signed(self.extra_groups)))
            .and_then(|config| config.with_extra_members(signed(self.extra_members)))
            .unwrap()
    }
}

pub(crate) const MOST_MEMBERS: usize = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Member {
    Waiting,
    Running {
        engine: u64,
        attempt: u64,
    },
    /// `token` is the oldest one that it may hold; an engine keeps its version until it tells.
    Finished {
        token: u64,
        reported: Option<u64>,
        attempt: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    Running,
    Complete,
    Leased,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Group {
    pub(crate) id: GroupId,
    pub(crate) place: Place,
    pub(crate) version: u64,
    pub(crate) members: [Member; MOST_MEMBERS],
}

#[derive(Debug, Clone)]
pub(crate) struct OutForTraining {
    pub(crate) held: bool,
    pub(crate) groups: Vec<GroupId>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Move {
    Admit { engine: u64 },
    Start { group: GroupId, member: usize, engine: u64 },
    Finish { group: GroupId, member: usize, attempt: u64, report: Option<u64> },
    Complete { group: GroupId, report: Option<u64> },
    CloseShort { group: GroupId },
    Abort { group: GroupId },
    Filter { group: GroupId },
    Consume,
    Publish,
    Release,
    Drain,
}

/// What the ledger said to a move.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Admit(Result<GroupId, Refusal>),
    Start(Result<Result<(), Refusal>, LedgerError>),
    Finish(Result<Finish, LedgerError>),
    Consume(Result<Lease, LedgerError>),
    Other(Result<(), LedgerError>),
}

/// How groups ended, and what was heard too late.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Account {
    pub(crate) admitted: u64,
    pub(crate) trained: u64,
    pub(crate) filtered: u64,
    pub(crate) aborted: u64,
    pub(crate) expired: u64,
    pub(crate) closed_short: u64,
    pub(crate) late: u64,
}

/// The moves that led to a state, last one first.
#[derive(Debug)]
pub(crate) struct Past {
    last: Move,
    before: Option<Rc<Past>>,
}

#[derive(Debug, Clone)]
pub(crate) struct World {
    pub(crate) size: Size,
    pub(crate) ledger: Ledger,
    pub(crate) published: u64,
    pub(crate) draining: bool,
    /// Running, complete and leased ones as admitted.
    pub(crate) groups: Vec<Group>,
    pub(crate) lease: Option<OutForTraining>,
    pub(crate) account: Account,
    past: Option<Rc<Past>>,
}

impl World {
    pub(crate) fn new(size: Size) -> Self {
        Self {
            size,
            ledger: Ledger::new(size.config()),
            published: 0,
            draining: false,
            groups: Vec::new(),
            lease: None,
            account: Account::default(),
            past: None,
        }
    }

    /// The same world with another ledger.
    pub(crate) fn with_ledger(&self, ledger: Ledger) -> Self {
        Self { ledger, ..self.clone() }
    }

    pub(crate) fn is_held(&self) -> bool {
        self.lease.as_ref().is_some_and(|lease| lease.held)
    }

    pub(crate) fn next_batch(&self) -> u64 {
        self.published + u64::from(self.is_held())
    }

    /// The first batch with places to give: a lease fills its own.
    pub(crate) fn first_batch(&self) -> u64 {
        self.published + u64::from(self.lease.is_some())
    }

    pub(crate) fn in_place(&self, place: Place) -> impl Iterator<Item = &Group> {
        self.groups.iter().filter(move |group| group.place == place)
    }

    /// The deadlines of the groups that still need a place.
    pub(crate) fn live(&self) -> Live {
        let due = |place| self.in_place(place).map(|group| group.version + self.size.staleness).collect();
        Live { running: due(Place::Running), complete: due(Place::Complete) }
    }

    /// Versions on both sides of everything admission distinguishes.
    pub(crate) fn engine_versions(&self) -> impl Iterator<Item = u64> + use<> {
        self.next_batch().saturating_sub(self.size.staleness + 1)..=self.published + 1
    }

    /// What can be known of this state up to a renaming of groups and a shift of all versions.
    pub(crate) fn shape(&self) -> Vec<u8> {
        let mut groups: Vec<Vec<u8>> = self.groups.iter().map(|group| self.kind(group)).collect();
        if !self.size.ordered {
            groups.sort_unstable();
        }
        let lease = self.lease.as_ref().map_or(0, |lease| 1 + u8::from(lease.held));
        let history = byte(self.published.min(self.size.staleness + 1));
        [vec![lease, history, u8::from(self.draining)], groups.concat()].concat()
    }

    /// The moves that are worth making: of groups that are alike, one moves for all.
    pub(crate) fn moves(&self) -> Vec<Move> {
        let mut moves = vec![Move::Consume, Move::Publish, Move::Release];
        if self.size.drains && !self.draining {
            moves.push(Move::Drain);
        }
        let waiting = self.groups.iter().filter(|group| group.place != Place::Leased).count();
        if self.size.live_limit.is_none_or(|limit| waiting < limit) {
            moves.extend(self.engine_versions().map(|engine| Move::Admit { engine }));
        }
        let mut kinds = Vec::new();
        for group in &self.groups {
            let kind = self.kind(group);
            if self.size.ordered || !kinds.contains(&kind) {
                self.push_moves_of(group, &mut moves);
                kinds.push(kind);
            }
        }
        moves
    }

    fn push_moves_of(&self, found: &Group, moves: &mut Vec<Move>) {
        let group = found.id;
        match found.place {
            Place::Leased => return,
            Place::Complete => moves.push(Move::Filter { group }),
            Place::Running => {
                let versions = found.version..=self.published;
                let reports = || versions.clone().map(Some).chain([None]);
                moves.extend(reports().map(|report| Move::Complete { group, report }));
                if self.size.played() > 1 {
                    moves.push(Move::CloseShort { group });
                }
                for (member, state) in found.members[..self.size.played()].iter().enumerate() {
                    let versions = found.version.saturating_sub(1)..=self.published + 1;
                    let starts = versions.map(|engine| Move::Start { group, member, engine });
                    match *state {
                        Member::Waiting => moves.extend(starts),
                        Member::Running { attempt, .. } => {
                            let finish = |report| Move::Finish { group, member, attempt, report };
                            moves.extend(reports().map(finish));
                            if attempt < self.size.restarts {
                                moves.extend(starts);
                            }
                        }
                        Member::Finished { .. } => {}
                    }
                }
            }
        }
        moves.push(Move::Abort { group });
    }

    /// Makes the move, asserts what the protocol says of the answer.
    pub(crate) fn apply(&mut self, next: Move) -> Answer {
        self.past = Some(Rc::new(Past { last: next, before: self.past.take() }));
        match next {
            Move::Admit { engine } => self.admit(engine),
            Move::Start { group, member, engine } => self.start(group, member, engine),
            Move::Finish { group, member, attempt, report } => self.finish(group, member, attempt, report),
            Move::Complete { group, report } => self.complete(group, report),
            Move::CloseShort { group } => self.close_short(group),
            Move::Abort { group } => {
                self.account.aborted += 1;
                self.groups.retain(|found| found.id != group);
                Answer::Other(self.ledger.abort(group, "moved"))
            }
            Move::Filter { group } => {
                self.account.filtered += 1;
                self.groups.retain(|found| found.id != group);
                Answer::Other(self.ledger.filter(group, "moved"))
            }
            Move::Consume => self.consume(),
            Move::Publish => self.publish(),
            Move::Release => self.release(),
            Move::Drain => {
                self.draining = true;
                self.ledger.drain();
                Answer::Other(Ok(()))
            }
        }
    }

    fn admit(&mut self, engine: u64) -> Answer {
        let answer = self.ledger.admit(Version(engine));
        if let Ok(id) = answer {
            self.account.admitted += 1;
            assert_eq!(id, GroupId(self.account.admitted));
            let mut members = [Member::Waiting; MOST_MEMBERS];
            members[0] = Member::Running { engine, attempt: 0 };
            self.groups.push(Group { id, place: Place::Running, version: engine, members });
        }
        Answer::Admit(answer)
    }

    fn start(&mut self, id: GroupId, member: usize, engine: u64) -> Answer {
        let published = self.published;
        let answer = self.ledger.start_member(id, member, Version(engine));
        let group = self.group(id);
        let fits = group.version <= engine && engine <= published;
        assert_eq!(answer.as_ref().map(Result::is_ok), Ok(fits));
        if fits {
            let attempt = match group.members[member] {
                Member::Running { attempt, .. } => attempt + 1,
                Member::Waiting | Member::Finished { .. } => 0,
            };
            group.members[member] = Member::Running { engine, attempt };
        }
        Answer::Start(answer)
    }

    fn finish(&mut self, id: GroupId, member: usize, attempt: u64, report: Option<u64>) -> Answer {
        for late in [attempt.wrapping_sub(1), attempt + 1] {
            assert_eq!(self.ledger.finish_member(id, member, report.map(Version), late), Ok(Finish::Late));
            self.account.late += 1;
        }
        let answer = self.ledger.finish_member(id, member, report.map(Version), attempt);
        let size = self.size;
        let group = self.group(id);
        let Member::Running { engine, .. } = group.members[member] else {
            panic!("{group:?} runs no {member}")
        };
        let token = report.unwrap_or(engine);
        group.members[member] = Member::Finished { token, reported: report, attempt };
        let whole = group.finished() == size.members;
        assert_eq!(answer, Ok(if whole { Finish::Group } else { Finish::Member }));
        if whole {
            self.complete_group(id);
        }
        Answer::Finish(answer)
    }

    fn complete(&mut self, id: GroupId, report: Option<u64>) -> Answer {
        let answer = self.ledger.complete(id, report.map(Version));
        assert_eq!(answer, Ok(()));
        let needed = self.size.members;
        let played = self.size.played();
        let group = self.group(id);
        let missing = needed - group.finished();
        let unfinished = |member: &&mut Member| !matches!(member, Member::Finished { .. });
        let version = group.version;
        for member in group.members[..played].iter_mut().filter(unfinished).take(missing) {
            let (engine, attempt) = match *member {
                Member::Running { engine, attempt } => (engine, attempt),
                Member::Waiting | Member::Finished { .. } => (version, 0),
            };
            *member = Member::Finished { token: report.unwrap_or(engine), reported: report, attempt };
        }
        self.complete_group(id);
        Answer::Other(answer)
    }

    fn close_short(&mut self, id: GroupId) -> Answer {
        let answer = self.ledger.close_short(id);
        if self.group(id).finished() > 0 {
            assert_eq!(answer, Ok(()));
            self.account.closed_short += 1;
            self.complete_group(id);
        } else {
            assert_eq!(answer, Err(LedgerError::NoMemberFinished { group: id }));
        }
        Answer::Other(answer)
    }

    /// The version rises to the smallest report if no finished member kept silent. Whoever still runs is dismissed.
    fn complete_group(&mut self, id: GroupId) {
        let group = self.group(id);
        let finished = group.members.iter().filter_map(|member| match member {
            Member::Finished { reported, .. } => Some(*reported),
            Member::Waiting | Member::Running { .. } => None,
        });
        let lowest = finished.collect::<Option<Vec<u64>>>().and_then(|reports| reports.into_iter().min());
        group.version = lowest.unwrap_or(group.version);
        group.place = Place::Complete;
        let Group { version, members, .. } = *group;
        assert_eq!(self.ledger.group_version(id), Ok(Version(version)));
        for (member, state) in members.iter().enumerate() {
            if let Member::Running { attempt, .. } = *state {
                assert_eq!(self.ledger.finish_member(id, member, None, attempt), Ok(Finish::Late));
                self.account.late += 1;
            }
        }
    }

    fn consume(&mut self) -> Answer {
        let answer = self.ledger.consume();
        if let Ok(lease) = &answer {
            assert_eq!(lease.batch, Batch(self.published));
            if let Some(released) = self.lease.take() {
                assert_eq!((&lease.groups, &lease.expired), (&released.groups, &vec![]));
            } else {
                let mut due: Vec<(u64, GroupId)> =
                    self.in_place(Place::Complete).map(|group| (group.version, group.id)).collect();
                due.sort_unstable();
                due.truncate(self.size.batch);
                assert_eq!(lease.groups, due.iter().map(|(_, id)| *id).collect::<Vec<_>>());
                assert_eq!(lease.groups.len(), self.size.batch);
            }
            for id in &lease.groups {
                self.group(*id).place = Place::Leased;
            }
            self.expire(lease);
            self.lease = Some(OutForTraining { held: true, groups: lease.groups.clone() });
        }
        Answer::Consume(answer)
    }

    /// With extra groups, those that are not in the batch and due by it are lost.
    fn expire(&mut self, lease: &Lease) {
        let (staleness, batch) = (self.size.staleness, lease.batch.0);
        let late = |group: &Group| group.place != Place::Leased && group.version + staleness <= batch;
        let expired: Vec<GroupId> =
            self.groups.iter().filter(|group| late(group)).map(|group| group.id).collect();
        self.groups.retain(|group| !late(group));
        self.account.expired += expired.len() as u64;
        assert_eq!(lease.expired, expired);
    }

    fn publish(&mut self) -> Answer {
        let answer = self.ledger.publish(Version(self.published + 1));
        assert_eq!(answer.is_ok(), self.is_held());
        if answer.is_ok() {
            self.published += 1;
            self.lease = None;
            self.account.trained += self.in_place(Place::Leased).count() as u64;
            self.groups.retain(|group| group.place != Place::Leased);
        }
        Answer::Other(answer)
    }

    fn release(&mut self) -> Answer {
        let answer = self.ledger.release(Batch(self.published));
        assert_eq!(answer.is_ok(), self.is_held());
        if let Some(lease) = &mut self.lease {
            lease.held = false;
        }
        Answer::Other(answer)
    }

    fn group(&mut self, id: GroupId) -> &mut Group {
        self.groups.iter_mut().find(|group| group.id == id).expect("the group is live")
    }

    fn kind(&self, group: &Group) -> Vec<u8> {
        let age = |version: u64| byte(self.published + 1 - version);
        let mut kind = vec![group.place as u8, age(group.version)];
        if group.place != Place::Running {
            kind.push(age(group.oldest_token()));
            return kind;
        }
        for member in &group.members[..self.size.played()] {
            match *member {
                Member::Waiting => kind.push(0),
                Member::Running { engine, attempt } => kind.extend([1, age(engine), byte(attempt)]),
                Member::Finished { token, reported, .. } => {
                    kind.extend([2, age(token), u8::from(reported.is_some())]);
                }
            }
        }
        kind
    }
}

impl Group {
    fn finished(&self) -> usize {
        self.members.iter().filter(|member| matches!(member, Member::Finished { .. })).count()
    }

    /// The oldest token that may be in this finished group.
    pub(crate) fn oldest_token(&self) -> u64 {
        let tokens = self.members.iter().filter_map(|member| match member {
            Member::Finished { token, .. } => Some(*token),
            Member::Waiting | Member::Running { .. } => None,
        });
        tokens.min().expect("some member is finished")
    }
}

/// Tells how a state came about if its test fails.
pub(crate) struct Witness<'a>(pub(crate) &'a World);

impl Drop for Witness<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let steps = std::iter::successors(self.0.past.as_deref(), |past| past.before.as_deref());
            let mut moves: Vec<Move> = steps.map(|past| past.last).collect();
            moves.reverse();
            eprintln!("{:?}, after {moves:#?}", self.0.size);
        }
    }
}

fn byte(number: u64) -> u8 {
    u8::try_from(number).expect("small worlds have small numbers")
}
