"""The rendezvous server: one process per job, started by the chief.

It admits tasks and keeps watch: if the kernel closes a connection its task has died, and if a connection is silent its
task is stopped or cut off. It tells all tasks which tasks are there and which are lost; the tasks decide what that
means. Tasks exchange small values over it (`tfdist.cluster.value_exchange`), ranks agree on their collectives
(`tfdist.cluster.coordination`), and rounds find their quorum (`tfdist.cluster.quorums`). It is a separate process
because MPI can block a whole Python process while it starts.

Run it as ``python -m tfdist.cluster.server FD``, where ``FD`` is a listening socket. The job's description comes as one
line of JSON on standard input, which the chief keeps open as long as it lives.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec

from tfdist.cluster import messages, proof
from tfdist.cluster.admission import Admission
from tfdist.cluster.coordination import CollectiveCoordinator
from tfdist.cluster.message import RendezvousMessage
from tfdist.cluster.messages import Claims, FromTask
from tfdist.cluster.quorum_messages import RoundsMessage
from tfdist.cluster.quorums import QuorumCoordinator
from tfdist.cluster.value_exchange import ValueExchange
from tfdist.comm import segments

ANSWER_SECONDS = 2.0
"""Seconds for the ranks to report their collectives under way, when a rank has waited long."""
LINGER_SECONDS = 10.0
"""Seconds for which the server goes on after the job has failed, so that the other tasks can end."""


class JobDescription(msgspec.Struct, frozen=True):
    """The description of a job, which the server has before any task comes.

    Attributes:
        name: name that no other job of a machine ever has.
        tasks: names of the tasks for messages, by number.
        size: number of tasks with a rank; these come first.
        is_elastic: whether tasks may come again, and new tasks may come, after the start.
        digest: fingerprint of the cluster that every task must have been given.
        version: version of tfdist, which must be the same on every task.
        secret: the secret that a task must prove to know; empty for a job without a secret.
        start_timeout: seconds for all training tasks to come.
        heartbeat_timeout: seconds of silence after which a task counts as lost.
    """

    name: str
    tasks: tuple[str, ...]
    size: int
    is_elastic: bool
    digest: str
    version: str
    secret: str
    start_timeout: float
    heartbeat_timeout: float


@dataclass
class Member:
    """An admitted task.

    Attributes:
        task: the task's number.
        claims: the task's statement about itself.
        writer: the connection to the task.
        heard: whether the task has sent anything since the last check.
        silence: seconds in which the task sent nothing but other tasks did. If all tasks are silent the whole job is
            stopped (Ctrl-Z), and no task is lost.
        left: whether the task's script has ended.
        ended: whether the task no longer needs the others, or is known to be lost.
        is_lost: whether the others have been told that the task is lost.
    """

    task: int
    claims: Claims
    writer: asyncio.StreamWriter
    heard: bool = True
    silence: float = 0.0
    left: bool = False
    ended: bool = False
    is_lost: bool = False

    def send(self, message: RendezvousMessage) -> None:
        """Sends a message, if the task is still there."""
        if not self.writer.is_closing():
            self.writer.write(messages.encode(message))


class RendezvousServer:
    """The rendezvous server of one job.

    Attributes:
        job: the job's description.
        members: tasks that are there, by number.
        bound: tasks that have started MPI with each other. None of them can be replaced.
        lost: bound tasks that are lost.
        failure: the message that tells why the job cannot start; None if it can.
        over: event that is set when the server may end.
    """

    def __init__(self, job: JobDescription) -> None:
        self.job = job
        self.members: dict[int, Member] = {}
        self.bound: frozenset[int] = frozenset()
        self.lost: set[int] = set()
        self.failure: RendezvousMessage | None = None
        self.over = asyncio.Event()
        self._names = list(job.tasks)
        self._refused: list[str] = []
        self._binding_since: float | None = None
        self._chief_has_come = False
        self._awaited: set[int] = set()
        self._closing: asyncio.TimerHandle | None = None
        self._meetings = ValueExchange(self._tell)
        self._coordination = CollectiveCoordinator(job.size, self._name_of, self._tell, self._mismatch, _later)
        self._quorums = QuorumCoordinator(self._tell, _later, job.start_timeout)
        self._explaining: tuple[float, asyncio.TimerHandle] | None = None
        self._explained = -ANSWER_SECONDS

    async def run(self, listener: socket.socket) -> None:
        """Serves until the job is over."""
        admission = Admission(self._admit, self._serve, len(self.job.tasks), messages.MAX_HANDSHAKE_LINE)
        receiving = asyncio.create_task(admission.open(listener))
        watch = asyncio.create_task(self._watch())
        chief = asyncio.create_task(self._chief_lives())
        await self.over.wait()
        for task in (receiving, watch, chief):
            task.cancel()
        listener.close()
        for member in self.members.values():
            member.writer.close()
        admission.close()
        segments.unlink_of(self.job.name)

    # Admitting tasks.

    async def _serve(self, member: Member, reader: asyncio.StreamReader) -> None:
        try:
            async for line in _lines(reader):
                member.heard = True
                self._heard(member, messages.from_task(line))
        except (OSError, ValueError):
            pass  # the connection is broken or a message invalid; without a connection the task counts as lost
        finally:
            self._gone(member)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Member | None:
        challenge = proof.nonce()
        writer.write(messages.encode(messages.Challenge(messages.PROTOCOL, challenge)))
        hello = messages.hello(await reader.readline())
        claims, nonces = hello.claims, (challenge, hello.nonce)
        secret = self.job.secret.encode("utf-8", "surrogateescape")
        if why := self._objection(hello, proof.prove(secret, "task", nonces, claims)):
            peer = writer.get_extra_info("peername")
            self._note_refusal(f"{self._claimed_name(claims)} from {peer[0]} ({why.split(':')[0]})")
            writer.write(messages.encode(messages.AdmissionRefused(why)))
            await writer.drain()
            return None
        member = Member(self._number(claims), claims, writer)
        welcome = messages.Welcome(member.task, self.job.name)
        proven = proof.prove(secret, "server", nonces, [welcome.task, welcome.job])
        member.send(msgspec.structs.replace(welcome, proof=proven))
        for other in self.members.values():
            member.send(messages.TaskPresent(other.task, self._names[other.task]))
        self.members[member.task] = member
        self._chief_has_come |= member.task == 0
        self._awaited.discard(member.task)
        if self._trains(member.task) and self._closing:
            self._closing.cancel()
            self._closing = None
        self._meetings.returned(member.task)
        self._quorums.came(member.task)
        self._tell_all(messages.TaskPresent(member.task, self._names[member.task]))
        if self.failure:
            member.send(self.failure)
        elif not self.bound:
            self._report_missing()
        return member

    def _objection(self, hello: messages.Hello, expected: str) -> str | None:
        """Returns why a task is not admitted, or None. The proof is checked first, so that strangers learn nothing."""
        claims, job = hello.claims, self.job
        if not proof.is_proven(hello.proof, expected):
            return (
                "wrong or missing secret: this task could not prove that it knows the job's secret. "
                "Set TFDIST_SECRET (or TFDIST_SECRET_FILE) to the same value on every task, or on none."
            )
        if claims.version != job.version:
            return (
                f"another tfdist version: the chief runs {job.version}, this task {claims.version}. "
                "Install the same version on every task."
            )
        if claims.digest != job.digest:
            tasks = textwrap.shorten(", ".join(job.tasks), 1000, placeholder=" …")
            return (
                "another cluster spec: this task's list of tasks differs from the chief's, which is: "
                f"{tasks}. Give every task the same `cluster` in TF_CONFIG."
            )
        task = claims.task
        if task is not None and not 0 <= task < len(job.tasks):
            return f"no such task: expected a number from 0 to {len(job.tasks) - 1}, got {task}"
        if task is None and not (job.is_elastic or claims.name.startswith("evaluator ")):
            return (
                f"not in the cluster: the chief's cluster does not list {claims.name}. Only clusters with parameter "
                "servers take additional workers."
            )
        number = self._number(claims)
        if number in self.members:
            other = self.members[number].claims
            return (
                f"two tasks claim one index: {self._names[number]} is already taken by process {other.pid} "
                f"on {other.hostname}. Give every task its own `task.index` in TF_CONFIG."
            )
        if number in self.bound:
            return (
                f"too late: the job has started, and {self._names[number]} has left it already. Processes that train "
                "with collectives cannot be replaced: start the whole job again."
            )
        return None

    def _number(self, claims: Claims) -> int:
        """Returns a task's number; a task that the cluster does not list gets a new number for its name."""
        if claims.task is not None:
            return claims.task
        if claims.name not in self._names[len(self.job.tasks) :]:
            self._names.append(claims.name)
        return self._names.index(claims.name, len(self.job.tasks))

    def _claimed_name(self, claims: Claims) -> str:
        listed = claims.task is not None and 0 <= claims.task < len(self.job.tasks)
        return self.job.tasks[claims.task or 0] if listed else "a task"

    def _report_missing(self) -> None:
        self._tell_all(messages.MissingTasks(self._missing(), tuple(self._refused)))

    def _missing(self) -> tuple[str, ...]:
        return tuple(self.job.tasks[rank] for rank in range(self.job.size) if rank not in self.members)

    def _note_refusal(self, who: str) -> None:
        if who not in self._refused and len(self._refused) < 100:
            self._refused.append(who)
            if not self.bound:
                self._report_missing()

    # Keeping watch.

    async def _watch(self) -> None:
        looked = time.monotonic()
        while True:
            await asyncio.sleep(messages.HEARTBEAT_SECONDS)
            now = time.monotonic()
            passed, looked = min(now - looked, 2 * messages.HEARTBEAT_SECONDS), now
            someone = any(member.heard for member in self.members.values())
            if self._binding_since is not None and now - self._binding_since > self.job.start_timeout:
                self._binding_since = None
                self._fail(self._too_late())
            for member in list(self.members.values()):
                if member.heard:
                    member.heard, member.silence = False, 0.0
                elif someone:
                    member.silence += passed
                if not member.ended and member.silence > self.job.heartbeat_timeout:
                    self._lose(
                        member,
                        f"{self._name(member)} gave no sign of life for {member.silence:.0f} s: "
                        "it is stopped, its machine is down, or its link is cut.",
                    )
                    if member.task not in self.bound:
                        member.writer.close()  # it may come again, over a new connection
            self._tell_all(messages.Ping())

    def _too_late(self) -> str:
        refused = f" Refused: {'; '.join(self._refused)}." if self._refused else ""
        came = sum(task < self.job.size for task in self.members)
        if not self._missing():
            return (
                f"not all of the {came} tasks started MPI within {self.job.start_timeout:g} s. Every training task "
                "must make its strategy, or call tfdist.init(). If they may take that long, raise TFDIST_START_TIMEOUT."
            )
        return (
            f"{came} of {self.job.size} tasks came within {self.job.start_timeout:g} s. "
            f"Missing: {', '.join(self._missing())}.{refused} Start the missing tasks with the same TF_CONFIG "
            "cluster, see that they can reach the chief's address, or raise TFDIST_START_TIMEOUT."
        )

    async def _chief_lives(self) -> None:
        """Ends the job when the chief's process dies before the start; later its connection shows its death."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while await reader.read(1024):
            pass
        self._chief_has_come = True
        if not self.bound and not self.job.is_elastic:
            self._fail(f"{self.job.tasks[0]}, the chief, died before the job started.")
        self._end_if_deserted()

    def _gone(self, member: Member) -> None:
        member.writer.close()
        if self.members.get(member.task) is not member:
            return
        is_bound = member.task in self.bound
        if not member.ended and (is_bound or not member.left):
            when = (
                "after its script had ended, before MPI was finalized" if member.left else "before its script had ended"
            )
            self._lose(member, f"{self._name(member)} died (its connection closed {when}).")
        del self.members[member.task]
        if not is_bound:
            self._meetings.lost(member.task, None)
            if not self.bound and member.task < self.job.size:
                self._report_missing()
        self._end_if_deserted()

    def _lose(self, member: Member, why: str, reported: bool = False) -> None:
        """Tells all tasks that one of them is lost.

        Args:
            member: the lost task.
            why: the reason, as a sentence.
            reported: whether the task reported an error itself; otherwise it died or cannot be reached.
        """
        if member.is_lost:  # it has reported an error, then its script ends with the same one
            return
        member.is_lost = True
        is_bound = member.task in self.bound
        if is_bound:
            self.lost.add(member.task)
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self._end_if_deserted)
        else:
            if self.job.is_elastic and self._trains(member.task):
                self._awaited.add(member.task)
            self._meetings.lost(member.task, why if reported else None)
            self._quorums.gone(member.task, lost=True)
        member.ended = True
        self._tell_all(messages.TaskLost(member.task, why, not reported, is_bound))

    def _end_if_deserted(self) -> None:
        """Ends the server when no training task is left except lost ones, which may be stopped and never end.

        If an elastic job has lost a training task, the server waits up to the start's deadline for it to come again,
        as long as other tasks are there, unless the chief has ended without an error.
        """
        trains = [task for task in self.members if self._trains(task) and task not in self.lost]
        if trains or not self._chief_has_come:
            return
        if self._awaited and self.members.keys() - self.lost:
            if self._closing is None:
                self._closing = asyncio.get_running_loop().call_later(self.job.start_timeout, self._end)
        else:
            self._end()

    def _end(self) -> None:
        self._tell_all(messages.JobOver())
        self.over.set()

    def _trains(self, task: int) -> bool:
        return task < self.job.size or self._names[task].startswith("worker ")

    def _fail(self, why: str) -> None:
        """Tells all tasks that the job cannot start, and ends the server soon after."""
        if self.failure is None:
            self.failure = messages.JobFailed(why, mismatch=False)
            self._tell_all(self.failure)
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self.over.set)

    def _mismatch(self, why: str, members: tuple[int, ...] | None) -> None:
        """Tells the ranks of a group that they do different things."""
        for rank in range(self.job.size) if members is None else members:
            self._tell(rank, messages.JobFailed(why, mismatch=True))

    # Names.

    def _name(self, member: Member) -> str:
        rank = f"rank {member.task}, " if member.task < self.job.size else ""
        return f"{rank}{self._names[member.task]}, process {member.claims.pid} on {member.claims.hostname},"

    def _name_of(self, rank: int) -> str:
        member = self.members.get(rank)
        return self._name(member) if member else f"rank {rank}, {self.job.tasks[rank]},"

    # Messages.

    def _tell_all(self, message: RendezvousMessage) -> None:
        for member in self.members.values():
            member.send(message)

    def _tell(self, task: int, message: RendezvousMessage) -> None:
        if member := self.members.get(task):
            member.send(message)

    def _heard(self, member: Member, message: FromTask) -> None:
        match message:
            case messages.Ping():
                pass
            case messages.PublishValue():
                self._meetings.put(member.task, message)
            case messages.GetValue():
                self._meetings.get(member.task, message)
            case messages.GatherValues():
                self._gather(member, message)
            case messages.Stalled():
                self._explain(message.seconds)
            case messages.ScriptEnded():
                self._leave(member, message)
            case messages.MPIShutDown():
                member.ended = True
                if all(task in self.members and self.members[task].ended for task in self.bound):
                    self._tell_all(messages.AllMPIShutDown())
            case RoundsMessage():
                self._quorums.heard(member.task, message)
            case messages.ReportFailure(why, mismatch=True):
                self._mismatch(why, message.members)
            case messages.ReportFailure(why):
                self._lose(member, f"{self._name(member)} failed: {why}", reported=True)
            case _:
                self._coordination.heard(member.task, message)
                if isinstance(message, messages.RankStatus) and self._coordination.all_have_answered():
                    self._tell_explanation()

    def _gather(self, member: Member, message: messages.GatherValues) -> None:
        if message.binds and self._binding_since is None:
            self._binding_since = time.monotonic()
        if self._meetings.gather(member.task, message) and message.binds:
            self._binding_since = None
            self.bound = frozenset(message.tasks)

    def _leave(self, member: Member, message: messages.ScriptEnded) -> None:
        member.left = True
        if message.failed:
            self._lose(member, f"{self._name(member)} failed: {message.failed}", reported=True)
        else:
            if member.task == 0:
                self._awaited.clear()  # the job has ended without an error
            self._quorums.gone(member.task, lost=False)
            self._tell_all(messages.TaskFinished(member.task, self._name(member), message.counts))

    # Explaining a stall.

    def _explain(self, seconds: float) -> None:
        """Finds out why ranks wait, and tells the ranks concerned; once for all requests at about the same time."""
        if self._explaining is None and time.monotonic() - self._explained > ANSWER_SECONDS:
            self._coordination.ask()
            loop = asyncio.get_running_loop()
            self._explaining = seconds, loop.call_later(ANSWER_SECONDS, self._tell_explanation)

    def _tell_explanation(self) -> None:
        if self._explaining is not None:
            seconds, timer = self._explaining
            timer.cancel()
            self._explaining = None
            self._explained = time.monotonic()
            report = self._coordination.explanation(seconds)
            for rank in self._coordination.concerned():
                self._tell(rank, report)


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yields the lines of an admitted task, which may be longer than the lines of an unknown process."""
    pending = b""
    while chunk := await reader.read(1 << 16):
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(pending) > messages.MAX_LINE:
            raise ValueError("a line is longer than the maximum")


def _later(seconds: float, then: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, then)


def main() -> None:
    """Serves the job described on standard input, on the listening socket whose number is the argument."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.setblocking(False)
    job = msgspec.json.decode(sys.stdin.readline(), type=JobDescription)
    asyncio.run(_serve(job, listener))


async def _serve(job: JobDescription, listener: socket.socket) -> None:
    await RendezvousServer(job).run(listener)


if __name__ == "__main__":
    main()
