"""Stack: what a training program keeps for its backward pass, and what its kernels fuse and hide.

`SHOAL` is this engine; tests/dist/parallel/test_saved_activations.py counts what it keeps. The others describe programs
whose published runs bench/published_runs.py compares with the planner. Each number follows from the program's source or
paper, not from the speed or memory of its runs. `memory` and `step_time` read a stack through `Work`. Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal_workers.contract.layout import BY_LOCALITY


class AttentionKernel(StrEnum):
    UNFUSED = "unfused"
    """Scores are written to memory (Shoeybi et al. 2019). Its core is recomputed even if nothing else is (Korthikanti
    et al. 2022), unless the stack `keeps_scores`."""
    FLASH_1 = "flash_1"
    """Dao et al. 2022, and its Triton version."""
    FLASH_2 = "flash_2"
    """Dao 2023: torch's scaled_dot_product_attention."""
    CUDNN = "cudnn"
    """cuDNN 9 and Transformer Engine; FlashAttention-3 (Shah et al. 2024) is about as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    locality: tuple[str, ...] = BY_LOCALITY
    """The axes beside tp in the order in which their ranks are put next to each other."""
    attention: AttentionKernel = AttentionKernel.FLASH_2
    keeps_scores: bool = False
    """The scores of unfused attention are kept for the backward pass of a block that is not recomputed."""
    skips_masked: bool = False
    """Attention computes no score outside a sliding window. Otherwise a block with a window computes all scores, also
    those of later tokens, since torch's kernel gets its mask as a tensor."""
    norm_input_bytes: int = 4
    """Bytes of a number that a norm saves of its input."""
    widths_saved: int = 4
    """Tensors of the width of a feed-forward layer that its backward pass needs: the gate, its activation, `up` and
    their product. A fused SwiGLU saves no activation. A GELU over 4 x dim that is written as a SwiGLU of equal weights
    saves 8 x dim, as three tensors of 8/3 x dim."""
    selective_share: float = 1.0
    """Share of the outputs of matrix products that selective recomputation keeps."""
    is_sequence_parallel: bool = True
    """tp divides the activations between tensor-parallel layers. Otherwise every tp rank has all of them."""
    sums_after_exchange: bool = True
    """Ranks of tp that are sequence parallel exchange what they sum, and each adds up its part. NCCL's reduce-scatter
    does both at once."""
    repeats_keys: bool = False
    """cp sends keys and values of every query head, although groups of them share theirs."""
    gathers_again: bool = False
    """The gathered inputs of column layers are not saved but gathered again in the backward pass."""
    parameter_bytes: int = 4
    """Bytes of a parameter as it is kept, with what its update needs to be exact."""
    moment_bytes: int = 4
    """Bytes of each number of the optimizer's state."""
    summed_gradient_bytes: int = 4
    """Bytes of a gradient while the micro-batches of a step are summed and nothing is sharded."""
    held_gradient_bytes: int = 4
    """Bytes of a gradient from its reduction to the update."""
    updates_in_place: bool = False
    """The update needs no temporaries of the size of the gradients: a fused kernel, or one parameter at a time."""
    update_bytes: int = 0
    """Bytes of each number of the shard that the update puts into one piece. The allocator joins no freed pieces."""
    logit_bytes: float = 12.0
    """Bytes for each logit in the loss, besides the logits in the type of the computation."""
    gradient_bytes: int = 4
    """Bytes of a gradient when it is reduced."""
    elementwise: float = 1.0
    """Memory traffic of element-wise operations, relative to one kernel for each operation. A compiler fuses them."""
    launch_s: float = 0.0
    """Seconds that the GPU waits for the host in each block of a micro-batch, all passes together."""
    hides_tensor: bool = False
    """The collectives of tp that do not depend on a matrix product of the backward pass run beside it."""
    hides_data: bool = True
    """Reductions of gradients run beside the backward pass."""
    message_waits: float | None = None
    """Messages between pipeline ranks that a rank waits for, for each micro-batch; None: what the hardware's overlap
    leaves of the two that it sends."""
    scatters_messages: bool = True
    """The tp ranks of a stage each send a part of a message to the next stage, not all of it."""
    sums_in_product: bool = False
    """The matrix product that makes a gradient also adds it to the sum of the micro-batches."""
    reduces_whole: bool = False
    """Gradients are summed by an all-reduce although each rank updates only its part."""
    shards_in_pipeline: bool = False
    """Gradients are reduced and sharded after every micro-batch in a pipeline, too."""
    fp8: bool = False
    """Matrix products of the blocks are in fp8 with dynamic scales. The head, attention and experts are not."""
    gathers_fp8: bool = False
    """What tp gathers for products in fp8 is cast before."""
    dispatches_once: bool = False
    """A token is sent once to each rank that has experts for it, and crosses the network once for each node
    (DeepEP)."""
    routes_in_order: bool = False
    """A benchmark's router: the experts of a token are neighbours, and all experts get equally many."""
    splits_routed_tokens: bool = False
    """Each tp rank sends its own tokens to experts. Otherwise each sends all tokens of its tp group."""
    expert_overlap: float = 0.0
    """Share of the exchange of tokens that runs beside computation."""


SHOAL = Stack()
