"""The cache inside transformers models: `attach` makes ``generate`` and ``model(...)`` use it.

How it works. An attached model has five instance attributes over its class's methods, and the name of an attention
function of ours (a registry entry that falls through to the model's own) in its config:

* ``generate`` is the scope of a request: when it ends well, what was computed is published, and its leases go with
  its cache object; when it fails, nothing is published and they go at once.
* ``_prepare_cache_for_generation`` gives greedy, sampled, beam and assisted generation a `PagedCache` instead of a
  ``DynamicCache``. Beams share blocks: a row that parts from another forks its lease.
* ``forward`` looks the prompt up, packs the tokens that are not cached, without padding, into one row, and runs the
  model's own forward on it; its layers write K/V into the pool and attend over it. What rows have in common goes
  through the model once.
* ``continuous_batching_context_manager`` (``generate_batch``) names the model's own attention while it runs;
  ``init_continuous_batching`` alone says that the cache must be detached.

What cannot be cached runs the model's own code untouched: training, gradients, ``inputs_embeds``, a cache of the
user's own, another ``cache_implementation``, masks that are not left padding, outputs of hidden states or attention
weights.
"""

from npu_prompt_cache.integrations.transformers.attachment import Attachment, attach, attachment_of
from npu_prompt_cache.integrations.transformers.identity import namespace_of_prompt
from npu_prompt_cache.integrations.transformers.models import (
    SUPPORTED_MODEL_TYPES,
    check_supported,
    inner_model,
    layout_of,
)
from npu_prompt_cache.integrations.transformers.paged_cache import CacheBypassWarning, PagedCache

__all__ = [
    "SUPPORTED_MODEL_TYPES",
    "Attachment",
    "CacheBypassWarning",
    "PagedCache",
    "attach",
    "attachment_of",
    "check_supported",
    "inner_model",
    "layout_of",
    "namespace_of_prompt",
]
