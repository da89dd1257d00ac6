"""vLLM's own offline usage, with nothing changed but the import and the model."""

import pytest

from moestro import LLM, SamplingParams

MODEL = "tiny-hy3"


def test_basic(capsys: pytest.CaptureFixture[str]) -> None:
    """examples: basic generate, printing prompt and text."""
    prompts = [
        "Hello, my name is",
        "The president of the United States is",
        "The capital of France is",
        "The future of AI is",
    ]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

    llm = LLM(model=MODEL)
    outputs = llm.generate(prompts, sampling_params)
    print("\nGenerated Outputs:\n" + "-" * 60)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt:    {prompt!r}")
        print(f"Output:    {generated_text!r}")
        print("-" * 60)

    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("Prompt:")] == [
        f"Prompt:    {p!r}" for p in prompts
    ]
    assert all(o.outputs[0].text for o in outputs)
    assert all(len(o.outputs[0].token_ids) <= 16 for o in outputs)


def test_chat() -> None:
    """examples: chat with one conversation, then with a batch and another template."""
    llm = LLM(model=MODEL, max_model_len=1024)
    sampling_params = llm.get_default_sampling_params()
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Write an essay about the importance of higher education."},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    assert outputs[0].prompt is not None
    assert outputs[0].prompt.startswith("<|bos|># You are a helpful assistant\n# Hello\n")
    assert outputs[0].prompt_token_ids.count(1) == 1
    assert outputs[0].outputs[0].text

    conversations = [conversation for _ in range(3)]
    outputs = llm.chat(messages=conversations, sampling_params=sampling_params, use_tqdm=True)
    assert len(outputs) == 3

    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    outputs = llm.chat(conversations[:1], sampling_params, chat_template=template)
    assert outputs[0].prompt is not None
    assert outputs[0].prompt.startswith("[system] You are")


def test_prompt_token_ids() -> None:
    """examples: prompts that are tokenised by the caller."""
    llm = LLM(model=MODEL)
    tokenizer = llm.get_tokenizer()
    prompts = ["import os", "class Point:\n"]
    sampling_params = SamplingParams(temperature=0, max_tokens=8)
    by_ids = llm.generate(
        [{"prompt_token_ids": tokenizer.encode(p)} for p in prompts], sampling_params
    )
    by_text = llm.generate(prompts, sampling_params)
    assert [o.prompt for o in by_ids] == [None, None]
    assert [o.outputs[0].token_ids for o in by_ids] == [o.outputs[0].token_ids for o in by_text]
    assert tokenizer.decode(by_ids[0].outputs[0].token_ids) == by_text[0].outputs[0].text


def test_list_of_sampling_params() -> None:
    """examples: one SamplingParams a prompt."""
    prompts = ["def add(a, b):\n", "while True:\n"]
    llm = LLM(MODEL, gpu_memory_utilization=0.3, trust_remote_code=False, block_size=16)
    sampling_params = [
        SamplingParams(temperature=0.0, max_tokens=5),
        SamplingParams(temperature=1.0, seed=1, max_tokens=9, ignore_eos=True),
    ]
    outputs = llm.generate(prompts, sampling_params=sampling_params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [5, 9]
    assert outputs[0].outputs[0].finish_reason == "length"


def test_default_params_samples_and_logprobs() -> None:
    """examples: get_default_sampling_params; n samples; logprobs of output and prompt."""
    llm = LLM(model=MODEL)
    sampling_params = llm.get_default_sampling_params()
    assert (sampling_params.temperature, sampling_params.top_p) == (0.4, 0.95)
    outputs = llm.generate("for i in range(", sampling_params)
    assert len(outputs) == 1

    sampling_params = SamplingParams(
        n=3, temperature=1.0, logprobs=2, prompt_logprobs=1, max_tokens=6, ignore_eos=True
    )
    (output,) = llm.generate(["for i in range("], sampling_params)
    assert output.finished
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    for completion in output.outputs:
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids) == 6
        total = 0.0
        for token_id, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
            assert 2 <= len(candidates) <= 3
            assert candidates[token_id].rank is not None
            assert candidates[token_id].decoded_token is not None
            total += candidates[token_id].logprob
        assert completion.cumulative_logprob == total
