"""A trainer whose ranks torchrun has started, on this or other machines: the controller's side.

It listens until it has one connection of every rank, each proven by a shared secret (``handshake``), and then speaks to
them as to the local trainer's. The ranks' side is ``rank``.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import msgspec

from staleflow.errors import ConfigError, TrainerError
from staleflow.process import Wire, frame
from staleflow.trainer.faults import NonfinitePolicy
from staleflow.trainer.handshake import (
    HANDSHAKE_TIMEOUT_S,
    LONGEST_MESSAGE_BYTES,
    Hello,
    challenge,
    keep_alive,
    shared_secret,
    welcome,
)
from staleflow.trainer.local import ComputeType, LocalTrainer
from staleflow.trainer.loss_settings import AdvantageKind, AggregationKind, Parameter
from staleflow.trainer.protocol import FromRank
from staleflow.trainer.ranks import Rank, RankGoneError

logger = logging.getLogger("staleflow")


class TrainerOptions(TypedDict, total=False):
    """The keyword arguments of :class:`LocalTrainer` that say how to train."""

    loss: str | Callable[..., Any]
    loss_parameters: Mapping[str, Parameter] | None
    advantages: AdvantageKind
    aggregation: AggregationKind
    longest_tokens: int | None
    learning_rate: float
    warmup_steps: int
    decay_steps: int | None
    betas: tuple[float, float]
    weight_decay: float
    max_gradient_norm: float
    minibatches: int
    micro_batch_tokens: int
    packing: bool
    temperature: float
    reference: str | Path | None
    kl_weight: float
    dtype: ComputeType
    activation_checkpointing: bool
    sharded: bool
    threads: int
    on_nonfinite: NonfinitePolicy
    step_timeout_s: float


class RemoteTrainer(LocalTrainer):
    """:class:`LocalTrainer` with ranks that are started elsewhere, by torchrun, and connect to here.

    ::

        STALEFLOW_TRAINER_SECRET=... torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 \\
            -m staleflow.trainer.rank CONTROLLER:29400

    ``$STALEFLOW_TRAINER_SECRET`` must be the same here. Every folder (model, reference, published weights, checkpoints)
    must be the same one on all machines.

    Args:
        model: Hugging Face causal LM folder.
        ranks: how many will connect; torchrun must start as many.
        listen: ``"address:port"`` to accept them at; port 0 takes one that is free.
        connect_timeout_s: the run ends if a rank is missing for so long.
        options: those of :class:`LocalTrainer`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        ranks: int,
        listen: str,
        connect_timeout_s: float = 600.0,
        **options: Unpack[TrainerOptions],
    ) -> None:
        super().__init__(model, ranks=ranks, **options)
        host, _, port = listen.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"listen is {listen!r}; it must be 'address:port'")
        if not connect_timeout_s > 0:
            raise ConfigError(f"connect_timeout_s is {connect_timeout_s}; it must be above 0")
        self._secret = shared_secret()
        self._connect_timeout_s = connect_timeout_s
        self._listening = (host.strip("[]"), int(port))
        self._present: dict[int, RemoteRank] = {}
        self._complete: asyncio.Future[None] | None = None

    @property
    def address(self) -> str:
        """Where ranks connect to: ``listen``, with the port that was taken if that was 0, once it listens."""
        return "{}:{}".format(*self._listening)

    async def _come_by_ranks(self, log_folder: Path) -> Sequence[Rank]:
        """Accept connections until every rank has one; raises :class:`TrainerError` when some are missing."""
        complete = self._complete = asyncio.get_running_loop().create_future()
        try:
            server = await asyncio.start_server(self._accept, *self._listening)
        except OSError as error:
            raise TrainerError(f"cannot listen at {self.address}: {error.strerror}") from None
        self._listening = server.sockets[0].getsockname()[:2]
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await complete
        except TimeoutError:
            missing = sorted(set(range(self.settings.ranks)) - self._living)
            await self._hang_up()
            raise TrainerError(
                f"ranks {', '.join(map(str, missing))} of {self.settings.ranks} did not connect to {self.address} "
                f"within {self._connect_timeout_s:.0f} s"
            ) from None
        except BaseException:
            await self._hang_up()
            raise
        finally:
            server.close()
        return [self._present[rank] for rank in range(self.settings.ranks)]

    @property
    def _living(self) -> set[int]:
        """The ranks that have a connection. Of one that was lost, torchrun will start another."""
        return {number for number, rank in self._present.items() if not rank.gone}

    async def _hang_up(self) -> None:
        for rank in self._present.values():
            await rank.stop()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a connection for a rank's if it can prove that it is one."""
        peer = "{}:{}".format(*writer.get_extra_info("peername")[:2])
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                who = await self._greet(reader, writer)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
            logger.warning("a connection from %s is no rank's: %s", peer, str(error) or type(error).__name__)
            writer.transport.abort()
            return
        if self._complete is None or self._complete.done():
            writer.transport.abort()
            return
        if who.size != self.settings.ranks or not 0 <= who.rank < who.size:
            self._complete.set_exception(
                TrainerError(
                    f"{peer} is rank {who.rank} of {who.size}, but the trainer has ranks={self.settings.ranks}"
                )
            )
            writer.transport.abort()
            return
        keep_alive(writer.get_extra_info("socket"))
        before = self._present.get(who.rank)
        self._present[who.rank] = RemoteRank(f"trainer-{who.rank} at {peer}", reader, writer)
        if len(self._living) == self.settings.ranks:
            self._complete.set_result(None)
        if before is not None:
            await before.stop()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Hello:
        """The handshake; raises ``ConnectionError`` for someone who does not know the secret."""
        asked = challenge()
        writer.write(frame(asked))
        size_bytes = int.from_bytes(await reader.readexactly(4), "little")
        if size_bytes > LONGEST_MESSAGE_BYTES:
            raise ConnectionError(f"it begins with a message of {size_bytes} bytes")
        answer = msgspec.msgpack.decode(await reader.readexactly(size_bytes), type=Hello)
        proof = welcome(self._secret, asked, answer)
        if proof is None:
            raise ConnectionError("it does not know the secret")
        writer.write(frame(proof))
        await writer.drain()
        return answer


class RemoteRank:
    """A connected rank. Somebody always reads, so that its end is noticed whatever the trainer is doing."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self._wire: Wire[FromRank] = Wire(reader, writer, FromRank)  # type: ignore[arg-type]
        self._answers: asyncio.Queue[FromRank | RankGoneError] = asyncio.Queue()
        self._gone: asyncio.Future[RankGoneError] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    def post(self, framed: bytes) -> None:
        """Write one message without waiting."""
        self._wire.post(framed)

    async def flush(self) -> None:
        """Wait while the rank is far behind."""
        try:
            await self._wire.flush()
        except ConnectionError:
            # What it has said before its end comes first.
            return

    async def receive(self) -> FromRank:
        """The next answer."""
        answer = await self._answers.get()
        if isinstance(answer, RankGoneError):
            self._answers.put_nowait(answer)
            raise answer
        return answer

    @property
    def gone(self) -> bool:
        """Whether its connection has ended."""
        return self._gone.done()

    async def died(self) -> RankGoneError:
        """Wait for the end of the connection."""
        return await asyncio.shield(self._gone)

    async def stop(self) -> None:
        """Hang up: the rank's process ends itself."""
        self._wire.abort()
        self._reading.cancel()
        await asyncio.wait({self._reading})

    async def _read(self) -> None:
        try:
            while True:
                self._answers.put_nowait(await self._wire.receive())
        except (ConnectionError, TimeoutError, msgspec.MsgspecError) as error:
            end = RankGoneError(f"{self.name} is gone ({error}); its log is where torchrun was started", time.time_ns())
        self._answers.put_nowait(end)
        self._gone.set_result(end)
