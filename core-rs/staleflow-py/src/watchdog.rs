//! `LoopWatch`: a thread that tells of an event loop that has stopped to run.
//!
//! Invariant: the thread needs nothing of the interpreter to notice a stall and to tell of it. What it asks Python, it
//! asks through another thread, which may wait for the interpreter lock for ever; it itself waits with a bound.
//!
//! It counts its own waits instead of reading a clock, so a process that was suspended has not stalled.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pyo3::prelude::*;
use staleflow_core::stall::StallAlarm;

use crate::stacks::Stacks;
use crate::stall::SecondsArgument;

/// How long Python has to answer before the thread does with what it knows.
const PATIENCE: Duration = Duration::from_secs(2);

/// A watch over one event loop, by a thread of its own.
#[pyclass(frozen, module = "staleflow._core")]
pub(crate) struct LoopWatch {
    signs: Arc<Signs>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[pymethods]
impl LoopWatch {
    /// Begins to watch.
    #[new]
    fn new(
        py: Python<'_>,
        limit_s: SecondsArgument,
        period_s: SecondsArgument,
        folder: PathBuf,
        account: Py<PyAny>,
    ) -> PyResult<Self> {
        let signs = Arc::new(Signs::default());
        let watch = Watch {
            signs: Arc::clone(&signs),
            period: period_s.0,
            alarm: StallAlarm::new(limit_s.0),
            folder,
            account: Arc::new(account),
            stacks: Stacks::of_process(py)?,
        };
        let thread = thread::Builder::new().name("loop-watch".to_owned()).spawn(move || watch.run())?;
        Ok(Self { signs, thread: Mutex::new(Some(thread)) })
    }

    /// The loop runs.
    fn beat(&self, t: f64, known: String) {
        let mut newest = self.signs.newest();
        *newest = Beat { count: newest.count + 1, t, known, stopped: newest.stopped };
    }

    /// Ends the watch, and its thread.
    fn stop(&self, py: Python<'_>) {
        self.signs.stop();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A thread that panicked has said so on stderr.
        py.detach(|| thread.map(JoinHandle::join));
    }
}

impl Drop for LoopWatch {
    fn drop(&mut self) {
        self.signs.stop();
    }
}

/// What the loop has said last.
#[derive(Default)]
struct Beat {
    count: u64,
    t: f64,
    known: String,
    stopped: bool,
}

/// Signs of life, on their way from the loop to the thread.
#[derive(Default)]
struct Signs {
    newest: Mutex<Beat>,
    stop: Condvar,
}

impl Signs {
    fn newest(&self) -> MutexGuard<'_, Beat> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop(&self) {
        self.newest().stopped = true;
        self.stop.notify_all();
    }

    /// The newest beat after `period`, or at once when the watch ends.
    fn wait(&self, period: Duration) -> MutexGuard<'_, Beat> {
        let waited = self.stop.wait_timeout_while(self.newest(), period, |newest| !newest.stopped);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// The thread's own.
struct Watch {
    signs: Arc<Signs>,
    period: Duration,
    alarm: StallAlarm,
    folder: PathBuf,
    account: Arc<Py<PyAny>>,
    stacks: &'static Stacks,
}

impl Watch {
    fn run(mut self) {
        let (mut seen, mut since_s) = (0, 0.0);
        let mut lasted = Duration::ZERO;
        loop {
            let newest = self.signs.wait(self.period);
            let (count, t, stopped) = (newest.count, newest.t, newest.stopped);
            drop(newest);
            // Whoever ends the watch is the loop, which therefore runs.
            if count != seen || stopped {
                if self.alarm.moves() {
                    tell(&self.path(since_s), &over(lasted));
                }
                (seen, since_s, lasted) = (count, t, Duration::ZERO);
            } else {
                lasted += self.period;
                if self.alarm.stands_still(lasted) {
                    tell(&self.path(since_s), &self.report(lasted));
                }
            }
            if stopped {
                return;
            }
        }
    }

    /// One file per stall, named after the time of the run at which the loop was last seen to run.
    fn path(&self, since_s: f64) -> PathBuf {
        self.folder.join(format!("{since_s:08.1}s-loop-blocked.txt"))
    }

    fn report(&self, lasted: Duration) -> String {
        let known = self.signs.newest().known.clone();
        let lasted_s = lasted.as_secs_f64();
        let account = self.ask().unwrap_or_else(|Silence { why, stacks }| {
            format!("as of {lasted_s:.1} s ago ({why}), {known}\n\n# threads\n\n{stacks}")
        });
        format!("the event loop has not run for {lasted_s:.1} s: {account}\n")
    }

    /// Python's account of the run.
    fn ask(&self) -> Result<String, Silence> {
        let (account, stacks) = (Arc::clone(&self.account), self.stacks);
        let (answer, answered) = mpsc::channel();
        let ask = move || {
            let said = Python::try_attach(|py| {
                let said = account.call0(py).and_then(|said| said.extract::<String>(py));
                // With the lock in hand, so that no stack changes meanwhile.
                said.map_err(|error| Silence { why: error.to_string(), stacks: stacks.text() })
            });
            let shut = || Err(Silence { why: "Python is shutting down".to_owned(), stacks: String::new() });
            // Too late, if nobody listens any more.
            let _ = answer.send(said.unwrap_or_else(shut));
        };
        let silent = |why| Silence { why, stacks: stacks.text() };
        let asking = thread::Builder::new().name("loop-watch-ask".to_owned()).spawn(ask);
        asking.map_err(|error| silent(format!("no thread to ask Python with: {error}")))?;
        let late = |_| silent(format!("Python did not answer for {} s", PATIENCE.as_secs()));
        answered.recv_timeout(PATIENCE).map_err(late)?
    }
}

/// Why there is no account, and the stacks in its place.
struct Silence {
    why: String,
    stacks: String,
}

fn over(lasted: Duration) -> String {
    format!("over: the event loop runs again, after {:.1} s or a little more\n", lasted.as_secs_f64())
}

/// Appends to a file and to stderr, whichever of them can be written to.
fn tell(path: &PathBuf, text: &str) {
    let mut stderr = io::stderr();
    let shown = writeln!(stderr, "staleflow: {text}");
    if let Err(error) = append(path, text) {
        let _ = writeln!(stderr, "staleflow: cannot write {}: {error}", path.display());
    }
    // Nowhere is left to say so.
    drop(shown);
}

fn append(path: &PathBuf, text: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    OpenOptions::new().create(true).append(true).open(path)?.write_all(text.as_bytes())
}
