"""The forward of an accelerated model: pack, plan, run the layers, commit, unpack."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import local
from types import MethodType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.modeling_outputs import MoeModelOutputWithPast

from dsv4.cache.batch import Batch
from dsv4.cache.prepare_forward import ForwardPlan, PlanOptions
from dsv4.cache.requests import Request
from dsv4.errors import InvalidInput
from dsv4.integrations.transformers.attention import RunningStep
from dsv4.integrations.transformers.cache import PagedCache
from dsv4.integrations.transformers.caches import FastCaches, RunningCall
from dsv4.integrations.transformers.generate import context_overflow, wrong_padding
from dsv4.integrations.transformers.model import no_gradients
from dsv4.integrations.transformers.packing import Packing, indices_for, make_packing, read_packing
from dsv4.integrations.transformers.private import has_known_wrappers, wrappers
from dsv4.ops.device import is_current, on_device

# transformers builds a dense mask unless it is given a dictionary of finished ones
_NO_MASK = {"packed": None}


class FastForward:
    """Replaces the forward of one DeepseekV4Model. For inference: no gradients.

    The model's own forward then sees the tokens of all rows in sequence, as one row without
    padding; everything except attention works on single tokens.
    """

    def __init__(self, model: Any, step: RunningStep, caches: FastCaches, *, capture: bool) -> None:
        self.model, self.step, self.caches = model, step, caches
        self.replaced: Any = None
        self.hook: Any = None
        self.is_restored = False  # the model has its own forward again
        self._asked = local()  # .logits: which logits the call that begins in this thread wants
        if step.ranks is None:  # where a rewind resumes may differ between ranks
            caches.rerun = self.rerun
        self.max_step_tokens = step.manager.memory.max_step_tokens
        self._place = step.manager.device
        self.own_forward: Callable[..., Any] = model.forward
        self._bare_forward = _without_recording(model)
        self._uncompiled = torch.compiler.disable(
            self._take_turn,
            reason="dsv4: the steps of an accelerated model are planned in Python, token by token, "
            "and captured as CUDA graphs; compile the model without fullgraph, or restore(model)",
        )
        self.graphs: DecodeGraphs | None = None
        if capture and can_capture(model):
            self.graphs = DecodeGraphs(
                self.decode,
                max_rows=min(step.manager.memory.max_requests, self.max_step_tokens),
                device=step.manager.device,
            )

    def observe(self, model: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """A forward of the causal LM begins. Cached columns may be left out only if just the logits
        of the last columns are wanted, as generate does for a prompt."""
        keep = given.get("logits_to_keep", 0) if len(args) < 2 else 0
        ids = given.get("input_ids", args[0] if args else None)
        is_last = isinstance(keep, int) and keep >= 1
        self._asked.logits = (ids, keep) if isinstance(ids, Tensor) and is_last else None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidInput(
            "an accelerated model cannot be copied or pickled, because its cache would be too: "
            "restore(model), copy it, and accelerate both"
        )

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._uncompiled(*args, **options)

    def _take_turn(self, *args: Any, **options: Any) -> Any:
        """One call at a time, because all share one plan."""
        asked: tuple[Tensor, int] | None = getattr(self._asked, "logits", None)
        self._asked.logits = None
        with self.caches.turn:
            self.caches.mend()
            result = self._call(asked, *args, **options)
        return self._without_gradients(result) if torch.is_grad_enabled() else result

    def _without_gradients(self, result: Any) -> Any:
        """A result without a graph to go back through: logits would only lead to lm_head."""
        wanted, instead = self.model.norm.weight, "restore(model) to train it"
        if isinstance(result, tuple):
            return no_gradients(result[0], wanted, instead), *result[1:]
        hidden = no_gradients(result.last_hidden_state, wanted, instead)
        _put(result, "last_hidden_state", hidden)
        return result

    @torch.no_grad()
    def _call(
        self,
        asked: tuple[Tensor, int] | None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> Any:
        return_dict = options.pop("return_dict", getattr(self.model.config, "return_dict", True))
        given = self._checked_input(input_ids, inputs_embeds, options)
        if use_cache is None:
            use_cache = self.model.config.use_cache
        keep = use_cache or past_key_values is not None
        rows, columns = given.shape[:2]
        found, call = self.caches.find(past_key_values, rows=rows), self.caches.call
        is_used = call is not None and found in call.caches
        if (
            found is not None
            and call is not None
            and not is_used
            and self._is_all(found, attention_mask, position_ids, rows, columns)
        ):
            found.rows.give_back()
        begun = found if found is not None and found.rows.requests else None
        if begun is None or (not is_used and (columns > 1 or call is not None)):
            self.caches.weights.read()  # only for the first decode step of a call
        lengths = [0] * rows if begun is None else begun.rows.lengths
        past_mask = None
        if begun is not None and attention_mask is not None and not is_used:
            # from its second step on, generate passes what it has run
            past_mask = begun.history_mask
        packing = read_packing(
            batch=rows,
            columns=columns,
            past_columns=0 if begun is None else begun.rows.columns,
            past_mask=past_mask,
            lengths=lengths,
            attention_mask=attention_mask,
            position_ids=position_ids,
            device=given.device,
        )
        self._check_context(lengths, packing)
        if call is not None:
            self._check_generated(call, packing, lengths)
        prompts = None
        if asked is not None and asked[0] is input_ids and begun is None and keep:
            prompts = self._prompts(packing, *asked, options)
        cache = self.caches.open(past_key_values, found, rows=rows, prompts=prompts)
        run = packing
        if prompts is not None:
            run = packing.after(cache.rows.lengths, given.device)
        try:
            outputs = self._run(cache, run, input_ids, inputs_embeds, options)
        except BaseException:
            self.caches.mend()
            if begun is None:
                self.caches.discard(cache)
            elif lengths != cache.rows.lengths or any(row.is_torn for row in cache.requests):
                self.caches.close(cache, "a call with it failed halfway; run the prompt again")
            raise
        cache.rows.note_columns(input_ids, torch.from_numpy(packing.mask).to(given.device))
        if not keep:
            self.caches.discard(cache)
        result = _unpacked(outputs, run)
        _put(result, "past_key_values", cache if keep else None)
        return result if return_dict else MoeModelOutputWithPast(**result).to_tuple()

    def _is_all(
        self, cache: PagedCache, mask: Any, positions: Any, rows: int, columns: int
    ) -> bool:
        """Whether generate begins with all ids of a conversation although the cache has some: with
        drafts transformers leaves none out. The rows continue like those of any next turn."""
        if not cache.columns:
            return False
        if mask is None:  # newer versions leave out a mask that hides nothing, and pass positions
            return isinstance(positions, Tensor) and not bool(positions[..., 0].any())
        return isinstance(mask, Tensor) and tuple(mask.shape) == (rows, columns)

    def _prompts(
        self, packing: Packing, ids: Tensor, logits: int, options: dict[str, Any]
    ) -> list[NDArray[np.int64]] | None:
        """The prompts of a call that wants the logits of the last `logits` columns, if it may leave
        out what is cached. After the first of these columns there are drafts, which do not belong
        to the prompt."""
        is_recorded = any(self._wants(options, name) for name in ("hidden_states", "router_logits"))
        if not self.step.manager.prefix or is_recorded:
            return None
        if not packing.mask[:, packing.columns - logits :].all() or logits > packing.columns:
            return None
        return [row[: len(row) - logits + 1] for row in packing.rows_of(ids)]

    def _check_generated(self, call: RunningCall, packing: Packing, lengths: Sequence[int]) -> None:
        """Raises InvalidInput for padding that generate cannot use, inferred or given."""
        if packing.mask[:, -1].all():
            return
        for row in np.flatnonzero(~packing.mask[:, -1]).tolist():
            is_empty = not lengths[row] and not packing.counts[row]
            if not (is_empty and call.chunked):
                raise wrong_padding(row, is_empty=is_empty)

    def _checked_input(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """The one input that is given. Raises InvalidInput for what the fast path does not
        support."""
        if (input_ids is None) == (inputs_embeds is None):
            raise InvalidInput("give exactly one of input_ids and inputs_embeds")
        if self._wants(options, "attentions"):
            raise InvalidInput(
                "output_attentions: the fast path never forms attention weights; restore(model) "
                "for a call that needs them"
            )
        if self.model.training:
            raise InvalidInput(
                "the model is in training mode, but the fast path computes no gradients: call "
                "model.eval(), or restore(model) to train"
            )
        given = inputs_embeds if input_ids is None else input_ids
        assert given is not None
        if given.ndim != (3 if input_ids is None else 2) or not given.numel():
            name = "inputs_embeds" if input_ids is None else "input_ids"
            raise InvalidInput(
                f"{name} is {list(given.shape)}: give [batch, columns], with a token at least"
            )
        rows, most = given.shape[0], self.step.manager.memory.max_requests
        if rows > most:
            raise InvalidInput(
                f"a batch of {rows} rows, but the model was accelerated for max_batch={most}: "
                f"split it, or accelerate with a larger max_batch"
            )
        return given

    def _wants(self, options: dict[str, Any], what: str) -> bool:
        """Whether transformers should record this output, by argument or by config."""
        name = f"output_{what}"
        asked = options.get(name)
        return bool(getattr(self.model.config, name, False) if asked is None else asked)

    def _check_context(self, lengths: Sequence[int], packing: Packing) -> None:
        longest = max(map(sum, zip(lengths, packing.counts, strict=True)))
        most = self.step.manager.schema.max_context
        if longest > most:
            raise context_overflow(longest, most)

    def _run(
        self,
        cache: PagedCache,
        packing: Packing,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        options: dict[str, Any],
    ) -> list[Any]:
        """The outputs of all pieces, in order."""
        weights = self.caches.weights.glance()
        if cache.rows.weights != weights:
            cache.rows.go_on_with(weights)
        ids = None if input_ids is None else packing.pack(input_ids)
        embeds = None if inputs_embeds is None else packing.pack(inputs_embeds)
        is_recorded = self._wants(options, "hidden_states") or self._wants(options, "router_logits")
        captured = max(packing.counts) == 1 and ids is not None and not is_recorded
        forward = self._bare_forward
        if is_recorded:
            forward, options = self.own_forward, options | {"return_dict": True}
        outputs, requests = [], cache.rows.requests
        for piece, rows in packing.pieces(self.max_step_tokens):
            steps = [(requests[row], count) for row, count in rows]
            if captured and self.graphs is not None and ids is not None:
                outputs.append(self._replay(steps, ids[:, piece]))
            else:
                inputs = {
                    "input_ids": None if ids is None else ids[:, piece],
                    "inputs_embeds": None if embeds is None else embeds[:, piece],
                }
                with self._planned(steps, self._host_ids(ids, piece)) as plan:
                    outputs.append(self._forward(forward, plan.batch, **inputs, **options))
        return outputs

    def _replay(self, steps: list[tuple[Request, int]], ids: Tensor) -> Any:
        assert self.graphs is not None
        size = self.graphs.padded(len(steps))
        host_ids = self._host_ids(ids, slice(None))
        with self._planned(steps, host_ids, pad_tokens=size, pad_requests=size) as plan:
            hidden: Any = self.graphs(ids, plan.batch, self.caches.weights.version)
            plan.mark_appended()
        return MoeModelOutputWithPast(last_hidden_state=hidden)

    def _host_ids(self, ids: Tensor | None, piece: slice) -> Tensor | None:
        """With tiers, generated text is cached too, so its ids must reach the host."""
        if ids is None or not self.step.manager.tiers:
            return None
        return ids[0, piece].cpu()

    @torch.no_grad()
    def rerun(self, cache: PagedCache, ids: Tensor, mask: Tensor) -> int:
        """After a rewind, runs those of a cache's first columns [rows, n] that its rows lack;
        returns the number of tokens."""
        lacking = make_packing(np.asarray(mask.cpu()), ids.device).after(
            cache.rows.lengths, ids.device
        )
        if lacking.tokens:
            self._run(cache, lacking, ids, None, {})
        return lacking.tokens

    @contextmanager
    def _planned(
        self,
        steps: list[tuple[Request, int]],
        ids: Tensor | None,
        *,
        pad_tokens: int | None = None,
        pad_requests: int | None = None,
    ) -> Iterator[ForwardPlan]:
        """A plan that is committed at the end. After an error it fails, so lengths stay, and rows
        that are lost are torn. Inside, autocast is off: layers and cache compute in their own
        types. The cache's device is the current one, on which graphs and kernels are launched."""
        manager, place = self.step.manager, self._place
        if torch.is_autocast_enabled(place.type) or not is_current(place):
            with (
                on_device(place),
                torch.autocast(place.type, enabled=False),
                self._planned(steps, ids, pad_tokens=pad_tokens, pad_requests=pad_requests) as plan,
            ):
                yield plan
            return
        if self.is_restored:
            self.check_restored()
        plan = manager.prepare_forward(steps, pad_tokens=pad_tokens, pad_requests=pad_requests)
        self.step.batch = plan.batch
        try:
            yield plan
        except BaseException:
            manager.fail(plan)
            raise
        finally:
            self.step.batch = None
        manager.commit(plan, ids=ids)

    def check_restored(self) -> None:
        """Raises InvalidInput if the layers use their own attention again; the rows are gone
        then."""
        if self.is_restored:
            raise InvalidInput(
                "the model has been restored since this call or its Engine began, and the rows are "
                "gone: call again, or make an Engine for the model as it is accelerated now"
            )

    def _forward(self, forward: Callable[..., Any], batch: Batch, **options: Any) -> Any:
        return forward(
            attention_mask=_NO_MASK,
            position_ids=batch.positions.long().unsqueeze(0),
            use_cache=False,
            **options,
        )

    # ---- steps of an Engine

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, autocast is off, because layers and cache compute in their own types, and the
        cache's device is the current one, on which graphs and kernels are launched."""
        self.check_restored()
        place = self._place
        if torch.is_autocast_enabled(place.type) or not is_current(place):
            with on_device(place), torch.autocast(place.type, enabled=False):
                yield
        else:
            yield

    def padding(self, counts: Sequence[int]) -> PlanOptions:
        """How a step of requests with these token counts is padded: to the size of a graph."""
        if self.graphs is None or max(counts) > 1:
            return {}
        size = self.graphs.padded(len(counts))
        return {"pad_tokens": size, "pad_requests": size}

    def hidden_states(self, plan: ForwardPlan, ids: Tensor, rows: Tensor) -> Tensor:
        """[rows, hidden] of a plan's tokens, which every layer writes to the cache."""
        given, self.step.batch = ids.unsqueeze(0), plan.batch
        try:
            if self.graphs is not None and len(ids) == len(plan.requests):
                hidden = self.graphs(given, plan.batch, self.caches.weights.version)[0]
                plan.mark_appended()
            else:
                hidden = self.decode(given, plan.batch)[0]  # where the last layer is
        finally:
            self.step.batch = None
        own = rows.clone()  # never one tensor for two devices: tests tell them apart by memory
        return hidden.index_select(0, indices_for(hidden, own))

    def decode(self, ids: Tensor, batch: Batch) -> Tensor:
        hidden: Tensor = self._forward(self._bare_forward, batch, input_ids=ids).last_hidden_state
        return hidden


def _without_recording(model: Any) -> Callable[..., Any]:
    """The model's forward without transformers' wrappers that record outputs and take defaults from
    the config; unchanged if it has other wrappers."""
    forward: Callable[..., Any] = model.forward
    if "forward" in vars(model):
        return forward
    around, inside = wrappers(forward.__func__)  # type: ignore[attr-defined]
    bare: Callable[..., Any] = MethodType(inside, model) if has_known_wrappers(around) else forward
    return bare


def _unpacked(pieces: Sequence[Any], packing: Packing) -> Any:
    """One output of transformers for the padded batch from those of its packed pieces."""

    def by_column(tensors: Sequence[Tensor]) -> Any:
        flat = packing.unpack(torch.cat([tensor[0] for tensor in tensors]))
        return flat.view(packing.batch, packing.columns, *flat.shape[1:])

    result = pieces[0]
    hidden_states, router_logits = result.hidden_states, result.router_logits
    _put(result, "last_hidden_state", by_column([piece.last_hidden_state for piece in pieces]))
    if hidden_states is not None:
        layers = zip(*(piece.hidden_states for piece in pieces), strict=True)
        # None for layers that were not requested
        unpacked = tuple(None if layer[0] is None else by_column(layer) for layer in layers)
        _put(result, "hidden_states", unpacked)
    if router_logits is not None:
        layers = zip(*(piece.router_logits for piece in pieces), strict=True)
        _put(result, "router_logits", tuple(packing.unpack(torch.cat(each)) for each in layers))
    return result


def _put(output: Any, name: str, value: Any) -> None:
    """Does what `output.name = value` does to an output of transformers, which itself goes through
    all fields: 80 Python calls for a new one. None is not an item of an output."""
    object.__setattr__(output, name, value)
    if value is None:
        OrderedDict.pop(output, name, None)
    else:
        OrderedDict.__setitem__(output, name, value)


_KEPT_WEIGHTS = 4
_Step = tuple[Tensor, Tensor, Callable[[], None]]  # ids, hidden states, replay
Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


class DecodeGraphs:
    """Steps of one token per row, at sizes that are powers of two.

    `run(ids, batch)` is the model on static ids int64 [1, size] and a batch padded to that size. It
    reads nothing else that changes between steps, so its graph serves every later batch: the index
    tensors never move. A graph belongs to the weights and adapters that it was captured with; the
    most recently used ones are kept.
    """

    def __init__(
        self,
        run: Callable[[Tensor, Batch], Tensor],
        *,
        max_rows: int,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self._run, self._max_rows, self._device = run, max_rows, device
        self._capture = capture or CudaCapture()
        self._steps: OrderedDict[int, dict[int, _Step]] = OrderedDict()

    @property
    def sizes(self) -> list[int]:
        """Batch sizes that have been captured."""
        return sorted({size for steps in self._steps.values() for size in steps})

    def padded(self, rows: int) -> int:
        """The captured size that `rows` rows run at."""
        return min(1 << (rows - 1).bit_length(), self._max_rows)

    def __call__(self, ids: Tensor, batch: Batch, weights: int = 0) -> Tensor:
        """[1, rows, hidden] of int64 `ids` [1, rows]; the batch is padded to `padded(rows)`.
        `weights` is the version of the weights that the model computes with (weights.py)."""
        size, rows = batch.padded_tokens, ids.shape[1]
        steps = self._steps.get(weights)
        if steps is None or size not in steps:
            static = torch.zeros((1, size), dtype=torch.int64, device=self._device)
            static[:, :rows] = ids
            step = (static, *self._capture(lambda: self._run(static, batch)))
            steps = self._steps.setdefault(weights, {})
            steps[size] = step
            self._steps.move_to_end(weights)
            while len(self._steps) > _KEPT_WEIGHTS:  # not earlier: all share one pool of memory
                self._steps.popitem(last=False)
        elif len(self._steps) > 1:
            self._steps.move_to_end(weights)
        static, hidden, replay = steps[size]
        static[:, :rows] = ids
        replay()
        return hidden[:, :rows].clone()


class CudaCapture:
    """Runs a step once, so that its kernels are compiled, and captures it. It is a decode step, so
    running it again changes nothing. All graphs share one memory pool: they never overlap. The
    device is the current one, the same in every call. torch's own stream for captures belongs to
    the first device that captured in this process, and would make that one current."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        self._stream = self._stream or torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            hidden = step()
        self._pool = graph.pool()
        return hidden, graph.replay


def can_capture(model: Any) -> bool:
    """Whether transformers runs the experts of this model without reading values from the device:
    "batched_mm" always does, "grouped_mm" in bf16; "eager" loops over the experts that were hit."""
    experts: str = model.config._experts_implementation
    if model.device.type != "cuda":
        return False
    return experts == "batched_mm" or (experts == "grouped_mm" and model.dtype == torch.bfloat16)
