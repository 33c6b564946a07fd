//! What each ledger operation costs, and a group's whole life, beside bookkeeping that checks no law.
//!
//! A benchmark is named `ledger/<life>/<step>/<contestant>/<cell>`. Its iteration is a turn of a [`World`]: admit one
//! batch, complete the one admitted first, consume it, publish. Every step of the turn is timed by itself and `life` is
//! their sum; making the list of the ids due is in none of them. The throughput says how many calls (for `consume` and
//! `publish`: groups) a turn makes, so time over throughput is the cost of one.
#![expect(clippy::disallowed_methods, reason = "a benchmark is where the clock belongs")]
#![expect(missing_docs, reason = "criterion_group makes a public function")]

mod world;

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use staleflow_core::ids::{GroupId, Version};

use self::world::{Cell, World};

/// Members of a group in the lives that tell the ledger about each.
const MEMBERS: u32 = 8;

/// A part of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Admit,
    Refuse,
    Start,
    Finish,
    Complete,
    Consume,
    Publish,
    Life,
}

impl Step {
    fn name(self) -> &'static str {
        match self {
            Self::Admit => "admit",
            Self::Refuse => "refused admit",
            Self::Start => "start_member",
            Self::Finish => "finish_member",
            Self::Complete => "complete",
            Self::Consume => "consume",
            Self::Publish => "publish",
            Self::Life => "life",
        }
    }

    /// Calls per group, or shares of one call.
    fn per_group(self) -> u64 {
        match self {
            Self::Admit | Self::Refuse | Self::Complete | Self::Consume | Self::Publish | Self::Life => 1,
            Self::Start => u64::from(MEMBERS) - 1,
            Self::Finish => MEMBERS.into(),
        }
    }
}

/// Time spent in one step; the others run untimed, but on the same clock reads.
struct Watch {
    step: Step,
    spent: Duration,
}

impl Watch {
    fn time<T>(&mut self, step: Step, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = work();
        let elapsed = started.elapsed();
        if step == self.step || (self.step == Step::Life && step != Step::Refuse) {
            self.spent += elapsed;
        }
        result
    }
}

/// Takes a batch through its life with bulk calls.
fn bulk(world: &mut World, watch: &mut Watch) {
    let due = world.take_due();
    let (ledger, batch_size) = (&mut world.ledger, world.cell.batch_size);
    let version = ledger.published();
    watch.time(Step::Admit, || black_box(ledger.admit_many(version, batch_size)));
    watch.time(Step::Complete, || ledger.complete_many(black_box(&due)).unwrap());
    watch.time(Step::Consume, || black_box(ledger.consume().unwrap()));
    watch.time(Step::Publish, || ledger.publish(version.next()).unwrap());
}

/// Takes a batch through its life with a call for each group.
fn single(world: &mut World, watch: &mut Watch) {
    let due = world.take_due();
    let full = world.cell.is_full();
    let (ledger, batch_size) = (&mut world.ledger, world.cell.batch_size);
    let version = ledger.published();
    watch.time(Step::Admit, || {
        for _ in 0..batch_size {
            black_box(ledger.admit(version)).unwrap();
        }
    });
    if full {
        watch.time(Step::Refuse, || {
            for _ in 0..batch_size {
                black_box(ledger.admit(version)).unwrap_err();
            }
        });
    }
    watch.time(Step::Complete, || {
        for group in due {
            ledger.complete(black_box(group), None).unwrap();
        }
    });
    watch.time(Step::Consume, || black_box(ledger.consume().unwrap()));
    watch.time(Step::Publish, || ledger.publish(version.next()).unwrap());
}

/// Takes a batch through its life with a call for each start and end of a member.
fn members(world: &mut World, watch: &mut Watch) {
    let due = world.take_due();
    let (ledger, batch_size) = (&mut world.ledger, world.cell.batch_size);
    let version = ledger.published();
    watch.time(Step::Admit, || {
        for _ in 0..batch_size {
            black_box(ledger.admit(version)).unwrap();
        }
    });
    watch.time(Step::Start, || {
        for &group in &due {
            for member in 1..MEMBERS as usize {
                black_box(ledger.start_member(group, member, version).unwrap()).unwrap();
            }
        }
    });
    watch.time(Step::Finish, || {
        for &group in &due {
            for member in 0..MEMBERS as usize {
                black_box(ledger.finish_member(group, member, Some(version), 0).unwrap());
            }
        }
    });
    watch.time(Step::Consume, || black_box(ledger.consume().unwrap()));
    watch.time(Step::Publish, || ledger.publish(version.next()).unwrap());
}

/// The baseline: a limit on how many are live and a queue of those complete. It knows no deadline, no group's state
/// and no illegal call.
struct Counters {
    limit: u64,
    live: u64,
    last_id: u64,
    complete: VecDeque<GroupId>,
    published: Version,
}

impl Counters {
    fn new(cell: Cell) -> Self {
        let limit = (cell.max_staleness + 1) * cell.batch_size;
        let complete = VecDeque::new();
        Self { limit, live: cell.live, last_id: cell.live, complete, published: Version(0) }
    }

    fn admit(&mut self) -> Option<GroupId> {
        if self.live == self.limit {
            return None;
        }
        self.live += 1;
        self.last_id += 1;
        Some(GroupId(self.last_id))
    }

    fn consume(&mut self, batch_size: u64) -> Vec<GroupId> {
        self.live -= batch_size;
        self.complete.drain(..usize::try_from(batch_size).expect("a batch fits in memory")).collect()
    }

    fn turn(&mut self, cell: Cell, watch: &mut Watch) {
        let first = self.last_id - cell.live + 1;
        watch.time(Step::Admit, || {
            for _ in 0..cell.batch_size {
                black_box(self.admit()).unwrap();
            }
        });
        watch.time(Step::Complete, || {
            for group in first..first + cell.batch_size {
                self.complete.push_back(black_box(GroupId(group)));
            }
        });
        watch.time(Step::Consume, || black_box(self.consume(cell.batch_size)));
        watch.time(Step::Publish, || self.published = black_box(self.published.next()));
    }
}

/// Measures one step of one life in every cell.
fn measure<W>(
    criterion: &mut Criterion,
    (life, contestant): (&str, &str),
    step: Step,
    new: impl Fn(Cell) -> W,
    turn: impl Fn(&mut W, Cell, &mut Watch),
) {
    let mut group = criterion.benchmark_group(format!("ledger/{life}/{}", step.name()));
    group.sampling_mode(SamplingMode::Flat);
    for cell in Cell::grid().into_iter().filter(|cell| step != Step::Refuse || cell.is_full()) {
        group.throughput(Throughput::Elements(cell.batch_size * step.per_group()));
        let mut world = None;
        group.bench_function(BenchmarkId::new(contestant, cell), |bencher| {
            let world = world.get_or_insert_with(|| new(cell));
            bencher.iter_custom(|turns| {
                let mut watch = Watch { step, spent: Duration::ZERO };
                for _ in 0..turns {
                    turn(world, cell, &mut watch);
                }
                watch.spent
            });
        });
    }
}

fn ledger(criterion: &mut Criterion) {
    use Step::{Admit, Complete, Consume, Finish, Life, Publish, Refuse, Start};
    type Turn = fn(&mut World, &mut Watch);
    let lives: [(&str, u32, Turn, &[Step]); 3] = [
        ("bulk", 1, bulk, &[Admit, Complete, Consume, Publish, Life]),
        ("single", 1, single, &[Admit, Refuse, Complete, Life]),
        ("members", MEMBERS, members, &[Start, Finish, Life]),
    ];
    for (life, group_size, turn, steps) in lives {
        for &step in steps {
            let new = |cell| World::new(cell, group_size);
            measure(criterion, (life, "staleflow"), step, new, |world, _, watch| turn(world, watch));
        }
    }
    measure(criterion, ("single", "counters"), Life, Counters::new, Counters::turn);
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(15)
        .warm_up_time(Duration::from_millis(15))
        .measurement_time(Duration::from_millis(75))
        .nresamples(2_000)
        .without_plots();
    targets = ledger
}
criterion_main!(benches);
