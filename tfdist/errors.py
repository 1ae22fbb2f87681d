"""The exceptions of tfdist. Every message says what was expected, what was received, and what to do."""

from __future__ import annotations


class TfdistError(RuntimeError):
    """Base class of all tfdist errors."""


class ClusterSpecError(TfdistError, ValueError):
    """TF_CONFIG, or the cluster resolver, does not describe a cluster that this task can enter."""


class RendezvousError(TfdistError):
    """Not all tasks entered the job, or this task was refused."""


class MPIUnavailableError(TfdistError, ImportError):
    """No MPI library could be loaded or initialized."""


class TensorFlowMissingError(TfdistError, ImportError):
    """TensorFlow is not installed, or its version is not supported."""


class IncompatibleKerasError(TfdistError, ImportError):
    """A function of Keras or TensorFlow that tfdist replaces is gone, or has changed."""


class PeerLostError(TfdistError):
    """Another task of the job died, left, stopped responding or reported a failure."""


class MismatchError(TfdistError):
    """Ranks differ where they must be alike: in variables, shapes or dtypes of a collective, settings, or weights."""


class CalibrationError(TfdistError, ValueError):
    """A calibration file is damaged, or was made on another machine or for another job."""


class CollectiveTimeoutError(TfdistError, TimeoutError):
    """A collective did not complete before its deadline."""


class PayloadError(TfdistError, ValueError):
    """A compressed gradient was truncated or corrupted in transit, or is not what this rank expected."""
