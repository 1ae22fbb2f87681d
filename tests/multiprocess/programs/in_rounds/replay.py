"""Records what happens when in gossip that waits for nobody, and computes in NumPy what is to come of it.

An event is three numbers: what happened, with whom, and in which round of the other one. Each process's events are in
their order, a step of training among them; what one process sends to another arrives in its order. So all events can be
done again, one process after another.
"""

import contextlib
from collections import defaultdict, deque
from unittest import mock

from gossip_reference import descended, mean

from tfdist.gossip.bounded import BoundedStalenessMixing
from tfdist.gossip.messages import MessageKind
from tfdist.gossip.pairs import PairwiseMixing

STEP, ASK, ANSWER, ADD, CROSS, TAKE, VOID, END = range(1, 9)
ROOM = 400
"""Events of a process at most, as all processes gather equal numbers of them."""


class Recorder(contextlib.ExitStack):
    """Records this process's events.

    Attributes:
        events: ROOM of them, followed by zeros.
    """

    def __enter__(self):
        self._found = []
        before = {
            "mix": PairwiseMixing.mix,
            "_ask": PairwiseMixing._ask,
            "_answer": PairwiseMixing._answer,
            "_hear": PairwiseMixing._hear,
        }

        def mix(mixing, values):
            self._found.append((STEP, 0, 0))
            return before["mix"](mixing, values)

        def ask(mixing, values):
            before["_ask"](mixing, values)
            self._found.append((ASK, mixing._asked, 0))

        def answer(mixing, rank, request, values):
            self._found.append((ANSWER, rank, 0))
            before["_answer"](mixing, rank, request, values)

        def hear(mixing, rank, message, values):
            if message.kind == MessageKind.REQUEST:
                self._found.append((CROSS if rank == mixing._asked else VOID, rank, 0))
            elif message.kind == MessageKind.ANSWER:
                self._found.append((ADD, rank, 0))
            before["_hear"](mixing, rank, message, values)

        for name, replacement in (("mix", mix), ("_ask", ask), ("_answer", answer), ("_hear", hear)):
            self.enter_context(mock.patch.object(PairwiseMixing, name, replacement))
        bounded_mix, take, finish = (
            BoundedStalenessMixing.mix,
            BoundedStalenessMixing._take,
            BoundedStalenessMixing.finish,
        )

        def mix_bounded(mixing, values):
            self._found.append((STEP, 0, 0))
            return bounded_mix(mixing, values)

        def record_take(mixing, rank, message, values):
            if message.round in mixing._own:
                self._found.append((TAKE, rank, message.round))
            take(mixing, rank, message, values)

        self.enter_context(mock.patch.object(BoundedStalenessMixing, "mix", mix_bounded))

        def finish_bounded(mixing, values):
            if self._found:  # `fit` also begins with an end
                self._found.append((END, 0, 0))
            return finish(mixing, values)

        self.enter_context(mock.patch.object(BoundedStalenessMixing, "_take", record_take))
        self.enter_context(mock.patch.object(BoundedStalenessMixing, "finish", finish_bounded))
        return super().__enter__()

    @property
    def events(self):
        assert len(self._found) <= ROOM, len(self._found)
        return self._found + [(0, 0, 0)] * (ROOM - len(self._found))


class Process:
    """One that does its events again."""

    def __init__(self, rank, events, start):
        self.rank, self.events = rank, deque(event for event in map(tuple, events) if event[0])
        self.weights = [weight.copy() for weight in start]
        self.sent = {}  # by round, the weights
        self.rounds = -1
        self.given = None


def replayed(start, events, batches, rate, weight):
    """Returns the mean at the end of an epoch.

    Args:
        start: initial weights, equal on all processes.
        events: events of each process.
        batches: for each step, each process's inputs and outputs.
        rate: learning rate of SGD.
        weight: weight of a neighbour, with bounded staleness.
    """
    processes = [Process(rank, process_events, start) for rank, process_events in enumerate(events)]
    requests, answers = defaultdict(deque), defaultdict(deque)

    def half(arrays, others):
        return [(array - other) / 2 for array, other in zip(arrays, others, strict=True)]

    def done(process, what, other, number):
        """Does an event, if what it needs is there."""
        if what == STEP:
            process.rounds += 1
            process.weights = descended(process.weights, *batches[process.rounds][process.rank], rate)
            process.sent[process.rounds] = [array.copy() for array in process.weights]
        elif what == END:  # what comes now is later by a round than at the last step
            process.rounds += 1
        elif what == ASK:
            process.given = [array.copy() for array in process.weights]
            requests[process.rank, other].append(process.given)
        elif what in (ANSWER, CROSS, VOID):
            if not requests[other, process.rank]:
                return False
            theirs = requests[other, process.rank].popleft()
            if what == ANSWER:
                changes = half(process.weights, theirs)
                answers[process.rank, other].append(changes)
                process.weights = [array - change for array, change in zip(process.weights, changes, strict=True)]
            elif what == CROSS:
                changes = half(theirs, process.given)
                process.weights = [array + change for array, change in zip(process.weights, changes, strict=True)]
        elif what == ADD:
            if not answers[other, process.rank]:
                return False
            changes = answers[other, process.rank].popleft()
            process.weights = [array + change for array, change in zip(process.weights, changes, strict=True)]
        elif what == TAKE:
            if number not in processes[other].sent:
                return False
            factor = weight / (1 + process.rounds - number)
            process.weights = [
                mine + factor * (theirs - ours)
                for mine, theirs, ours in zip(
                    process.weights, processes[other].sent[number], process.sent[number], strict=True
                )
            ]
        return True

    while any(process.events for process in processes):
        moved = False
        for process in processes:
            while process.events and done(process, *process.events[0]):
                process.events.popleft()
                moved = True
        assert moved, [list(process.events)[:3] for process in processes]
    return mean([process.weights for process in processes])
