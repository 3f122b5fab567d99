"""The worker's side of the backend "process_group"."""

from typing import Any

from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine


class ProcessGroupWeightTransferEngine(NCCLWeightTransferEngine):
    """The HTTP payloads of the backend "nccl", which needs CUDA, with tensors sent one by one through a TCP store.

    What the payloads say about packing is not used.
    """

    def init_transfer_engine(self, init_info: Any) -> None:
        parallel = self.parallel_config
        self.model_update_group = StatelessProcessGroup.create(
            init_info.master_address,
            init_info.master_port,
            rank=init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank,
            world_size=init_info.world_size,
        )

    def receive_weights(self, update_info: Any) -> None:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = self.model_update_group.broadcast(None, src=0)
            announced, sent = (f"torch.{dtype}", list(shape)), (str(weight.dtype), list(weight.shape))
            if sent != announced:
                raise ValueError(f"{name} was announced as {announced} and sent as {sent}")
            self.model.load_weights([(name, weight)])
