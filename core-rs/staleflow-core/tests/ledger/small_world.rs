//! Every reachable state of small ledgers, compared with an oracle that searches.
//!
//! States that differ only by ids and by a shift of all versions decide alike, so the reachable states are
//! finitely many and all of them are visited.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Mutex;
use std::thread;

use staleflow_core::error::LedgerError;
use staleflow_core::ids::{Batch, GroupId, Version};
use staleflow_core::ledger::{Finish, Ledger, Refusal};

use crate::oracle::Oracle;
use crate::world::{Place, Size, Witness, World};

/// What has to be true in every state.
type Law = fn(&World, &mut Oracle);

const LAWS: [Law; 10] =
    [never_later, admits, ready, accounts, once, restores, bounded, nothing_discarded, lives, untouched];

/// Small enough for every run of the tests, and large enough that no boundary coincides with another.
const FEW: [Size; 12] = [
    ordered(1, 0),
    ordered(3, 0),
    ordered(2, 1),
    whole_groups(1, 3),
    whole_groups(2, 2),
    whole_groups(3, 1),
    pairs(1, 1, 2),
    pairs(2, 0, 2),
    Size { extra_groups: 1, ..whole_groups(1, 1) },
    Size { extra_groups: 1, ..whole_groups(2, 1) },
    Size { extra_members: 1, live_limit: Some(2), restarts: 1, ..whole_groups(1, 1) },
    Size { extra_members: 1, ..pairs(1, 0, 2) },
];

/// Groups of one member, as many as the ledger admits.
const fn whole_groups(batch: usize, staleness: u64) -> Size {
    Size {
        batch,
        staleness,
        members: 1,
        extra_groups: 0,
        extra_members: 0,
        restarts: 0,
        live_limit: None,
        ordered: false,
        drains: false,
    }
}

const fn ordered(batch: usize, staleness: u64) -> Size {
    Size { ordered: true, drains: true, ..whole_groups(batch, staleness) }
}

/// Groups of two members that have many states each, so only so many of them live at once.
const fn pairs(batch: usize, staleness: u64, live_limit: usize) -> Size {
    Size {
        members: 2,
        live_limit: Some(live_limit),
        restarts: 1,
        drains: true,
        ..whole_groups(batch, staleness)
    }
}

/// The worlds with batches of 1 to 3 and bounds of 0 to 3, the largest first.
fn many() -> Vec<Size> {
    let mut sizes = Vec::new();
    for batch in (1..=3).rev() {
        for staleness in (0..=3).rev() {
            let places = batch * (usize::try_from(staleness).unwrap() + 1);
            sizes.push(Size { drains: places <= 6, ordered: places <= 6, ..whole_groups(batch, staleness) });
            if places <= 6 {
                sizes.push(Size { extra_groups: 1, ..whole_groups(batch, staleness) });
            }
        }
    }
    let with_extra_member = |size| Size { extra_members: 1, ..size };
    sizes.extend([
        with_extra_member(pairs(1, 1, 2)),
        with_extra_member(pairs(2, 0, 2)),
        Size { restarts: 1, ..ordered(1, 2) },
        Size { restarts: 1, ..ordered(2, 1) },
    ]);
    sizes.extend(
        [(1, 0, 3), (1, 1, 3), (1, 2, 2), (1, 3, 1)].map(|(batch, bound, live)| pairs(batch, bound, live)),
    );
    sizes.extend([(2, 0, 4), (2, 1, 2), (3, 0, 3)].map(|(batch, bound, live)| pairs(batch, bound, live)));
    sizes
}

/// What goes on from a state.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Survivor {
    Original,
    Restored,
}

/// Checks the laws in every state of the world, and counts the states.
fn explore(size: Size, laws: &[Law], survivor: Survivor) -> usize {
    let mut oracle = Oracle::default();
    let start = World::new(size);
    let mut seen = BTreeSet::from([start.shape()]);
    let mut unexplored = VecDeque::from([start]);
    while let Some(mut world) = unexplored.pop_front() {
        if survivor == Survivor::Restored {
            world.ledger = Ledger::restore(&world.ledger.snapshot()).unwrap();
        }
        let _witness = Witness(&world);
        for law in laws {
            law(&world, &mut oracle);
        }
        for next in world.moves() {
            let mut reached = world.clone();
            reached.apply(next);
            if seen.insert(reached.shape()) {
                unexplored.push_back(reached);
            }
        }
    }
    seen.len()
}

fn in_few_worlds(laws: &[Law]) {
    for size in FEW {
        let states = explore(size, laws, Survivor::Original);
        assert!(states > 4 * size.batch, "only {states} states of {size:?}");
    }
}

#[test]
#[ignore = "takes minutes; make prove runs it"]
fn every_law_in_every_state_of_many_worlds() {
    let mut sizes = many();
    sizes.reverse();
    let (sizes, total) = (Mutex::new(sizes), Mutex::new(0));
    let explore_next = || {
        while let Some(size) = { sizes.lock().unwrap().pop() } {
            let states = explore(size, &LAWS, Survivor::Restored);
            println!("{states:9} states of {size:?}");
            *total.lock().unwrap() += states;
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, Into::into) {
            scope.spawn(explore_next);
        }
    });
    let total = total.into_inner().unwrap();
    println!("{total:9} states explored");
    assert!(total >= 1_000_000);
}

#[test]
fn never_later_than_deadline() {
    in_few_worlds(&[never_later]);
}

fn never_later(world: &World, oracle: &mut Oracle) {
    let (live, first) = (world.live().all(), world.first_batch());
    if world.size.extra_groups > 0 {
        // There may be more groups than places, but none of them is late yet.
        assert!(live.iter().all(|due| *due >= first));
    } else {
        assert!(oracle.placeable(&live, first, world.size.batch));
    }
    for group in world.in_place(Place::Leased) {
        assert!(group.version + world.size.staleness >= world.published);
    }
}

#[test]
fn admits_iff_feasible() {
    in_few_worlds(&[admits]);
}

fn admits(world: &World, oracle: &mut Oracle) {
    let live = world.live().all();
    let (first, places) = (world.first_batch(), world.size.places());
    for version in world.engine_versions() {
        let deadline = version + world.size.staleness;
        let refusal = world.ledger.clone().admit(Version(version)).err();
        let room = if world.draining || version > world.published {
            0
        } else {
            oracle.room(&live, deadline, first, places)
        };
        assert_eq!(world.ledger.capacity(Version(version)), room);
        assert_eq!(world.ledger.clone().admit_many(Version(version), u64::MAX).len() as u64, room);
        let engine_version = Version(version);
        let expected = if world.draining {
            Some(Refusal::Draining)
        } else if version > world.published {
            Some(Refusal::FromFuture { engine_version, published: Version(world.published) })
        } else if deadline < world.next_batch() {
            let oldest = Version(world.next_batch() - world.size.staleness);
            Some(Refusal::TooOld { engine_version, oldest })
        } else if room == 0 {
            Some(Refusal::WindowFull { batch: Batch(first_overfull(world, oracle, deadline)) })
        } else {
            None
        };
        assert_eq!(refusal, expected);
    }
}

/// The first batch such that the groups due by then cannot all be placed, with one more of this deadline.
fn first_overfull(world: &World, oracle: &mut Oracle, deadline: u64) -> u64 {
    let live = [world.live().all(), vec![deadline]].concat();
    let overfull = |batch: &u64| {
        let due: Vec<u64> = live.iter().copied().filter(|due| due <= batch).collect();
        !oracle.placeable(&due, world.first_batch(), world.size.places())
    };
    (deadline.min(world.first_batch())..=deadline.max(world.published + world.size.staleness))
        .find(overfull)
        .unwrap()
}

#[test]
fn ready_iff_feasible() {
    in_few_worlds(&[ready]);
}

fn ready(world: &World, oracle: &mut Oracle) {
    let live = world.live();
    let (first, batch_size) = (world.first_batch(), world.size.batch);
    let feasible = match &world.lease {
        Some(lease) => !lease.held,
        None if world.size.extra_groups > 0 => live.complete.len() >= batch_size,
        None => oracle.ready(&live, first, batch_size),
    };
    assert_eq!(world.ledger.is_ready(), feasible);
    assert_eq!(world.ledger.clone().consume().is_ok(), feasible);

    let blockers = world.ledger.blockers();
    if world.lease.as_ref().is_some_and(|lease| !lease.held) {
        assert_eq!(blockers, []);
        return;
    }
    let fewest = if world.size.extra_groups > 0 {
        let missing = batch_size.saturating_sub(live.complete.len());
        (missing <= live.running.len()).then_some(missing)
    } else {
        oracle.fewest_blockers(&live, first, batch_size)
    };
    let mut running: Vec<(u64, GroupId)> =
        world.in_place(Place::Running).map(|group| (group.version, group.id)).collect();
    running.sort_unstable();
    running.truncate(fewest.unwrap_or(usize::MAX));
    assert_eq!(blockers, running.into_iter().map(|(_, id)| id).collect::<Vec<_>>());
    if fewest.is_some() {
        let mut unblocked = world.ledger.clone();
        unblocked.complete_many(&blockers).unwrap();
        if world.is_held() {
            unblocked.publish(Version(world.published + 1)).unwrap();
        }
        assert!(unblocked.is_ready());
    }
}

#[test]
fn accounting_law() {
    in_few_worlds(&[accounts]);
}

fn accounts(world: &World, _: &mut Oracle) {
    let statistics = world.ledger.statistics();
    assert!(statistics.accounting_holds());
    let count = |place| world.in_place(place).count() as u64;
    assert_eq!(statistics.admitted, world.account.admitted);
    assert_eq!(statistics.trained, world.account.trained);
    assert_eq!(statistics.filtered.values().sum::<u64>(), world.account.filtered);
    assert_eq!(statistics.aborted.values().sum::<u64>(), world.account.aborted);
    assert_eq!(statistics.expired, world.account.expired);
    assert_eq!(statistics.closed_short, world.account.closed_short);
    assert_eq!(statistics.running, count(Place::Running));
    assert_eq!(statistics.complete, count(Place::Complete));
    assert_eq!(statistics.leased, count(Place::Leased));
    assert_eq!(statistics.late_completions, world.account.late);
    assert_eq!(statistics.next_batch, Batch(world.next_batch()));
    assert_eq!(statistics.published, Version(world.published));
}

/// Consuming asserts that a released batch comes again as it was, and that every other group it hands out is one
/// that was complete. Here, what is leased can neither end otherwise nor, once it is trained, be touched again.
#[test]
fn exactly_once() {
    in_few_worlds(&[once]);
}

fn once(world: &World, _: &mut Oracle) {
    let Some(lease) = &world.lease else { return };
    let mut ledger = world.ledger.clone();
    for id in &lease.groups {
        assert!(matches!(ledger.abort(*id, "engine lost"), Err(LedgerError::GroupState { .. })));
        assert!(matches!(ledger.filter(*id, "no signal"), Err(LedgerError::GroupState { .. })));
        assert!(matches!(ledger.complete(*id, None), Err(LedgerError::GroupState { .. })));
        assert!(matches!(ledger.start_member(*id, 0, Version(0)), Err(LedgerError::GroupState { .. })));
    }
    if !lease.held {
        assert_eq!(ledger.consume().unwrap().groups, lease.groups);
    }
    assert!(matches!(ledger.consume(), Err(LedgerError::LeaseHeld { .. })));
    for version in [world.published, world.published + 2] {
        assert!(matches!(ledger.publish(Version(version)), Err(LedgerError::PublishOrder { .. })));
    }
    assert!(matches!(ledger.release(Batch(world.published + 1)), Err(LedgerError::OtherLease { .. })));
    ledger.publish(Version(world.published + 1)).unwrap();
    for id in &lease.groups {
        assert!(matches!(ledger.abort(*id, "engine lost"), Err(LedgerError::UnknownGroup { .. })));
        assert_eq!(ledger.finish_member(*id, 0, None, 0), Ok(Finish::Late));
    }
    assert_eq!(ledger.statistics().trained, world.account.trained + lease.groups.len() as u64);
}

/// The process dies in every state, and the answers to every move are the same.
#[test]
fn restore_equals_original() {
    in_few_worlds(&[restores, twins_move_alike]);
}

fn restores(world: &World, _: &mut Oracle) {
    let (original, snapshot) = (&world.ledger, world.ledger.snapshot());
    let restored = Ledger::restore(&snapshot).unwrap();
    assert_eq!(restored.snapshot(), snapshot);
    assert_eq!(restored.statistics(), original.statistics());
    assert_eq!(restored.is_ready(), original.is_ready());
    assert_eq!(restored.blockers(), original.blockers());
    for version in world.engine_versions().map(Version) {
        assert_eq!(restored.capacity(version), original.capacity(version));
    }
}

fn twins_move_alike(world: &World, _: &mut Oracle) {
    let twin = world.with_ledger(Ledger::restore(&world.ledger.snapshot()).unwrap());
    for next in world.moves() {
        let (mut from_original, mut from_restored) = (world.clone(), twin.clone());
        assert_eq!(from_restored.apply(next), from_original.apply(next));
        assert_eq!(from_restored.ledger.snapshot(), from_original.ledger.snapshot());
    }
}

/// A member that does not report may have sampled with whatever its engine served when it started.
#[test]
fn staleness_bound_holds() {
    in_few_worlds(&[bounded]);
}

fn bounded(world: &World, _: &mut Oracle) {
    for group in world.in_place(Place::Leased) {
        assert!(world.published <= group.oldest_token() + world.size.staleness);
    }
}

#[test]
fn no_finished_work_discarded() {
    in_few_worlds(&[nothing_discarded]);
}

/// From here on the system works as it should, and every group that is complete gets into a batch.
fn nothing_discarded(world: &World, _: &mut Oracle) {
    if world.size.extra_groups > 0 {
        return;
    }
    assert_eq!(world.account.expired, 0);
    let mut finished: BTreeSet<GroupId> = world.in_place(Place::Complete).map(|group| group.id).collect();
    let mut ledger = world.ledger.clone();
    publish_what_is_out(world, &mut ledger);
    while !finished.is_empty() {
        let before = ledger.published();
        ledger.complete_many(&ledger.blockers()).unwrap();
        let missing = world.size.batch as u64;
        let fresh = ledger.admit_many(before, missing);
        ledger.complete_many(&fresh).unwrap();
        let Ok(lease) = ledger.consume() else {
            assert!(world.draining, "nothing can be consumed although all work is finished");
            return;
        };
        finished.retain(|id| !lease.groups.contains(id));
        ledger.publish(before.next()).unwrap();
        assert!(
            ledger.published().0 <= world.published + world.size.staleness + 2,
            "{finished:?} wait for ever"
        );
    }
}

#[test]
fn liveness() {
    in_few_worlds(&[lives]);
}

/// Once all running groups are complete, or all have ended, and the engines have synced, the batch is ready.
fn lives(world: &World, _: &mut Oracle) {
    if world.draining {
        return;
    }
    for completes in [true, false] {
        let mut ledger = world.ledger.clone();
        publish_what_is_out(world, &mut ledger);
        for group in world.in_place(Place::Running) {
            if completes {
                ledger.complete(group.id, None).unwrap();
            } else {
                ledger.abort(group.id, "engine lost").unwrap();
            }
        }
        for _ in 0..2 {
            let fresh = ledger.admit_many(ledger.published(), u64::MAX);
            ledger.complete_many(&fresh).unwrap();
            ledger.consume().unwrap();
            ledger.publish(ledger.published().next()).unwrap();
        }
    }
}

fn publish_what_is_out(world: &World, ledger: &mut Ledger) {
    if world.lease.as_ref().is_some_and(|lease| !lease.held) {
        ledger.consume().unwrap();
    }
    if world.lease.is_some() {
        ledger.publish(Version(world.published + 1)).unwrap();
    }
}

#[test]
fn illegal_calls_change_nothing() {
    in_few_worlds(&[untouched]);
}

/// What is illegal leaves no trace.
fn untouched(world: &World, _: &mut Oracle) {
    let mut ledger = world.ledger.clone();
    let before = ledger.snapshot();
    let future = Some(Version(world.published + 1));
    for group in &world.groups {
        let id = group.id;
        assert!(ledger.complete(id, future).is_err());
        assert!(ledger.finish_member(id, world.size.played(), None, 0).is_err());
        match group.place {
            Place::Running => assert!(ledger.filter(id, "no signal").is_err()),
            Place::Complete | Place::Leased => {
                assert!(ledger.complete(id, None).is_err());
                assert!(ledger.complete_many(&[id]).is_err());
                assert!(ledger.close_short(id).is_err());
                assert!(ledger.start_member(id, 0, Version(world.published)).is_err());
            }
        }
    }
    let unknown = GroupId(world.account.admitted + 1);
    assert!(ledger.finish_member(unknown, 0, None, 0).is_err());
    assert!(ledger.abort(unknown, "engine lost").is_err());
    assert!(ledger.publish(Version(world.published)).is_err());
    assert!(ledger.publish(Version(world.published + 2)).is_err());
    assert!(ledger.release(Batch(world.published + 1)).is_err());
    assert_eq!(ledger.snapshot(), before);
}
