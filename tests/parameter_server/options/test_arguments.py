"""What the arguments of the strategy mean to servers and workers."""

from pathlib import Path

import pytest

from tfdist.compression import Int8
from tfdist.compression.policy import as_policy
from tfdist.parameter_server import (
    BoundedStaleness,
    Gradients,
    Hogwild,
    LocalSteps,
    PerHost,
    Servers,
    SoftSync,
    Synchronous,
)
from tfdist.parameter_server.options.arguments import Arguments


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"synchronization": "synchronous"}, TypeError, r"Synchronous\(\); got 'synchronous'"),
        ({"synchronization": Synchronous}, TypeError, "got <class .*Synchronous'>"),
        ({"pushes": "local"}, TypeError, r"such as Gradients\(\), .*; got 'local'"),
        ({"pushes": None}, TypeError, r"such as Gradients\(\), .*; got None"),
        ({"servers": True}, TypeError, r"such as Servers\(\) or PerHost\(\); got True"),
        ({"data": "all"}, ValueError, "got 'all'"),
        ({"data": "shared", "pushes": LocalSteps(2)}, ValueError, "does not go with"),
    ],
)
def test_values_of_another_type_or_range_are_errors(given, error, message):
    with pytest.raises(error, match=message):
        Arguments(**given)


@pytest.mark.parametrize(
    ("given", "averages", "waits", "bound"),
    [
        ({}, False, False, None),
        ({"synchronization": BoundedStaleness(2)}, False, True, 2),
        ({"synchronization": SoftSync(1)}, True, False, None),
        ({"synchronization": Synchronous()}, True, True, None),
        ({"synchronization": BoundedStaleness(3), "servers": PerHost(BoundedStaleness(2))}, False, True, 2),
        ({"synchronization": BoundedStaleness(2), "servers": PerHost(BoundedStaleness(3))}, False, True, 2),
        ({"servers": PerHost(Synchronous())}, True, True, None),
        ({"servers": PerHost()}, True, None, None),
    ],
    ids=str,
)
def test_modes_determine_waiting_averaging_and_bound(given, averages, waits, bound):
    arguments = Arguments(**given)
    assert (arguments.averages, arguments.bound) == (averages, bound)
    assert waits is None or arguments.workers_wait is waits


def test_pushes_determine_compression_and_update_maker():
    gradients = Arguments(pushes=Gradients(compression=Int8(), prefetch=1, sparse="lazy"))
    assert (gradients.makes_updates, gradients.is_lazy, gradients.gradients.prefetch) == (False, True, 1)
    assert repr(gradients.compression) == repr(as_policy(Int8()))
    assert gradients.pull_compression is None
    assert repr(Arguments(pushes=Gradients(parameters=Int8())).pull_compression) == repr(as_policy(Int8()))
    local = Arguments(pushes=LocalSteps(3, Int8()))
    assert (local.makes_updates, local.is_lazy, local.gradients) == (True, False, Gradients())
    assert repr(local.compression) == repr(as_policy(Int8()))
    assert (Arguments(pushes=Hogwild()).makes_updates, Arguments(pushes=Hogwild()).compression) == (True, None)


def test_servers_determine_snapshots_copies_and_hierarchy():
    arguments = Arguments(servers=Servers(snapshots=Path("a"), snapshot_seconds=5.0, copies=1))
    assert (arguments.snapshots, arguments.has_copies, arguments.hierarchy) == ((Path("a"), 5.0), True, None)
    hierarchy = PerHost(SoftSync(2), 3)
    arguments = Arguments(servers=hierarchy)
    assert (arguments.snapshots, arguments.has_copies, arguments.hierarchy) == (None, False, hierarchy)
