"""Gossip in a few lines of NumPy: linear regression by all processes, one after another. Nothing of tfdist."""

import numpy as np
from common import gradient


def descended(weights, x, y, rate):
    return [weight - rate * g for weight, g in zip(weights, gradient(weights, x, y), strict=True)]


def mixed(matrix, everyone):
    """Σ_j W_ij x_j for all i."""
    return [[sum(w * x[place] for w, x in zip(row, everyone, strict=True)) for place in (0, 1)] for row in matrix]


def mean(everyone):
    return [sum(x[place] for x in everyone) / len(everyone) for place in (0, 1)]


def ring(size, number=0):
    matrix = np.zeros([size, size])
    for node in range(size):
        for other in {(node - 1) % size, node, (node + 1) % size}:
            matrix[node, other] = 1
    return matrix / matrix.sum(axis=1, keepdims=True)


def exponential(size, number):
    hop = 2 ** (number % max(1, int(np.ceil(np.log2(size)))))
    matrix = np.eye(size) / 2
    for node in range(size):
        matrix[node, (node - hop) % size] += 0.5
    return matrix


class Training:
    """The training of several processes, whose weights are averaged at the end of each epoch.

    Args:
        start: initial weights, equal on all processes.
        matrix: returns the mixing matrix of a round, from the number of processes and of the round.
        every: number of steps between rounds.
        overlaps: whether weights are used a round later.
        rate: learning rate of SGD.
        kept: number of elements of the weight matrix's differences that CHOCO-SGD sends in each round; None for all.
        consensus: the γ of CHOCO-SGD.
    """

    def __init__(self, start, size, matrix=ring, every=1, overlaps=False, rate=1 / 16, kept=None, consensus=1.0):
        self.weights = [[weight.copy() for weight in start] for _ in range(size)]
        self.matrix, self.every, self.overlaps, self.rate = matrix, every, overlaps, rate
        self.kept, self.consensus = kept, consensus

    def epoch(self, batches):
        """Trains; leaves the processes' weights before the end in `apart`."""
        size, number, under_way = len(self.weights), 0, None
        copies = [[weight.copy() for weight in weights] for weights in self.weights]
        for step, batch in enumerate(batches):
            self.weights = [descended(w, x, y, self.rate) for w, (x, y) in zip(self.weights, batch, strict=True)]
            if (step + 1) % self.every:
                continue
            if self.overlaps:
                self.add(under_way)
                under_way = self.changes(self.weights, self.matrix(size, number))
            elif self.kept is not None:
                self.add(self.compressed(copies, self.matrix(size, number)))
            else:
                self.add(self.changes(self.weights, self.matrix(size, number)))
            number += 1
        self.add(under_way)
        self.apart = self.weights
        self.weights = [mean(self.weights) for _ in self.weights]

    def changes(self, weights, matrix):
        return [
            [new - old for new, old in zip(after, before, strict=True)]
            for after, before in zip(mixed(matrix, weights), weights, strict=True)
        ]

    def compressed(self, copies, matrix):
        for weights, copy in zip(self.weights, copies, strict=True):
            difference = (weights[0] - copy[0]).reshape(-1)
            largest = np.argsort(-np.abs(difference), kind="stable")[: self.kept]
            copy[0].reshape(-1)[largest] += difference[largest]
            copy[1] = weights[1].copy()  # vectors are sent as they are
        return [[self.consensus * change[0], change[1]] for change in self.changes(copies, matrix)]

    def add(self, changes):
        if changes is not None:
            self.weights = [
                [x + c for x, c in zip(weights, change, strict=True)]
                for weights, change in zip(self.weights, changes, strict=True)
            ]

    def distance(self):
        middle = mean(self.apart)
        away = np.mean([sum(np.sum((x - m) ** 2) for x, m in zip(w, middle, strict=True)) for w in self.apart])
        return np.sqrt(away / sum(np.sum(m**2) for m in middle))
