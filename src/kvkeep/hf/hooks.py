"""Forward hooks on the user's model: how a cache learns what a forward brings."""

from __future__ import annotations

import inspect
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .model import ModelInfo, Unsupported, implementation
from .queries import listen, tap_modules
from .watch import Watch, output_of

if TYPE_CHECKING:
    from .cache import EvictCache


class Hooks:
    """``torch.nn.Module`` hooks, which act only in forwards that were given this cache.

    On the decoder: before a forward the cache runs due rounds and decides where to write; after it
    the tokens count as seen. On each evicting attention: the mask is replaced where rows hold
    different numbers of entries. For policies that ask: the tap on attention, hidden states of the
    decoder's blocks, the output layer's logits. The hooks do not keep the cache alive.

    Args:
        cache: who is told.
        info: the model's decoder and attention modules.
        watch: what the cache's policy asks to see.
    """

    def __init__(self, cache: EvictCache, info: ModelInfo, watch: Watch) -> None:
        reference = weakref.ref(cache)
        self.thread = 0  # in which a forward with this cache is under way
        signature = inspect.signature(info.decoder.forward)

        # Torch may call a hook that was just removed (a dropped cache) without its kwargs: then do nothing.

        def before(module: nn.Module, args: Any, kwargs: Any = None) -> None:
            owner = reference()
            if self.thread == get_ident():  # an earlier forward of this thread failed, or another cache's begins
                self.thread = 0
            if owner is None or not isinstance(kwargs, dict):
                return
            given = {**kwargs, **signature.bind_partial(*args).arguments} if args else kwargs
            # Whatever the output layer does from now on in this thread belongs to this forward.
            owner.watch.settle(anybody=_passed(given) is owner)
            if _passed(given) is owner:
                self.thread = get_ident()
                _begin(owner, given)

        def after(module: nn.Module, args: Any, kwargs: Any = None, output: Any = None) -> None:
            owner = reference()
            if owner is not None and self.thread == get_ident():
                self.thread = 0
                owner.end(output_of(output))

        def mask(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
            owner = reference()
            step = None if owner is None or self.thread != get_ident() else owner.step
            if step is None or not isinstance(kwargs, dict):
                return None
            step = step.part(place[module])
            if step.mask is None and not step.unmasked:
                return None
            if "attention_mask" not in kwargs:
                raise Unsupported(f"{type(module).__name__} takes no attention_mask by name, which padding needs")
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            made = None
            if step.mask is not None:
                made = step.mask.for_attention(implementation(module), hidden.dtype, hidden.device)
            return args, {**kwargs, "attention_mask": made}

        place = {info.attention[number]: i for i, number in enumerate(info.evicting)}
        self._handles: list[Any] = [
            info.decoder.register_forward_pre_hook(before, with_kwargs=True),
            info.decoder.register_forward_hook(after, with_kwargs=True),
            *(m.register_forward_pre_hook(mask, with_kwargs=True) for m in info.attention.values()),
        ]
        if watch.taps:
            self._tap(reference, info)
        self._handles += [m.register_forward_hook(self._hidden(reference, n)) for n, m in watch.blocks.items()]
        if watch.predictions is not None:
            self._handles.append(watch.predictions.head.register_forward_hook(_predicted(reference)))
            if info.model is not None:
                self._handles.append(info.model.register_forward_hook(_compared(reference), with_kwargs=True))
        self._finalizer = weakref.finalize(cache, _remove, self._handles)

    def _tap(self, reference: weakref.ref[EvictCache], info: ModelInfo) -> None:
        """Let attention modules hand over their queries in forwards of this cache."""

        def take(module: nn.Module, *seen: Any) -> None:
            owner = reference()
            if owner is not None:
                owner.tap(module, *seen)

        def forget(module: nn.Module, args: Any, kwargs: Any = None) -> None:
            listen(None)  # an interrupt may have left somebody waiting, whom these queries do not concern

        def active() -> bool:
            owner = reference()
            return owner is not None and self.thread == get_ident() and owner.step is not None

        self._handles.append(info.decoder.register_forward_pre_hook(forget, with_kwargs=True))
        instead = ", so its queries cannot be seen: use a policy that does not ask for queries"
        self._handles += tap_modules(info.attention.values(), take, instead, active)

    def _hidden(self, reference: weakref.ref[EvictCache], number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            owner = reference()
            if owner is not None and self.thread == get_ident():
                owner.watch.hidden(number, output_of(output))

        return hook

    def remove(self) -> None:
        """Take the hooks off."""
        self._finalizer()


def _predicted(reference: weakref.ref[EvictCache]) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        owner = reference()
        if owner is not None and owner.watch.predictions is not None:
            owner.watch.predictions.predicted(output)

    return hook


def _compared(reference: weakref.ref[EvictCache]) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any = None, output: Any = None) -> None:
        owner, logits = reference(), getattr(output, "logits", None)
        if owner is None or owner.watch.predictions is None or not isinstance(kwargs, dict):
            return
        if _passed(kwargs) is owner and isinstance(logits, Tensor):
            owner.watch.predictions.compare(logits)

    return hook


def _passed(kwargs: dict[str, Any]) -> Any:
    """The cache of a forward; transformers 5.24 renamed the argument."""
    return kwargs["cache"] if kwargs.get("cache") is not None else kwargs.get("past_key_values")


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _begin(cache: EvictCache, given: dict[str, Any]) -> None:
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    mask = given.get("attention_mask")
    tokens = ids if ids is not None else embeds
    if tokens is None:
        raise ValueError("a forward needs input_ids or inputs_embeds")
    if mask is not None and not isinstance(mask, Tensor):
        raise Unsupported("ready-made attention masks are not supported: pass the 2D mask")
    if tokens.shape[1] == 0:
        raise ValueError(
            f"a forward without new tokens: the cache has seen {cache.get_seq_length()}; call reset() before the next "
            "prompt"
            if cache.rows
            else "the prompt is empty: a forward needs at least one token"
        )
    cache.begin(tokens, ids, mask, given.get("position_ids"))
