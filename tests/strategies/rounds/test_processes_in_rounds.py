import tfdist
from tfdist.strategies.rounds import processes_in_rounds


def test_a_loop_of_ones_own_ends_a_round_as_fit_does(monkeypatch):
    asked = []
    monkeypatch.setattr(processes_in_rounds.keras_rounds, "settle", lambda *given: asked.append(given))
    strategy = tfdist.LocalSGDStrategy(sync_every=4)
    strategy.settle("a model")
    assert asked == [("a model", strategy.extended)]
