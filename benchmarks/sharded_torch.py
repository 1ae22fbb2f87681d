"""The peer of `sharded.py`: its models in `torch.nn`, under DistributedDataParallel and `fully_shard`, on Gloo.

Started once per rank by a Python with PyTorch, as ``kind width steps rank size port``; needs nothing of tfdist.
"""

import os
import statistics
import sys
import time
from pathlib import Path

import sharded
import side_by_side
import torch
import torch.distributed
from torch import nn
from torch.distributed.fsdp import fully_shard


def models(width):
    equal = [part for _ in range(sharded.LAYERS) for part in (nn.Linear(width, width), nn.ReLU())]
    return {
        "equal layers": [*equal, nn.Linear(width, 10)],
        "one large layer": [nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 10)],
    }


def main(kind, width, steps, rank, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    share = sharded.BATCH // size
    x, y = torch.randn(share * steps, width), torch.randint(10, (share * steps,))
    figures, loss = {}, nn.CrossEntropyLoss()
    for name in models(1):
        before = sharded.memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
        model = nn.Sequential(*models(width)[name])
        weights = sum(weight.numel() for weight in model.parameters()) * 4 / 1e6
        if kind == "fully_shard":
            for layer in model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer)
            fully_shard(model)
        else:
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters())

        def epoch(model=model, optimizer=optimizer):
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
        figures[f"{name} ({weights:.0f} MB): ms a step"] = 1e3 * seconds / steps
        figures[f"{name} ({weights:.0f} MB): MB of memory"] = float(added) / 1e6
        del model, optimizer, epoch
    if rank == 0:
        side_by_side.report(figures)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    kind, width, steps, rank, size, port = sys.argv[1:]
    main(kind, int(width), int(steps), int(rank), int(size), port)
