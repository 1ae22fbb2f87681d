"""What hooks of a model's trainer are given."""

import numpy as np

from tfdist.seams import trainer

X = np.ones((4, 2), np.float32)


def test_hooks_get_arguments_by_name_and_can_change_them(provided, model):
    seen = []

    class Hooks(trainer.TrainerHooks):
        def evaluate(self, call):
            seen.append((call.name, call.model is model, call.is_within_fit, call.arguments["steps"]))
            call.arguments["return_dict"] = True

    provided(Hooks)
    assert model.evaluate(X, X[:, :1], verbose=0) == {"loss": 1.0}
    assert seen == [("evaluate", True, False, None)]
    model.fit(X, X[:, :1], verbose=0, validation_data=(X, X[:, :1]))
    assert seen[1:] == [("evaluate", True, True, None)]


def test_with_predict_step_delegates_other_attributes_to_model(model):
    other = trainer.WithPredictStep(model, lambda data: data[0] * 10)
    other.jit_compile = False
    assert model.jit_compile is False
    assert other.predict_step((3,)) == 30
    assert other.run_eagerly
