"""What servers' strategies have to offer, and what tells them from others."""

import pytest

from tests.strategies.served import served
from tfdist.strategies import current_strategy
from tfdist.strategies.server_abilities import UpdatesOnServers


def test_ability_without_required_methods_raises():
    with pytest.raises(TypeError, match="update_on_servers"):
        UpdatesOnServers()


def test_a_strategy_on_servers_has_the_ability():
    with served() as (strategy,):
        assert current_strategy.of_strategy(strategy, UpdatesOnServers) is strategy.extended
        assert current_strategy.current(UpdatesOnServers) is None
        with strategy.scope():
            assert current_strategy.current(UpdatesOnServers) is strategy.extended
