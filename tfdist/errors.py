"""What can go wrong, by name. Every message says what was expected, what came, and what to do."""

from __future__ import annotations


class TfdistError(RuntimeError):
    """Base class of every error that tfdist raises on purpose."""


class ClusterSpecError(TfdistError, ValueError):
    """TF_CONFIG, or the cluster resolver, does not describe a cluster that this task can join."""


class RendezvousError(TfdistError):
    """The tasks of the job did not all come together."""


class MPIUnavailableError(TfdistError, ImportError):
    """No MPI library could be loaded or initialized."""


class TensorFlowMissingError(TfdistError, ImportError):
    """TensorFlow is not installed, or is not a version that tfdist works with."""


class PeerLostError(TfdistError):
    """Another task of the job died, left, stopped answering or reported a failure."""


class MismatchError(TfdistError):
    """Ranks took part in one collective with different variables, shapes or dtypes."""


class CalibrationError(TfdistError, ValueError):
    """A calibration file is damaged, or was made on another machine or for another job."""


class CollectiveTimeoutError(TfdistError, TimeoutError):
    """A collective did not complete before its deadline."""


class PayloadError(TfdistError, ValueError):
    """A compressed gradient was cut off or changed on its way, or is not what this rank expected."""
