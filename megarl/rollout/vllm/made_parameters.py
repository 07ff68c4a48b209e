"""Parameters of a vLLM model as they were made, for its loaders, which take no others."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.nn import Parameter
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, _get_original_loader
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs


@contextmanager
def as_made(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Have the parameters that a model was made with in place, for its loaders; yields modules that have others there.

    Kernels of vLLM 0.32 put parameters of their own in place of those that they process: plain ones, even if the
    bytes are the same, which loaders of quantised layers refuse. Here such a parameter has its class and attributes
    back for a while. In place of one that has become another, or is gone, there is one without memory. vLLM's own
    reload has noted how all of them were made.
    """
    others: set[nn.Module] = set()
    with ExitStack() as stack:
        for module in model.modules():
            made = LAYERWISE_INFO[module].restore_metadata[0] if module in LAYERWISE_INFO else {}
            for name, parameter in made.items():
                held = module._parameters.get(name)
                copy = restore_layer_refs(to_meta_tensor(parameter), module)
                # A reload leaves its own, which waits for all tensors of a layer, around it.
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
