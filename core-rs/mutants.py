"""Breaks the law of the ledger in one place at a time and shows that a test notices.

Every mutant is an exact text of one source file and another text in its place. The workspace is copied to
``target/mutants``, and for each mutant the ordinary tests of the ledger are compiled and run there until one fails.

Exit status 1 if a mutant survives, does not compile, or is stale: its text is not in the file exactly once.
``python core-rs/mutants.py WORD...`` tries only the mutants with one of these words in their name.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "target" / "mutants"
SOURCES = "core-rs/staleflow-core/src"
TEST = ["cargo", "test", "--package", "staleflow-core", "--lib", "--test", "ledger"]
LIMIT_S = 600.0
"""A mutant whose tests are not done by then has made something endless."""


class Mutant(NamedTuple):
    """One way to get the law wrong."""

    name: str
    file: str
    old: str
    new: str


WINDOW, LEASE, PROGRESS = "ledger/window.rs", "ledger/lease.rs", "ledger/progress.rs"
ADMISSION, GROUP, SNAPSHOT = "ledger/admission.rs", "ledger/group.rs", "ledger/snapshot.rs"

MUTANTS = [
    # -- the bound and the capacity law
    Mutant("deadline one batch late", "ids.rs", "Batch(self.0.saturating_add(max_staleness))",
           "Batch(self.0.saturating_add(max_staleness + 1))"),
    Mutant("deadline one batch early", "ids.rs", "Batch(self.0.saturating_add(max_staleness))",
           "Batch(self.0.saturating_add(max_staleness.saturating_sub(1)))"),
    Mutant("engine one version too old is admitted", ADMISSION, "saturating_sub(self.config().max_staleness())",
           "saturating_sub(self.config().max_staleness() + 1)"),
    Mutant("oldest admissible engine is refused", ADMISSION, "saturating_sub(self.config().max_staleness())",
           "saturating_sub(self.config().max_staleness().saturating_sub(1))"),
    Mutant("engine of a version not published is admitted", ADMISSION, "if engine_version > published {",
           "if engine_version > published.next() {"),
    Mutant("one place too many", WINDOW, "self.places_before(batch.next()).saturating_sub(total)))",
           "(self.places_before(batch.next()) + 1).saturating_sub(total)))"),
    Mutant("one place too few", WINDOW, "self.places_before(batch.next()).saturating_sub(total)))",
           "self.places_before(batch.next()).saturating_sub(total + 1)))"),
    Mutant("capacity ignores later deadlines", WINDOW, "self.dues.range(later..)", "self.dues.range(later..later)"),
    Mutant("capacity ignores earlier deadlines", WINDOW, "self.dues.range(..later).map", "self.dues.range(..0).map"),
    Mutant("admission while the law is false", WINDOW, "self.first_overfull_before(deadline).or_else(full)", "full()"),
    Mutant("draining admits", ADMISSION, "Gate::Draining => return Err(Refusal::Draining),", "Gate::Draining => {}"),
    # -- ready
    Mutant("ready without looking at running groups", WINDOW,
           "shortfall.max(running.saturating_sub(self.places_before(due.deadline)))", "shortfall"),
    Mutant("ready with one running group too many", WINDOW, "self.places_before(due.deadline)))",
           "self.places_before(due.deadline) + 1))"),
    Mutant("ready lets running groups be one batch late", WINDOW, "self.places_before(due.deadline)))",
           "self.places_before(due.deadline.next())))"),
    Mutant("ready waits for every running group due next", WINDOW, "self.places_before(due.deadline)))",
           "self.places_before(due.deadline).saturating_sub(1)))"),
    Mutant("ready with one complete group too few", WINDOW, "self.batch_size.saturating_sub(complete)",
           "self.batch_size.saturating_sub(complete + 1)"),
    Mutant("blockers due last are named first", LEASE, "due.sort_unstable();",
           "due.sort_unstable_by(|left, right| right.cmp(left));"),
    # -- consume, publish, release
    Mutant("what is due last is taken first", WINDOW, "for due in &mut self.dues {",
           "for due in self.dues.iter_mut().rev() {"),
    Mutant("order of admission is ignored", WINDOW, "let Some(Reverse(group)) = due.queue.pop() else",
           "let mut queue = std::mem::take(&mut due.queue).into_sorted_vec();\n"
           "let next = (!queue.is_empty()).then(|| queue.remove(0)); due.queue = queue.into();\n"
           "let Some(Reverse(group)) = next else"),
    Mutant("ended groups are handed out", WINDOW, "if is_complete(group) {", "if is_complete(group) || true {"),
    Mutant("publish without a lease", LEASE,
           "let Training::Held(groups) = &self.training else {\n            return Err(self.no_lease(Call::Publish));",
           "let (Training::Held(groups) | Training::Released(groups)) = &self.training else {\n"
           "            return Err(self.no_lease(Call::Publish));"),
    Mutant("publish skips versions", LEASE, "if version != published.next() {", "if version <= published {"),
    Mutant("published groups stay", LEASE, "for group in groups {\n            self.live.remove(*group);\n        }",
           "let _ = groups;"),
    Mutant("release forgets the batch", LEASE, "self.training = Training::Released(groups.clone());",
           "self.training = Training::Idle;"),
    Mutant("released batch comes back in another order", LEASE,
           "Training::Released(groups) => (groups.clone(), Vec::new()),",
           "Training::Released(groups) => (groups.iter().rev().copied().collect(), Vec::new()),"),
    Mutant("what is left behind does not expire", LEASE,
           "if self.window.drop_late() { self.expire() } else { Vec::new() }",
           "if self.window.drop_late() { Vec::new() } else { Vec::new() }"),
    # -- groups end
    Mutant("filtered groups count as live", PROGRESS,
           "self.end(group);\n        count(&mut self.ended.filtered, reason);",
           "count(&mut self.ended.filtered, reason);"),
    Mutant("aborted running groups keep their place", PROGRESS,
           "GroupState::Running => self.window.remove_running(deadline),", "GroupState::Running => {}"),
    Mutant("aborted groups are not counted", PROGRESS, "count(&mut self.ended.aborted, reason);", ""),
    Mutant("leased groups can be aborted", PROGRESS, "&[GroupState::Running, GroupState::Complete], Call::Abort",
           "&[GroupState::Running, GroupState::Complete, GroupState::Leased], Call::Abort"),
    Mutant("leased groups can be filtered", PROGRESS, "&[GroupState::Complete], Call::Filter",
           "&[GroupState::Complete, GroupState::Leased], Call::Filter"),
    Mutant("running groups can be filtered", PROGRESS, "&[GroupState::Complete], Call::Filter",
           "&[GroupState::Complete, GroupState::Running], Call::Filter"),
    # -- members and versions
    Mutant("version rises though a member is silent", GROUP, "Progress::Silent => Some(0),",
           "Progress::Silent => None,"),
    Mutant("version rises to the newest report", GROUP, "rise.min()", "rise.max()"),
    Mutant("version never rises", GROUP, "rise.min().unwrap_or(0)", "rise.min().map_or(0_u32, |_| 0)"),
    Mutant("late completion is accepted", GROUP, "_ if u64::from(member.attempt) != attempt => Report::Late,",
           "_ if u64::from(member.attempt) < attempt => Report::Late,"),
    Mutant("restart is the same attempt", GROUP, "self.attempt = self.attempt.saturating_add(1);", ""),
    Mutant("member starts on older weights than its group", PROGRESS,
           "check_engine(engine_version, found.version, published)",
           "check_engine(engine_version, Version(0), published)"),
    Mutant("report older than the group is believed", PROGRESS, "version < group.version || version > published",
           "version > published"),
    Mutant("report of a version not published is believed", PROGRESS, "version < group.version || version > published",
           "version < group.version"),
    Mutant("group closed short with nobody finished", PROGRESS, "if !Group::has_finished_member(members) {",
           "if members.is_empty() {"),
    # -- snapshots
    Mutant("snapshot forgets draining", SNAPSHOT, "gate: self.gate,", "gate: Gate::Open,"),
    Mutant("snapshot forgets a counter", SNAPSHOT, "ended: self.ended.clone(),",
           "ended: Ended { late_completions: 0, ..self.ended.clone() },"),
    Mutant("restore gives the places of a released batch away", SNAPSHOT,
           "Training::Idle => published,\n            Training::Held(_) | Training::Released(_) => published.next(),",
           "Training::Idle | Training::Released(_) => published,\n"
           "            Training::Held(_) => published.next(),"),
]  # fmt: skip


def main(words: list[str]) -> int:
    """Try the mutants and return the exit status."""
    copy_workspace()
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    if (healthy := run_tests()).status != 0:
        print(f"without a mutant, {healthy.failed or 'something'} fails\n{healthy.output}")
        return 1
    bad = 0
    for mutant in chosen:
        start = time.monotonic()
        answer = tried(mutant)
        bad += not answer.startswith("killed")
        print(f"{time.monotonic() - start:5.0f} s  {mutant.name}: {answer}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} mutants killed")
    return int(bad > 0)


def copy_workspace() -> None:
    """Copy what the tests of the core are built from, as it is in the working tree; builds there are kept.

    The copies are as young as they can be, or cargo could take the build of an earlier mutant for theirs.
    """
    COPY.mkdir(parents=True, exist_ok=True)
    for name in ("Cargo.toml", "Cargo.lock"):
        shutil.copyfile(ROOT / name, COPY / name)
    shutil.rmtree(COPY / "core-rs", ignore_errors=True)
    shutil.copytree(ROOT / "core-rs", COPY / "core-rs", copy_function=shutil.copyfile)


def tried(mutant: Mutant) -> str:
    """Put the mutant in place, run the tests and put the original back."""
    path = COPY / SOURCES / mutant.file
    original = path.read_text()
    if (found := original.count(mutant.old)) != 1:
        return f"STALE, its text is {found} times in {mutant.file}"
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        return verdict(run_tests())
    finally:
        path.write_text(original)


class Outcome(NamedTuple):
    """What the tests said: the first one to fail, or why there is none."""

    failed: str | None
    status: int | None
    output: str


def run_tests() -> Outcome:
    """Run the tests until one fails."""
    environment = os.environ | {"CARGO_PROFILE_TEST_DEBUG": "0", "RUST_BACKTRACE": "0"}
    command = [*TEST, "--target-dir", str(COPY / "target")]
    with subprocess.Popen(
        command,
        cwd=COPY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    ) as process:
        limit = threading.Timer(LIMIT_S, os.killpg, (process.pid, 9))
        limit.start()
        lines: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("test ") and line.rstrip().endswith("FAILED"):
                os.killpg(process.pid, 9)
                limit.cancel()
                return Outcome(line.split()[1], None, "")
        limit.cancel()
    return Outcome(None, process.returncode, "".join(lines))


def verdict(outcome: Outcome) -> str:
    """The outcome in words."""
    if outcome.failed is not None:
        return f"killed by {outcome.failed}"
    if "could not compile" in outcome.output:
        return "DOES NOT COMPILE\n" + outcome.output
    if outcome.status == -9:
        return f"killed, the tests did not end within {LIMIT_S:.0f} s"
    return "SURVIVED" if outcome.status == 0 else f"FAILED with status {outcome.status}\n" + outcome.output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
