"""Gradient compression: methods, error feedback, and policies that choose among them.

A strategy takes a method, a schedule or a policy as ``compression=``.
"""

from tfdist.compression.atomo import Atomo, AtomoSVD
from tfdist.compression.casts import BFloat16, Float8, Float16
from tfdist.compression.feedback import ErrorFeedback, WithoutFeedback
from tfdist.compression.method import Method, Route
from tfdist.compression.policy import FewerWorkers, Policy, Schedule, by_name, by_size, skip_small
from tfdist.compression.power_sgd import PowerSGD
from tfdist.compression.quantizers import QSGD, Int4, Int8, TernGrad
from tfdist.compression.signs import OneBit, SignSGD
from tfdist.compression.sparsifiers import DeepGradientCompression, RandomK, Threshold, TopK
from tfdist.compression.state import State
from tfdist.compression.strom import Strom

__all__ = [
    "QSGD",
    "Atomo",
    "AtomoSVD",
    "BFloat16",
    "DeepGradientCompression",
    "ErrorFeedback",
    "FewerWorkers",
    "Float8",
    "Float16",
    "Int4",
    "Int8",
    "Method",
    "OneBit",
    "Policy",
    "PowerSGD",
    "RandomK",
    "Route",
    "Schedule",
    "SignSGD",
    "State",
    "Strom",
    "TernGrad",
    "Threshold",
    "TopK",
    "WithoutFeedback",
    "by_name",
    "by_size",
    "skip_small",
]
