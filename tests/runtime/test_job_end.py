from types import SimpleNamespace

from tfdist.runtime import job_end
from tfdist.runtime.job_end import JobEnd


def test_job_end_error_appears_after_a_grace_period(monkeypatch):
    """The deaths of others end nothing."""
    watchers, now = [], [100.0]
    monkeypatch.setattr(job_end.time, "monotonic", lambda: now[0])
    end = JobEnd(SimpleNamespace(control=SimpleNamespace(watch=watchers.append)))
    assert watchers == [end]
    end.left(0)
    end.came(1)
    end.lost(1, None)
    now[0] += 1000
    assert not end.event.is_set()
    assert end.error() is None
    end.over()
    assert end.event.is_set()
    assert end.error() is None, "they may still answer"
    now[0] += 10
    assert "the job is over" in str(end.error())
