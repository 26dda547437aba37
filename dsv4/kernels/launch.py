"""One launch of one kernel as an object: what launchers return and tests compile.

Triton finds the binary of a launch by the text of all its constants, which takes the host longer
than most of our kernels take the GPU. `Launch.run` asks Triton once for each specialization and
then starts the binary itself. What a call has launched can be launched again with other tensors of
the same shapes (`repeatable`): nothing is built again, only the addresses change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.errors import TritonError
from triton.runtime import driver

from dsv4.kernels.cache_key import cache_key
from dsv4.kernels.numerics import INTERPRETED
from dsv4.kernels.target import compiled_for
from dsv4.ops.device import on_device

_INT32_MAX = 2**31 - 1
# per specialization: what Triton compiled, and its constants in the order of the arguments
_binaries: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


class Launch(NamedTuple):
    """`grid` programs of `kernel`. `constants` are its compile-time arguments by name, `options`
    the compiler's: warps, stages, a bound on registers."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> None:
        """Launches on the current stream of the tensors' device, whichever device is current. A
        grid without programs launches nothing."""
        if not all(self.grid):
            return
        recorder = _recording.recorder
        if recorder is None:
            self._run()
        elif isinstance(recorder, Collection):
            recorder.take(self)
        else:
            with recorder.paused():
                self._run()
            recorder.launches.append(self)

    def _run(self) -> None:
        if INTERPRETED.value:
            self.kernel[self.grid](*self.arguments, **self.constants, **self.options)
            return
        with on_device(next(a.device for a in self.arguments if isinstance(a, Tensor))):
            binary, constants = self.binary()
            binary[self.whole_grid](*self.arguments, *constants)

    @property
    def whole_grid(self) -> tuple[int, ...]:
        """All three extents."""
        return (*self.grid, 1, 1)[:3]

    def binary(self) -> tuple[Any, tuple[Any, ...]]:
        """What Triton compiled for this launch, and the constants that follow the arguments. The
        first launch of a specialization compiles it."""
        key = self.specialization()
        found = _binaries.get(key)
        if found is None:
            names = self.kernel.arg_names[len(self.arguments) :]
            constants = tuple(self.constants[name] for name in names)
            found = _binaries[key] = compiled(self), constants
        return found

    def specialization(self) -> tuple[Any, ...]:
        """Launches of one kind run the same binary. The kind consists of the device, the kernel,
        its constants and, because Triton specialises on them, each argument's type, its alignment
        and whether it is 1; for arguments that a kernel does not specialise on, only whether they
        have 32 bits."""
        forms = [*map(_form, self.arguments)]
        for at in _unspecialized(self.kernel):
            forms[at] = forms[at] >= _LONG
        return (
            torch.cuda.current_device(),
            id(self.kernel),
            tuple(self.constants.values()),
            tuple(self.options.values()),
            *forms,
        )


class CompilationFailed(TritonError):  # type: ignore[misc]
    """A pass of Triton's compiler failed. Triton lets the C++ exception through as whatever Python
    type pybind maps it to; this gives it one type."""


# pybind's mapping from C++: out_of_range is an IndexError, invalid_argument a ValueError
_COMPILER_ERRORS = (RuntimeError, IndexError, ValueError, AssertionError)


def compiled(launch: Launch) -> Any:
    """Triton's binary of a launch, which is not started. Raises TritonError if it cannot be
    compiled."""
    cache_key(launch.kernel)  # before Triton makes it
    options = compiled_for().options(**launch.options)
    arguments, constants = launch.arguments, launch.constants
    try:
        return launch.kernel.warmup(*arguments, grid=launch.grid, **constants, **options)
    except _COMPILER_ERRORS as error:
        # errors of the device or its driver are not the compiler's
        text = str(error)
        if isinstance(error, torch.AcceleratorError) or "[CUDA]" in text or "[HIP]" in text:
            raise
        name, target = launch.kernel.fn.__name__, compiled_for().name
        raise CompilationFailed(f"{name} cannot be compiled for {target}: {error}") from error


_LONG = 4  # numbers outside this range need more than 32 bits


def _form(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, float):
        return float
    if is_descriptor(argument):
        return argument.base.dtype, *argument.block_shape
    number = argument if type(argument) is int else index(argument)  # numpy's integers too
    if number == 1:
        return 1
    return 2 + (number % 16 == 0) + 2 * (number < -_INT32_MAX or number > _INT32_MAX)


def is_descriptor(argument: Any) -> bool:
    """Whether it is a tensor descriptor, for bulk copies. Gluon, which has the class, is not
    imported here, because portable kernels run without it."""
    return hasattr(argument, "block_shape")


_unspecialized_places: dict[int, tuple[int, ...]] = {}


def _unspecialized(kernel: Any) -> tuple[int, ...]:
    """The arguments that a kernel does not specialise on: its do_not_specialize."""
    places = _unspecialized_places.get(id(kernel))
    if places is None:
        options = getattr(kernel, "kwargs", {})  # an interpreted kernel
        given = getattr(kernel, "do_not_specialize", None) or options.get("do_not_specialize") or ()
        names = getattr(kernel, "arg_names", ())
        places = tuple(at for at, name in enumerate(names) if name in given)
        _unspecialized_places[id(kernel)] = places
    return places


# ---- launching again -------------------------------------------------------------------------


class _Start(NamedTuple):
    """One launch as its binary takes it. `moved` lists the arguments in tensors that may be others
    next time: the argument's index, the tensor's, and the offset from its first byte."""

    launch: Launch
    run: Any
    grid: tuple[int, ...]
    function: Any
    metadata: Any
    arguments: tuple[Any, ...]
    moved: tuple[tuple[int, int, int], ...]


_ALIGNMENT = (15).__and__  # an address modulo 16 bytes


class Repetition:
    """The launches of a call, to be made again with other tensors in place of those that the call
    was given. These must have the types, shapes and strides of the first ones, which the caller
    checks. How they are aligned, and how tensors of one storage lie in it, is checked here."""

    __slots__ = ("_alignments", "_device", "_starts", "_tied")

    def __init__(
        self, starts: Sequence[_Start], tensors: Sequence[Tensor], homes: Sequence[int]
    ) -> None:
        """`homes[i]` is the first of the tensors that lies in the storage of tensor i."""
        places = [tensor.data_ptr() for tensor in tensors]
        self._device = None if INTERPRETED.value else driver.active.get_current_device()
        self._starts = tuple(starts)
        self._alignments = [*map(_ALIGNMENT, places)]
        self._tied = tuple(
            (nth, home, places[nth] - places[home]) for nth, home in enumerate(homes) if nth != home
        )

    def places(self, tensors: Sequence[Tensor]) -> list[int] | None:
        """The addresses of these tensors, or None if the launches cannot be repeated with them
        unchanged."""
        places = [*map(Tensor.data_ptr, tensors)]
        if [*map(_ALIGNMENT, places)] != self._alignments:
            return None
        for nth, home, distance in self._tied:
            if places[nth] - places[home] != distance:
                return None
        return None if self._device is not None and _is_watched() else places

    def run(self, places: list[int], tensors: Sequence[Tensor]) -> None:
        """Makes the launches, on the current stream of their device, with the addresses that
        `places` returned."""
        if self._device is None:
            self._interpret(tensors)
            return
        if driver.active.get_current_device() != self._device:
            with torch.cuda.device(self._device):
                self.run(places, tensors)
            return
        stream = driver.active.get_current_stream(self._device)
        for _, run, grid, function, metadata, arguments, moved in self._starts:
            given = list(arguments)
            for at, nth, offset in moved:
                given[at] = places[nth] + offset
            run(*grid, stream, function, metadata, None, None, None, *given)

    def _interpret(self, tensors: Sequence[Tensor]) -> None:
        """The interpreter needs tensors, not addresses."""
        for start in self._starts:
            arguments = list(start.launch.arguments)
            for at, nth, offset in start.moved:
                arguments[at] = _view_like(arguments[at], tensors[nth], offset)
            start.launch._replace(arguments=tuple(arguments)).run()


def repeatable(
    call: Callable[[], None], tensors: Sequence[Tensor], fixed: Sequence[Tensor]
) -> Repetition | None:
    """Makes `call` and returns how to launch the same again with other tensors in place of
    `tensors`. Returns None if repeating the launches is not enough: the call did more with tensors
    than take views of them, or some of `tensors` share memory with the `fixed` ones, which always
    stay the same. All of them are on one device, which need not be the current one, now or
    later."""
    if isinstance(_recording.recorder, Collection):
        call()
        return None
    with on_device(fixed[0].device):
        return _repeatable(call, tensors, fixed)


def _repeatable(
    call: Callable[[], None], tensors: Sequence[Tensor], fixed: Sequence[Tensor]
) -> Repetition | None:
    recorder = _Recorder()
    before, _recording.recorder = _recording.recorder, recorder
    try:
        with recorder:
            call()
    finally:
        _recording.recorder = before
    storages: dict[int, int] = {}
    homes = [
        storages.setdefault(tensor.untyped_storage().data_ptr(), nth)
        for nth, tensor in enumerate(tensors)
    ]
    owned = {tensor.untyped_storage().data_ptr() for tensor in fixed}
    if recorder.did_more or not owned.isdisjoint(storages):
        return None
    firsts = [tensor.data_ptr() for tensor in tensors]
    starts = []
    for launch in recorder.launches:
        arguments, moved = [], []
        for at, argument in enumerate(launch.arguments):
            if not isinstance(argument, Tensor):
                arguments.append(argument)
                continue
            arguments.append(argument.data_ptr())
            home = storages.get(argument.untyped_storage().data_ptr())
            if home is not None:
                moved.append((at, home, argument.data_ptr() - firsts[home]))
        starts.append(_start(launch, arguments, tuple(moved)))
    return Repetition(starts, tensors, homes)


def _start(launch: Launch, arguments: list[Any], moved: tuple[tuple[int, int, int], ...]) -> _Start:
    """A launch keeps the tensors alive that never change."""
    places = {at for at, _, _ in moved}
    kept = tuple(
        argument if at not in places else 0 for at, argument in enumerate(launch.arguments)
    )
    if INTERPRETED.value:
        return _Start(launch, None, launch.whole_grid, None, None, (), moved)
    binary, constants = launch.binary()
    return _Start(
        launch=launch._replace(arguments=kept),
        run=binary.run,
        grid=launch.whole_grid,
        function=binary.function,
        metadata=binary.packed_metadata,
        arguments=(*arguments, *constants),
        moved=moved,
    )


def _view_like(view: Tensor, tensor: Tensor, offset: int) -> Tensor:
    """Memory `offset` bytes after the start of `tensor`, in the form of `view`."""
    storage = tensor.untyped_storage()
    first = tensor.data_ptr() + offset - storage.data_ptr()
    empty = torch.empty(0, dtype=view.dtype, device=view.device)
    return empty.set_(storage, first // view.element_size(), view.shape, view.stride())


def _is_watched() -> bool:
    """Whether something listens for launches, as profilers do."""
    hook = knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


class _Recorder(TorchDispatchMode):
    """The launches of a call, and whether it did more than launch and take views."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.did_more = False
        self._pauses = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What a launch does itself, interpreted or compiled, is not counted as `did_more`."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._pauses and not func.is_view:
            self.did_more = True
        return func(*args, **(kwargs or {}))


class _Recording(threading.local):
    """What records the launches of this thread, if anything does."""

    recorder: _Recorder | Collection | None = None


_recording = _Recording()


# ---- launching nothing -----------------------------------------------------------------------


class Collection:
    """One launch of each kind that calls would make. Inside `collecting` nothing is launched;
    kinds that are `refused` raise the error that compiling them raised."""

    def __init__(self) -> None:
        self.launches: dict[Any, Launch] = {}
        self.refused: dict[Any, TritonError] = {}

    def take(self, launch: Launch) -> None:
        key = launch.specialization()
        if key in self.refused:
            raise self.refused[key]
        self.launches.setdefault(key, launch)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        before, _recording.recorder = _recording.recorder, self
        try:
            yield
        finally:
            _recording.recorder = before
