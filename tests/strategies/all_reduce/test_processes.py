import pytest

import tfdist


@pytest.mark.parametrize("kind", [tfdist.AllReduceStrategy, tfdist.LocalSGDStrategy])
def test_single_process_communicates_and_saves_nothing(kind, monkeypatch, tmp_path):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = kind()
    assert (strategy.rank, strategy.size, strategy.local_rank) == (0, 1, 0)
    assert strategy.cluster_resolver is not None
    assert strategy.communication()["bytes"] == 0
    assert strategy.compression() == {}
    strategy.save_compression(str(tmp_path / "nothing"))
    strategy.restore_compression(str(tmp_path / "nothing"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [tfdist.AllReduceStrategy, tfdist.LocalSGDStrategy])
def test_invalid_devices_raise(kind):
    with pytest.raises(ValueError, match=rf"{kind.__name__}\(devices=…\) must name each device once"):
        kind(devices=["CPU:0", "cpu:0"])
    with pytest.raises(ValueError, match="expected a device of this process; got 'GPU:7'"):
        kind(devices=["GPU:7"])
