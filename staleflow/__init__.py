"""staleflow: asynchronous RL post-training of language models inside a hard staleness bound.

Importing it imports neither torch nor transformers, which run in child processes, nor an HTTP client.
"""

from staleflow._core import Lease, LedgerStatistics, QueueStatistics, Refusal, RefusalReason, StalenessLedger
from staleflow.blockers import Blocker
from staleflow.config import Config, StragglerPolicy
from staleflow.engines.embedded import EmbeddedEngine
from staleflow.engines.vllm import VllmEngine
from staleflow.engines.vllm_server import VllmServer, launch_vllm
from staleflow.members import uniform_rewards
from staleflow.parameter_server.tcp import TcpParameterServer
from staleflow.pipeline import Pipeline
from staleflow.queue import TrajectoryQueue
from staleflow.rollout import LLM, Completion
from staleflow.runner import run
from staleflow.statistics import Accounting, PipelineStatistics, Report
from staleflow.tasks import ListTasks, ResumableTaskSource, TaskSource, read_jsonl
from staleflow.trainer.local import LocalTrainer
from staleflow.trainer.remote import RemoteTrainer
from staleflow.types import Segment, Task, Trajectory

__all__ = [
    "LLM",
    "Accounting",
    "Blocker",
    "Completion",
    "Config",
    "EmbeddedEngine",
    "Lease",
    "LedgerStatistics",
    "ListTasks",
    "LocalTrainer",
    "Pipeline",
    "PipelineStatistics",
    "QueueStatistics",
    "Refusal",
    "RefusalReason",
    "RemoteTrainer",
    "Report",
    "ResumableTaskSource",
    "Segment",
    "StalenessLedger",
    "StragglerPolicy",
    "Task",
    "TaskSource",
    "TcpParameterServer",
    "Trajectory",
    "TrajectoryQueue",
    "VllmEngine",
    "VllmServer",
    "launch_vllm",
    "read_jsonl",
    "run",
    "uniform_rewards",
]
