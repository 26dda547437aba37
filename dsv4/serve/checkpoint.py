"""A checkpoint of DeepSeek-V4 in transformers' form, accelerated, as a served model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from dsv4.cache import build
from dsv4.cache.options import ManagerOptions
from dsv4.cache.residency.sizes import needed_entry_rows
from dsv4.errors import Dsv4Error, InvalidInput, PoolTooSmall
from dsv4.integrations.transformers.accelerate import accelerate
from dsv4.integrations.transformers.engine import _Model
from dsv4.integrations.transformers.forward import FastForward
from dsv4.integrations.transformers.model import cache_schema
from dsv4.serve.calls import MARK
from dsv4.serve.models import Defaults, Message, Opened, Room
from dsv4.serve.schemas import GenerationFile
from dsv4.units import format_bytes

LOGGER = logging.getLogger("dsv4.serve")
# what generation_config.json may say and a server need not do: of transformers' own cache and files
_KNOWN = {
    *("_from_model_config", "transformers_version", "bos_token_id", "pad_token_id", "use_cache"),
    *("cache_implementation", "return_dict_in_generate", "max_length"),
}


class CheckpointTokenizer:
    """A byte-level tokenizer of transformers, as DeepSeek's are. Raises InvalidInput for another
    kind, whose tokens are not bytes."""

    def __init__(self, tokenizer: Any, end_tokens: frozenset[int]) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = {} if backend is None else json.loads(backend.to_str()).get("decoder") or {}
        if "ByteLevel" not in json.dumps(decoder):
            raise InvalidInput(
                f"the tokenizer is {type(tokenizer).__name__} with decoder "
                f"{decoder.get('type')!r}: the server needs a byte-level one, as DeepSeek-V4 has"
            )
        self._tokenizer, self.end_tokens = tokenizer, end_tokens
        self.vocabulary = len(tokenizer)
        byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        added = tokenizer.added_tokens_decoder
        self._bytes: list[bytes] = []
        for token, word in enumerate(tokenizer.convert_ids_to_tokens(range(self.vocabulary))):
            if token in added:
                # the mark of calls is text here, special or not
                is_silent = added[token].special and added[token].content != MARK
                self._bytes.append(b"" if is_silent else added[token].content.encode())
            else:
                self._bytes.append(bytes(byte_of[letter] for letter in word or ""))

    @cached_property
    def longest_token(self) -> int:
        """No token stands for more bytes."""
        return max(map(len, self._bytes))

    def encode(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )
        return found

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""


def _with_read_arguments(message: Message) -> Message:
    """With the arguments of its calls as objects, as transformers' templates take them; clients
    send them as JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    found = list[Any]()
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with suppress(ValueError, RecursionError):  # what is not JSON stays as it is
                read = {**function, "arguments": json.loads(function["arguments"])}
                call = {**call, "function": read}
        found.append(call)
    return {**message, "tool_calls": found}


class _Padded:
    """A tokenizer with as many tokens as the model's vocabulary, which may be larger: the
    additional ones are never chosen."""

    def __init__(self, inner: Any, words: int) -> None:
        self._inner, self.vocabulary = inner, words

    def forward(self, plan: Any, ids: Tensor, rows: Tensor) -> Tensor:
        logits: Tensor = self._inner.forward(plan, ids, rows)
        return logits[:, : self.vocabulary]

    def draft(self, plan: Any, newest: Tensor, count: int) -> Tensor:
        raise AssertionError("the server asks for no drafts")


class Checkpoint:
    """Loads the tokenizer from a directory or a repository, and the model when it is opened. Raises
    InvalidInput, ConfigError."""

    def __init__(self, path: str) -> None:
        config, tokenizer = _load_small(path)
        self._path = path
        self.name = Path(path).name if Path(path).is_dir() else path
        self.max_context = int(config.max_position_embeddings)
        self._template = tokenizer
        given = generation_file(path)
        self.defaults = _defaults(given)
        self.tokenizer = CheckpointTokenizer(tokenizer, _end_tokens(given, config, tokenizer))
        self.weights_id = _weights_id(path, config)

    def chat_tokens(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """By the tokenizer's chat template, which may read special tokens from a message. Raises
        InvalidInput."""
        from jinja2.exceptions import TemplateError

        if self._template.chat_template is None:
            raise InvalidInput(
                f"{self.name} has no chat template: use /v1/completions, or add one to its "
                f"tokenizer"
            )
        try:
            found = self._template.apply_chat_template(
                [_with_read_arguments(message) for message in messages],
                tools=[*tools] or None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **(options or {}),
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidInput(f"the chat template cannot render this chat: {error}") from error
        return [*found]

    def open(self, room: Room) -> Opened:
        """All requests fit at once. Raises PoolTooSmall if that is more than the memory given."""
        if room.handoff is not None:
            raise InvalidInput(
                "rows of an accelerated model are not handed to other machines: serve replicas "
                "that run prompts and answers alike"
            )
        model = _load_model(self._path)
        schema = cache_schema(
            model,
            max_context=room.max_context,
            records="fp8_ds",
            entries_apart=room.entries_apart,
        )
        blocks = room.max_requests * (schema.blocks_for(room.max_context) + 1)
        needed = blocks * schema.bytes.block + room.max_requests * schema.bytes.slot
        options: ManagerOptions = {
            "max_step_tokens": room.max_step_tokens,
            "max_open_plans": 1,
            "prefix": room.prefix,
            "host_memory": room.host_memory_bytes,
            "device": model.device,
        }
        needed += build.other_bytes(schema, max_requests=room.max_requests, **options)
        if room.entries_apart:
            rows = needed_entry_rows(schema, options, max_requests=room.max_requests)
            needed += min(blocks, rows) * schema.bytes.entries
        if room.memory_bytes is not None and needed > room.memory_bytes:
            raise PoolTooSmall(
                f"{room.max_requests} requests of {room.max_context:,} tokens need "
                f"{format_bytes(needed)} of cache and {format_bytes(room.memory_bytes)} are given: "
                f"give more, or ask for fewer requests or less context",
                minimum_bytes=needed,
            )
        accelerate(
            model,
            max_batch=room.max_requests,
            max_context=room.max_context,
            max_step_tokens=room.max_step_tokens,
            prefix=room.prefix,
            tiers=room.tiers,
            host_memory=room.host_memory_bytes,
        )
        forward: FastForward = vars(model.model)["forward"]

        @contextmanager
        def stepping() -> Iterator[None]:
            with torch.no_grad(), forward.computing():
                yield

        manager: Any = forward.step.manager
        words = min(self.tokenizer.vocabulary, model.config.vocab_size)
        return Opened(
            model=_Padded(_Model(model, forward), words),
            manager=manager,
            padding=forward.padding,
            stepping=stepping,
        )


def _load_small(path: str) -> tuple[Any, Any]:
    """Config and tokenizer, before anything large is read."""
    from transformers import AutoConfig, AutoTokenizer

    if not Path(path).exists() and (path[:1] in ("/", ".", "~") or path.count("/") != 1):
        raise InvalidInput(
            f"{path} does not exist: give a checkpoint's directory, or a name at Hugging Face "
            f"(owner/name)"
        )
    try:
        config = AutoConfig.from_pretrained(path)
        if config.model_type != "deepseek_v4":
            raise InvalidInput(
                f"{path} is a {config.model_type!r}: the server runs checkpoints of DeepSeek-V4 "
                f"(model_type 'deepseek_v4')"
            )
        return config, AutoTokenizer.from_pretrained(path)
    except Dsv4Error:
        raise
    except Exception as error:  # whatever the loaders raise
        raise InvalidInput(
            f"{path} cannot be loaded as a checkpoint with a tokenizer: {error}"
        ) from error


def _load_model(path: str) -> Any:
    from transformers import DeepseekV4ForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader: Any = DeepseekV4ForCausalLM
    try:
        model = loader.from_pretrained(path, dtype="auto")
    except Exception as error:  # whatever the loaders raise
        raise InvalidInput(f"the weights of {path} cannot be loaded: {error}") from error
    return model.to(device).eval()


def generation_file(path: str) -> GenerationFile:
    """A checkpoint's generation_config.json, empty if it has none. What it asks for and is not done
    here is named in the log. Raises InvalidInput for one that cannot be followed: transformers
    passes over some of these without a word."""
    name = "generation_config.json"
    found = _file_of(path, name)
    if found is None:
        return GenerationFile()
    try:
        given = GenerationFile.model_validate_json(found.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidInput(
            f"{name} of {path}: {where + ': ' if where else ''}{first['msg']}: correct it, or "
            f"remove the file to sample as OpenAI's API does"
        ) from error
    others = (given.model_extra or {}).items()
    without = sorted(key for key, value in others if value is not None and key not in _KNOWN)
    if without:
        LOGGER.warning("%s of %s: without effect here: %s", name, path, ", ".join(without))
    return given


def _file_of(path: str, name: str) -> Path | None:
    """A file of a directory or a repository; None if it has none. Without a network only
    what was loaded before is there: the log says so."""
    if Path(path).is_dir():
        return found if (found := Path(path) / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(path, name))
    except LocalEntryNotFoundError:
        LOGGER.warning("%s of %s: not on this machine, and cannot be asked for", name, path)
    except EntryNotFoundError:
        pass
    return None


def _defaults(given: GenerationFile) -> Defaults:
    """`do_sample: false` is a temperature of 0, as transformers reads it."""
    return Defaults(
        temperature=0.0 if given.do_sample is False else given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        new_tokens=given.max_new_tokens,
    )


def _end_tokens(given: GenerationFile, config: Any, tokenizer: Any) -> frozenset[int]:
    """Those of the generation config, or else the model's, or else the tokenizer's."""
    found = given.eos_token_id
    if found is None:
        found = config.eos_token_id
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        raise InvalidInput("neither the model nor its tokenizer says which token ends an answer")
    ends = frozenset(found if isinstance(found, list) else [found])
    if (last := max(ends)) >= config.vocab_size:
        raise InvalidInput(
            f"token {last} is said to end an answer, and the model has {config.vocab_size}: "
            f"correct eos_token_id in generation_config.json or config.json"
        )
    return ends


def _weights_id(path: str, config: Any) -> str:
    """Names the weights. For a directory: names, sizes and times of its weight files; for a
    repository: its commit."""
    named = hashlib.blake2b(digest_size=16)
    place = Path(path)
    if place.is_dir():
        for file in sorted(place.glob("*.safetensors")):
            found = os.stat(file)
            named.update(f"{file.name} {found.st_size} {found.st_mtime_ns}\n".encode())
        named.update((place / "config.json").read_bytes())
        return named.hexdigest()
    return f"{path}@{getattr(config, '_commit_hash', None)}"
