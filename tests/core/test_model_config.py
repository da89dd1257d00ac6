"""config.json to ModelSpec: published values, what transformers writes, traps and bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.core.model_config import load_model_spec, parse_model_config
from moestro.errors import CheckpointError, MoestroError, UnsupportedError

DATA = Path(__file__).parent / "data"
HF_FILES = sorted(path.stem for path in DATA.glob("hf_*.json"))


def config(name: str = "hub_hy3", **changes: Any) -> dict[str, Any]:
    """A config of the data folder with some keys set; a value of ... removes the key."""
    values: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    values.update(changes)
    return {key: value for key, value in values.items() if value is not ...}


def qwen(**changes: Any) -> dict[str, Any]:
    return config("hub_qwen3_30b_a3b", **changes)


def tiny(**changes: Any) -> dict[str, Any]:
    return config("hf_hy_v3_tiny_saved", **changes)


def test_hy3_values() -> None:
    spec = parse_model_config(config())
    assert (spec.model_type, spec.vocab_size, spec.hidden_size) == ("hy_v3", 120832, 4096)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (64, 8, 128)
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.num_experts_per_tok) == (192, 8)
    assert (spec.moe.intermediate_size, spec.moe.num_shared_experts) == (1536, 1)
    assert (spec.moe.scoring, spec.moe.scaling, spec.moe.renormalize) == ("sigmoid", 2.826, True)
    assert spec.moe.renormalize_epsilon == 1e-20
    assert spec.moe.has_expert_bias
    assert not spec.moe.fp32_combine
    assert spec.moe_layers == (False,) + (True,) * 79
    assert (spec.num_mtp_layers, spec.dtype) == (1, "bfloat16")
    assert (spec.rope.theta, spec.rope.rope_type) == (11158840.0, "default")
    assert (spec.max_position_embeddings, spec.rms_norm_eps) == (262144, 1e-5)
    assert spec.eos_token_ids == (120025,)


def test_qwen3_values() -> None:
    spec = parse_model_config(qwen())
    assert spec.moe is not None
    assert (spec.moe.scoring, spec.moe.renormalize, spec.moe.scaling) == ("softmax", True, 1.0)
    assert not spec.moe.has_expert_bias
    assert spec.moe.num_shared_experts == 0
    assert spec.moe.renormalize_epsilon == 0.0
    assert spec.moe_layers == (True,) * 48
    assert (spec.rope.theta, spec.rms_norm_eps, spec.num_mtp_layers) == (1e6, 1e-6, 0)


@pytest.mark.parametrize("name", ["hub_qwen3_coder_480b_a35b", "hub_qwen3_coder_30b_a3b"])
def test_coder_extras_are_accepted(name: str) -> None:
    assert parse_model_config(config(name)).rope.theta == 1e7


@pytest.mark.parametrize("name", HF_FILES)
def test_what_transformers_writes_is_accepted(name: str) -> None:
    spec = parse_model_config(config(name))
    assert len(spec.moe_layers) == spec.num_hidden_layers


def test_resaved_by_transformers_is_the_same_model() -> None:
    assert parse_model_config(config("hf_hy_v3_hub_resaved")) == parse_model_config(config())
    assert parse_model_config(config("hf_qwen3_moe_hub_resaved")) == parse_model_config(qwen())


def test_tiny_configs_of_transformers() -> None:
    spec = parse_model_config(tiny())
    assert (spec.eos_token_ids, spec.dtype) == ((2, 3), "float32")
    assert spec.moe is not None
    assert spec.moe.fp32_combine  # the class default, which save_pretrained writes
    spec = parse_model_config(config("hf_qwen3_moe_tiny_yarn_saved"))
    assert spec.moe_layers == (True, False, True)
    assert (spec.rope.rope_type, spec.rope.factor) == ("yarn", 4.0)
    assert spec.max_position_embeddings == 131072


# --- the traps ---------------------------------------------------------------------------------


def width(values: dict[str, Any]) -> int:
    moe = parse_model_config(values).moe
    assert moe is not None
    return moe.intermediate_size


def test_either_name_of_the_expert_width() -> None:
    assert width(config(expert_hidden_dim=...)) == 1536
    assert width(config(moe_intermediate_size=...)) == 1536
    with pytest.raises(CheckpointError, match="expert_hidden_dim=1024 must agree with moe_inter"):
        parse_model_config(config(expert_hidden_dim=1024))
    with pytest.raises(CheckpointError, match="lacks 'moe_intermediate_size'"):
        parse_model_config(config(expert_hidden_dim=..., moe_intermediate_size=...))


@pytest.mark.parametrize("base", [config, qwen])
def test_either_name_of_the_number_of_experts(base: Any) -> None:
    spec = parse_model_config(base(num_experts=..., num_local_experts=64))
    assert spec.moe is not None
    assert spec.moe.num_experts == 64
    with pytest.raises(CheckpointError, match="num_local_experts=64 must agree"):
        parse_model_config(base(num_local_experts=64))
    with pytest.raises(CheckpointError, match="must be a whole number"):
        parse_model_config(base(num_experts=[64, 64]))


def test_dense_layers_by_count_or_by_list() -> None:
    kinds = ["dense", "dense", "sparse"]
    by_list = parse_model_config(tiny(mlp_layer_types=kinds))
    by_count = parse_model_config(tiny(mlp_layer_types=..., first_k_dense_replace=2))
    assert by_list.moe_layers == by_count.moe_layers == (False, False, True)
    assert parse_model_config(tiny(mlp_layer_types=...)).moe_layers == (False, True, True)
    assert parse_model_config(tiny(mlp_layer_types=kinds, first_k_dense_replace=2)) == by_list
    assert parse_model_config(tiny(mlp_layer_types=["sparse"] * 3)).moe_layers == (True,) * 3
    with pytest.raises(CheckpointError, match="contradicts first_k_dense_replace=1"):
        parse_model_config(tiny(mlp_layer_types=kinds, first_k_dense_replace=1))
    with pytest.raises(CheckpointError, match="has 2 entries; num_hidden_layers=3"):
        parse_model_config(tiny(mlp_layer_types=kinds[:2]))
    with pytest.raises(CheckpointError, match="first_k_dense_replace=4 must be between 0 and 3"):
        parse_model_config(tiny(mlp_layer_types=..., first_k_dense_replace=4))
    with pytest.raises(CheckpointError, match='"dense" and "sparse"'):
        parse_model_config(tiny(mlp_layer_types=["dense", "moe", "sparse"]))


def test_qwen_dense_layers() -> None:
    def layers(**changes: Any) -> tuple[bool, ...]:
        return parse_model_config(qwen(num_hidden_layers=4, **changes)).moe_layers

    assert layers(decoder_sparse_step=2) == (False, True, False, True)
    assert layers(mlp_only_layers=[0, 3]) == (False, True, True, False)
    assert layers(mlp_only_layers=[1], decoder_sparse_step=2) == (False, False, False, True)
    assert layers(mlp_only_layers=None, decoder_sparse_step=...) == (True,) * 4
    with pytest.raises(CheckpointError, match="mlp_only_layers"):
        layers(mlp_only_layers=[4])
    with pytest.raises(CheckpointError, match="decoder_sparse_step=0"):
        layers(decoder_sparse_step=0)


def test_qwen_without_experts_is_dense() -> None:
    keys = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    spec = parse_model_config(qwen(num_experts=0, **dict.fromkeys(keys, ...)))
    assert spec.moe is None
    assert not any(spec.moe_layers)
    assert spec.num_parameters == spec.num_active_parameters


def test_qwen_head_dim_may_be_absent() -> None:
    assert parse_model_config(qwen(head_dim=...)).head_dim == 2048 // 32
    with pytest.raises(CheckpointError, match="no head_dim"):
        parse_model_config(qwen(head_dim=..., num_attention_heads=24))


def test_hy3_head_dim_is_never_guessed() -> None:
    with pytest.raises(CheckpointError, match="lacks 'head_dim'"):
        parse_model_config(config(head_dim=...))


def test_defaults_that_differ_between_libraries(caplog: pytest.LogCaptureFixture) -> None:
    moe = parse_model_config(config(enable_moe_fp32_combine=...)).moe
    assert moe is not None
    assert not moe.fp32_combine
    moe = parse_model_config(qwen(norm_topk_prob=...)).moe
    assert moe is not None
    assert not moe.renormalize
    assert not caplog.records
    moe = parse_model_config(config(router_scaling_factor=...)).moe
    assert moe is not None
    assert moe.scaling == 1.0
    assert "router_scaling_factor" in caplog.text


def test_eos_may_be_an_id_a_list_or_absent() -> None:
    assert parse_model_config(config(eos_token_id=[5, 7, 5])).eos_token_ids == (5, 7)
    assert parse_model_config(config(eos_token_id=None)).eos_token_ids == ()
    for wrong in (120832, -1, [1, 120832], "2", [True], 1.0, [[1]]):
        with pytest.raises(CheckpointError, match="eos_token_id"):
            parse_model_config(config(eos_token_id=wrong))


def test_dtype_under_both_names() -> None:
    for name in ("float32", "float16", "torch.bfloat16"):
        wanted = name.removeprefix("torch.")
        assert parse_model_config(config(dtype=name)).dtype == wanted
        assert parse_model_config(qwen(torch_dtype=name)).dtype == wanted
    assert parse_model_config(config(dtype=...)).dtype == "float32"
    with pytest.raises(CheckpointError, match="torch_dtype='float32' must agree with dtype"):
        parse_model_config(config(torch_dtype="float32"))
    with pytest.raises(UnsupportedError, match="float8_e4m3fn"):
        parse_model_config(config(dtype="float8_e4m3fn"))


def test_mtp_layers() -> None:
    assert parse_model_config(config(num_nextn_predict_layers=...)).num_mtp_layers == 0
    assert parse_model_config(config(num_nextn_predict_layers=2)).num_mtp_layers == 2


def test_sliding_window_switched_off_is_full_attention() -> None:
    parse_model_config(qwen(sliding_window=4096, use_sliding_window=False))
    with pytest.raises(UnsupportedError, match="use_sliding_window=True"):
        parse_model_config(qwen(sliding_window=4096, use_sliding_window=True))
    with pytest.raises(UnsupportedError, match="sliding_window=4096"):
        parse_model_config(qwen(sliding_window=4096, use_sliding_window=...))
    parse_model_config(qwen(num_hidden_layers=2, layer_types=["full_attention"] * 2))
    for other in (["sliding_attention"], "full_attention", 5, True):
        with pytest.raises(UnsupportedError, match="layer_types"):
            parse_model_config(qwen(layer_types=other))


def test_router_without_bias_or_renormalisation() -> None:
    moe = parse_model_config(config(moe_router_enable_expert_bias=False, route_norm=False)).moe
    assert moe is not None
    assert not moe.has_expert_bias
    assert not moe.renormalize


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (config, {"hidden_act": "gelu"}),
        (config, {"attention_bias": True}),
        (config, {"mlp_bias": True}),
        (config, {"qk_norm": False}),
        (config, {"moe_router_use_sigmoid": False}),
        (config, {"n_group": 8}),
        (config, {"n_group": True}),
        (config, {"topk_group": 4}),
        (config, {"is_encoder_decoder": True}),
        (config, {"partial_rotary_factor": 0.5}),
        (qwen, {"attention_bias": True}),
        (qwen, {"qkv_bias": True}),
        (qwen, {"use_qk_norm": False}),
        (qwen, {"shared_expert_intermediate_size": 512}),
        (qwen, {"num_nextn_predict_layers": 1}),
        (qwen, {"hidden_act": "relu"}),
        (qwen, {"architectures": ["Qwen3MoeForSequenceClassification"]}),
    ],
)
def test_unsupported_is_refused_by_name_and_value(base: Any, changes: dict[str, Any]) -> None:
    ((key, value),) = changes.items()
    with pytest.raises(UnsupportedError) as caught:
        parse_model_config(base(**changes))
    assert key in str(caught.value)
    assert repr(value) in str(caught.value)


def test_quantized_checkpoints() -> None:
    spec = parse_model_config(config("hub_hy3_fp8"))
    assert spec.quantization is not None
    assert spec.quantization.method == "fp8"
    assert parse_model_config(config(quantization_config=None)).quantization is None
    # what the newer pipeline adds beside it is ignored on its own
    attention_only = config("hub_hy3_fp8", quantization_config=...)
    assert parse_model_config(attention_only) == parse_model_config(config())


def test_other_architectures() -> None:
    with pytest.raises(UnsupportedError, match=r"'llama'.*hy_v3, qwen3_moe"):
        parse_model_config({"model_type": "llama"})
    with pytest.raises(CheckpointError, match="lacks 'model_type'"):
        parse_model_config({})
    with pytest.raises(CheckpointError, match="model_type=3 must be a string"):
        parse_model_config({"model_type": 3})


def test_all_unknown_keys_are_named_at_once() -> None:
    with pytest.raises(UnsupportedError, match="attn_logit_cap, mystery_scale, zeta"):
        parse_model_config(config(zeta=1, mystery_scale=2.0, attn_logit_cap=None))
    # a key of the other family is unknown as well
    with pytest.raises(UnsupportedError, match="norm_topk_prob"):
        parse_model_config(config(norm_topk_prob=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 63}, "num_key_value_heads=8 must divide num_attention_heads=63"),
        ({"head_dim": 127}, "head_dim=127 must be even"),
        ({"num_experts_per_tok": 193}, "num_experts_per_tok=193 must be between 1 and 192"),
        ({"hidden_size": -4096}, "hidden_size=-4096 must be between 1"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": "4096"}, "hidden_size='4096' must be a whole number"),
        ({"hidden_size": 4096.0}, "hidden_size=4096.0 must be a whole number"),
        ({"vocab_size": True}, "vocab_size=True must be a whole number"),
        ({"vocab_size": None}, "lacks 'vocab_size'"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000 must be between 1 and"),
        ({"num_hidden_layers": [80]}, r"num_hidden_layers=\[80\]"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a finite number above 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000"),
        ({"router_scaling_factor": -1.0}, "router_scaling_factor=-1.0"),
        ({"router_scaling_factor": "2.8"}, "router_scaling_factor='2.8' must be a number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
        ({"route_norm": 1}, "route_norm=1 must be true or false"),
        ({"bos_token_id": 120832}, "bos_token_id=120832 must be between 0 and 120831"),
        ({"pad_token_id": 120832}, "pad_token_id"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers=-1"),
        ({"num_shared_experts": -1}, "num_shared_experts=-1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
        ({"mlp_layer_types": "dense"}, "mlp_layer_types='dense'"),
        ({"dtype": 16}, "dtype=16 must be a string"),
    ],
)
def test_contradictions_name_key_value_and_constraint(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        parse_model_config(config(**changes))


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_model_config(config(hidden_size="x" * 10**6))
    assert len(str(caught.value)) < 400


def test_padding_may_be_spelt_minus_one() -> None:
    assert parse_model_config(config(pad_token_id=-1)) == parse_model_config(config())


# --- the file ----------------------------------------------------------------------------------


def test_load_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()))
    assert load_model_spec(tmp_path) == parse_model_config(config())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[1, 2]", "must hold a JSON object, found a list"),
        (b'"hy_v3"', "found a str"),
        (b"null", "found a NoneType"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": 1, "a": 2}', "'a' stands twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        load_model_spec(tmp_path)


def test_missing_file_and_folder_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint folder"):
        load_model_spec(tmp_path)
    with pytest.raises(CheckpointError, match="not a checkpoint folder"):
        load_model_spec(tmp_path / "nowhere")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="Can't read"):
        load_model_spec(tmp_path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(
    base=st.sampled_from(["hub_hy3", "hub_qwen3_30b_a3b", "hf_qwen3_moe_tiny_yarn_saved"]),
    data=st.data(),
)
def test_any_value_of_any_key_is_read_or_refused(base: str, data: st.DataObject) -> None:
    """Whatever stands in a config, the outcome is a consistent spec or one of our errors."""
    values = config(base)
    for key in data.draw(st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=3)):
        values[key] = data.draw(JSON_VALUES)
    try:
        spec = parse_model_config(values)
    except MoestroError:
        return
    assert len(spec.moe_layers) == spec.num_hidden_layers
    assert spec.num_attention_heads % spec.num_key_value_heads == 0
    assert spec.num_parameters >= spec.num_active_parameters > 0


def test_qwen_with_every_layer_named_dense() -> None:
    spec = parse_model_config(qwen(mlp_only_layers=list(range(48))))
    assert spec.moe is None
    assert not any(spec.moe_layers)
