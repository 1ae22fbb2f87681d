import json

from tfdist.engine import timeline
from tfdist.engine.pending import Pending
from tfdist.engine.timeline import EventRecorder, Flight, WaitEvent


def recorded():
    made = EventRecorder(rank=1, offset=100.0)
    made.flights.append(Flight("sum", 4, "kernel", [1.0, 1.1, 1.5, 2.0]))
    made.waits += [WaitEvent("sum", 1.2, 1.4), WaitEvent("count", 1.3, 1.6), WaitEvent("sum", 2.0, 2.5)]
    return made


def slices(events, name):
    return [(round(e["ts"] / 1e6, 6), round(e["dur"] / 1e6, 6)) for e in events if e["name"] == name]


def test_a_collective_is_a_slice_with_its_steps_on_the_chiefs_clock():
    events = recorded().events()
    assert slices(events, "sum") == [(101.0, 1.0)]
    assert slices(events, "ready, until posted") == [(101.0, 0.1)]
    assert slices(events, "step 1") == [(101.1, 0.4)]
    assert slices(events, "step 2") == [(101.5, 0.5)]
    (flight,) = [event for event in events if event["name"] == "sum"]
    assert flight["args"] == {"call": 5, "contents": "kernel", "steps": 2}


def test_waits_that_overlap_are_one_and_computing_lies_between():
    events = recorded().events()
    assert slices(events, "waits") == [(101.2, 0.2), (101.4, 0.2), (102.0, 0.5)]
    assert slices(events, "computes") == [(101.6, 0.4)]


def test_parts_are_merged_from_the_beginning_on_and_removed(tmp_path):
    path = str(tmp_path / "out.json")
    recorded().write_part(path)
    assert timeline.merge(path, 3) == [0, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert slices(events, "sum") == [(0.0, 1.0)]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"rank 1", "training", "sum"}


def test_without_parts_there_is_no_file(tmp_path):
    assert timeline.merge(str(tmp_path / "out.json"), 2) == [0, 1]
    assert not list(tmp_path.iterdir())


def test_a_collective_that_began_before_the_timeline_is_left_out():
    made, pending = EventRecorder(0), Pending("sum")
    pending.done = True
    made.stepped(pending)
    assert made.flights == []


def test_records_are_bounded(monkeypatch):
    monkeypatch.setattr(timeline, "MOST_RECORDS", 2)
    made = EventRecorder(0)
    for _ in range(3):
        with made.waiting(Pending("sum")):
            pass
    assert len(made.waits) == 2
    assert made.left_out == 1
