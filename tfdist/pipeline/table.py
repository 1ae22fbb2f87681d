"""Tables: the order of every worker's actions, and the exchanges between them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from tfdist.pipeline.actions import Action, ActionKind, Step, Transfer, WorkerExchange, parse

Edge = tuple[int, int]
"""The numbers of two stages: the second one takes results of the first one."""


class Table:
    """The actions of each worker, in their order.

    Args:
        rows: actions of each worker, or their notation.
        stages: number of stages.
        micro_batches: number of micro-batches.
        edges: edges from earlier to later stages; by default from each stage to the next.
        training: whether the table has backward passes.

    Attributes:
        rows: as given.
        stages: as given.
        micro_batches: as given.
        edges: as given.
        workers: number of the worker of each stage.

    Raises:
        ValueError: an action is missing, occurs twice, is invalid, or precedes an action of its worker that it needs;
            or several workers have actions of one stage.
    """

    def __init__(
        self,
        rows: Sequence[Iterable[Action | str]],
        stages: int,
        micro_batches: int,
        edges: Collection[Edge] | None = None,
        training: bool = True,
    ) -> None:
        self.rows = tuple(tuple(parse(entry) if isinstance(entry, str) else entry for entry in row) for row in rows)
        self.stages = stages
        self.micro_batches = micro_batches
        self.edges = tuple(itertools.pairwise(range(stages))) if edges is None else tuple(sorted(edges))
        places = {action: worker for worker, row in enumerate(self.rows) for action in row}
        self._check_each_once(places, training)
        self.workers = tuple(self._worker_of(stage, places) for stage in range(stages))
        self._check_order()

    @functools.cached_property
    def is_divided(self) -> bool:
        """Whether backward passes are divided into those of inputs and those of weights."""
        return any(action.kind is ActionKind.WEIGHTS for row in self.rows for action in row)

    @functools.cached_property
    def ends_forward_first(self) -> bool:
        """Whether the last stage makes all its forward passes before its first backward pass."""
        row = self.rows[self.workers[-1]]
        kinds = [action.kind for action in row if action.stage == self.stages - 1]
        return all(kind is ActionKind.FORWARD for kind in kinds[: self.micro_batches])

    def needs(self, action: Action) -> list[Action]:
        """Returns the actions whose results an action needs.

        Args:
            action: an action of the table.
        """
        stage, kind, number = action
        if kind is ActionKind.FORWARD:
            return [Action(source, kind, number) for source, end in self.edges if end == stage]
        if kind is ActionKind.WEIGHTS:
            return [Action(stage, ActionKind.INPUTS, number)]
        later = [Action(end, self._backward_of(end, number), number) for begin, end in self.edges if begin == stage]
        return [Action(stage, ActionKind.FORWARD, number), *later]

    def steps(self, worker: int, here: Collection[int] = ()) -> list[Step]:
        """Returns a worker's actions, and its exchanges with other processes between them.

        Results are sent as soon as they are made. Each exchange also expects what the next exchange receives, so that
        it arrives while the worker computes.

        Args:
            worker: number of the worker.
            here: numbers of the workers in the same process.
        """
        row, here = self.rows[worker], {worker, *here}
        sent = [(), *(tuple(self._sent(action, here)) for action in row)]
        received = [*(tuple(self._received(action, here)) for action in row), ()]
        places = [place for place in range(len(row) + 1) if sent[place] or received[place]]
        exchanges = {
            place: WorkerExchange(sent[place], () if later is None else received[later], received[place])
            for place, later in itertools.zip_longest(places, places[1:])
        }
        steps: list[Step] = []
        for place, action in enumerate([*row, None]):
            steps += [exchanges[place]] if place in exchanges else []
            steps += [] if action is None else [action]
        return steps

    def _sent(self, action: Action, here: Collection[int]) -> Iterator[Transfer]:
        for stage in self._takers.get(action, ()):
            if self.workers[stage] not in here:
                yield Transfer(action, stage)

    def _received(self, action: Action, here: Collection[int]) -> Iterator[Transfer]:
        for source in self.needs(action):
            if self.workers[source.stage] not in here:
                yield Transfer(source, action.stage)

    @functools.cached_property
    def _takers(self) -> dict[Action, list[int]]:
        """The other stages that take the results of an action, by action."""
        takers: dict[Action, list[int]] = {}
        for action in itertools.chain(*self.rows):
            for source in self.needs(action):
                if source.stage != action.stage:
                    takers.setdefault(source, []).append(action.stage)
        return takers

    def _backward_of(self, stage: int, number: int) -> ActionKind:
        return ActionKind.INPUTS if Action(stage, ActionKind.INPUTS, number) in self._actions else ActionKind.BACKWARD

    @functools.cached_property
    def _actions(self) -> frozenset[Action]:
        return frozenset(itertools.chain(*self.rows))

    def _check_each_once(self, places: dict[Action, int], training: bool) -> None:
        given = list(itertools.chain(*self.rows))
        for action in given:
            if not (0 <= action.stage < self.stages and 0 <= action.micro_batch < self.micro_batches):
                raise ValueError(
                    f"a table for {self.stages} stages and {self.micro_batches} micro-batches has no place for {action}"
                )
            if not training and action.kind is not ActionKind.FORWARD:
                raise ValueError(f"a table of forward passes has no place for {action}")
        if len(places) != len(given):
            twice = next(action for action in given if given.count(action) > 1)
            raise ValueError(f"the action {twice} stands in the table more than once")
        for stage, number in itertools.product(range(self.stages), range(self.micro_batches)):
            kinds = {kind for kind in ActionKind if Action(stage, kind, number) in places}
            if ActionKind.FORWARD not in kinds:
                raise ValueError(f"the action {Action(stage, ActionKind.FORWARD, number)} is missing from the table")
            if training and kinds not in (
                {ActionKind.FORWARD, ActionKind.BACKWARD},
                {ActionKind.FORWARD, ActionKind.INPUTS, ActionKind.WEIGHTS},
            ):
                names = ", ".join(sorted(kind.value for kind in kinds))
                raise ValueError(
                    f"the table needs either B, or I and W, of stage {stage} and micro-batch {number}; got {names}"
                )

    def _worker_of(self, stage: int, places: dict[Action, int]) -> int:
        workers = sorted({worker for action, worker in places.items() if action.stage == stage})
        if len(workers) != 1:
            raise ValueError(
                f"the actions of stage {stage} stand in the rows of workers {workers}; expected one worker"
            )
        return workers[0]

    def _check_order(self) -> None:
        for row in self.rows:
            row_actions, done = set(row), set[Action]()
            for action in row:
                for source in self.needs(action):
                    if source in row_actions and source not in done:
                        raise ValueError(f"the action {action} stands before {source}, which it needs")
                done.add(action)
