"""Serves shards at the address that is given, until it is killed; see `tests/parameter_server/test_client.py`."""

import sys

import tensorflow  # noqa: F401  (of the optimizer)

from tfdist.parameter_server.ledger import Ledger
from tfdist.parameter_server.server import Server
from tfdist.parameter_server.shard import Shard
from tfdist.parameter_server.shards import Shards
from tfdist.parameter_server.staleness import AsItIs
from tfdist.parameter_server.synchronization import Asynchronous

server = Server(Shards(lambda model, occurrence: Shard(Ledger(Asynchronous(), AsItIs()))), sys.argv[1])
print("SERVING", server.address, "now", flush=True)
server.run()
