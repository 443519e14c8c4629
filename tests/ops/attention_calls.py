"""The two fused inference attention operators called with the same names."""

import torch

from npu_prompt_cache.sim.ops.attention_fused import (
    npu_fused_infer_attention_score,
    npu_fused_infer_attention_score_v2,
)

COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
"""The mask of sparse modes 2, 3 and 4."""

# What v2 calls the parameters of v1.
SECOND_NAMES = {
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "softmax_lse_flag": "return_softmax_lse",
}


def fused(version, query, key, value, **arguments):
    """v1 or v2, with v1's names."""
    if version == 1:
        return npu_fused_infer_attention_score(query, key, value, **arguments)
    renamed = {SECOND_NAMES.get(name, name): given for name, given in arguments.items()}
    return npu_fused_infer_attention_score_v2(query, key, value, **renamed)
