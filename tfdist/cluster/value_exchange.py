"""The values that tasks exchange over the rendezvous server: gathered from a list of tasks, or published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.cluster.messages import GatherValues, GetValue, PublishValue, Reply


class ValueExchange:
    """The server's bookkeeping of exchanged values; it has no connection of its own.

    Args:
        reply: function that sends a reply to a task.
    """

    def __init__(self, reply: Callable[[int, Reply], None]) -> None:
        self._reply = reply
        self._gathers: dict[tuple[str, tuple[int, ...]], dict[int, tuple[int, Any]]] = {}
        self._values: dict[str, tuple[int, str]] = {}
        self._waiting: dict[str, list[tuple[int, int]]] = {}
        self._failed: dict[int, str] = {}

    def gather(self, task: int, message: GatherValues) -> bool:
        """Takes a task's value. Returns whether it completes the exchange, so that all tasks have been answered."""
        if task not in message.tasks or len(set(message.tasks)) < len(message.tasks):
            error = (
                f"a gather of task {task} must list the task itself, and each task once; got {list(message.tasks)[:20]}"
            )
            self._reply(task, Reply(message.id, error=error))
            return False
        for other in message.tasks:
            if other in self._failed:
                self._reply(task, Reply(message.id, error=self._failed[other]))
                return False
        meeting = (message.name, message.tasks)
        given = self._gathers.setdefault(meeting, {})
        given[task] = message.id, message.value
        if len(given) < len(message.tasks):
            return False
        values = [given[participant][1] for participant in message.tasks]
        for participant, (request, _) in self._gathers.pop(meeting).items():
            self._reply(participant, Reply(request, values))
        return True

    def put(self, task: int, message: PublishValue) -> None:
        """Publishes a value, and answers the tasks that wait for it."""
        self._values[message.key] = task, message.value
        for waiter, request in self._waiting.pop(message.key, ()):
            self._reply(waiter, Reply(request, message.value))

    def get(self, task: int, message: GetValue) -> None:
        """Answers with a published value: at once, or if ``message.wait`` is set, as soon as there is one."""
        if message.key in self._values or not message.wait:
            _, value = self._values.get(message.key, (task, None))
            self._reply(task, Reply(message.id, value))
        else:
            self._waiting.setdefault(message.key, []).append((task, message.id))

    def returned(self, task: int) -> None:
        """Forgets an earlier failure of a task that has come, perhaps again."""
        self._failed.pop(task, None)

    def lost(self, task: int, error: str | None) -> None:
        """Forgets the values of a lost task.

        Args:
            task: number of the lost task.
            error: the error that the task reported. Tasks that gather from this task get it as the answer. None lets
                them wait until the task comes again.
        """
        self._values = {key: entry for key, entry in self._values.items() if entry[0] != task}
        for key, requests in self._waiting.items():
            self._waiting[key] = [(waiter, request) for waiter, request in requests if waiter != task]
        for meeting, given in list(self._gathers.items()):
            given.pop(task, None)
            if error is not None and task in meeting[1]:
                del self._gathers[meeting]
                for participant, (request, _) in given.items():
                    self._reply(participant, Reply(request, error=error))
        if error is not None:
            self._failed[task] = error
