from tfdist.cluster.messages import CollectiveCall
from tfdist.engine.pending import Pending


def test_name_includes_the_group():
    assert Pending("sum").name == "sum"
    assert Pending("sum", (2, 0)).name == "sum in group [2, 0]"


def test_describe_holds_number_call_members_and_contents():
    pending = Pending("sum", (2, 0), contents="kernel, bias")
    assert pending.describe().number is None, "the members have not agreed yet"
    pending.number, pending.call = 4, 17
    assert pending.describe() == CollectiveCall("sum", 4, 17, (2, 0), "kernel, bias")


def test_ready_defaults_to_the_creation_time():
    earlier = Pending("sum").ready
    assert Pending("sum").ready >= earlier
    assert Pending("sum", ready=0.0).ready == 0.0


def test_new_pending_call_is_not_done():
    pending = Pending("sum")
    assert not pending.done
    assert pending.result is None
    assert pending.requests == ()
