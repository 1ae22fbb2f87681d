from tfdist.callbacks.summaries import Summaries


def test_scalars_and_histograms_are_written_as_events(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summaries = Summaries(str(tmp_path))
    summaries.write(0, {"a/b": 1.5}, {"a/c": {0: 4, 3: 1}})
    summaries.write(1, {"a/b": 2.5}, {})
    summaries.close()
    summaries.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["tensors"]) == {"a/b", "a/c"}
    assert [event.step for event in events.Tensors("a/b")] == [0, 1]
    (event,) = events.Tensors("a/c")
    assert list(event.tensor_proto.double_val or ()) or len(event.tensor_proto.tensor_content) == 2 * 3 * 8


def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summaries = Summaries(None)
    summaries.write(0, {"a": 1.0}, {})
    summaries.close()
    assert not list(tmp_path.iterdir())
