import functools

from tfdist.parameter_server import Gradients, Hogwild, LocalSteps
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.shard.hogwild_store import MemoryStore
from tfdist.parameter_server.shard.store import Store
from tfdist.parameter_server.shard.stores import new_store_of


def test_hogwild_keeps_values_in_memory_and_lazy_gradients_update_rows():
    assert new_store_of(Arguments(pushes=Hogwild())) is MemoryStore
    for pushes, is_lazy in ((Gradients(), False), (Gradients(sparse="lazy"), True), (LocalSteps(2), False)):
        made = new_store_of(Arguments(pushes=pushes))
        assert isinstance(made, functools.partial)
        assert (made.func, made.keywords) == (Store, {"is_lazy": is_lazy})
