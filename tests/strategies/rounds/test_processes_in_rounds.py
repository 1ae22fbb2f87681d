import tfdist
from tfdist.strategies.rounds import processes_in_rounds


def test_settle_ends_the_round_of_a_custom_loop(monkeypatch):
    asked = []
    monkeypatch.setattr(processes_in_rounds.keras_rounds, "settle", lambda *given: asked.append(given))
    strategy = tfdist.LocalSGDStrategy(sync_every=4)
    strategy.settle("a model")
    assert asked == [("a model", strategy.extended)]
