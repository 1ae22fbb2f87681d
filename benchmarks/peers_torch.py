"""The peers of `peers.py` under PyTorch's DistributedDataParallel on Gloo: equal models of `torch.nn`, and Keras's own.

Those of Keras are trained as its guide to distributed training with PyTorch does. Started once per rank by a Python
with PyTorch, and with Keras for the latter, as ``model kind rank size port``; needs nothing of tfdist.
"""

import os
import sys
import time

import peers
import side_by_side
import torch
import torch.distributed
from torch import nn


class Text(nn.Module):
    def __init__(self, width=peers.WIDTH):
        super().__init__()
        self.embedding = nn.Embedding(peers.WORDS, width)
        self.table = nn.Parameter(torch.randn(peers.LENGTH, width) * 0.02)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = self.embedding(x) + self.table
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def model_of(name):
    if name == "mlp":
        return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    if name == "lenet":
        return nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )
    return Text()


def keras_model_of(name):
    os.environ["KERAS_BACKEND"] = "torch"
    return peers.model_of(name)


def leave():
    """Ends this process at once, when all ranks are here.

    PyTorch 2.13 may deadlock as a process frees a model under DDP and with it the group: its destructor, which holds
    the GIL, waits for a thread that frees gradients, which waits for the GIL.
    """
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def main(name, kind, rank, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    is_keras = kind == "keras"
    model = nn.parallel.DistributedDataParallel(keras_model_of(name) if is_keras else model_of(name))
    rates = {"text": (torch.optim.Adam, 1e-3)}
    optimizer_kind, rate = rates.get(name, (torch.optim.SGD, 0.01))
    optimizer, loss = optimizer_kind(model.parameters(), rate), nn.CrossEntropyLoss()
    batch, steps = peers.BATCH[name], peers.STEPS[name]
    x, y = (torch.from_numpy(part) for part in peers.data(name, steps * batch))
    x = x.permute(0, 3, 1, 2).contiguous() if name == "lenet" and not is_keras else x
    seconds = []
    for _ in range(peers.EPOCHS):
        begun, total, right = time.perf_counter(), 0.0, 0
        for begin in range(0, steps * batch, batch):
            optimizer.zero_grad()
            labels = y[begin : begin + batch]
            outputs = model(x[begin : begin + batch])
            batch_loss = loss(outputs, labels)
            batch_loss.backward()
            optimizer.step()
            total += batch_loss.detach()
            right += (outputs.argmax(1) == labels).sum()  # the same metrics as `fit` has
        seconds.append(time.perf_counter() - begun)
    if rank == 0:
        side_by_side.report(min(seconds[1:]))
    leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
