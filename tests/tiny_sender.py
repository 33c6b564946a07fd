"""Stands in for ``staleflow.engines.nccl_sender`` where there is no GPU: says that all is done, and does nothing."""

from pathlib import Path

from staleflow.engines.nccl_messages import Broadcast, Done, Join
from staleflow.process import Parent

PORT = 4000


def session(parent: Parent[Join | Broadcast]) -> None:
    for message in parent:
        if isinstance(message, Join):
            parent.send(Done(PORT))
        elif Path(message.folder).name == "breaks":
            raise RuntimeError("unhandled system error of NCCL")
        parent.send(Done())


if __name__ == "__main__":
    Parent.serve(Join | Broadcast, session)  # type: ignore[arg-type]
