"""The peer of `split_layers.py`: its model in `torch.nn`, under DDP and under tensor parallelism, on Gloo.

Started once per rank by a Python with PyTorch, as ``kind width steps batch rank size port``; needs nothing of tfdist.
"""

import os
import statistics
import sys
import time
from pathlib import Path

import peers_torch
import sharded
import side_by_side
import split_layers
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main(kind, width, steps, batch, rank, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    share = batch if kind == "split" else batch // size  # split layers get the same samples on each process
    torch.manual_seed(0 if kind == "split" else rank)
    x, y, loss = torch.randn(share * steps, width), torch.randint(10, (share * steps,)), nn.CrossEntropyLoss()
    before = sharded.memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    pairs = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        for _ in range(split_layers.PAIRS)
    ]
    model = nn.Sequential(*pairs, nn.Linear(width, 10))
    weights = sum(weight.numel() for weight in model.parameters()) * 4 / 1e6
    if kind == "split":
        mesh = init_device_mesh("cpu", (size,))
        for pair in pairs:
            parallelize_module(pair, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def epoch():
        begun = time.perf_counter()
        for begin in range(0, len(x), share):
            optimizer.zero_grad()
            loss(model(x[begin : begin + share]), y[begin : begin + share]).backward()
            optimizer.step()
        return time.perf_counter() - begun

    epoch()
    added = torch.tensor(float(sharded.memory("VmHWM") - before))
    seconds = statistics.median(epoch() for _ in range(3))
    torch.distributed.all_reduce(added, torch.distributed.ReduceOp.MAX)
    if rank == 0:
        figures = {"ms a step": 1e3 * seconds / steps, "MB of memory": float(added) / 1e6, "MB of weights": weights}
        side_by_side.report(figures)
    peers_torch.leave()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:7]), sys.argv[7])
