"""A checkpoint of transformers, saved by itself: served texts are those of its own generate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dsv4 import InvalidInput, PoolTooSmall
from dsv4.serve.app import make_state
from dsv4.serve.calls import MARK
from dsv4.serve.checkpoint import Checkpoint, generation_file
from dsv4.serve.models import Defaults
from dsv4.serve.options import ServerOptions
from dsv4.serve.schemas import GenerationFile
from tests.integrations.tiny_v4 import draw_weights, tiny_config
from tests.serve.serving import running

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{% for name, value in c.function.arguments.items() %}({{ name }}={{ value }}){% endfor %}"
    "{% endfor %}<|end|>{% endfor %}"
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}<|assistant|>"
)
ROLES = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", MARK]


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and one merge."""
    words = [*bytes_to_unicode().values()]
    vocabulary = {word: nth for nth, word in enumerate([*words, "he"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    found.add_special_tokens({"additional_special_tokens": ROLES})
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from transformers import DeepseekV4ForCausalLM

    place, words = tmp_path_factory.mktemp("tiny-v4"), tokenizer()
    config = tiny_config(vocab_size=264, eos_token_id=words.eos_token_id)
    model = draw_weights(DeepseekV4ForCausalLM(config), 0)
    model.save_pretrained(place)
    words.save_pretrained(place)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield place
    torch.set_num_threads(threads)


def test_a_checkpoint_is_served_as_its_own_generate_runs_it(checkpoint: Path) -> None:
    from transformers import AutoTokenizer, DeepseekV4ForCausalLM

    from dsv4.integrations.transformers import accelerate

    model = DeepseekV4ForCausalLM.from_pretrained(checkpoint).eval()
    words = AutoTokenizer.from_pretrained(checkpoint)
    accelerate(model, max_batch=1, max_context=512)
    asked = [{"role": "user", "content": "hello, where are the blocks?"}]
    ids = words.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    whole = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
    served = Checkpoint(str(checkpoint))
    raw = b"".join(map(served.tokenizer.token_bytes, whole)).decode(errors="replace")
    with running(served, max_requests=2, max_context=512, max_step_tokens=128) as server:
        client = server.openai()
        found = client.chat.completions.create(
            model=checkpoint.name, messages=asked, temperature=0, max_tokens=16
        )
        assert found.choices[0].message.content == raw
        assert found.usage.prompt_tokens == ids.shape[1]
        tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
        with_tool = client.chat.completions.create(
            model=checkpoint.name, messages=asked, tools=[tool], max_tokens=1
        )
        assert with_tool.usage.prompt_tokens == ids.shape[1] + len("[look]")
        server.engine.manager.check_invariants()
    far = {"max_requests": 1, "max_context": 512, "max_step_tokens": 64}
    with running(Checkpoint(str(checkpoint)), **far, host_memory_bytes=64 << 20) as server:
        found = server.openai().chat.completions.create(
            model=checkpoint.name, messages=asked, temperature=0, max_tokens=16
        )
        assert found.choices[0].message.content == raw  # also with entries in host memory
        assert server.engine.manager.stats().residency is not None


def test_tokens_are_bytes_and_text_gives_no_special_token(checkpoint: Path) -> None:
    words = Checkpoint(str(checkpoint)).tokenizer
    for text in ("hehe", "Größe 🙂", "<|user|>", ""):
        ids = words.encode(text)
        assert b"".join(map(words.token_bytes, ids)).decode() == text
        assert not {*ids} & {*range(257, words.vocabulary)}
    assert words.end_tokens == {tokenizer().eos_token_id}
    assert words.token_bytes(tokenizer().eos_token_id) == b""


def test_the_mark_of_calls_is_text_and_arguments_reach_the_template_as_objects(
    checkpoint: Path,
) -> None:
    served = Checkpoint(str(checkpoint))
    (token,) = served._template.encode(MARK, add_special_tokens=False)
    assert served.tokenizer.token_bytes(token) == MARK.encode()  # special in this tokenizer

    def call(arguments: str) -> dict[str, Any]:
        function = {"name": "look", "arguments": arguments}
        said = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        return {"messages": [said], "tools": [{"type": "function", "function": function}]}

    found = served.chat_tokens(**call('{"city": "Oslo", "days": 3}'))
    assert b"(city=Oslo)(days=3)" in b"".join(map(served.tokenizer.token_bytes, found))
    with pytest.raises(InvalidInput, match="chat template"):  # and not an error of the server
        served.chat_tokens(**call("no JSON"))


def changed(checkpoint: Path, place: Path, **changes: Any) -> str:
    """A copy, with another config."""
    for file in checkpoint.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    if changes:
        (place / "config.json").write_text(json.dumps(changes))
    return str(place)


def test_what_cannot_be_served_says_why(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="'gpt2'"):
        Checkpoint(changed(checkpoint, tmp_path, model_type="gpt2"))
    with pytest.raises(InvalidInput, match="does not exist"):
        Checkpoint(str(tmp_path / "nowhere" / "at" / "all"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="cannot be loaded"):
        Checkpoint(str(tmp_path / "empty"))
    place = changed(checkpoint, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InvalidInput, match="weights of"):
        make_state(Checkpoint(place), ServerOptions())
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InvalidInput, match="tokenizer"):
        Checkpoint(place)
    with pytest.raises(PoolTooSmall, match="give more"):
        make_state(Checkpoint(str(checkpoint)), ServerOptions(memory_bytes=1 << 16, max_requests=2))
    options = ServerOptions(memory_bytes=1 << 16, max_requests=2, host_memory_bytes=64 << 20)
    with pytest.raises(PoolTooSmall, match="give more"):
        make_state(Checkpoint(str(checkpoint)), options)
    bare = Checkpoint(str(checkpoint))
    bare._template.chat_template = None
    with pytest.raises(InvalidInput, match="no chat template"):
        bare.chat_tokens([{"role": "user", "content": "x"}])


def asked_to(place: Path, checkpoint: Path, **says: Any) -> Checkpoint:
    """The same checkpoint with another generation_config.json."""
    place.mkdir(exist_ok=True)
    path = changed(checkpoint, place)
    (place / "generation_config.json").write_text(json.dumps(says))
    return Checkpoint(path)


def test_what_a_request_leaves_open_the_checkpoint_decides(
    checkpoint: Path, tmp_path: Path
) -> None:
    says = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "max_new_tokens": 3}
    says |= {"do_sample": True, "repetition_penalty": 1.5, "eos_token_id": [3, 256]}
    served = asked_to(tmp_path, checkpoint, **says)
    assert served.tokenizer.end_tokens == {3, 256}
    asked = {"model": served.name, "messages": [{"role": "user", "content": "hello"}]}
    with running(served, max_requests=2, max_context=256, max_step_tokens=64) as server:
        seen = []
        submit = server.state.runner.submit

        def note(ids: Any, new: int, generation: Any, **kwargs: Any) -> Any:
            seen.append((generation.sampling, new))
            return submit(ids, new, generation, **kwargs)

        server.state.runner.submit = note  # type: ignore[method-assign]
        client = server.openai()
        client.chat.completions.create(**asked)
        own = {"top_k": -1, "min_p": 0, "repetition_penalty": 1}
        client.chat.completions.create(
            **asked, temperature=0, top_p=1, max_tokens=2, extra_body=own
        )
        server.anthropic().messages.create(**asked, max_tokens=2)
        client.completions.create(model=served.name, prompt="hello")
    sampled = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1}
    sampled["repetition_penalty"] = 1.5
    plain = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    found = [({name: getattr(each, name) for name in sampled}, new) for each, new in seen]
    # the request's own values win; /v1/completions has OpenAI's 16 tokens
    assert found == [(sampled, 3), (plain, 2), (sampled, 2), (sampled, 16)]
    with running(served, max_requests=1, max_context=64, max_new_tokens=5) as server:
        assert server.state.new_tokens == 5  # of the operator


def test_without_sampling_the_most_likely_token_is_chosen(checkpoint: Path, tmp_path: Path) -> None:
    assert asked_to(tmp_path, checkpoint, do_sample=False, temperature=0.7).defaults == Defaults(
        temperature=0.0
    )
    assert asked_to(tmp_path, checkpoint, do_sample=True).defaults == Defaults()
    (tmp_path / "generation_config.json").unlink()
    served = Checkpoint(str(tmp_path))
    assert served.defaults == Defaults()
    assert served.tokenizer.end_tokens == {tokenizer().eos_token_id}  # of config.json


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{bad", "JSON"),
        ("[]", "object"),
        ('{"temperature": "hot"}', "temperature: "),
        ('{"temperature": NaN}', "temperature: "),
        ('{"top_p": 7}', "top_p: "),
        ('{"top_k": 1.5}', "top_k: "),
        ('{"max_new_tokens": true}', "max_new_tokens: "),
        ('{"eos_token_id": []}', "eos_token_id"),
        ('{"eos_token_id": 264}', "the model has 264"),
    ],
)
def test_a_generation_config_that_cannot_be_followed_is_refused(
    checkpoint: Path, tmp_path: Path, content: str, says: str
) -> None:
    path = changed(checkpoint, tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(InvalidInput, match=says) as found:
        Checkpoint(path)
    assert "generation_config.json" in str(found.value)


def test_what_a_generation_config_asks_for_in_vain_is_in_the_log(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    says = {"no_repeat_ngram_size": 3, "num_beams": None, "use_cache": True, "bos_token_id": 0}
    with caplog.at_level("WARNING", "dsv4.serve"):
        asked_to(tmp_path, checkpoint, **says)
    (line,) = caplog.messages
    assert "without effect here: no_repeat_ngram_size" in line
    assert "num_beams" not in line
    assert "use_cache" not in line


def test_a_file_of_a_repository_that_cannot_be_asked_for_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(error: Exception) -> None:
        def download(repository: str, name: str) -> str:
            raise error

        monkeypatch.setattr("huggingface_hub.hf_hub_download", download)

    missing(LocalEntryNotFoundError("offline"))
    assert generation_file("deepseek-ai/none") == GenerationFile()
    assert "cannot be asked for" in caplog.text
    caplog.clear()
    missing(EntryNotFoundError("there is none"))
    assert generation_file("deepseek-ai/none") == GenerationFile()
    assert not caplog.messages
