"""The newest queries of every evicting layer, tapped where attention is computed.

transformers lets anyone register attention functions (``AttentionInterface``), which a module looks up by the name in
its configuration. The tap is such a function: it hands the queries, after RoPE, to the cache whose forward is under way
and calls the function that was chosen. Configurations are shared by all layers and all threads, so theirs is not
touched: while a :class:`Tap` is open, attention modules read theirs through a view that names the tap to the thread
that listens, for one call, and says what the configuration says to everybody else.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .model import Unsupported

_PREFIX = "kvkeep_tap_"
_waiting = threading.local()
_lock = threading.RLock()  # a finalizer may close a tap while this thread opens another
hf: Any = transformers

#: Takes an attention module, its queries [B, H_q, q, D] after RoPE, the keys [B, H, S, D] they see, the mask, and what
#: it multiplies scores with (None: unknown).
Listener = Callable[[nn.Module, Tensor, Tensor, Tensor | None, float | None], None]


def listen(to: Listener | None) -> Listener | None:
    """The next attention this thread computes in a tapped module hands its queries to ``to``.

    Returns:
        Who has waited in vain until now.
    """
    before: Listener | None = getattr(_waiting, "listener", None)
    _waiting.listener = to
    return before


class Tap:
    """Makes attention modules hand over their queries to whoever listens, until it is removed.

    Args:
        modules: attention modules of a model.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        with _lock:
            for module in self._modules:
                config: Any = module.config
                view = config if isinstance(config, _Tapped) else _Tapped(config)
                view.users.add(self)
                module.config = view  # type: ignore[assignment]

    def remove(self) -> None:
        """Give the modules their configuration back, unless another tap is open."""
        with _lock:
            for module in self._modules:
                view: Any = module.config
                if isinstance(view, _Tapped):
                    view.users.discard(self)
                    if not view.users:
                        module.config = view.config


def tap_modules(
    modules: Iterable[nn.Module], take: Listener, instead: str, active: Callable[[], bool] = lambda: True
) -> list[Any]:
    """Let attention modules hand over their queries.

    Args:
        modules: attention modules of a model.
        take: gets what each hands over.
        instead: what to do about a module that computes attention in its own way, for the message.
        active: whether a forward is one to listen to.

    Returns:
        Handles with ``remove()``.
    """
    modules = list(modules)

    def before(module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if active():
            listen(take)

    def after(module: nn.Module, args: Any, kwargs: Any = None, output: Any = None) -> None:
        if listen(None) is take and output is not None:  # there is no output after an exception
            raise Unsupported(f"{type(module).__name__} computes attention in its own way{instead}")

    handles: list[Any] = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
    handles.append(Tap(modules))
    return handles


class _Tapped:
    """A configuration that names the tap to a thread that listens; all else is the configuration's own."""

    __slots__ = ("config", "users")

    def __init__(self, config: Any) -> None:
        object.__setattr__(self, "config", config)
        object.__setattr__(self, "users", set())

    @property
    def _attn_implementation(self) -> str:
        name = getattr(self.config, "_attn_implementation", None) or "eager"
        return name if getattr(_waiting, "listener", None) is None else tap_name(name)

    @_attn_implementation.setter
    def _attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def __getattr__(self, name: str) -> Any:
        if name in self.__slots__:  # a half-made copy
            raise AttributeError(name)
        return getattr(self.config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.config, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.config, memo)  # a copy of the model is not tapped


def tap_name(original: str) -> str:
    """Name of the attention function that taps queries and goes on to ``original``; registered on first use."""
    name = _PREFIX + original
    if name not in hf.AttentionInterface():
        hf.AttentionInterface.register(name, _tapping(original))
    return name


def _tapping(original: str) -> Callable[..., Any]:
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        listener = listen(None)  # from here on the configuration names the original, which may look
        if listener is not None:
            listener(module, query, key, attention_mask, kwargs.get("scaling"))
        return _function(original, module)(module, query, key, value, attention_mask, *args, **kwargs)

    return attend


def _function(name: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function that the module would have used; a model file may have its own."""
    names = inspect.unwrap(type(module).forward).__globals__
    known = names.get("ALL_ATTENTION_FUNCTIONS", hf.AttentionInterface())
    found: Callable[..., Any] | None = names.get("eager_attention_forward") if name == "eager" else known.get(name)
    if found is None:
        raise Unsupported(f"{type(module).__name__} has no attention function {name!r} that kvkeep can call")
    return found


class QueryRing:
    """The newest w queries of each evicting layer.

    Args:
        window: w.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.scaling: dict[int, float | None] = {}  # what a layer multiplies scores with
        self._data: dict[int, Tensor] = {}  # layer -> [B, H_q, w, D], column c at c % w

    def add(self, layer: int, queries: Tensor, first: int, scaling: float | None = None) -> None:
        """Keep the newest of a forward's queries.

        Args:
            layer: global layer number.
            queries: [B, H_q, q, D].
            first: column of the first of them.
            scaling: what the layer multiplies scores with, if it says so.
        """
        end = first + queries.shape[2]
        columns = torch.arange(max(first, end - self.window), end, device=queries.device)
        if layer not in self._data:
            shape = (*queries.shape[:2], self.window, queries.shape[3])
            with torch.inference_mode(False):
                self._data[layer] = torch.zeros(shape, dtype=queries.dtype, device=queries.device)
            self.scaling[layer] = scaling
        newest = queries.detach()[:, :, queries.shape[2] - len(columns) :]
        self._data[layer].index_copy_(2, columns % self.window, newest)

    def get(self, layer: int, rows: Sequence[int], end: int) -> Tensor:
        """[R, H_q, w, D], oldest first, of the columns up to ``end``; columns before the first hold zeros."""
        data = self._data[layer]
        columns = torch.arange(end - self.window, end, device=data.device) % self.window
        whole = list(rows) == list(range(data.shape[0]))
        return (data if whole else data[list(rows)]).index_select(2, columns)

    def select(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        with torch.inference_mode(False):
            self._data = {layer: data[list(order)] for layer, data in self._data.items()}

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return sum(data.untyped_storage().nbytes() for data in self._data.values())
