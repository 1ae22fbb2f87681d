"""What other ranks learn of calls beside the engine; `tests/multiprocess/test_shared_sums.py` has real ones."""

import types

from tfdist.engine.beside import Totals


def test_calls_beside_the_engine_are_reported(ranks):
    engine = ranks(2).groups[0].engine
    site = (None, "a sum")
    engine.numbers.take(site, 5)
    engine.numbers.begin(site)
    engine.beside.sites[site] = types.SimpleNamespace(totals=lambda: Totals(2, 0.5))
    engine.beside.sites[None, "another"] = types.SimpleNamespace(totals=lambda: Totals(1, 0.25, 3, 4))
    assert engine.beside.totals() == Totals(3, 0.75, 3, 4)
    assert engine.numbers.counts()[5] == engine.numbers.calls(site) == 3
    pending, monitor = engine.beside.waits_for(site, "kernel")
    assert (monitor is None) == (engine.control is None)
    (call,) = engine.state().under_way
    assert (call.key, call.number, call.call, call.contents) == ("a sum", 5, 2, "kernel")
    assert pending.operation.stand_in is None
    engine.beside.over(pending)
    assert not engine.state().under_way
