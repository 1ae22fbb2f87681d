"""The functions that tfdist replaces, with the parameters that its wrappers expect.

If a function is missing, or has other parameters, the first use of a feature that needs it raises an error. Without
this check, a new version of Keras could lead to wrong results later.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import keras

from tfdist.private.versions import TRIED, incompatible

log = logging.getLogger("tfdist")

_STARS: defaultdict[Any, str] = defaultdict(
    str, {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
)
_KNOWN = """
BaseOptimizer._backend_apply_gradients(self, grads, trainable_variables)
BaseOptimizer._backend_reset_gradient_accumulators(self)
BaseOptimizer._clip_gradients(self, grads)
BaseOptimizer._overwrite_variables_directly_with_gradients(self, grads, vars)
BaseOptimizer._update_model_variables_moving_average(self, trainable_variables)
BaseOptimizer.add_variable(self, shape, initializer, dtype, aggregation, layout, name)
BaseOptimizer.apply(self, grads, trainable_variables)
BaseOptimizer.build(self, variables)
BaseOptimizer.finalize_variable_values(self, var_list)
BatchNormalization._moments(self, inputs, mask)
Checkpoint._write(self, file_prefix, options)
EarlyStopping.on_epoch_end(self, epoch, logs)
EarlyStopping.on_train_begin(self, logs)
EarlyStopping.on_train_end(self, logs)
Function._run_through_graph(self, inputs, operation_fn, call_fn)
Functional.get_config(self)
GradientTape.gradient(self, target, sources, output_gradients, unconnected_gradients)
Layer.__call__(self, *args, **kwargs)
Layer._get_own_losses(self)
Layer._get_regularization_losses(self)
Layer.add_weight(self, *args, shape, initializer, dtype, trainable, autocast, regularizer, constraint, aggregation, overwrite_with_gradient, name)
Layer.add_weight(self, shape, initializer, dtype, trainable, autocast, regularizer, constraint, aggregation, overwrite_with_gradient, name)
Layer.get_weights(self)
Layer.set_weights(self, weights)
LossScaleOptimizer.apply(self, grads, trainable_variables)
LossScaleOptimizer.check_finite(self, grads)
Mean.update_state(self, values, sample_weight)
Model.export(self, filepath, format, verbose, input_signature, **kwargs)
Model.load_weights(self, filepath, skip_mismatch, **kwargs)
Model.save(self, filepath, overwrite, zipped, **kwargs)
Model.save_weights(self, filepath, overwrite, max_shard_size)
MultiOptimizer.apply(self, grads, trainable_variables)
MultiOptimizer.build(self, var_list)
Node.__init__(self, operation, call_args, call_kwargs, outputs)
Operation.__call__(self, *args, **kwargs)
OrderedEnqueuer._run(self)
PyDatasetAdapter._finite_generator(self)
ReplicaContext.all_gather(self, value, axis, options)
ReplicaContext.all_reduce(self, reduce_op, value, options)
ReplicaContext.merge_call(self, merge_fn, args, kwargs)
SeedGenerator.next(self, ordered)
Sequential.add(self, layer, rebuild)
Sequential.build(self, input_shape)
Sequential.get_config(self)
SwapEMAWeights._tf_finalize_ema_values(self, optimizer)
SwapEMAWeights._tf_swap_variables(self, optimizer)
TFEpochIterator.__init__(self, distribute_strategy, *args, **kwargs)
TFEpochIterator.catch_stop_iteration(self)
TFOptimizer._all_reduce_sum_gradients(self, grads_and_vars)
TFOptimizer._apply_weight_decay(self, variables)
TFOptimizer._backend_increment_gradient_accumulators(self, grads, acc_grads)
TFOptimizer._distributed_tf_update_step(self, distribution, grads_and_vars, learning_rate)
TFOptimizer._overwrite_model_variables_with_average_value(self, trainable_variables)
TFOptimizer._var_key(self, variable)
TFOptimizer.add_variable_from_reference(self, reference_variable, name, initializer)
TensorFlowTrainer._make_function(self, step_function)
TensorFlowTrainer._maybe_symbolic_build(self, iterator, data_batch)
TensorFlowTrainer.evaluate(self, x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict, **kwargs)
TensorFlowTrainer.fit(self, x, y, batch_size, epochs, verbose, callbacks, validation_split, validation_data, shuffle, class_weight, sample_weight, initial_epoch, steps_per_epoch, validation_steps, validation_batch_size, validation_freq)
TensorFlowTrainer.make_predict_function(self, force)
TensorFlowTrainer.predict(self, x, batch_size, verbose, steps, callbacks)
TensorFlowTrainer.predict_on_batch(self, x)
TensorFlowTrainer.test_on_batch(self, x, y, sample_weight, return_dict)
TensorFlowTrainer.train_on_batch(self, x, y, sample_weight, class_weight, return_dict)
Trainer._get_metrics_result_or_logs(self, logs)
Trainer.compile(self, optimizer, loss, loss_weights, metrics, weighted_metrics, run_eagerly, steps_per_execution, jit_compile, auto_scale_loss)
Trainer.get_metrics_result(self)
Variable.__init__(self, initializer, shape, dtype, trainable, autocast, aggregation, synchronization, name, **kwargs)
Variable.__init__(self, initializer, shape, dtype, trainable, autocast, aggregation, synchronization, name, layout, **kwargs)
Variable._deferred_initialize(self)
Variable._direct_assign(self, value)
Variable._initialize(self, value)
Variable._initialize_with_initializer(self, initializer)
Variable._map_aggregation(self, aggregation)
Variable._serialize_to_tensors(self)
base_optimizer.global_norm(value_list)
cloning._clone_sequential_model(model, clone_function, input_tensors)
functional.clone_graph_nodes(inputs, outputs)
functional.deserialize_node(node_data, created_layers)
functional.find_nodes_by_inputs_and_outputs(inputs, outputs)
functional.serialize_node(node, own_nodes)
global_state.set_global_attribute(name, value)
input_lib._calculate_replicas_with_values(strategy, input_workers, optional_list)
loss.apply_mask(sample_weight, mask, dtype, reduction)
loss.reduce_values(values, sample_weight, reduction)
loss.scale_loss_for_distribution(value)
loss.unscale_loss_for_distribution(value)
models.load_model(filepath, custom_objects, compile, safe_mode)
models.save_model(model, filepath, overwrite, zipped, **kwargs)
multi_device_iterator_ops._create_device_dataset(prototype_ds, incarnation_id, prefetch_buffer_size, experimental_slack)
naming.to_snake_case(name)
nn._compute_moments_sync(x, axes, keepdims)
nn.compute_average_loss(per_example_loss, sample_weight, global_batch_size)
nn.scale_regularization_loss(regularization_loss)
saving.load_model(filepath, custom_objects, compile, safe_mode)
saving.save_model(model, filepath, overwrite, zipped, **kwargs)
saving_lib._load_state(saveable, weights_store, assets_store, inner_path, skip_mismatch, visited_saveables, failed_saveables, error_msgs)
serialization_lib.deserialize_keras_object(config, custom_objects, safe_mode, **kwargs)
trainer.model_supports_jit(model)
trainer.reduce_per_replica(values, strategy, reduction)
"""  # noqa: E501
"""Functions by class or module and name; a function that has changed between versions is listed twice."""
_PARAMETERS: defaultdict[str, list[str]] = defaultdict(list)
for _line in _KNOWN.split("\n")[1:-1]:
    _key, _, _own = _line.removesuffix(")").partition("(")
    _PARAMETERS[_key].append(_own)


def check(owner: Any, name: str) -> Callable[..., Any]:
    """Checks the parameters of a function that is about to be replaced, and returns the function.

    A function that other code has replaced is not checked, nor is one that is not listed here.

    Args:
        owner: a class, or a module.
        name: name of the function.

    Raises:
        IncompatibleKerasError: there is no such function, or it has other parameters than those listed.
    """
    _warn_of_untried()
    key = key_of(owner, name)
    function = getattr(owner, name, None)
    if function is None:
        raise incompatible(f"{key} is gone")
    known = _PARAMETERS.get(key, [])
    is_original = re.match(r"(keras|tensorflow)\b", getattr(function, "__module__", None) or "") is not None
    if not known or not is_original or (parameters := parameters_of(function)) in known:
        return function
    raise incompatible(f"{key} takes ({parameters}); tfdist expects ({') or ('.join(known)})")


@functools.cache
def _warn_of_untried() -> None:
    newest = tuple(int(part) for part in TRIED[1].split("."))
    installed = tuple(int(part) for part in re.findall(r"\d+", keras.__version__)[:2])
    if installed > newest:
        log.warning("tfdist: Keras %s has not been tried; the newest tried is %s.", keras.__version__, TRIED[1])


def key_of(owner: Any, name: str) -> str:
    """Returns the name of a function with that of its class, or of its module.

    Args:
        owner: a class, or a module.
        name: name of the function.
    """
    return f"{owner.__name__ if isinstance(owner, type) else owner.__name__.rpartition('.')[2]}.{name}"


def parameters_of(function: Callable[..., Any]) -> str:
    """Returns the names of a function's parameters, separated by commas.

    Args:
        function: a Python function.
    """
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(_STARS[parameter.kind] + parameter.name for parameter in parameters)
