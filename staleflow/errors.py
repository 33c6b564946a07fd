"""Every error that staleflow raises, split by who is at fault.

::

    StaleflowError
    ├── ConfigError             a setting can never be right          (also a ValueError)
    ├── TaskSourceError         a task file or task source is malformed or empty
    ├── RolloutError            the user's rollout function
    │   ├── RolloutTimeoutError     did not return before its deadline
    │   ├── RewardError             returned something that is not a finite number
    │   ├── ContextError            sent a prompt that its trajectory cannot take
    │   ├── TruncatedError          went on asking after its trajectory was cut short
    │   └── TooManyFailuresError    failed so often that the run was ended
    ├── LedgerError             an illegal call to the ledger; its state is unchanged
    │   ├── UnknownGroupError       no live group has this id
    │   ├── WrongStateError         the group, member or lease is not in a state for this call
    │   ├── NotReadyError           the next batch cannot be consumed yet
    │   ├── VersionOrderError       a version that goes backwards or comes from the future
    │   └── SnapshotError           bytes that are no snapshot or journal, or a damaged one
    ├── QueueError              the trajectory queue cannot do this now; nothing in it is lost
    │   ├── QueueFull               it holds as many items as it may; gives the item back
    │   ├── QueueClosed             it was closed; gives the item back, if there is one
    │   └── SecondConsumerError     another consumer is at it
    ├── ChildError              a child process died, hung or broke its protocol
    │   ├── EngineError             ... and it was an engine
    │   │   ├── EngineGoneError         ... which has answered nobody and never will
    │   │   ├── EngineTimeoutError      ... which did not answer in time
    │   │   ├── EngineStatusError       ... which answered with an HTTP error
    │   │   └── EngineReplyError        ... whose answer is broken off, malformed or of another request
    │   └── TrainerError            ... and it was the trainer
    ├── WeightsError            a version cannot be published, pulled or loaded
    ├── RunFolderError          the run folder cannot be created, written or read
    └── CheckpointError         a checkpoint cannot be written, or is missing, damaged, foreign or of another run
"""


class StaleflowError(Exception):
    """Root of all errors raised by staleflow."""


class ConfigError(StaleflowError, ValueError):
    """A setting can never be right; names the setting, its value and what is allowed."""


class TaskSourceError(StaleflowError):
    """A task file or task source is malformed or empty; names file, line and field."""


class RolloutError(StaleflowError):
    """The user's rollout function misbehaved; only its own trajectory fails."""


class RolloutTimeoutError(RolloutError):
    """A rollout did not return before ``rollout_timeout_s``."""


class RewardError(RolloutError):
    """A rollout returned something that is not a finite number."""


class ContextError(RolloutError):
    """A prompt is empty, leaves no room to generate, or comes while its trajectory is busy or after it has ended."""


class TruncatedError(RolloutError):
    """The straggler policy has cut the trajectory short, and its rollout goes on asking for more."""


class TooManyFailuresError(RolloutError):
    """The share of failed trajectories passed its limit; the first failure is the cause."""


class LedgerError(StaleflowError):
    """An illegal call to the ledger. The ledger's state is unchanged."""


class UnknownGroupError(LedgerError):
    """No live group has this id."""


class WrongStateError(LedgerError):
    """The group, member or lease named in the message is not in a state that allows the call."""


class NotReadyError(LedgerError):
    """The next batch cannot be consumed yet; the message names the groups it waits for."""


class VersionOrderError(LedgerError):
    """A version that goes backwards, or one that is not published yet."""


class SnapshotError(LedgerError):
    """The bytes are not a ledger's snapshot or journal, are of another format version, or are damaged."""


class QueueError(StaleflowError):
    """The trajectory queue cannot do this now. Nothing that it holds is lost."""


class QueueFull(QueueError):  # noqa: N818 - a state to act upon, named as asyncio and queue name it
    """The queue holds as many items as it may; ``item`` is the one that was not put."""

    def __init__(self, message: str, item: object = None) -> None:
        super().__init__(message)
        self.item = item


class QueueClosed(QueueError):  # noqa: N818 - likewise
    """The queue was closed: nothing can be put, or nothing more will come. ``item`` is the one that was not put."""

    def __init__(self, message: str, item: object = None) -> None:
        super().__init__(message)
        self.item = item


class SecondConsumerError(QueueError):
    """A queue has one consumer at a time, and its ``get_batch`` has not returned yet."""


class ChildError(StaleflowError):
    """A child process died, did not answer in time or broke the wire protocol."""


class EngineError(ChildError):
    """An engine died, did not answer in time or sent a malformed reply."""


class EngineGoneError(EngineError):
    """An engine died with a request unanswered. It is taken for dead, and the request goes on elsewhere."""


class EngineTimeoutError(EngineError):
    """An engine did not answer before a deadline."""


class EngineStatusError(EngineError):
    """An engine answered with an HTTP error; ``status`` is its code."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class EngineReplyError(EngineError):
    """An engine's answer is broken off, malformed or of another request."""


class TrainerError(ChildError):
    """The trainer died, did not answer in time or could not train a batch."""


class WeightsError(StaleflowError):
    """A version cannot be published, pulled or loaded; names the version, the place and the reason."""


class RunFolderError(StaleflowError):
    """The run folder cannot be created, written or read."""


class CheckpointError(StaleflowError):
    """A checkpoint cannot be written, or cannot be resumed from: it is missing, damaged, foreign or of another run."""
