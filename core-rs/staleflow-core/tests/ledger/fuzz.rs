//! Calls with any numbers in any order, and snapshots that somebody tampered with. Seeded, so every run is the same.

use staleflow_core::ids::{Batch, GroupId, Version};
use staleflow_core::ledger::{Ledger, LedgerConfig};

const CHECKSUM_BYTES: usize = 4;

/// A source of numbers that are small, near something, or near the end of their type.
struct Numbers(fastrand::Rng);

impl Numbers {
    fn any(&mut self) -> u64 {
        match self.0.u8(0..8) {
            0 => u64::MAX - self.0.u64(0..3),
            1 => 1 << self.0.u32(0..64),
            2 => self.0.u64(..),
            3 => u64::from(u32::MAX) + self.0.u64(0..3),
            _ => self.0.u64(0..8),
        }
    }

    fn near(&mut self, number: u64) -> u64 {
        match self.0.u8(0..8) {
            0 => self.any(),
            1 => number.saturating_sub(self.0.u64(0..4)),
            2 => number.saturating_add(self.0.u64(0..4)),
            _ => number,
        }
    }

    fn maybe(&mut self, number: u64) -> Option<Version> {
        let near = self.near(number);
        self.0.bool().then_some(Version(near))
    }

    fn group(&mut self, ledger: &Ledger) -> GroupId {
        let admitted = ledger.statistics().admitted;
        let recent = admitted.saturating_sub(self.0.u64(0..12));
        GroupId(self.near(recent))
    }

    fn member(&mut self) -> usize {
        usize::try_from(self.any()).unwrap_or(usize::MAX)
    }

    fn config(&mut self) -> LedgerConfig {
        let (batch, staleness) = match self.0.u8(0..20) {
            0 => (1 << 24, self.0.i64(0..5)),
            1 => (self.0.i64(1..5), 1_000_000),
            _ => (self.0.i64(1..5), self.0.i64(0..5)),
        };
        LedgerConfig::new(batch, staleness, self.0.i64(1..4)).unwrap()
    }
}

/// Makes one call with numbers out of the air and says whether it was granted.
fn call(ledger: &mut Ledger, numbers: &mut Numbers) -> bool {
    let published = ledger.published().0;
    let (group, version) = (numbers.group(ledger), Version(numbers.near(published)));
    match numbers.0.u8(0..14) {
        0 | 1 => ledger.admit(version).is_ok(),
        // What is granted is also allocated, so the wish has to be modest.
        2 => !ledger.admit_many(version, numbers.0.u64(0..20)).is_empty(),
        3 | 4 => matches!(ledger.start_member(group, numbers.member(), version), Ok(Ok(()))),
        5 | 6 => {
            let (report, attempt) = (numbers.maybe(published), numbers.any());
            ledger.finish_member(group, numbers.member(), report, attempt).is_ok()
        }
        7 => ledger.complete(group, numbers.maybe(published)).is_ok(),
        8 => {
            let groups: Vec<GroupId> = (0..numbers.0.usize(0..4)).map(|_| numbers.group(ledger)).collect();
            let granted = ledger.complete_many(&groups).is_ok();
            granted && !groups.is_empty()
        }
        9 => ledger.abort(group, ["", "lost", "stuck"][numbers.0.usize(0..3)]).is_ok(),
        10 => ledger.filter(group, ["", "equal", "\u{1f41f}"][numbers.0.usize(0..3)]).is_ok(),
        11 => ledger.consume().is_ok(),
        12 => ledger.publish(Version(numbers.near(published.saturating_add(1)))).is_ok(),
        _ => ledger.release(Batch(numbers.near(published))).is_ok(),
    }
}

/// A batch as a healthy system makes it, so that the calls meet a ledger that has moved on.
fn train_a_batch(ledger: &mut Ledger) {
    ledger.admit_many(ledger.published(), 4);
    ledger.complete_many(&ledger.blockers()).unwrap();
    if let Ok(lease) = ledger.consume() {
        for group in lease.groups {
            let version = ledger.group_version(group).unwrap();
            assert!(lease.batch <= version.deadline(ledger.config().max_staleness()), "{group} is too old");
        }
        ledger.publish(ledger.published().next()).unwrap();
    }
}

fn make_calls(ledger: &mut Ledger, numbers: &mut Numbers, calls: usize) {
    for _ in 0..calls {
        if numbers.0.u8(0..8) == 0 {
            train_a_batch(ledger);
        } else {
            let before = ledger.snapshot();
            let granted = call(ledger, numbers);
            assert!(granted || ledger.snapshot() == before, "a call that was not granted left a trace");
        }
        assert!(ledger.statistics().accounting_holds());
    }
}

/// The same calls go to a restored twin, which has to answer with the same bytes.
fn fuzz_calls(seed: u64) {
    let mut numbers = Numbers(fastrand::Rng::with_seed(seed));
    let mut ledger = Ledger::new(numbers.config());
    make_calls(&mut ledger, &mut numbers, 60);
    if numbers.0.u8(0..8) == 0 {
        ledger.drain();
    }
    let mut twin = Ledger::restore(&ledger.snapshot()).unwrap();
    let mut same_numbers = Numbers(numbers.0.clone());
    make_calls(&mut ledger, &mut numbers, 20);
    make_calls(&mut twin, &mut same_numbers, 20);
    assert_eq!(twin.snapshot(), ledger.snapshot());
    assert_eq!(twin.statistics(), ledger.statistics());
}

fn tamper(data: &mut Vec<u8>, other: &[u8], numbers: &mut Numbers) {
    let random = &mut numbers.0;
    match random.u8(0..7) {
        0 => data.truncate(random.usize(0..=data.len())),
        1 => {
            let (from, to) = (random.usize(0..=data.len()), random.usize(0..=other.len()));
            data.truncate(from);
            data.extend(&other[to..]);
        }
        2 => data.extend((0..random.usize(1..9)).map(|_| random.u8(..)).collect::<Vec<u8>>()),
        _ if data.is_empty() => {}
        3 => {
            let at = random.usize(0..data.len());
            data.remove(at);
        }
        // Varints that are as long as they can be, or longer.
        4 => {
            let at = random.usize(0..data.len());
            data.splice(at..at, std::iter::repeat_n(0xff, random.usize(1..11)));
        }
        5 => {
            let at = random.usize(0..data.len());
            data[at] = random.u8(0..4);
        }
        _ => {
            let at = random.usize(0..data.len());
            data[at] ^= 1 << random.u8(0..8);
        }
    }
}

/// What became of a tampered snapshot.
#[derive(Debug, Clone, Copy, Default)]
struct Restored {
    refused: u64,
    lawful: u64,
}

fn fuzz_snapshot(seed: u64, restored: &mut Restored) {
    let mut numbers = Numbers(fastrand::Rng::with_seed(seed));
    let [mut data, other] = std::array::from_fn(|_| {
        let mut ledger = Ledger::new(numbers.config());
        make_calls(&mut ledger, &mut numbers, 30);
        let mut data = ledger.snapshot();
        data.truncate(data.len() - CHECKSUM_BYTES);
        data
    });
    for _ in 0..numbers.0.usize(1..4) {
        tamper(&mut data, &other, &mut numbers);
    }
    // With a good checksum, most of the time: behind it are the checks that are worth reaching.
    let checksum = crc32fast::hash(&data) ^ u32::from(numbers.0.u8(0..10) == 0);
    data.extend(checksum.to_le_bytes());
    let Ok(mut ledger) = Ledger::restore(&data) else {
        restored.refused += 1;
        return;
    };
    restored.lawful += 1;
    assert!(ledger.statistics().accounting_holds());
    assert_eq!(Ledger::restore(&ledger.snapshot()).unwrap().snapshot(), ledger.snapshot());
    // A forged group may be of any size, and every call below copies all of them.
    if ledger.config().group_size() < 100 {
        make_calls(&mut ledger, &mut numbers, 20);
        for _ in 0..4 {
            train_a_batch(&mut ledger);
        }
    }
}

fn fuzz(cases: u64) {
    let mut restored = Restored::default();
    for seed in 0..cases {
        fuzz_calls(seed);
        fuzz_snapshot(seed, &mut restored);
    }
    let Restored { refused, lawful } = restored;
    println!(
        "{cases} fuzzed histories; of as many tampered snapshots {refused} are refused, {lawful} lawful"
    );
    assert!(refused > cases / 4 && lawful > cases / 50, "the cases are one-sided");
}

#[test]
fn no_call_and_no_bytes_break_a_ledger() {
    fuzz(300);
}

#[test]
#[ignore = "takes a minute; make prove runs it"]
fn no_call_and_no_bytes_break_a_ledger_at_length() {
    fuzz(100_000);
}

#[test]
fn random_bytes_behind_a_good_header_break_nothing() {
    let mut random = fastrand::Rng::with_seed(0);
    for _ in 0..20_000 {
        let mut data = b"SFLEDGER".to_vec();
        data.extend(1_u16.to_le_bytes());
        let largest = [1, 3, 15, 255][random.usize(0..4)];
        data.extend((0..random.usize(0..60)).map(|_| random.u8(0..=largest)).collect::<Vec<u8>>());
        data.extend(crc32fast::hash(&data).to_le_bytes());
        if let Ok(mut ledger) = Ledger::restore(&data) {
            assert!(ledger.statistics().accounting_holds());
            make_calls(&mut ledger, &mut Numbers(random.fork()), 5);
        }
    }
}
