"""Weights written straight into the parameters of a vLLM worker, without vLLM's loader."""

from typing import Any

from converters.layouts.recorded import local_tensors
from megarl.resharding.receiver import Receiver
from megarl.resharding.route import Route
from megarl.resharding.transports.ends import Meeting
from megarl.rollout.vllm.recording import after_direct_write, loaded_parameters


class DirectWriter:
    """Worker `worker` of engine `replica`, as a destination of the `route`; sources are met where `meeting` says."""

    def __init__(
        self, model: Any, model_config: Any, route: Route, replica: int, worker: int, meeting: Meeting
    ) -> None:
        self._model = model
        self._model_config = model_config
        rank = replica * len(route.recordings) + worker
        tensors = local_tensors(loaded_parameters(model), route.recordings[worker].shard)
        self._receiver = Receiver(rank, route.incoming(rank), tensors, meeting)
        try:
            self._receiver.join()
        except BaseException:
            self.close()
            raise

    def receive(self, version: int) -> None:
        """Write the weights of `version` and what vLLM derives from them. Raises TransferError as `Receiver`."""
        self._receiver.receive(version)
        after_direct_write(self._model, self._model_config)

    def compare(self, version: int) -> set[str]:
        """The parameters that are not as `receive` would leave them; nothing is written."""
        return self._receiver.compare(version)

    def close(self) -> None:
        """Leave the sources."""
        self._receiver.close()
