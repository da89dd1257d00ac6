"""Which Drafter a plan asks for, and who decides how much it drafts."""

from moestro.backends.base import Device
from moestro.core.plan import Plan, logits_rows, page_table_width
from moestro.core.speculative_config import DraftMethod
from moestro.models.causal_lm import CausalLM
from moestro.runner.kv_pool import KVPool
from moestro.scheduler.drafting import DraftPolicy, FixedDrafts
from moestro.speculative.drafter import Drafter
from moestro.speculative.hybrid import HybridDrafter
from moestro.speculative.mtp import MTPDrafter
from moestro.speculative.prompt_lookup import PromptLookup


def make_drafter(
    plan: Plan, device: Device, model: CausalLM, kv_pool: KVPool, *, captures: bool
) -> Drafter | None:
    """None where nothing is drafted. captures: draft steps are captured graphs."""
    config = plan.speculation
    if config is None:
        return None
    lookup = PromptLookup(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method is DraftMethod.NGRAM:
        return lookup
    mtp = MTPDrafter(
        model,
        kv_pool.layers,
        max_num_seqs=plan.max_num_seqs,
        page_table_width=page_table_width(plan.max_model_len, plan.page_size),
        max_logits_rows=logits_rows(model.spec.vocab_size),
        graph_pool=device.graph_pool() if captures else None,
    )
    return mtp if config.method is DraftMethod.MTP else HybridDrafter(lookup, mtp)


def make_draft_policy(plan: Plan) -> DraftPolicy | None:
    """None where nothing is drafted."""
    if plan.speculation is None:
        return None
    return FixedDrafts(plan.speculation.num_speculative_tokens)
