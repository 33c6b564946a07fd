"""Stands in for ``staleflow.engines.nccl_sender`` where there is no GPU: says that all is done, and does nothing."""

from pathlib import Path

from staleflow.engines.nccl_messages import Broadcast, Done, Join, Prepare
from staleflow.process import Parent

PORT = 4000


def session(parent: Parent[Join | Prepare | Broadcast]) -> None:
    prepared = ""
    for message in parent:
        match message:
            case Join():
                parent.send(Done(PORT))
            case Prepare():
                prepared = Path(message.folder).name
                if prepared == "unreadable":
                    raise OSError("input/output error")
            case Broadcast():
                if prepared == "breaks":
                    raise RuntimeError("unhandled system error of NCCL")
        parent.send(Done())


if __name__ == "__main__":
    Parent.serve(Join | Prepare | Broadcast, session)  # type: ignore[arg-type]
