"""Error feedback: the part of a gradient that a method does not send is added to the next one, so it is never lost."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from tfdist.compression.method import Method, saturate
from tfdist.compression.state import State


class _Wrapper(Method):
    """A method that uses the route and the payload format of another one."""

    def __init__(self, method: Method) -> None:
        if not isinstance(method, Method):
            raise TypeError(f"{type(self).__name__} wraps a compression method; got {method!r}")
        if isinstance(method, _Wrapper):
            raise TypeError(f"{type(self).__name__} wraps a plain method; got {method!r}")
        self.method = method
        self.number = method.number
        self.route = method.route
        self.keeps_residual = method.keeps_residual
        self.votes = method.votes
        self.momentum = method.momentum

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.method!r})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.method == self.method

    def __hash__(self) -> int:
        return hash((type(self), self.method))

    def payload_bytes(self, elements: int) -> float:
        """Returns the wrapped method's estimate."""
        return self.method.payload_bytes(elements)

    def granule(self, shape: tuple[int, ...] | None) -> int:
        """Returns the wrapped method's granule."""
        return self.method.granule(shape)

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Encodes with the wrapped method."""
        return self.method.pack(vector, state)

    def unpack(self, body: np.ndarray, out: np.ndarray, combine: np.ufunc | None = None) -> None:
        """Decodes with the wrapped method."""
        self.method.unpack(body, out, combine)

    def merge(self, encoded: Sequence[np.ndarray], elements: int, dtype: np.dtype, state: State) -> np.ndarray:
        """Counts votes with the wrapped method, or adds vectors; see `Method`."""
        merge = self.method.merge if self.votes else super().merge
        return merge(encoded, elements, dtype, state)

    def scalers(self, vector: np.ndarray, state: State) -> np.ndarray | None:
        """Returns the wrapped method's scalers."""
        return self.method.scalers(vector, state)

    def rounds(self, vector: np.ndarray, state: State) -> Generator[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
        """Runs the wrapped method's rounds."""
        return self.method.rounds(vector, state)


class ErrorFeedback(_Wrapper):
    """Adds the residual of earlier vectors to each vector, and keeps the new residual.

    Strategies wrap biased methods automatically. For a random method of relative variance ω, the vector is divided by
    1 + ω before it is sent, which makes the method the best possible contraction; otherwise its own noise would be fed
    back and grow.

    After any number of steps, the sum of the sent vectors and the residual equals the sum of all gradients, up to
    rounding. A vector with NaN or infinity leaves the residual unchanged; a residual never exceeds the largest finite
    number.

    Args:
        method: a method without error feedback.

    References:
        Seide et al., 1-bit stochastic gradient descent, 2014; Karimireddy et al., Error feedback fixes SignSGD and
        other gradient compression schemes, 2019; Beznosikov et al., On biased compression for distributed learning,
        2020 (the division by 1 + ω).
    """

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        if method.keeps_residual or (method.votes and not method.needs_feedback):
            raise TypeError(f"{method!r} takes no error feedback; pass it without ErrorFeedback")
        self.keeps_residual = True

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Encodes the vector and the residual, and keeps the new residual; see `Method`."""
        residual = state.array("residual", vector)
        with np.errstate(over="ignore"):
            residual += vector
            body = self.method.pack(self._contracted(saturate(residual)), state)
            self.method.unpack(body, residual, np.subtract)
        saturate(residual)
        return body

    def rounds(self, vector: np.ndarray, state: State) -> Generator[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
        """Sums the vector and the residual over all ranks, and keeps the new residual; see `Method`."""
        residual = state.array("residual", vector)
        with np.errstate(over="ignore"):
            residual += vector
        try:
            total, payload = yield from super().rounds(self._contracted(saturate(residual)), state)
        except GeneratorExit:  # a vector of another rank was not finite: undo this step
            residual -= vector
            raise
        with np.errstate(over="ignore"):
            self.method.unpack(payload, residual, np.subtract)
        saturate(residual)
        return total, payload

    def scalers(self, vector: np.ndarray, state: State) -> np.ndarray | None:
        """Returns the scalers of the vector and the residual; see `Method`."""
        if type(self.method).scalers is Method.scalers:
            return None
        with np.errstate(over="ignore"):
            fed_back = saturate(state.array("residual", vector) + vector)
        return self.method.scalers(self._contracted(fed_back), state)

    def _contracted(self, vector: np.ndarray) -> np.ndarray:
        factor = 1 / (1 + self.method.variance(vector.size))
        return vector if factor == 1 else vector * vector.dtype.type(factor)


class WithoutFeedback(_Wrapper):
    """A biased method without error feedback: the part of a gradient that it does not send is lost.

    Where differences are compressed (gossip, `tfdist.QuorumStrategy`, and ``parameters`` of
    `tfdist.parameter_server.Gradients`), what is not sent is in the next difference, and this class is refused.

    Args:
        method: the method to use unchanged.
    """


def with_feedback(method: Method) -> Method:
    """Returns the method, wrapped in `ErrorFeedback` if it needs it and is not wrapped already."""
    return ErrorFeedback(method) if method.needs_feedback and not isinstance(method, _Wrapper) else method


def plain(method: Method) -> Method:
    """Returns the method that `ErrorFeedback` or `WithoutFeedback` wraps; a method that is not wrapped itself."""
    return method.method if isinstance(method, _Wrapper) else method
