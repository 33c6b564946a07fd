"""The event log: every change of state of a run, one JSON object a line, in the order in which it happened.

``t`` is seconds since the start of the run. The log is a function of the seed when the run is on a virtual clock.
"""

from typing import Annotated, TypeAlias

import msgspec

from staleflow.types import Interruption, SyncMode

Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""Since the start of the run."""

EngineIndex: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""Counts the engines of the run from 0."""


class PhaseBegan(msgspec.Struct, tag="phase_began", tag_field="event", frozen=True):
    """The run has come to this phase of its life."""

    t: Seconds
    phase: str


class TaskFetched(msgspec.Struct, tag="task_fetched", tag_field="event", frozen=True):
    """The next task is at hand; from the admission before until now the source was awaited."""

    t: Seconds
    task: int


class SourceEnded(msgspec.Struct, tag="source_ended", tag_field="event", frozen=True):
    """The task source has no more."""

    t: Seconds


class Admitted(msgspec.Struct, tag="admitted", tag_field="event", frozen=True):
    """The ledger admitted a group for ``task`` at ``version``."""

    t: Seconds
    group: int
    task: int
    version: int


class Requested(msgspec.Struct, tag="requested", tag_field="event", frozen=True):
    """A rollout asked for tokens; the request waits for an engine. Its id is group, member, attempt and a count, with
    dots between. The group of an evaluation is 0, and its attempt the version evaluated."""

    t: Seconds
    request: str


class Routed(msgspec.Struct, tag="routed", tag_field="event", frozen=True):
    """A request was sent to an engine."""

    t: Seconds
    request: str
    engine: EngineIndex


class Answered(msgspec.Struct, tag="answered", tag_field="event", frozen=True):
    """The engine has answered a request."""

    t: Seconds
    request: str
    tokens: int


class Interrupted(msgspec.Struct, tag="interrupted", tag_field="event", frozen=True):
    """The engine has let go of a request after so many tokens. The call that it was part of goes on by another request
    with all tokens so far, ends with them (``truncate``), or starts over without them (``abort``)."""

    t: Seconds
    request: str
    tokens: int
    why: Interruption


class Dropped(msgspec.Struct, tag="dropped", tag_field="event", frozen=True):
    """A request has ended without an answer: it was cancelled, or the engine failed."""

    t: Seconds
    request: str


class Finished(msgspec.Struct, tag="finished", tag_field="event", frozen=True):
    """A member has its reward; ``versions`` are the oldest and the newest of its sampled tokens."""

    t: Seconds
    group: int
    member: int
    attempt: int
    reward: float
    tokens: int
    versions: tuple[int, int]


class Failed(msgspec.Struct, tag="failed", tag_field="event", frozen=True):
    """An attempt of a member failed."""

    t: Seconds
    group: int
    member: int
    attempt: int
    cause: str


class Truncated(msgspec.Struct, tag="truncated", tag_field="event", frozen=True):
    """The straggler policy has cut a member short: what it has sampled so far is to be scored."""

    t: Seconds
    group: int
    member: int


class ClosedShort(msgspec.Struct, tag="closed_short", tag_field="event", frozen=True):
    """The straggler policy has made do with these members of a group; it is complete."""

    t: Seconds
    group: int
    members: tuple[int, ...]


class Completed(msgspec.Struct, tag="completed", tag_field="event", frozen=True):
    """As many members of a group have finished as it needs."""

    t: Seconds
    group: int


class Filtered(msgspec.Struct, tag="filtered", tag_field="event", frozen=True):
    """A complete group was taken out because nothing can be learned from it."""

    t: Seconds
    group: int
    reason: str


class Aborted(msgspec.Struct, tag="aborted", tag_field="event", frozen=True):
    """A group was given up."""

    t: Seconds
    group: int
    reason: str


class Expired(msgspec.Struct, tag="expired", tag_field="event", frozen=True):
    """The last batch that could have held a group was filled without it."""

    t: Seconds
    group: int


class Consumed(msgspec.Struct, tag="consumed", tag_field="event", frozen=True):
    """The trainer took a batch."""

    t: Seconds
    batch: int
    groups: tuple[int, ...]


class Released(msgspec.Struct, tag="released", tag_field="event", frozen=True):
    """A batch came back untrained."""

    t: Seconds
    batch: int


class Published(msgspec.Struct, tag="published", tag_field="event", frozen=True):
    """New weights can be pulled."""

    t: Seconds
    version: int


class Stalled(msgspec.Struct, tag="stalled", tag_field="event", frozen=True):
    """No step has come for a while; that is all, and tells how far the log goes."""

    t: Seconds


class EngineDied(msgspec.Struct, tag="engine_died", tag_field="event", frozen=True):
    """An engine is dead; its requests are interrupted, and what it pulled does not count."""

    t: Seconds
    engine: EngineIndex
    cause: str


class EngineRestarted(msgspec.Struct, tag="engine_restarted", tag_field="event", frozen=True):
    """A dead engine has started again, with the initial weights. It serves once it has confirmed a published version;
    as long as none but version 0 is published, that is at once."""

    t: Seconds
    engine: EngineIndex
    epoch: int


class EngineRetired(msgspec.Struct, tag="engine_retired", tag_field="event", frozen=True):
    """A dead engine will not be started again."""

    t: Seconds
    engine: EngineIndex
    cause: str


class SyncBegan(msgspec.Struct, tag="sync_began", tag_field="event", frozen=True):
    """An engine was told to pull ``version``."""

    t: Seconds
    engine: EngineIndex
    version: int
    mode: SyncMode = "keep"


class Synced(msgspec.Struct, tag="synced", tag_field="event", frozen=True):
    """An engine confirmed that it serves ``version``."""

    t: Seconds
    engine: EngineIndex
    version: int


class CheckpointBegan(msgspec.Struct, tag="checkpoint_began", tag_field="event", frozen=True):
    """A checkpoint is being saved; training stands still."""

    t: float
    step: int


class CheckpointSaved(msgspec.Struct, tag="checkpoint_saved", tag_field="event", frozen=True):
    """The checkpoint is whole; training goes on."""

    t: float
    step: int


class Resumed(msgspec.Struct, tag="resumed", tag_field="event", frozen=True):
    """The run goes on in another process, from the checkpoint of ``step``, with so many engines.

    Time goes on where it stood. No request is left, and every unfinished member is played from its start, as its next
    attempt. What the process before did after the checkpoint is not in the log."""

    t: float
    step: int
    engines: int


class Reused(msgspec.Struct, tag="reused", tag_field="event", frozen=True):
    """An attempt after a resume has taken so many sampled tokens from what was said in the process before, and will
    take no more; ``dropped`` tokens it could not use."""

    t: Seconds
    group: int
    member: int
    attempt: int
    tokens: int
    dropped: int


class EvaluationBegan(msgspec.Struct, tag="evaluation_began", tag_field="event", frozen=True):
    """The held-out tasks are being played by ``version``; these engines are held at it until the end."""

    t: Seconds
    version: int
    engines: tuple[EngineIndex, ...]


class Evaluated(msgspec.Struct, tag="evaluated", tag_field="event", frozen=True):
    """The held-out tasks were played; ``versions`` are the oldest and the newest that answered."""

    t: Seconds
    step: int
    reward: float
    tasks: int
    failed: int
    versions: tuple[int, int]


class UpdateSkipped(msgspec.Struct, tag="update_skipped", tag_field="event", frozen=True):
    """An optimizer update of ``batch`` was not finite and so was not made; ``dump`` is the file with its offenders,
    which are numbered by task, group, member and attempt."""

    t: Seconds
    batch: int
    update: int
    reason: str
    offenders: tuple[tuple[int, int, int, int], ...]
    dump: str


Event: TypeAlias = (
    PhaseBegan
    | TaskFetched
    | SourceEnded
    | Admitted
    | Requested
    | Routed
    | Answered
    | Interrupted
    | Dropped
    | Finished
    | Failed
    | Truncated
    | ClosedShort
    | Completed
    | Filtered
    | Aborted
    | Expired
    | Consumed
    | Released
    | Published
    | Stalled
    | EngineDied
    | EngineRestarted
    | EngineRetired
    | SyncBegan
    | Synced
    | CheckpointBegan
    | CheckpointSaved
    | Resumed
    | Reused
    | EvaluationBegan
    | Evaluated
    | UpdateSkipped
)
