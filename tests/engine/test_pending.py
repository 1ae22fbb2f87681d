from tfdist.cluster.messages import Call
from tfdist.engine.pending import Pending


def test_name_tells_whose_key_it_is():
    assert Pending("sum").name == "sum"
    assert Pending("sum", (2, 0)).name == "sum in group [2, 0]"


def test_description():
    pending = Pending("sum", (2, 0), contents="kernel, bias")
    assert pending.describe().number is None, "the members have not agreed yet"
    pending.number, pending.call = 4, 17
    assert pending.describe() == Call("sum", 4, 17, (2, 0), "kernel, bias")


def test_ready_is_when_it_is_made_unless_it_is_told():
    earlier = Pending("sum").ready
    assert Pending("sum").ready >= earlier
    assert Pending("sum", ready=0.0).ready == 0.0


def test_nothing_is_done_yet():
    pending = Pending("sum")
    assert not pending.done
    assert pending.result is None
    assert pending.requests == ()
