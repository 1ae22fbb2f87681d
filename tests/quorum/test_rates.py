from tfdist.quorum.rates import EPOCHS, Rates, rates_before_epoch


def rates_of(*epochs):
    rates = Rates()
    for epoch in epochs:
        rates.begin_epoch(epoch, [float(epoch), 0.5])
    return rates


def test_rates_before_epoch_returns_recorded_or_oldest_rates():
    rates = rates_of(3, 4, 5)
    assert rates.epoch == 5
    for epoch, expected in ((5, (5.0, 0.5)), (4, (4.0, 0.5)), (3, (3.0, 0.5)), (2, (3.0, 0.5)), (6, None)):
        assert rates_before_epoch(epoch, rates.epoch, rates.of_epochs) == expected


def test_end_of_fit_clears_rates():
    rates = rates_of(0, 1)
    rates.end_fit()
    assert (rates.epoch, rates.of_epochs) == (-1, ())
    assert rates_before_epoch(0, rates.epoch, rates.of_epochs) is None


def test_nonconsecutive_epoch_clears_earlier_rates():
    rates = rates_of(0, 1, 7)
    assert rates.of_epochs == ((7.0, 0.5),)
    assert rates_before_epoch(1, rates.epoch, rates.of_epochs) == (7.0, 0.5)


def test_only_latest_epochs_are_kept():
    rates = rates_of(*range(EPOCHS + 10))
    assert len(rates.of_epochs) == EPOCHS
    assert rates_before_epoch(EPOCHS + 9, rates.epoch, rates.of_epochs) == (EPOCHS + 9.0, 0.5)
