"""The peer of `sharded.py`: its models in `torch.nn`, under DistributedDataParallel and `fully_shard`, on Gloo.

Started once per rank by a Python with PyTorch, as ``kind model width batch steps rank size port``; needs nothing of
tfdist. `fully_shard` is applied to each dense layer, or to each block of the transformer, and to the model.
"""

import os
import statistics
import sys
import time

import peers_torch
import sharded
import side_by_side
import torch
import torch.distributed
from torch import nn
from torch.distributed.fsdp import fully_shard


def model_of(name, width):
    if name == "transformer":
        return peers_torch.Text(width)
    if name == "equal layers":
        equal = [part for _ in range(sharded.LAYERS) for part in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*equal, nn.Linear(width, 10))
    return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 10))


def divide(model):
    for part in model.blocks if isinstance(model, peers_torch.Text) else model:
        if next(part.parameters(), None) is not None:
            fully_shard(part)
    fully_shard(model)


def main(kind, name, width, batch, steps, rank, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    share = batch // size
    x, y = (torch.from_numpy(part) for part in sharded.data(name, width, share * steps))
    before, loss = sharded.memory("VmRSS"), nn.CrossEntropyLoss()
    sharded.forget_highest()
    model = model_of(name, width)
    weights = sum(weight.numel() for weight in model.parameters())
    if kind == "fully_shard":
        divide(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())

    def epoch():
        begun = time.perf_counter()
        for begin in range(0, len(x), share):
            optimizer.zero_grad()
            loss(model(x[begin : begin + share]), y[begin : begin + share]).backward()
            optimizer.step()
        return time.perf_counter() - begun

    epoch()
    added = torch.tensor(float(sharded.memory("VmHWM") - before))
    seconds = statistics.median(epoch() for _ in range(sharded.EPOCHS - 1))
    torch.distributed.all_reduce(added, torch.distributed.ReduceOp.MAX)
    if rank == 0:
        side_by_side.report(
            {"ms a step": 1e3 * seconds / steps, "MB of memory": float(added) / 1e6, "MB of weights": weights * 4 / 1e6}
        )
    peers_torch.leave()


if __name__ == "__main__":
    kind, name, width, batch, steps, rank, size, port = sys.argv[1:]
    main(kind, name, int(width), int(batch), int(steps), int(rank), int(size), port)
