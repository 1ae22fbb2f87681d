"""Hook points: methods of Keras that several features change, each replaced once.

The replacement asks providers for the hooks of the object whose method is called, and calls the hooks from the
outermost to the innermost, in the order of `tfdist.seams.order`. Without hooks, Keras's own method runs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from tfdist.seams.order import place_of
from tfdist.seams.registry import Function, replace

Context = contextlib.AbstractContextManager[Any] | None


class MethodCall:
    """A call of a method of Keras.

    Args:
        owner: the object whose method is called.
        name: name of the hook point, and so of the hooks' method.
        original: Keras's method.
        bound: arguments of the call, including the owner.
        hooks: hooks to call, outer to inner.

    Attributes:
        owner: the object whose method is called.
        name: name of the hook point.
        arguments: arguments of the call by name, with defaults. A hook may change them.
    """

    def __init__(
        self, owner: Any, name: str, original: Function, bound: inspect.BoundArguments, hooks: Sequence[Hooks]
    ) -> None:
        bound.apply_defaults()
        self.owner = owner
        self.name = name
        self.arguments = bound.arguments
        self._original = original
        self._bound = bound
        self._hooks = list(hooks)
        self._action: Callable[[], Any] | None = None

    def replace(self, action: Callable[[], Any]) -> None:
        """Runs an action in place of Keras's method and of the hooks further in.

        Args:
            action: function whose result the caller gets. It may call `inner`.
        """
        self._action = action

    def inner(self) -> Any:
        """Calls the hooks further in, and then Keras's method with the arguments as the hooks have changed them."""
        with contextlib.ExitStack() as stack:
            while self._hooks:
                context = getattr(self._hooks.pop(0), self.name)(self)
                if context is not None:
                    stack.enter_context(context)
                if self._action is not None:
                    action, self._action = self._action, None
                    return action()
            return self._original(*self._bound.args, **self._bound.kwargs)


class Hooks:
    """The base of hooks; a method that is not overridden does nothing."""

    def error(self, error: Exception) -> Exception | None:
        """Returns the error to raise in place of an error of a hooked method.

        Args:
            error: the error of Keras's method or of a hook, as hooks further in have replaced it.

        Returns:
            The replacement; None raises the error itself.
        """
        return None


H = TypeVar("H", bound=Hooks)


class HookPoints(Generic[H]):
    """The hook points of the methods of a class.

    Args:
        base: base class of the hooks, with a method for each hook point.
        places: by method of `base`, the owners and names of the methods of Keras that are replaced. Where a method of
            Keras belongs to several methods of `base`, `around` calls the first of them.
        call: class of the calls that hooks are given.
        wrappers: by method of Keras, the function that makes its replacement; by default `around`.

    Attributes:
        kinds: classes of hooks that have been provided.
        provided: providers, each with the names of the methods that its classes of hooks override.
    """

    def __init__(
        self,
        base: type[H],
        places: Mapping[str, Sequence[tuple[type, str]]],
        call: type[MethodCall] = MethodCall,
        wrappers: Mapping[str, Callable[[Function], Function]] | None = None,
    ) -> None:
        self.kinds: list[type[H]] = []
        self.provided: list[tuple[set[str], Callable[[Any], Iterable[H]]]] = []
        self._base = base
        self._places = places
        self._call = call
        self._wrappers = wrappers or {}
        self._names: dict[tuple[type, str], str] = {}
        for name, of_name in places.items():
            for place in of_name:
                self._names.setdefault(place, name)
        self._replaced: set[tuple[type, str]] = set()

    def provide(self, kinds: Sequence[type[H]], provider: Callable[[Any], Iterable[H]]) -> None:
        """Adds the hooks of a feature, and replaces the methods of Keras that they need.

        Args:
            kinds: classes of hooks that the provider may make.
            provider: function that makes the hooks of an object; called at each hook point that the object reaches.

        Raises:
            IncompatibleKerasError: a method of Keras is missing, or has other parameters than tfdist knows.
        """
        for name, places in self._places.items():
            for owner, method in places if self._with_hooks(name, kinds) else ():
                if (owner, method) not in self._replaced:
                    asking = functools.partial(self.around, name=self._names[owner, method])
                    replace(owner, method, self._wrappers.get(method, asking))
                    self._replaced.add((owner, method))
        self.kinds.extend(kinds)
        self.provided.append(({name for name in self._places if self._with_hooks(name, kinds)}, provider))

    def hooks_of(self, owner: Any, name: str) -> list[H]:
        """Returns the hooks of an object, outer to inner, from features that use a hook point.

        Args:
            owner: the object whose method is called.
            name: name of the hook point.
        """
        hooks = [hook for names, provider in self.provided if name in names for hook in provider(owner)]
        if len(hooks) > 1:
            hooks.sort(key=lambda hook: _place(type(hook)))
        return hooks

    def standing(self) -> dict[str, list[str]]:
        """Returns the names of the hook classes, outer to inner, by Keras's method; see `registry.standing`."""
        by_method: dict[str, dict[type[H], None]] = {}
        for name, places in self._places.items():
            for owner, method in places:
                kinds = dict.fromkeys(self._with_hooks(name, self.kinds))
                by_method.setdefault(f"{owner.__name__}.{method}", {}).update(kinds)
        return {
            method: [
                f"{kind.__module__.removeprefix('tfdist.')}.{kind.__qualname__}" for kind in sorted(kinds, key=_place)
            ]
            for method, kinds in by_method.items()
        }

    def around(self, original: Function, name: str) -> Function:
        """Returns a replacement whose hooks may change a call, replace it, and provide contexts in which it runs.

        Args:
            original: Keras's method.
            name: name of the hook point.
        """
        signature = inspect.signature(original)

        def method(self_: Any, *args: Any, **kwargs: Any) -> Any:
            hooks = self.hooks_of(self_, name)
            try:
                bound = _bound(signature, self_, *args, **kwargs) if hooks else None
                if bound is None:
                    return original(self_, *args, **kwargs)
                return self._call(self_, name, original, bound, hooks).inner()
            except Exception as error:
                telling = reversed(self.hooks_of(self_, "error"))
                told = functools.reduce(lambda current, hook: hook.error(current) or current, telling, error)
                if told is error:
                    raise
                raise told from None

        return method

    def _with_hooks(self, name: str, kinds: Sequence[type[H]]) -> list[type[H]]:
        return [kind for kind in kinds if getattr(kind, name) is not getattr(self._base, name)]


def _bound(signature: inspect.Signature, *args: Any, **kwargs: Any) -> inspect.BoundArguments | None:
    """Returns the bound arguments; None if the method does not accept them: its own error then says so."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:
        return None


def _place(kind: type[Hooks]) -> int:
    return -place_of(kind.__module__)
