"""The rendezvous server: one process per job, started by the chief, that outlives no task.

It lets tasks in, tells all of them to start once all are there, and then keeps watch: a connection that the
kernel closes is a task that died, a silent one a task that is stopped or cut off. Beside that it holds the few
small things that tasks must agree on (MPI's business cards; `tfdist.cluster.coordination`). It is a process of its
own because MPI can hold a whole Python process still while it starts.

Run as ``python -m tfdist.cluster.server FD``: ``FD`` is a listening socket, the job's description comes as one
line of JSON on standard input, which the chief keeps open as long as it lives.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from tfdist.cluster import wire
from tfdist.cluster.coordination import Coordination
from tfdist.cluster.doors import Doors
from tfdist.comm import segments

ANSWER_SECONDS = 2.0
"""For the ranks to tell what they have under way, when one has waited long."""
LINGER_SECONDS = 10.0


@dataclass
class Job:
    """What the server knows of its job before anyone comes.

    Attributes:
        name: unique among all jobs, at any time, of a machine.
        tasks: what each rank's task is called in messages.
        digest: fingerprint of the cluster that every task must have been given.
        version: of tfdist, the same on every task.
        secret: what a task must prove to know; empty when the job has none.
        start_timeout: seconds for all tasks to come.
        heartbeat_timeout: seconds of silence after which a task counts as lost.
    """

    name: str
    tasks: list[str]
    digest: str
    version: str
    secret: str
    start_timeout: float
    heartbeat_timeout: float


@dataclass
class Member:
    """A task that was let in.

    Attributes:
        rank: its rank.
        claims: what it says of itself.
        writer: its connection.
        heard: whether it gave a sign of life since the last look.
        silence: seconds without one in which other tasks gave some. Where all are silent the whole job is stopped
            (Ctrl-Z), and there is nobody to be told.
        left: its script has ended, and it waits for the others' to end.
        ended: it needs the others no more; or the job knows that it is lost.
    """

    rank: int
    claims: dict[str, Any]
    writer: asyncio.StreamWriter
    heard: bool = True
    silence: float = 0.0
    left: bool = False
    ended: bool = False

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, if the task is still there."""
        if not self.writer.is_closing():
            self.writer.write(wire.encode(message))


class Server:
    """One job's rendezvous."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.size = len(job.tasks)
        self.members: dict[int, Member] = {}
        self.refused: list[str] = []
        self.started = False
        self.failure: dict[str, Any] | None = None
        self.lost: set[int] = set()
        self.over = asyncio.Event()
        self._values: dict[str, str] = {}
        self._barriers: dict[str, dict[int, int]] = {}
        self._gathered: dict[str, dict[int, tuple[int, Any]]] = {}
        self._coordination = Coordination(
            self.size, self._name_of, self._answer, lambda why: self._fail(None, why, kind="mismatch")
        )
        self._explaining: tuple[float, asyncio.TimerHandle] | None = None

    async def run(self, listener: socket.socket) -> None:
        """Serves until the job is over."""
        doors = Doors(self._admit, self._serve, self.size, wire.MAX_HANDSHAKE_LINE)
        receiving = asyncio.create_task(doors.open(listener))
        watch = asyncio.create_task(self._watch())
        chief = asyncio.create_task(self._chief_lives())
        await self.over.wait()
        for task in (receiving, watch, chief):
            task.cancel()
        listener.close()
        for member in self.members.values():
            member.writer.close()
        doors.close()
        if self.failure:
            segments.unlink_of(self.job.name)

    # Letting tasks in.

    async def _serve(self, member: Member, reader: asyncio.StreamReader) -> None:
        try:
            async for line in _lines(reader):
                member.heard = True
                self._heard(member, wire.decode(line))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # a message that no task of this version sends; without its connection the task counts as lost
        finally:
            self._gone(member)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Member | None:
        challenge = wire.nonce()
        writer.write(wire.encode({"tfdist": wire.PROTOCOL, "nonce": challenge}))
        hello = wire.decode(await reader.readline())
        claims, nonces = hello.get("claims"), (challenge, str(hello.get("nonce")))
        if not isinstance(claims, dict):
            return None
        rank = claims.get("rank")
        if why := self._objection(hello, claims, nonces):
            peer = writer.get_extra_info("peername")
            name = self.job.tasks[rank] if isinstance(rank, int) and 0 <= rank < self.size else "a task"
            self._note_refusal(f"{name} from {peer[0]} ({why.split(':')[0]})")
            writer.write(wire.encode({"refused": why}))
            await writer.drain()
            return None
        assert isinstance(rank, int)
        member = Member(rank, claims, writer)
        self.members[rank] = member
        answer = {"welcome": rank, "job": self.job.name}
        proof = wire.prove(self.job.secret.encode("utf-8", "surrogateescape"), "server", nonces, answer)
        member.send({**answer, "proof": proof})
        if self.failure:
            member.send(self.failure)
        if len(self.members) == self.size:
            self._start()
        else:
            self._report_missing()
        return member

    def _objection(self, hello: dict[str, Any], claims: dict[str, Any], nonces: tuple[str, str]) -> str | None:
        """Why a task may not come in, or None. The proof comes first: nobody else learns anything."""
        expected = wire.prove(self.job.secret.encode("utf-8", "surrogateescape"), "task", nonces, claims)
        if not wire.proven(hello.get("proof"), expected):
            return (
                "wrong or missing secret: this task could not prove that it knows the job's secret. "
                "Set TFDIST_SECRET (or TFDIST_SECRET_FILE) to the same value on every task, or on none."
            )
        if claims.get("version") != self.job.version:
            return (
                f"another tfdist version: the chief runs {self.job.version}, this task {claims.get('version')}. "
                "Install the same version on every task."
            )
        if claims.get("digest") != self.job.digest:
            tasks = textwrap.shorten(", ".join(self.job.tasks), 1000, placeholder=" …")
            return (
                "another cluster spec: this task's list of tasks differs from the chief's, which is: "
                f"{tasks}. Give every task the same `cluster` in TF_CONFIG."
            )
        rank = claims.get("rank")
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            return f"no such rank: expected 0 to {self.size - 1}, got {rank}"
        if rank in self.members:
            other = self.members[rank].claims
            return (
                f"two tasks claim one index: {self.job.tasks[rank]} is already taken by process {other.get('pid')} "
                f"on {other.get('hostname')}. Give every task its own `task.index` in TF_CONFIG."
            )
        if self.started:
            return f"too late: the job has started, and {self.job.tasks[rank]} has left it already."
        return None

    def _start(self) -> None:
        self.started = True
        claims = [self.members[rank].claims for rank in range(self.size)]
        self._tell_all({"type": "start", "claims": claims})

    def _report_missing(self) -> None:
        self._tell_all({"type": "missing", "tasks": self._missing(), "refused": self.refused})

    def _missing(self) -> list[str]:
        return [name for rank, name in enumerate(self.job.tasks) if rank not in self.members]

    def _note_refusal(self, who: str) -> None:
        if who not in self.refused and len(self.refused) < 100:
            self.refused.append(who)
            self._report_missing()

    # Keeping watch.

    async def _watch(self) -> None:
        begin = looked = time.monotonic()
        while True:
            await asyncio.sleep(wire.HEARTBEAT_SECONDS)
            now = time.monotonic()
            passed, looked = min(now - looked, 2 * wire.HEARTBEAT_SECONDS), now
            someone = any(member.heard for member in self.members.values())
            if not self.started and not self.failure and now - begin > self.job.start_timeout:
                self._fail(None, self._too_late())
            for member in list(self.members.values()):
                if member.heard:
                    member.heard, member.silence = False, 0.0
                elif someone:
                    member.silence += passed
                if not member.ended and member.silence > self.job.heartbeat_timeout:
                    member.ended = True
                    self._fail(
                        member.rank,
                        f"{self._name(member)} gave no sign of life for {member.silence:.0f} s: "
                        "it is stopped, its machine is down, or its link is cut.",
                        died=True,
                    )
            self._tell_all({"type": "ping"})

    def _too_late(self) -> str:
        refused = f" Refused: {'; '.join(self.refused)}." if self.refused else ""
        return (
            f"{len(self.members)} of {self.size} tasks came within {self.job.start_timeout:g} s. "
            f"Missing: {', '.join(self._missing())}.{refused} Start the missing tasks with the same TF_CONFIG "
            "cluster, see that they can reach the chief's address, or raise TFDIST_START_TIMEOUT."
        )

    async def _chief_lives(self) -> None:
        """Ends the job when the chief's process goes before the start; later its connection tells."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while await reader.read(1024):
            pass
        if not self.started:
            self._fail(0, f"{self.job.tasks[0]}, the chief, died before the job started.")
            self._end_if_deserted()

    def _gone(self, member: Member) -> None:
        member.writer.close()
        if self.members.get(member.rank) is not member:
            return
        if not self.started and not self.failure:
            # Its scheduler may start it again; the deadline still runs.
            del self.members[member.rank]
            self._report_missing()
            return
        if not member.ended:
            member.ended = True
            when = "after its script had ended, before MPI had" if member.left else "before its script had ended"
            self._fail(member.rank, f"{self._name(member)} died (its connection closed {when}).", died=True)
        del self.members[member.rank]
        self._end_if_deserted()

    def _end_if_deserted(self) -> None:
        """Ends the server when no task is left, or none but lost ones, which may be stopped and never go."""
        if all(member.rank in self.lost for member in self.members.values()):
            self.over.set()

    def _name(self, member: Member) -> str:
        claims = member.claims
        return (
            f"rank {member.rank}, {self.job.tasks[member.rank]}, "
            f"process {claims.get('pid')} on {claims.get('hostname')},"
        )

    def _name_of(self, rank: int) -> str:
        member = self.members.get(rank)
        return self._name(member) if member else f"rank {rank}, {self.job.tasks[rank]},"

    def _fail(self, rank: int | None, why: str, kind: str = "lost", died: bool = False) -> None:
        """Tells everyone that a task is lost, or that the job cannot go on. Tasks take the first cause that they hear.

        Those that share no group with a lost task go on, and this server with them.
        """
        loop = asyncio.get_running_loop()
        if kind == "lost" and rank is not None and self.started:
            if rank in self.lost:
                return
            self.lost.add(rank)
            loop.call_later(LINGER_SECONDS, self._end_if_deserted)
        elif self.failure is not None:
            return
        else:
            loop.call_later(LINGER_SECONDS, self.over.set)
        message = {"type": "failed", "kind": kind, "rank": rank, "why": why, "died": died}
        self.failure = self.failure or message
        self._tell_all(message)

    def _tell_all(self, message: dict[str, Any]) -> None:
        for member in self.members.values():
            member.send(message)

    # What tasks ask for.

    def _heard(self, member: Member, message: dict[str, Any]) -> None:
        kind = message.get("type")
        if kind == "put":
            self._put(message["key"], message["value"])
        elif kind == "get":
            self._get(member, message["key"], message["id"])
        elif kind == "barrier":
            self._barrier(member, message["name"], message["id"])
        elif kind == "gather":
            self._gather(member, message["name"], message["value"], message["id"])
        elif kind == "stalled":
            self._explain(float(message["seconds"]))
        elif kind == "leave":
            self._leave(member, message)
        elif kind == "end":
            member.ended = True
            if len(self.members) == self.size and all(one.ended for one in self.members.values()):
                self._tell_all({"type": "all ended"})
        elif kind == "fails":
            mismatch, why = message["mismatch"], str(message["why"])
            told = why if mismatch else f"{self._name(member)} failed: {why}"
            self._fail(member.rank, told, "mismatch" if mismatch else "lost")
        else:
            self._coordination.heard(member.rank, message)
            if kind == "state" and self._coordination.all_have_answered():
                self._tell_explanation()

    def _put(self, key: str, value: str) -> None:
        self._values[key] = value

    def _get(self, member: Member, key: str, request: int) -> None:
        member.send({"re": request, "value": self._values.get(key)})

    def _barrier(self, member: Member, name: str, request: int) -> None:
        arrived = self._barriers.setdefault(name, {})
        arrived[member.rank] = request
        if len(arrived) == self.size:
            for rank, number in self._barriers.pop(name).items():
                self._answer(rank, {"re": number})

    def _gather(self, member: Member, name: str, value: Any, request: int) -> None:
        given = self._gathered.setdefault(name, {})
        given[member.rank] = request, value
        if len(given) == self.size:
            values = [given[rank][1] for rank in range(self.size)]
            for rank, (number, _) in self._gathered.pop(name).items():
                self._answer(rank, {"re": number, "values": values})

    def _explain(self, seconds: float) -> None:
        """Finds out, and tells everyone, why ranks wait; once for all who ask at about the same time."""
        if self._explaining is None:
            self._coordination.ask()
            loop = asyncio.get_running_loop()
            self._explaining = seconds, loop.call_later(ANSWER_SECONDS, self._tell_explanation)

    def _tell_explanation(self) -> None:
        if self._explaining is not None:
            seconds, timer = self._explaining
            timer.cancel()
            self._explaining = None
            self._tell_all({"type": "stall", "why": self._coordination.explanation(seconds)})

    def _answer(self, rank: int, message: dict[str, Any]) -> None:
        if member := self.members.get(rank):
            member.send(message)

    def _leave(self, member: Member, message: dict[str, Any]) -> None:
        member.left = True
        if reason := message.get("failed"):
            self._fail(member.rank, f"{self._name(member)} failed: {reason}")
        else:
            counts = message.get("counts", {})
            self._tell_all({"type": "left", "rank": member.rank, "name": self._name(member), "counts": counts})


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a task that was let in, which may be longer than those of a stranger."""
    pending = b""
    while chunk := await reader.read(1 << 16):
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(pending) > wire.MAX_LINE:
            raise ValueError("a line without an end")


def main() -> None:
    """Serves the job that standard input describes on the listening socket given by number."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.setblocking(False)
    job = Job(**json.loads(sys.stdin.readline()))
    asyncio.run(_serve(job, listener))


async def _serve(job: Job, listener: socket.socket) -> None:
    await Server(job).run(listener)


if __name__ == "__main__":
    main()
