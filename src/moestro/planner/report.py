"""The Plan as lines for people."""

from moestro.core.plan import Plan
from moestro.core.speculative_config import SpeculativeConfig
from moestro.planner.placement import FitReport
from moestro.planner.units import gigabytes


def plan_lines(plan: Plan) -> list[str]:
    """What runs, what it takes, what fits: a few lines, the same at start and in `plan`."""
    mtp = ""
    if plan.num_mtp_layers:
        mtp = f" with {plan.num_mtp_layers} MTP layer{'s' * (plan.num_mtp_layers != 1)}"
    sequences = f"{plan.max_full_sequences:,} sequence{'s' * (plan.max_full_sequences != 1)}"
    kv = plan.kv_cache_dtype + ", keys rotated" * plan.kv_hadamard
    host = f" + host tier {gigabytes(plan.host_kv_bytes)}" if plan.num_host_slots else ""
    lines = [
        f"{plan.model}: {_types(plan)} on {plan.device}, {plan.num_threads} threads",
        f"weights {gigabytes(plan.weight_bytes)}{mtp} + KV {gigabytes(plan.kv_cache_bytes)} + "
        f"buffers {gigabytes(plan.buffer_bytes)}{host} = {gigabytes(plan.total_bytes)}",
        f"KV: {plan.num_pages:,} pages of {plan.page_size} tokens, {kv}, "
        f"{plan.kv_bytes_per_token:,} bytes a token",
        f"KV memory holds {plan.max_context_tokens:,} tokens; max_model_len "
        f"{plan.max_model_len:,}, {sequences} of it at once",
        f"a step takes at most {plan.max_num_batched_tokens:,} tokens of "
        f"{plan.max_num_seqs:,} sequences",
    ]
    if plan.num_host_slots:
        lines.append(_tiers_line(plan))
    if plan.speculation is not None:
        lines.append(_drafts_line(plan.speculation))
    return lines + [f"note: {note}" for note in plan.notes]


def _tiers_line(plan: Plan) -> str:
    """What is below the device."""
    host = f"{plan.num_host_slots:,} host pages of {plan.host_kv_dtype}"
    if not plan.keeps_host:
        host = f"{plan.num_host_slots:,} host pages in passing"
    return f"KV tiers: {host}, store {plan.kv_store}"


def _drafts_line(speculation: SpeculativeConfig) -> str:
    """How tokens are drafted."""
    most = speculation.num_speculative_tokens
    up_to = "up to " * speculation.adaptive
    return f"drafts by {speculation.method.value}: {up_to}{most} a sequence and step"


def _types(plan: Plan) -> str:
    """The compute type, and the weights' formats where they differ from it."""
    formats = plan.weight_formats
    if formats.linear.is_float:
        return plan.dtype
    return f"{plan.dtype} with {formats.linear} weights (lm_head {formats.head})"


def fit_lines(report: FitReport) -> list[str]:
    """plan_lines, then whether it fits and what all the memory would hold."""
    lines = plan_lines(report.plan)
    if report.shortage is not None:
        return [*lines, report.shortage]
    return [
        *lines,
        f"fits: {gigabytes(report.available_bytes)} may be used; with all of it as KV memory the "
        f"longest context is {report.largest_context_tokens:,} tokens",
    ]
