"""Keys of config.json that change nothing in the forward pass of the supported families.

Any other key that the readers do not read is refused by name.
"""

_TRAINING = (
    "aux_loss_alpha", "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop",
    "classifier_dropout", "initializer_range", "router_aux_loss_coef", "router_jitter_noise",
    "output_router_logits", "pretraining_tp", "gradient_checkpointing", "torchscript",
    "unsloth_fixed", "unsloth_version",
)  # fmt: skip
_BOOKKEEPING = (
    "_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_internal",
    "_attn_implementation_autoset", "_experts_implementation", "attn_implementation",
    "experts_implementation", "architectures", "auto_map", "model_type", "name_or_path",
    "transformers_version", "tokenizer_class", "task_specific_params", "finetuning_task",
    "id2label", "label2id", "num_labels", "problem_type", "prefix", "return_dict",
    "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "pruned_heads",
    "tie_encoder_decoder", "tf_legacy_loss", "use_bfloat16", "use_cache", "use_return_dict",
    "use_grouped_mm", "max_window_layers", "cross_attention_hidden_size", "sep_token_id",
    "eod_token_id", "decoder_start_token_id", "attn_quant_config",
)  # fmt: skip
# Values for generate() that older versions of transformers wrote into config.json;
# generation_config.json is the only place they are taken from.
_GENERATION = (
    "max_length", "max_new_tokens", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens",
)  # fmt: skip
HARMLESS_KEYS = frozenset([*_TRAINING, *_BOOKKEEPING, *_GENERATION])
