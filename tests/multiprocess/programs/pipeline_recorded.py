"""The recorded timeline of a pipeline, a process for each worker: all processes get the same, of all workers."""

import json

import keras

import tfdist
from tests.pipeline import models

strategy = tfdist.PipelineStrategy(stages=2, micro_batches=3, schedule="zero_bubble", record=True)
keras.utils.set_random_seed(0)
with strategy.scope():
    model = models.perceptron()
    model.compile("sgd", "mse")
x, y = models.data_of(model)
model.fit(x[0], y[0], batch_size=6, verbose=0)
recorded, planned = strategy.recorded(), strategy.schedule
table = strategy.extended.of_model(model).table
spans = {span.action: span for row in recorded.spans for span in row}
for row, expected in zip(recorded.spans, planned.spans, strict=True):
    assert [span.action for span in row] == [span.action for span in expected]
for action, span in spans.items():
    assert all(spans[needed].begin < span.begin for needed in table.needs(action)), action
times = [(span.begin, span.end) for span in spans.values()]
print("RESULT " + json.dumps({"times": times, "idle": recorded.idle_share}), flush=True)
