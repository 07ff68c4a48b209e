"""Restores a vLLM model's parameters as they were created, since its loaders accept no others."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.nn import Parameter
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, _get_original_loader
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs


def note_biases() -> None:
    """Make vLLM's reload also record how biases were created; called before a model is built.

    vLLM 0.32 skips them, and loads into the present ones. The kernels of Humming and Marlin permute them and store them
    in plain parameters, which no loader accepts.
    """
    SKIP_TENSORS.discard("bias")


@contextmanager
def as_made(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Put back a model's original parameters for its loaders; yields the modules whose parameters had changed.

    Kernels of vLLM 0.32 replace parameters by plain ones after loading, even if the bytes stay the same, and loaders of
    quantised layers refuse plain parameters. Within the context, a parameter with the same bytes has its original class
    and attributes; one that changed or is gone is replaced by one without memory. vLLM's own reload has recorded how
    all parameters were created.
    """
    others: set[nn.Module] = set()
    with ExitStack() as stack:
        for module in model.modules():
            made = LAYERWISE_INFO[module].restore_metadata[0] if module in LAYERWISE_INFO else {}
            for name, parameter in made.items():
                held = module._parameters.get(name)
                copy = restore_layer_refs(to_meta_tensor(parameter), module)
                # A reload leaves it wrapped in a loader that waits for all tensors of a layer.
                copy.weight_loader = _get_original_loader(copy)
                if held is not None and (held.shape, held.dtype) == (copy.shape, copy.dtype):
                    stack.callback(_become, held, type(held), held.__dict__)
                    _become(held, type(copy), copy.__dict__)
                else:
                    if held is not None:
                        others.add(module)
                    if name in module._parameters:
                        stack.callback(module._parameters.__setitem__, name, held)
                    else:
                        stack.callback(module._parameters.pop, name)
                    module._parameters[name] = copy
        yield others


def _become(parameter: Parameter, kind: type[Parameter], attributes: dict[str, object]) -> None:
    parameter.__class__, parameter.__dict__ = kind, attributes
