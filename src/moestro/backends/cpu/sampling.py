"""Sampling on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import LogprobArgs, SampleArgs
from moestro.backends.cpu.buffers import new_empty
from moestro.backends.cpu.launch import Kernel, launch
from moestro.ops.registry import implements

_SAMPLE, _LOGPROBS = Kernel("sample"), Kernel("token_logprobs")


def _fits(logits: torch.Tensor, batch: ops.SamplingBatch) -> bool:
    mask = batch.mask
    return _fits_draw(logits, batch.metadata) and (
        mask is None or (mask.bits.dim() == 2 and mask.bits.shape[1] == -(-logits.shape[1] // 8))
    )


def _fits_draw(logits: torch.Tensor, metadata: ops.SamplingMetadata) -> bool:
    return _is_rows(logits) and len(metadata.temperature) == logits.shape[0]


def _fits_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> bool:
    return (
        _is_rows(logits)
        and token_ids.dtype == torch.int64
        and token_ids.shape == logits.shape[:1]
        and token_ids.is_contiguous()
    )


def _is_rows(logits: torch.Tensor) -> bool:
    return (
        logits.dim() == 2
        and logits.dtype == torch.float32
        and logits.shape[1] > 0
        and logits.stride(1) == 1
    )


@implements(ops.sample, devices=("cpu",), when=_fits, invariant=True)
def sample(logits: torch.Tensor, batch: ops.SamplingBatch) -> ops.SampledRows:
    rows = len(logits)
    a = _draw_arguments(logits, batch.metadata)
    finite = new_empty((rows,), torch.bool)
    a.finite = finite.data_ptr()
    held: list[torch.Tensor] = [finite]
    if (bias := batch.bias) is not None:
        a.bias_starts, a.bias_sizes = bias.starts.data_ptr(), bias.sizes.data_ptr()
        a.bias_ids, a.bias_values = bias.token_ids.data_ptr(), bias.values.data_ptr()
        a.num_bias = len(bias.token_ids)
        held += bias.starts, bias.sizes, bias.token_ids, bias.values
    if (mask := batch.mask) is not None:
        a.mask_rows, a.mask_bits = mask.rows.data_ptr(), mask.bits.data_ptr()
        a.num_masks, a.mask_stride = mask.bits.shape
        held += mask.rows, mask.bits
    if (counts := batch.counts) is not None:
        a.count_starts, a.count_sizes = counts.starts.data_ptr(), counts.sizes.data_ptr()
        a.count_ids, a.counts = counts.token_ids.data_ptr(), counts.output_counts.data_ptr()
        a.repetition, a.frequency = counts.repetition.data_ptr(), counts.frequency.data_ptr()
        a.presence = counts.presence.data_ptr()
        a.num_counts = len(counts.token_ids)
        held += counts.starts, counts.sizes, counts.token_ids, counts.output_counts
        held += counts.repetition, counts.frequency, counts.presence
    logprobs = None
    if (wanted := batch.num_logprobs) is not None:
        logprobs = _empty_logprobs(rows, 1 + batch.max_logprobs)
        a.num_top, a.logprob_stride = wanted.data_ptr(), 1 + batch.max_logprobs
        a.logprob_ids, a.logprobs = logprobs.token_ids.data_ptr(), logprobs.logprobs.data_ptr()
        a.ranks = logprobs.ranks.data_ptr()
        held += wanted, logprobs.token_ids, logprobs.logprobs, logprobs.ranks
    token_ids = _draw(a, logits, batch.metadata, held)
    return ops.SampledRows(token_ids, finite, logprobs)


@implements(ops.sample_tokens, devices=("cpu",), when=_fits_draw, invariant=True)
def sample_tokens(logits: torch.Tensor, metadata: ops.SamplingMetadata) -> torch.Tensor:
    return _draw(_draw_arguments(logits, metadata), logits, metadata, [])


def _draw_arguments(logits: torch.Tensor, metadata: ops.SamplingMetadata) -> SampleArgs:
    a = SampleArgs(
        logits.data_ptr(),
        metadata.temperature.data_ptr(),
        metadata.top_k.data_ptr(),
        metadata.top_p.data_ptr(),
        metadata.min_p.data_ptr(),
        metadata.seed.data_ptr(),
        metadata.sample_index.data_ptr(),
        metadata.position.data_ptr(),
    )
    a.num_rows, a.vocab = logits.shape
    a.row_stride = logits.stride(0)
    return a


def _draw(
    a: SampleArgs, logits: torch.Tensor, m: ops.SamplingMetadata, held: list[torch.Tensor]
) -> torch.Tensor:
    token_ids = new_empty((a.num_rows,), torch.int64)
    a.token_ids = token_ids.data_ptr()
    options = (m.temperature, m.top_k, m.top_p, m.min_p, m.seed, m.sample_index, m.position)
    launch(_SAMPLE, a, logits, token_ids, *options, *held)
    return token_ids


@implements(ops.token_logprobs, devices=("cpu",), when=_fits_logprobs, invariant=True)
def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> ops.RankedLogprobs:
    rows, vocab = logits.shape
    top = min(num_top, vocab)
    out = _empty_logprobs(rows, 1 + top)
    arguments = LogprobArgs(
        logits.data_ptr(),
        token_ids.data_ptr(),
        out.token_ids.data_ptr(),
        out.logprobs.data_ptr(),
        out.ranks.data_ptr(),
        rows,
        vocab,
        logits.stride(0),
        top,
    )
    launch(_LOGPROBS, arguments, logits, token_ids, out.token_ids, out.logprobs, out.ranks)
    return out


def _empty_logprobs(rows: int, width: int) -> ops.RankedLogprobs:
    shape = (rows, width)
    return ops.RankedLogprobs(
        new_empty(shape, torch.int64),
        new_empty(shape, torch.float64),
        new_empty(shape, torch.int64),
    )
