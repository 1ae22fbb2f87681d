"""Hook points: methods of Keras that several features take part in, each replaced once.

The replacement asks providers for the hooks of the object whose method is called, and calls them from the outermost to
the innermost, in the order of `tfdist.seams.order`. Where there are none, Keras's own method runs.
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


class Call:
    """A call of a method of Keras.

    Args:
        owner: whose method it is.
        name: of the hooks that are asked.
        original: Keras's method.
        bound: its arguments, with the owner.
        hooks: that are yet to be asked, outer to inner.

    Attributes:
        owner: as given.
        name: as given.
        arguments: by name, with defaults. A hook may change them.
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
        """Has something done in place of Keras's method, and of the hooks within the one that calls this.

        Args:
            action: returns what the caller gets. It may call `inner`.
        """
        self._action = action

    def inner(self) -> Any:
        """Asks the hooks further in, and calls Keras's method with the arguments as they are then."""
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
    """The base of hooks, which do nothing where they override nothing."""

    def error(self, error: Exception) -> Exception | None:
        """What is raised in place of an error of the methods that hooks stand around.

        Args:
            error: of Keras's method or a hook, or what a hook further in raises in its place.

        Returns:
            None for the error itself.
        """
        return None


H = TypeVar("H", bound=Hooks)


class HookPoints(Generic[H]):
    """The hook points of the methods of a class.

    Args:
        base: of the hooks, with a method for each hook point.
        places: by method of `base`, the methods of Keras that are replaced: their owners and names. Where one is of
            several methods of `base`, `around` asks the first of them.
        call: the kind of call that hooks are given.
        wrappers: by method of Keras, what makes its replacement; by default `around`.

    Attributes:
        kinds: of hooks.
        provided: providers, each with the names of the methods that its kinds of hooks override.
    """

    def __init__(
        self,
        base: type[H],
        places: Mapping[str, Sequence[tuple[type, str]]],
        call: type[Call] = Call,
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
        """Adds the hooks of a feature, and replaces the methods that they stand around.

        Args:
            kinds: of hooks that the provider may make.
            provider: makes the hooks of an object, whenever that comes to a hook point.

        Raises:
            IncompatibleKerasError: a method of Keras is not there, or is another one than tfdist knows.
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
        """The hooks of an object, outer to inner, of features that have something at a hook point.

        Args:
            owner: the object.
            name: of a method of hooks.
        """
        found = [one for names, provider in self.provided if name in names for one in provider(owner)]
        if len(found) > 1:
            found.sort(key=lambda one: _place(type(one)))
        return found

    def standing(self) -> dict[str, list[str]]:
        """The kinds of hooks, outer to inner, by Keras's method, as `tfdist.seams.registry.standing` names both."""
        found: dict[str, dict[type[H], None]] = {}
        for name, places in self._places.items():
            for owner, method in places:
                kinds = dict.fromkeys(self._with_hooks(name, self.kinds))
                found.setdefault(f"{owner.__name__}.{method}", {}).update(kinds)
        return {
            method: [
                f"{kind.__module__.removeprefix('tfdist.')}.{kind.__qualname__}" for kind in sorted(kinds, key=_place)
            ]
            for method, kinds in found.items()
        }

    def around(self, original: Function, name: str) -> Function:
        """Lets hooks change a call, do something in its place, and give contexts in which it runs.

        Args:
            original: Keras's method.
            name: of the hooks.
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
                told = functools.reduce(lambda found, one: one.error(found) or found, telling, error)
                if told is error:
                    raise
                raise told from None

        return method

    def _with_hooks(self, name: str, kinds: Sequence[type[H]]) -> list[type[H]]:
        return [kind for kind in kinds if getattr(kind, name) is not getattr(self._base, name)]


def _bound(signature: inspect.Signature, *args: Any, **kwargs: Any) -> inspect.BoundArguments | None:
    """The arguments of a method; None for those that it does not take, which its own error names."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:
        return None


def _place(kind: type[Hooks]) -> int:
    return -place_of(kind.__module__)
