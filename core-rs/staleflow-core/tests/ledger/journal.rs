//! Random use of a ledger, and a journal that keeps its own account of what happened.

use std::collections::BTreeMap;

use proptest::prelude::*;
use staleflow_core::ids::{Batch, GroupId, Version};
use staleflow_core::ledger::{Finish, Ledger, LedgerConfig};

/// One thing that the system around a ledger does. `pick` chooses among the groups it can be done to.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// Admit on an engine that lags this far behind a version not published yet.
    Admit { lag: u64 },
    /// Start or restart a member on such an engine.
    Start { pick: usize, member: usize, lag: u64 },
    /// Finish a member whose engine pulled `pulls` newer versions before its first token.
    Finish { pick: usize, member: usize, pulls: u64, report: bool },
    /// A member's earlier attempt is heard of after all.
    FinishLate { pick: usize, member: usize },
    /// Finish all members of a group.
    Complete { pick: usize, report: bool },
    /// Abort a running group.
    AbortRunning { pick: usize },
    /// Abort a complete group.
    AbortComplete { pick: usize },
    /// Filter a complete group.
    Filter { pick: usize },
    /// Consume, if ready.
    Consume,
    /// Publish, if a lease is held.
    Publish,
    /// Release, if a lease is held.
    Release,
    /// Replace the ledger by its restored snapshot.
    Crash,
}

/// Where the journal believes a group is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Running,
    Complete,
    Leased,
    Trained(u64),
    Aborted,
    Filtered,
}

#[derive(Debug, Clone)]
pub(crate) struct Group {
    pub(crate) place: Place,
    pub(crate) version: u64,
    members: Vec<Member>,
}

#[derive(Debug, Clone, Default)]
struct Member {
    /// Version of the engine at the start of the current attempt.
    engine: Option<u64>,
    attempt: u64,
    /// Version of the oldest token, once finished.
    oldest_token: Option<u64>,
    reported: Option<u64>,
}

#[derive(Debug, Clone)]
pub(crate) struct Journal {
    pub(crate) ledger: Ledger,
    pub(crate) groups: BTreeMap<GroupId, Group>,
    pub(crate) late: u64,
    lease: Option<Vec<GroupId>>,
    /// What a released lease has to hand out again.
    released: Option<Vec<GroupId>>,
}

impl Group {
    /// The oldest token that is sampled in this finished group.
    pub(crate) fn oldest_token(&self) -> u64 {
        self.members.iter().map(|member| member.oldest_token.expect("the group is finished")).min().unwrap()
    }

    fn complete(&mut self) {
        self.place = Place::Complete;
        let reported: Option<Vec<u64>> = self.members.iter().map(|member| member.reported).collect();
        self.version = reported.map_or(self.version, |versions| versions.into_iter().min().unwrap());
    }
}

impl Journal {
    pub(crate) fn new(config: LedgerConfig) -> Self {
        let ledger = Ledger::new(config);
        Self { ledger, groups: BTreeMap::new(), late: 0, lease: None, released: None }
    }

    pub(crate) fn in_place(&self, place: Place) -> Vec<GroupId> {
        self.groups.iter().filter(|(_, group)| group.place == place).map(|(id, _)| *id).collect()
    }

    /// Takes the step if the system could, and says what the ledger answered.
    pub(crate) fn take(&mut self, step: &Step) -> String {
        match *step {
            Step::Admit { lag } => self.admit(lag),
            Step::Start { pick, member, lag } => self.start(pick, member, lag),
            Step::Finish { pick, member, pulls, report } => self.finish(pick, member, pulls, report),
            Step::FinishLate { pick, member } => self.finish_late(pick, member),
            Step::Complete { pick, report } => self.complete(pick, report),
            Step::AbortRunning { pick } => self.end(pick, Place::Running, Place::Aborted),
            Step::AbortComplete { pick } => self.end(pick, Place::Complete, Place::Aborted),
            Step::Filter { pick } => self.end(pick, Place::Complete, Place::Filtered),
            Step::Consume => self.consume(),
            Step::Publish => self.publish(),
            Step::Release => self.release(),
            Step::Crash => {
                self.ledger = Ledger::restore(&self.ledger.snapshot()).unwrap();
                "restored".to_owned()
            }
        }
    }

    fn engine(&self, lag: u64) -> u64 {
        (self.ledger.published().0 + 1).saturating_sub(lag)
    }

    fn pick(&self, pick: usize, place: Place) -> Option<GroupId> {
        let candidates = self.in_place(place);
        candidates.get(pick % candidates.len().max(1)).copied()
    }

    fn group(&mut self, id: GroupId) -> &mut Group {
        self.groups.get_mut(&id).expect("the id was picked from the journal")
    }

    fn admit(&mut self, lag: u64) -> String {
        let version = self.engine(lag);
        let answer = self.ledger.admit(Version(version));
        if let Ok(id) = answer {
            let mut members = vec![Member::default(); self.ledger.config().group_size() as usize];
            members[0].engine = Some(version);
            self.groups.insert(id, Group { place: Place::Running, version, members });
        }
        format!("{answer:?}")
    }

    fn start(&mut self, pick: usize, member: usize, lag: u64) -> String {
        let (engine, published) = (self.engine(lag), self.ledger.published().0);
        let Some(id) = self.pick(pick, Place::Running) else { return String::new() };
        let group = self.groups.get_mut(&id).unwrap();
        let index = member % group.members.len();
        let member = &mut group.members[index];
        if member.oldest_token.is_some() {
            return String::new();
        }
        let answer = self.ledger.start_member(id, index, Version(engine)).unwrap();
        assert_eq!(answer.is_ok(), group.version <= engine && engine <= published);
        if answer.is_ok() {
            member.attempt += u64::from(member.engine.is_some());
            member.engine = Some(engine);
        }
        format!("{answer:?}")
    }

    fn finish(&mut self, pick: usize, member: usize, pulls: u64, report: bool) -> String {
        let published = self.ledger.published().0;
        let Some(id) = self.pick(pick, Place::Running) else { return String::new() };
        let group = self.groups.get_mut(&id).unwrap();
        let index = member % group.members.len();
        let member = &mut group.members[index];
        let (Some(engine), None) = (member.engine, member.oldest_token) else { return String::new() };
        let token = (engine + pulls).min(published);
        member.oldest_token = Some(token);
        member.reported = report.then_some(token);
        let answer =
            self.ledger.finish_member(id, index, member.reported.map(Version), member.attempt).unwrap();
        let all_finished = group.members.iter().all(|member| member.oldest_token.is_some());
        assert_eq!(answer, if all_finished { Finish::Group } else { Finish::Member });
        if all_finished {
            group.complete();
        }
        format!("{answer:?}")
    }

    fn finish_late(&mut self, pick: usize, member: usize) -> String {
        let ids: Vec<GroupId> = self.groups.keys().copied().collect();
        let Some(id) = ids.get(pick % ids.len().max(1)) else { return String::new() };
        let group = &self.groups[id];
        let index = member % group.members.len();
        let member = &group.members[index];
        let attempt = match group.place {
            Place::Trained(_) | Place::Aborted | Place::Filtered => member.attempt,
            Place::Running | Place::Complete | Place::Leased if member.attempt > 0 => member.attempt - 1,
            Place::Running | Place::Complete | Place::Leased => return String::new(),
        };
        let answer = self.ledger.finish_member(*id, index, None, attempt).unwrap();
        assert_eq!(answer, Finish::Late);
        self.late += 1;
        format!("{answer:?}")
    }

    fn complete(&mut self, pick: usize, report: bool) -> String {
        let Some(id) = self.pick(pick, Place::Running) else { return String::new() };
        let group = self.groups.get_mut(&id).unwrap();
        let version = group.version;
        let unfinished = group.members.iter_mut().filter(|member| member.oldest_token.is_none());
        let mut unfinished: Vec<&mut Member> = unfinished.collect();
        let oldest = unfinished.iter().map(|member| member.engine.unwrap_or(version)).min().unwrap();
        for member in &mut unfinished {
            member.oldest_token = Some(oldest);
            member.reported = report.then_some(oldest);
        }
        group.complete();
        self.ledger.complete(id, report.then_some(Version(oldest))).unwrap();
        "complete".to_owned()
    }

    fn end(&mut self, pick: usize, from: Place, to: Place) -> String {
        let Some(id) = self.pick(pick, from) else { return String::new() };
        let answer = match to {
            Place::Filtered => self.ledger.filter(id, "all rewards equal"),
            _ => self.ledger.abort(id, "engine lost"),
        };
        self.group(id).place = to;
        format!("{answer:?}")
    }

    fn consume(&mut self) -> String {
        let ready = self.ledger.is_ready();
        let answer = self.ledger.consume();
        assert_eq!(answer.is_ok(), ready);
        if let Ok(lease) = &answer {
            if let Some(released) = self.released.take() {
                assert_eq!(lease.groups, released);
            }
            for id in &lease.groups {
                self.group(*id).place = Place::Leased;
            }
            self.lease = Some(lease.groups.clone());
        }
        format!("{answer:?}")
    }

    fn publish(&mut self) -> String {
        let batch = self.ledger.published().0;
        let Some(groups) = self.lease.take() else { return String::new() };
        self.ledger.publish(Version(batch + 1)).unwrap();
        for id in groups {
            let place = &mut self.group(id).place;
            assert_eq!(*place, Place::Leased, "group {id} is trained twice");
            *place = Place::Trained(batch);
        }
        "published".to_owned()
    }

    fn release(&mut self) -> String {
        let Some(groups) = self.lease.take() else { return String::new() };
        self.ledger.release(Batch(self.ledger.published().0)).unwrap();
        self.released = Some(groups);
        "released".to_owned()
    }

    /// Trains one batch the way a healthy system does: engines sync, all running groups finish, new ones fill up.
    pub(crate) fn train_one_batch(&mut self) {
        self.publish();
        let published = self.ledger.published();
        while self.ledger.capacity(published) > 0 {
            self.admit(1);
        }
        while !self.in_place(Place::Running).is_empty() {
            self.complete(0, false);
        }
        assert!(self.ledger.is_ready());
        self.consume();
        self.publish();
    }
}

/// Small ledgers: small numbers meet every boundary often.
pub(crate) fn configs() -> impl Strategy<Value = LedgerConfig> {
    (1_i64..=4, 0_i64..=4, 1_i64..=3)
        .prop_map(|(batch, staleness, group)| LedgerConfig::new(batch, staleness, group).unwrap())
}

/// Ledgers of a size that is met in use, a window of up to two hundred groups among them.
pub(crate) fn large_configs() -> impl Strategy<Value = LedgerConfig> {
    (4_i64..=24, 0_i64..=8, 1_i64..=4)
        .prop_map(|(batch, staleness, group)| LedgerConfig::new(batch, staleness, group).unwrap())
}

/// Steps in proportions that fill, drain and break batches again and again.
pub(crate) fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 0..150)
}

/// Enough steps to fill large windows and to train several batches.
pub(crate) fn many_steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 300..1000)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0_u64..6).prop_map(|lag| Step::Admit { lag }),
        4 => (any::<usize>(), any::<usize>(), 0_u64..5)
            .prop_map(|(pick, member, lag)| Step::Start { pick, member, lag }),
        6 => (any::<usize>(), any::<usize>(), 0_u64..4, any::<bool>())
            .prop_map(|(pick, member, pulls, report)| Step::Finish { pick, member, pulls, report }),
        1 => (any::<usize>(), any::<usize>()).prop_map(|(pick, member)| Step::FinishLate { pick, member }),
        4 => (any::<usize>(), any::<bool>()).prop_map(|(pick, report)| Step::Complete { pick, report }),
        1 => any::<usize>().prop_map(|pick| Step::AbortRunning { pick }),
        1 => any::<usize>().prop_map(|pick| Step::AbortComplete { pick }),
        1 => any::<usize>().prop_map(|pick| Step::Filter { pick }),
        6 => Just(Step::Consume),
        4 => Just(Step::Publish),
        1 => Just(Step::Release),
        1 => Just(Step::Crash),
    ]
}
