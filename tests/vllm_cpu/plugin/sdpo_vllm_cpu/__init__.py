"""Weight updates of vLLM on a CPU, where they do not work as it is shipped. For tests only."""

from functools import cache
from typing import Any

import torch


@cache  # a backend can be registered once a process
def register() -> None:
    """Linear layers that follow their weights, and the weight-transfer backend "process_group"."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    utils.dispatch_cpu_unquantized_gemm = _keep_weight
    WeightTransferEngineFactory.register_engine(
        "process_group", "sdpo_vllm_cpu.process_group", "ProcessGroupWeightTransferEngine"
    )


def _keep_weight(layer: Any, remove_weight: bool) -> None:
    """In place of packing a dense layer's weight once, and perhaps dropping it: multiply by it as it is at each call.

    Without the weight `load_weights` has nothing to load into. A packed head tied to the embeddings would be worse: it
    keeps the old values without a word.
    """
    layer.cpu_linear = torch.nn.functional.linear
