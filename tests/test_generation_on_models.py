"""The API and the commands on tiny real models: the parts together, against the model alone."""

import json
import re
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from turbospark_mlx import Runner, cli, generate, load, store, stream_generate
from turbospark_mlx.errors import ContextError, InstallError
from turbospark_mlx.perplexity import perplexity
from turbospark_mlx.testing import make_tiny_install

TEXT = "One river, two rivers. The quick brown fox jumps over the lazy dog; naïve cafés cost 12345 €. "


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3"])
def install(request, tmp_path_factory):
    return make_tiny_install("llama", tmp_path_factory.mktemp("tiny") / "tiny.gturbo", variant=request.param)


@pytest.fixture(scope="module")
def loaded(install):
    return load(install, max_context=200, kernels="reference")


def greedy(model, ids, count):
    """Continuation by whole forwards without a cache."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(mx.argmax(model(mx.array([ids]))[0, -1])))
    return ids[-count:]


def test_greedy_generation_is_the_models_own(loaded):
    model, tokenizer = loaded
    for prompt in (TEXT, [5], [{"role": "user", "content": "Name a river."}]):
        responses = list(stream_generate(model, tokenizer, prompt, max_tokens=6))
        ids = (
            tokenizer.encode(prompt)
            if isinstance(prompt, str)
            else prompt
            if isinstance(prompt[0], int)
            else tokenizer.apply_chat_template(prompt)
        )
        tokens = [r.token for r in responses]
        assert tokens == greedy(model, ids, 6)[: len(tokens)]
        visible = [t for t in tokens if t not in tokenizer.eos_token_ids]
        assert "".join(r.text for r in responses) == tokenizer.decode(visible)
        assert responses[0].prompt_tokens == len(ids)


def test_logprobs_are_the_models(loaded):
    model, tokenizer = loaded
    ids = tokenizer.encode(TEXT)
    (response,) = stream_generate(model, tokenizer, ids, max_tokens=1)
    logits = np.array(model(mx.array([ids]))[0, -1].astype(mx.float32), dtype=np.float64)
    expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    np.testing.assert_allclose(np.array(response.logprobs), expected, atol=1e-3)


def test_a_conversation_on_one_runner_equals_turns_from_scratch(install):
    with Runner.open(install, max_context=400, kernels="reference", prefill_chunk=7) as runner:
        model, tokenizer = runner.model, runner.tokenizer
        messages, reused = [], []
        for question in ("Name a river.", "And another one?", "Why?"):
            messages.append({"role": "user", "content": question})
            responses = list(stream_generate(model, tokenizer, messages, max_tokens=20, runner=runner))
            alone = list(stream_generate(model, tokenizer, messages, max_tokens=20, max_context=400))
            assert [r.token for r in responses] == [r.token for r in alone]
            reused.append(responses[0].reused_tokens)
            messages.append({"role": "assistant", "content": "".join(r.text for r in responses)})
        assert reused[0] == 0
        # The same question again: nothing but its last token is left to run, or, behind a window, all of it.
        again = list(stream_generate(model, tokenizer, messages[:-1], max_tokens=20, runner=runner))
        assert [r.token for r in again] == [r.token for r in responses]
        assert again[0].reused_tokens in (0, again[0].prompt_tokens - 1)
        if all(type(layer).__name__ == "LinearKV" for layer in model.make_cache()):
            assert min(reused[1:]) > 0
            assert again[0].reused_tokens == again[0].prompt_tokens - 1


def test_cancellation_and_closing_leave_the_runner_usable(install):
    with Runner.open(install, max_context=300, kernels="reference", prefill_chunk=8) as runner:
        model, tokenizer = runner.model, runner.tokenizer
        ids = tokenizer.encode(TEXT)
        plain = [r.token for r in stream_generate(model, tokenizer, ids, max_tokens=10)]
        stop = threading.Event()
        *_, last = stream_generate(
            model,
            tokenizer,
            ids,
            runner=runner,
            max_tokens=10,
            prompt_progress_callback=lambda done, total: stop.set() if done >= 16 else None,
            cancelled=stop,
        )
        assert (last.finish_reason, runner.position) == ("cancelled", 16)
        half = stream_generate(model, tokenizer, ids, runner=runner, max_tokens=10)
        assert [next(half).token for _ in range(4)] == plain[:4]
        half.close()
        assert [r.token for r in stream_generate(model, tokenizer, ids, runner=runner, max_tokens=10)] == plain


def test_ids_and_lengths_that_the_model_does_not_have_are_refused(loaded):
    model, tokenizer = loaded
    with pytest.raises(ContextError, match=r"Token id 320 is not one of this model's"):
        generate(model, tokenizer, [1, 320])
    with pytest.raises(ContextError, match="max_context is 50"):
        generate(model, tokenizer, [1] * 45, max_tokens=6, max_context=50)


def test_generation_in_another_thread(loaded):
    model, tokenizer = loaded
    here, there = generate(model, tokenizer, TEXT, max_tokens=8), []
    worker = threading.Thread(target=lambda: there.append(generate(model, tokenizer, TEXT, max_tokens=8)))
    worker.start()
    worker.join()
    assert there == [here]


def test_perplexity_is_that_of_whole_forwards(loaded, monkeypatch):
    model, tokenizer = loaded
    monkeypatch.setattr("turbospark_mlx.perplexity.CHUNK", 10)
    monkeypatch.setattr("turbospark_mlx.perplexity.LOGITS_BYTES", 3 * 4 * 320)
    ids = tokenizer.encode(TEXT * 2)[:120]
    result = perplexity(model, ids, context=64, stride=40)
    losses = []
    for begin, scored, end in ((0, 1, 65), (40, 65, 105), (55, 105, 120)):
        logits = np.array(model(mx.array([ids[begin:end]]))[0].astype(mx.float32), dtype=np.float64)
        logprobs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        logprobs -= logits.max(-1, keepdims=True)
        losses += [-logprobs[position - 1 - begin, ids[position]] for position in range(scored, end)]
    assert result.tokens == len(losses) == 119
    assert result.windows == 3
    assert result.nll == pytest.approx(np.mean(losses), rel=1e-4)


def test_the_examples_of_the_python_api_run(tmp_path, monkeypatch, capsys):
    install = make_tiny_install("llama", tmp_path / "tiny.gturbo")
    monkeypatch.setattr(store, "resolve", lambda name: install)
    monkeypatch.chdir(tmp_path)
    make_tiny_install("gemma4", tmp_path / "gemma4.gturbo", variant="gemma4-moe")
    document = (Path(__file__).parents[1] / "docs" / "python-api.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    assert len(blocks) == 7
    namespace = {}
    for block in blocks:
        exec(block, namespace)
    printed = capsys.readouterr().out
    assert "prompt tokens reused" in printed
    assert "back end   " in printed


@pytest.fixture
def command(install, capsys):
    def run(name, *args):
        code = cli.main([name, str(install), *args, "--kernels", "reference"])
        return code, *capsys.readouterr()

    return run


def test_generate_command(command, loaded):
    model, tokenizer = loaded
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a river."}]
    expected = generate(model, tokenizer, messages, max_tokens=9)
    code, out, err = command("generate", "Name a river.", "--system", "Be brief.", "--max-tokens", "9")
    assert (code, out.removesuffix("\n")) == (0, expected.removesuffix("\n"))
    assert f"prompt: {len(tokenizer.apply_chat_template(messages))} tokens" in err


def test_perplexity_command(command, loaded, tmp_path):
    model, tokenizer = loaded
    file = tmp_path / "text.txt"
    file.write_text(TEXT * 4, encoding="utf-8")
    code, out, _ = command("perplexity", str(file), "--tokens", "90", "--context", "32", "--json")
    expected = perplexity(model, tokenizer.encode(TEXT * 4)[:90], context=32)
    document = json.loads(out)
    assert code == 0
    assert document["nll"] == pytest.approx(expected.nll, rel=1e-6)
    assert (document["tokens"], document["windows"]) == (89, 3)
    code, out, _ = command("perplexity", str(file), "--tokens", "90", "--context", "32")
    assert f"perplexity {expected.perplexity:.4f}\n" in out
    assert "tokens     89 predicted, in 3 windows\n" in out


def test_a_model_that_is_not_there(tmp_path, capsys):
    (tmp_path / "empty.gturbo").mkdir()
    assert cli.main(["generate", str(tmp_path / "empty.gturbo"), "hi"]) == 1
    assert "error: " in capsys.readouterr().err
    with pytest.raises(InstallError):
        Runner.open(tmp_path / "empty.gturbo")
