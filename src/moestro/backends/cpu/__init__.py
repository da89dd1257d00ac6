"""The CPU backend. Importing it registers its bodies: native kernels, or the references.

The reference serves an op where no native body takes the call only if REFERENCE_OK lists it.
"""

from moestro import ops
from moestro.backends.cpu import library
from moestro.core.hardware import probe_cpu

KERNEL_OPS: tuple[ops.Op, ...] = (
    ops.rms_norm,
    ops.add_rms_norm,
    ops.mtp_input,
    ops.silu_and_mul,
    ops.qk_norm_rope,
    ops.qk_norm_rope_store,
    ops.store_kv,
    ops.embedding,
    ops.linear,
    ops.moe_gating_top_k,
    ops.router_logits,
    ops.moe_router,
    ops.moe_experts,
    ops.attention_plan,
    ops.paged_attention,
    ops.sample,
    ops.sample_tokens,
    ops.token_logprobs,
)
REFERENCE_OK: tuple[ops.Op, ...] = () if library.has_native() else KERNEL_OPS

if library.has_native():
    from moestro.backends.cpu import (  # noqa: F401 -- each registers its bodies
        activation,
        attention,
        kv_pages,
        linear,
        moe,
        norm,
        rope,
        routing,
        sampling,
    )

    library.native().set_num_threads(probe_cpu().num_threads)

for _op in REFERENCE_OK:
    _op.allow_reference("cpu", invariant=False)
