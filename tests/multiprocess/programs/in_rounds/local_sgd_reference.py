"""Local SGD in a few lines of NumPy: linear regression by all processes, one after another. Nothing of tfdist."""

import numpy as np
from common import gradient


class Momentum:
    """SGD as Keras has it: v ← β v − η g, w ← w + v; with Nesterov's momentum w ← w + β v − η g."""

    def __init__(self, rate, momentum=0.0, nesterov=False):
        self.rate, self.momentum, self.nesterov = rate, momentum, nesterov
        self.velocity = None

    def step(self, weights, gradients):
        if self.velocity is None:
            self.velocity = [np.zeros_like(weight) for weight in weights]
        self.velocity = [self.momentum * v - self.rate * g for v, g in zip(self.velocity, gradients, strict=True)]
        if self.nesterov:
            ahead = [self.momentum * v - self.rate * g for v, g in zip(self.velocity, gradients, strict=True)]
            return [w + a for w, a in zip(weights, ahead, strict=True)]
        return [w + v for w, v in zip(weights, self.velocity, strict=True)]


class Process:
    """A process that trains.

    Args:
        weights: initial weights, equal on all processes.
        rate: learning rate of the process's SGD.
        momentum: momentum of the process's SGD.
    """

    def __init__(self, weights, rate, momentum):
        self.weights = [weight.copy() for weight in weights]
        self.inner = Momentum(rate, momentum)
        self.samples = [0] * len(weights)  # since each variable was exchanged

    def step(self, x, y):
        self.weights = self.inner.step(self.weights, gradient(self.weights, x, y))
        self.samples = [count + len(x) for count in self.samples]


def mean(arrays, counts):
    """Weighted by counts."""
    total = sum(counts)
    return sum(array * (count / total) for array, count in zip(arrays, counts, strict=True))


class Training:
    """The training of several processes.

    Args:
        start: the weights, a matrix and a vector.
        size: number of processes.
        interval: returns the number of steps of a round, from the number of the step.
        rate: learning rate of each process's SGD.
        momentum: momentum of each process's SGD.
        outer: for each fragment, moves the centre; None for the average.
        elastic: the moving rate of the centre.
        fragments: 1, or 2 for the matrix and the vector.
        delay: steps between an exchange and its use.
        mix: the part of its own weights that a process keeps.
        start_after: steps after which everything is averaged.
        averages_slots: whether rounds average velocities.
    """

    def __init__(
        self,
        start,
        size,
        interval=lambda step: 1,
        rate=1 / 16,
        momentum=0.0,
        outer=None,
        elastic=None,
        fragments=1,
        delay=0,
        mix=0.0,
        start_after=0,
        averages_slots=False,
    ):
        self.processes = [Process(start, rate, momentum) for _ in range(size)]
        self.centre = [weight.copy() for weight in start]
        self.interval, self.outer, self.elastic = interval, outer, elastic
        self.parts = [[0, 1]] if fragments == 1 else [[0], [1]]
        self.delay, self.mix, self.start_after, self.averages_slots = delay, mix, start_after, averages_slots
        self.step = 0

    def epoch(self, batches):
        """Trains, and makes the weights equal.

        Args:
            batches: for each step, each process's inputs and outputs.
        """
        part, under_way, since = 0, None, 0
        for batch in batches:
            for process, (x, y) in zip(self.processes, batch, strict=True):
                process.step(x, y)
            self.step += 1
            if self.step <= self.start_after:
                self.average()
                continue
            since += 1
            if under_way is not None and since == self.delay:
                self.end(*under_way)
                under_way = None
            if since == self.spacing:
                under_way = part, self.begin(part)
                part, since = (part + 1) % len(self.parts), 0
                if not self.delay:
                    self.end(*under_way)
                    under_way = None
                self.spaced = None
        if under_way is not None:
            self.end(*under_way)
        for last in range(part, part + len(self.parts)):
            number = last % len(self.parts)
            if sum(process.samples[self.parts[number][0]] for process in self.processes):
                self.end(number, self.begin(number))
        for process in self.processes:
            process.weights = [weight.copy() for weight in self.centre]
        self.spaced = None

    spaced = None

    @property
    def spacing(self):
        """Steps between two exchanges; decided at the first of them."""
        if self.spaced is None:
            self.spaced = max(1, self.interval(self.step - 1) // len(self.parts))
        return self.spaced

    def average(self):
        counts = [process.samples[0] for process in self.processes]
        weights = [mean([process.weights[i] for process in self.processes], counts) for i in (0, 1)]
        velocity = [mean([process.inner.velocity[i] for process in self.processes], counts) for i in (0, 1)]
        for process in self.processes:
            process.weights, process.inner.velocity = (
                [array.copy() for array in weights],
                [array.copy() for array in velocity],
            )
            process.samples = [0, 0]
        self.centre = weights

    def begin(self, number):
        """The mean difference from the centre."""
        differences = []
        for i in self.parts[number]:
            counts = [process.samples[i] for process in self.processes]
            differences.append(mean([process.weights[i] - self.centre[i] for process in self.processes], counts))
            if self.averages_slots:
                velocity = mean([process.inner.velocity[i] for process in self.processes], counts)
                for process in self.processes:
                    process.inner.velocity[i] = velocity.copy()
            for process in self.processes:
                process.samples[i] = 0
        return differences

    def end(self, number, difference):
        places = self.parts[number]
        before = [self.centre[i] for i in places]
        if self.elastic is not None:
            centre = [c + self.elastic * d for c, d in zip(before, difference, strict=True)]
        elif self.outer is not None:
            centre = self.outer[number].step(before, [-d for d in difference])
        else:
            centre = [c + d for c, d in zip(before, difference, strict=True)]
        for i, old, new in zip(places, before, centre, strict=True):
            self.centre[i] = new
            for process in self.processes:
                weight = process.weights[i]
                if self.elastic is not None:
                    process.weights[i] = weight + self.elastic / len(self.processes) * (old - weight)
                else:
                    process.weights[i] = self.mix * weight + (1 - self.mix) * new
