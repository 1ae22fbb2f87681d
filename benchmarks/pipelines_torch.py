"""The peer of `pipelines.py`: the same network in two stages of `torch.distributed.pipelining` on Gloo.

Started once per rank by a Python with PyTorch, as ``schedule settings rank size port``; needs nothing of tfdist.
"""

import json
import os
import sys
import time

import numpy as np
import torch
import torch.distributed
from torch import nn
from torch.distributed import pipelining

SCHEDULES = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}


def network(settings):
    units, layers = settings["units"], settings["layers"]
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(units, units), nn.ReLU())]
    return [*hidden, nn.Linear(units, settings["classes"])]


def main(name, rank, size, port, settings):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    calls, count = network(settings), settings["layers"] // size
    module = nn.Sequential(*calls[2 * count * rank : 2 * count * (rank + 1) if rank + 1 < size else None])
    stage = pipelining.PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = SCHEDULES[name](stage, settings["micro_batches"], loss_fn=nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(module.parameters(), settings["learning_rate"])
    generator, batch = np.random.default_rng(0), settings["batch"]
    rows = batch * settings["steps"]
    x = torch.from_numpy(generator.normal(size=(rows, settings["units"])).astype("float32"))
    y = torch.from_numpy(generator.integers(0, settings["classes"], rows))
    seconds, processor = [], []
    for _ in range(settings["epochs"]):
        torch.distributed.barrier()
        begun, used = time.perf_counter(), time.process_time()
        for begin in range(0, rows, batch):
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(x[begin : begin + batch])
            else:
                schedule.step(target=y[begin : begin + batch], losses=[])
            optimizer.step()
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - begun)
        processor.append(time.process_time() - used)
    total = torch.tensor([min(processor[1:])])
    torch.distributed.all_reduce(total)
    if rank == 0:
        figures = {"samples_per_s": rows / min(seconds[1:]), "processor": float(total)}
        print("MEASURED " + json.dumps(figures), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], json.loads(sys.argv[2]))
