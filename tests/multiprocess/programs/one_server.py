"""Serves shards at the address that is given, until it is killed; see `parameter_server/worker/test_client.py`."""

import sys

import tensorflow  # noqa: F401  (of the optimizer)

from tfdist.parameter_server.options.synchronization import Asynchronous
from tfdist.parameter_server.server.server import ParameterServer
from tfdist.parameter_server.server.shards import Shards
from tfdist.parameter_server.shard.ledger import Ledger
from tfdist.parameter_server.shard.shard import Shard

server = ParameterServer(Shards(lambda model, occurrence: Shard(Ledger(Asynchronous()))), sys.argv[1])
print("SERVING", server.address, "now", flush=True)
server.run()
